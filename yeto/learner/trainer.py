"""The training thread: loads the task, waits for the first anchors, trains, and ends.

Everything that touches the model happens here, in one thread from the first import to the last save. The
network is met at the boundary only. Whatever ends the run is looked for wherever the thread may be: between
micro batches, while it waits for anchors, and while it lingers after the final cut.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from yeto.errors import EXIT_STOPPED, ConfigError, ProtocolError
from yeto.layout import embedding_advice
from yeto.learner.anchors import FragmentBook
from yeto.learner.boundary import Boundary
from yeto.learner.config import LearnerConfig
from yeto.learner.ending import Ending, Outcome
from yeto.learner.equipment import equip
from yeto.learner.exchanged import Broadcast, OtherRun, Receipt, Taken, Values
from yeto.learner.identity import Identity, initial_fragment, make_identity
from yeto.learner.island import Island
from yeto.learner.mailbox import Arrivals, Departures, FinalCut, Stop
from yeto.learner.progress import Progress
from yeto.learner.saved import SavedLoop, SavedState
from yeto.learner.saved_keeper import StateKeeper
from yeto.learner.stopwatch import Stopwatch
from yeto.learner.task import Task
from yeto.learner.watch import Loss
from yeto.wire.layout import Layout


class Trainer:
    """One learner's life on the training thread; of several ranks, the head's."""

    def __init__(
        self,
        config: LearnerConfig,
        make_task: Callable[[], Task],
        *,
        arrivals: Arrivals,
        departures: Departures,
        progress: Progress,
        on_ready: Callable[[Identity], None],
        island: Island,
        on_lost: Callable[[Loss], None],
    ) -> None:
        """Prepare; nothing is loaded before ``run``.

        Args:
            config: how to train.
            make_task: loads model and data; called on the training thread.
            arrivals: what the network hands in.
            departures: what the network is handed.
            progress: told what happens.
            on_ready: called on the training thread once it is known what to state to a syncer.
            island: this rank's.
            on_lost: called from another thread when a rank of it is lost.
        """
        self._config = config
        self._make_task = make_task
        self._arrivals = arrivals
        self._departures = departures
        self._progress = progress
        self._on_ready = on_ready
        self._island = island
        self._on_lost = on_lost
        self._stopwatch = Stopwatch()
        self._evaluated_at: int | None = None
        self._has_given_way = False
        self.is_loaded = False
        """Whether the task is there; before that there is nothing to stop and nothing to save."""

    def run(self) -> Outcome:
        """Live; blocks for as long as the run takes.

        Returns:
            How it ended.

        Raises:
            YetoError: the task cannot be loaded or trained, or a rank is lost.
        """
        if self._config.torch_threads is not None:
            torch.set_num_threads(self._config.torch_threads)
        self._progress.phase("loading")
        try:
            self._island.open(self._on_lost)
            return self._run()
        except Exception as error:
            self._island.blame(error)
            raise

    def _run(self) -> Outcome:
        self._keeper = StateKeeper(self._config, self._progress.notice, self._island.size)
        empty_groups = 0
        try:
            done = self._island.share(self._keeper.done)
            if done is not None:
                outcome = Outcome(exit_code=0, reason=done)
            else:
                outcome = self._live()
                empty_groups = self._loop.empty_groups
        finally:
            with self._stopwatch.section("closing"):
                self._keeper.close()
        self._progress.ended(
            outcome.exit_code,
            outcome.reason,
            seconds=self._stopwatch.seconds() | {"total": self._stopwatch.total},
            empty_groups=empty_groups,
        )
        return outcome

    def _live(self) -> Outcome:
        with self._stopwatch.section("loading"):
            self._load()
        self.is_loaded = True
        cut = self._train()
        outcome = self._ending.leave() if cut is None else self._ending.finish(cut)
        with self._stopwatch.section("closing"):
            self._loop.close()
            self._crew.end()
        return outcome

    # -- loading --------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Load the task and make everything that depends on its parameters."""
        config = self._config
        self._task = self._make_task()
        saved: SavedState | None = None

        def restored(layout: Layout) -> SavedLoop | None:
            nonlocal saved
            self._announce(layout)
            saved = self._keeper.restored(self._task.binding(), layout)
            return None if saved is None else saved.loop

        equipment = equip(config, self._task, self._island, self._stopwatch, restored)
        self._loop, self._crew, layout = equipment.loop, equipment.crew, equipment.layout
        self._num_fragments = len(layout.fragments)
        self._book = FragmentBook(
            num_fragments=self._num_fragments,
            alpha=0.0 if config.carries else float(config.merge_alpha),
            error_feedback=config.owes_residuals,
            carries=config.carries,
        )
        self._boundary = Boundary(
            fragments=self._crew,
            book=self._book,
            arrivals=self._arrivals,
            departures=self._departures,
            stopwatch=self._stopwatch,
            on_broadcast=self._received,
            on_answer=self._progress.answered,
        )
        self._ending = Ending(
            config,
            crew=self._crew,
            loop=self._loop,
            book=self._book,
            keeper=self._keeper,
            arrivals=self._arrivals,
            departures=self._departures,
            progress=self._progress,
            stopwatch=self._stopwatch,
            evaluate=self._evaluate,
        )
        if saved is not None:
            self._resume(saved)
        if config.has_syncer:
            self._on_ready(self._identify(layout, equipment.initial, is_new=saved is None))

    def _resume(self, saved: SavedState) -> None:
        """Go on from what an earlier process saved."""
        self._book.restore(saved.book)
        self._departures.local_step = self._loop.steps
        self._progress.resumed(self._loop.steps, self._loop.tokens, global_step=self._book.global_step)

    def _announce(self, layout: Layout) -> None:
        """Say what is trained."""
        advice = embedding_advice(layout)
        if advice is not None:
            self._progress.notice(advice)
        described = dict(self._task.describe())
        if self._island.size > 1:
            described["ranks"] = self._island.size
        facts = ", ".join(f"{name} {_plain(value)}" for name, value in described.items())
        trained = sum(fragment.numel for fragment in layout.fragments)
        tensors = sum(len(fragment.tensors) for fragment in layout.fragments)
        self._progress.notice(
            f"training {trained:,} parameters in {tensors} tensors, {len(layout.fragments)} fragments"
            + (f" ({facts})" if facts else "")
        )

    def _identify(self, layout: Layout, built: tuple[Values, ...], *, is_new: bool) -> Identity:
        """Return what to state to a syncer; a new learner 0 takes its own initial values for anchors.

        One that goes on from saved state offers them, too: a syncer that has values ignores them, and one
        that has none would wait for ever for what nobody else brings.
        """
        initial = tuple(initial_fragment(values, self._config.wire_dtype) for values in built)
        if is_new:
            for fragment, init in enumerate(initial):
                self._book.adopt_init(fragment, init.values, init.digest)
        return make_identity(self._config, layout, self._task.binding(), initial)

    # -- training -------------------------------------------------------------------------------------

    def _train(self) -> FinalCut | None:
        """Train until there is a final cut, which is returned, or a reason to stop."""
        config, loop = self._config, self._loop
        self._progress.phase("waiting" if config.has_syncer else "training")
        frozen = False
        started = not config.has_syncer
        while True:
            if config.has_syncer:
                cut = self._cross()
                if cut is not None:
                    return cut
            if self._arrivals.stopping:
                return None
            if frozen or (config.has_syncer and not self._book.is_complete):
                self._progress.fragments(self._book.num_received, self._num_fragments)
                with self._stopwatch.section("waiting"):
                    self._crew.wait(self._arrivals, self._progress.idle)
                continue
            if not started:
                started = True
                self._progress.phase("training")
            if config.eval_every and loop.steps % config.eval_every == 0:
                self._evaluate()
            if loop.steps == config.budget_steps:
                frozen = True
                self._book.freeze(loop.steps, loop.tokens)
                # Before it is told: a learner that comes back must give the answer that was promised.
                self._keep(wait=True)
                self._departures.budget_used(loop.steps)
                self._progress.phase("frozen")
                continue
            if config.max_local_steps is not None and loop.steps >= config.max_local_steps:
                reason = f"--max-local-steps {loop.steps} reached"
                self._arrivals.stop(Stop(exit_code=EXIT_STOPPED, reason=reason))
                return None
            self._step()

    def _cross(self) -> FinalCut | None:
        """Cross the boundary; a syncer that contradicts itself is a reason to stop."""
        try:
            with self._stopwatch.section("boundary"):
                return self._boundary.cross(self._loop.steps)
        except ProtocolError as error:
            self._arrivals.stop(Stop(exit_code=1, reason=str(error)))
            return None
        except OtherRun as error:
            # Nothing is saved: the state is of a run that this one must not touch.
            raise ConfigError(
                f"--state-dir {self._config.state_dir}: its state is of global step {error.global_step}, and "
                f"the syncer at {self._config.syncer} is at the beginning of a run, of a new one or back at "
                "its first checkpoint; to begin with it, move the folder away; to go on with what was saved, "
                "start the syncer of that run with --resume"
            ) from error

    def _step(self) -> None:
        result = self._crew.step(self._interrupted)
        if result is None:
            return
        self._book.count_step(result.tokens)
        self._departures.stepped(self._loop.steps)
        with self._stopwatch.section("logging"):
            self._progress.stepped(result, local_step=self._loop.steps, tokens=self._loop.tokens)
        if self._keeper.is_due(self._loop.steps):
            self._keep()

    def _keep(self, *, wait: bool = False) -> None:
        """Save the state; what training waits for is the copy, unless it is to ``wait`` for the disk."""
        with self._stopwatch.section("saving"):
            self._keeper.save(self._crew.saved, self._book, wait=wait)

    def _interrupted(self) -> bool:
        return self._arrivals.stopping is not None or self._arrivals.has_final

    def _received(self, broadcast: Broadcast, receipt: Receipt) -> None:
        self._progress.received(broadcast, receipt, global_step=self._book.global_step)
        if receipt.taken is Taken.OVERWROTE and self._book.is_doubtful and not self._has_given_way:
            self._has_given_way = True
            self._progress.notice(
                f"the weights saved here give way to the syncer's (fragment {broadcast.fragment}: version "
                f"{receipt.previous_version}, now {broadcast.version}): it has gone on meanwhile, or its run "
                f"is not the one of --state-dir {self._config.state_dir}"
            )
        if receipt.taken is Taken.ROLLED_BACK:
            self._progress.notice(
                f"the syncer went back to an older state: fragment {broadcast.fragment} from version "
                f"{receipt.previous_version} to {broadcast.version}"
            )

    def _evaluate(self, once_more: bool = False) -> None:
        """Score the held-out rows, once for each state of the weights that asks for it."""
        if self._evaluated_at == self._loop.steps and not once_more:
            return
        self._evaluated_at = self._loop.steps
        with self._stopwatch.section("evaluation"):
            evaluation = self._crew.evaluate()
        if evaluation is not None:
            self._progress.evaluated(evaluation)


def _plain(value: object) -> str:
    """Return a fact as people write it: a list as its items."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

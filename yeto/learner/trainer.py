"""The training thread: loads the task, waits for the first anchors, trains, and saves what there is at last.

Everything that touches the model happens here, in one thread from the first import to the last save. The
network is met at the boundary only. Whatever ends the run is looked for wherever the thread may be: between
micro batches, while it waits for anchors, and while it lingers after the final cut.

What a learner leaves behind says what it is: the global result in the output folder after a final cut (and,
without a syncer, at the end of its own steps), or its own weights in ``unmerged-<learner>/``, which are not
the global result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from attrs import evolve, frozen
from torch import nn

from yeto.errors import ProtocolError, YetoError
from yeto.layout import build_layout, embedding_advice
from yeto.learner.anchors import Broadcast, FragmentBook, Receipt, Taken
from yeto.learner.boundary import Boundary
from yeto.learner.config import LearnerConfig
from yeto.learner.fragments import LiveFragments, named_shapes
from yeto.learner.identity import Identity, InitialFragment, initial_fragment, make_identity
from yeto.learner.loop import InnerLoop
from yeto.learner.mailbox import STOPPED, Arrivals, Departures, FinalCut, Stop
from yeto.learner.progress import Progress
from yeto.learner.stopwatch import Stopwatch
from yeto.learner.task import Task
from yeto.wire.layout import Layout


@frozen(kw_only=True)
class Outcome:
    """How the run ended."""

    exit_code: int
    reason: str


class Trainer:
    """One learner's life on the training thread."""

    def __init__(
        self,
        config: LearnerConfig,
        make_task: Callable[[], Task],
        *,
        arrivals: Arrivals,
        departures: Departures,
        progress: Progress,
        on_ready: Callable[[Identity], None],
    ) -> None:
        """Prepare; nothing is loaded before ``run``.

        Args:
            config: how to train.
            make_task: loads model and data; called on the training thread.
            arrivals: what the network hands in.
            departures: what the network is handed.
            progress: told what happens.
            on_ready: called on the training thread once it is known what to state to a syncer.
        """
        self._config = config
        self._make_task = make_task
        self._arrivals = arrivals
        self._departures = departures
        self._progress = progress
        self._on_ready = on_ready
        self._stopwatch = Stopwatch()
        self._evaluated_at: int | None = None
        self._scored_final = False
        self.is_loaded = False
        """Whether the task is there; before that there is nothing to stop and nothing to save."""

    def run(self) -> Outcome:
        """Live; blocks for as long as the run takes.

        Returns:
            How it ended.

        Raises:
            YetoError: the task cannot be loaded or trained.
        """
        if self._config.torch_threads is not None:
            torch.set_num_threads(self._config.torch_threads)
        self._progress.phase("loading")
        with self._stopwatch.section("loading"):
            self._load()
        self.is_loaded = True
        cut = self._train()
        outcome = self._leave() if cut is None else self._finish(cut)
        with self._stopwatch.section("closing"):
            self._loop.close()
        self._progress.ended(
            outcome.exit_code,
            outcome.reason,
            seconds=self._stopwatch.seconds() | {"total": self._stopwatch.total},
            empty_groups=self._loop.empty_groups,
        )
        return outcome

    # -- loading --------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Load the task and make everything that depends on its parameters."""
        config = self._config
        self._task = self._make_task()
        parameters = self._task.trainable_parameters()
        layout = build_layout(
            named_shapes(parameters),
            fragments=config.fragments,
            pattern=config.fragment_pattern,
            matrix_merge=config.matrix_merge,
        )
        self._fragments = LiveFragments(layout, parameters)
        self._num_fragments = len(layout.fragments)
        self._book = FragmentBook(
            num_fragments=self._num_fragments,
            alpha=config.merge_alpha,
            error_feedback=config.wire_dtype == "q4" and config.q4_error_feedback,
        )
        self._boundary = Boundary(
            fragments=self._fragments,
            book=self._book,
            arrivals=self._arrivals,
            departures=self._departures,
            on_broadcast=self._received,
            on_answer=self._progress.answered,
        )
        advice = embedding_advice(layout)
        if advice is not None:
            self._progress.notice(advice)
        self._loop = InnerLoop(self._task, parameters, config, self._stopwatch)
        self._announce(layout, parameters)
        if config.has_syncer:
            self._on_ready(self._identify(layout))

    def _announce(self, layout: Layout, parameters: Mapping[str, nn.Parameter]) -> None:
        facts = ", ".join(f"{name} {_plain(value)}" for name, value in self._task.describe().items())
        trained = sum(parameter.numel() for parameter in parameters.values())
        self._progress.notice(
            f"training {trained:,} parameters in {len(parameters)} tensors, {len(layout.fragments)} fragments"
            + (f" ({facts})" if facts else "")
        )

    def _identify(self, layout: Layout) -> Identity:
        """Return what to state to a syncer; learner 0 takes its own initial values for anchors."""
        initial: tuple[InitialFragment, ...] = ()
        if self._config.learner_id == 0:
            initial = tuple(
                initial_fragment(self._fragments.snapshot(fragment).values(), self._config.wire_dtype)
                for fragment in range(self._num_fragments)
            )
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
                with self._stopwatch.section("waiting"):
                    self._arrivals.wait()
                continue
            if not started:
                started = True
                self._progress.phase("training")
            if config.eval_every and loop.steps % config.eval_every == 0:
                self._evaluate()
            if loop.steps == config.budget_steps:
                frozen = True
                self._book.freeze(loop.steps, loop.tokens)
                self._departures.budget_used(loop.steps)
                self._progress.phase("frozen")
                continue
            if loop.steps == config.max_local_steps:
                reason = f"--max-local-steps {loop.steps} reached"
                self._arrivals.stop(Stop(exit_code=STOPPED, reason=reason))
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

    def _step(self) -> None:
        result = self._loop.step(self._interrupted)
        if result is None:
            return
        self._book.count_step(result.tokens)
        self._departures.stepped(self._loop.steps)
        self._progress.stepped(result, local_step=self._loop.steps, tokens=self._loop.tokens)

    def _interrupted(self) -> bool:
        return self._arrivals.stopping is not None or self._arrivals.has_final

    def _received(self, broadcast: Broadcast, receipt: Receipt) -> None:
        self._progress.received(broadcast, receipt, global_step=self._book.global_step)
        if receipt.taken is Taken.ROLLED_BACK:
            self._progress.notice(
                f"the syncer went back to an older state: fragment {broadcast.fragment} from version "
                f"{receipt.previous_version} to {broadcast.version}"
            )

    def _evaluate(self) -> None:
        """Score the held-out rows, once for each state of the weights that asks for it."""
        if self._evaluated_at == self._loop.steps:
            return
        self._evaluated_at = self._loop.steps
        with self._stopwatch.section("evaluation"):
            evaluation = self._task.evaluate()
        if evaluation is not None:
            self._progress.evaluated(evaluation)

    # -- leaving --------------------------------------------------------------------------------------

    def _finish(self, first: FinalCut) -> Outcome:
        """Take the final cut, and any other that comes before the network says that it is over."""
        cut: FinalCut | None = first
        saved: FinalCut | None = None
        while True:
            if cut is not None and not cut.is_same(saved):
                self._take_final(cut)
                saved = evolve(cut, values=())
            if cut is not None and saved is not None:
                self._departures.cut_saved(saved)
            if self._config.eval_every and not self._scored_final and not self._arrivals.stopping:
                self._scored_final, self._evaluated_at = True, None
                self._evaluate()
            if self._arrivals.released:
                break
            with self._stopwatch.section("waiting"):
                self._arrivals.wait()
            # Broadcasts and pulls mean nothing any more.
            cut = self._arrivals.take().final
        assert saved is not None, "the first cut was taken"
        return Outcome(
            exit_code=0, reason=f"global result of step {saved.step} saved in {self._config.output_dir}"
        )

    def _take_final(self, cut: FinalCut) -> None:
        """Make the global result the local weights, exactly, and save it."""
        self._progress.phase("saving")
        with self._stopwatch.section("saving"):
            self._book.finish()
            for fragment, values in enumerate(cut.values):
                self._fragments.blend(fragment, values, 0.0)
            self._save(self._config.output_dir)
        self._progress.final(cut.step)
        self._progress.phase("finishing")

    def _leave(self) -> Outcome:
        """Save what there is when there will be no final cut."""
        config, stop = self._config, self._arrivals.stopping
        assert stop is not None, "training ends for a reason"
        if not config.has_syncer and self._loop.steps == config.max_local_steps:
            if config.eval_every:
                self._evaluate()
            self._progress.phase("saving")
            with self._stopwatch.section("saving"):
                self._save(config.output_dir)
            return Outcome(exit_code=0, reason=f"{stop.reason}; result saved in {config.output_dir}")
        if self._loop.steps == 0:
            return Outcome(exit_code=stop.exit_code, reason=f"{stop.reason}; nothing was trained")
        self._progress.phase("saving")
        with self._stopwatch.section("saving"):
            self._save(config.unmerged_dir)
        advice = (
            "; export that from the syncer's checkpoint: "
            "yeto-export --checkpoint yeto-state.ckpt --model MODEL --output-dir out/"
            if config.has_syncer
            else ""
        )
        return Outcome(
            exit_code=stop.exit_code,
            reason=f"{stop.reason}; local weights of step {self._loop.steps} saved in {config.unmerged_dir}: "
            f"this is NOT the global result{advice}",
        )

    def _save(self, folder: Path) -> None:
        """Save the local weights.

        Raises:
            YetoError: the system refuses, in whatever way the library that writes says so.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._task.save(folder)
        except YetoError:
            raise
        except Exception as error:
            rescue = (
                "the syncer's checkpoint has the global model: yeto-export"
                if self._config.has_syncer
                else "the trained weights are lost"
            )
            raise YetoError(f"cannot save in --output-dir {folder}: {error}; {rescue}") from error


def _plain(value: object) -> str:
    """Return a fact as people write it: a list as its items."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

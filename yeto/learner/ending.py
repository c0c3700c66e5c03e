"""How a learner's training ends, and what it leaves behind.

That says what it is: the global result in the output folder after a final cut (and, without a syncer, at the
end of the learner's own steps), or its own weights in ``unmerged-<learner>/``, which are not the global
result.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from attrs import evolve, frozen

from yeto.errors import YetoError
from yeto.learner.anchors import FragmentBook
from yeto.learner.config import LearnerConfig
from yeto.learner.crew import Crew
from yeto.learner.loop import InnerLoop
from yeto.learner.mailbox import Arrivals, Departures, FinalCut
from yeto.learner.progress import Progress
from yeto.learner.saved_keeper import StateKeeper
from yeto.learner.stopwatch import Stopwatch


@frozen(kw_only=True)
class Outcome:
    """How the run ended."""

    exit_code: int
    reason: str


class Ending:
    """Ends the training that a :class:`~yeto.learner.trainer.Trainer` has done; on its thread."""

    def __init__(
        self,
        config: LearnerConfig,
        *,
        crew: Crew,
        loop: InnerLoop,
        book: FragmentBook,
        keeper: StateKeeper,
        arrivals: Arrivals,
        departures: Departures,
        progress: Progress,
        stopwatch: Stopwatch,
        evaluate: Callable[[bool], None],
    ) -> None:
        """Take what training has used.

        Args:
            config: where to save.
            crew: has the weights.
            loop: has counted the steps.
            book: of the fragments.
            keeper: of the state.
            arrivals: what the network hands in.
            departures: what the network is handed.
            progress: told what happens.
            stopwatch: told where the time goes.
            evaluate: scores the held-out rows; once more with True, else once for each step.
        """
        self._config = config
        self._crew = crew
        self._loop = loop
        self._book = book
        self._keeper = keeper
        self._arrivals = arrivals
        self._departures = departures
        self._progress = progress
        self._stopwatch = stopwatch
        self._evaluate = evaluate

    def finish(self, first: FinalCut) -> Outcome:
        """Take the final cut, and any other that comes before the network says that it is over."""
        cut: FinalCut | None = first
        saved: FinalCut | None = None
        is_scored = False
        while True:
            if cut is not None and not cut.is_same(saved):
                self._take_final(cut)
                saved = evolve(cut, values=())
            if cut is not None and saved is not None:
                self._departures.cut_saved(saved)
            if self._config.eval_every and not is_scored and not self._arrivals.stopping:
                is_scored = True
                self._evaluate(True)
            if self._arrivals.released:
                break
            with self._stopwatch.section("waiting"):
                self._crew.wait(self._arrivals, self._progress.idle)
            # Broadcasts and pulls mean nothing any more.
            cut = self._arrivals.take().final
        assert saved is not None, "the first cut was taken"
        reason = f"global result of step {saved.step} saved in {self._config.output_dir}"
        # Not sooner: one that dies before the syncer has its ACK must come back and give it.
        self._keeper.finish(reason)
        return Outcome(exit_code=0, reason=reason)

    def _take_final(self, cut: FinalCut) -> None:
        """Make the global result the local weights, exactly, and save it."""
        self._progress.phase("saving")
        with self._stopwatch.section("saving"):
            with self._stopwatch.section("receive"):
                self._book.finish()
                for fragment, values in enumerate(cut.values):
                    self._crew.blend(fragment, values, 0.0)
            self._save_result()
        self._progress.final(cut.step)
        self._progress.phase("finishing")

    def leave(self) -> Outcome:
        """Save what there is when there will be no final cut."""
        config, stop = self._config, self._arrivals.stopping
        assert stop is not None, "training ends for a reason"
        if self._loop.steps > 0:
            self._progress.phase("saving")
            with self._stopwatch.section("saving"):
                self._keeper.save(self._crew.saved, self._book, wait=True)
        if (
            not config.has_syncer
            and config.max_local_steps is not None
            and self._loop.steps >= config.max_local_steps
        ):
            if config.eval_every:
                self._evaluate(False)
            self._progress.phase("saving")
            with self._stopwatch.section("saving"):
                self._save_result()
            return Outcome(exit_code=0, reason=f"{stop.reason}; result saved in {config.output_dir}")
        if self._loop.steps == 0:
            return Outcome(exit_code=stop.exit_code, reason=f"{stop.reason}; nothing was trained")
        self._progress.phase("saving")
        with self._stopwatch.section("saving"):
            self._save(config.unmerged_dir)
        advice = (
            "; export that from the syncer's checkpoint: "
            "yeto-export --checkpoint CHECKPOINT --model MODEL --output-dir out/ "
            "(of a diffusion model, yeto-diffusion-export)"
            if config.has_syncer
            else ""
        )
        return Outcome(
            exit_code=stop.exit_code,
            reason=f"{stop.reason}; local weights of step {self._loop.steps} saved in {config.unmerged_dir}: "
            f"this is NOT the global result{advice}",
        )

    def _save_result(self) -> None:
        """Save the result; what an earlier stop left beside it is none, and goes."""
        self._save(self._config.output_dir)
        shutil.rmtree(self._config.unmerged_dir, ignore_errors=True)

    def _save(self, folder: Path) -> None:
        """Save the local weights.

        Raises:
            YetoError: the system refuses, in whatever way the library that writes says so.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._crew.save(folder)
        except YetoError:
            raise
        except Exception as error:
            rescue = (
                "the syncer's checkpoint has the global model: yeto-export or yeto-diffusion-export"
                if self._config.has_syncer
                else "the trained weights are lost"
            )
            raise YetoError(f"cannot save in --output-dir {folder}: {error}; {rescue}") from error

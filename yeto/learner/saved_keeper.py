"""When a learner saves its state, and with which settings it may go on.

What training knows of ``--state-dir``; how a set lies on the disk is none of its business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from yeto.errors import ConfigError
from yeto.learner.anchors import FragmentBook
from yeto.learner.config import LearnerConfig
from yeto.learner.saved import SavedLoop, SavedState
from yeto.learner.saved_folder import DONE, StateFolder
from yeto.wire.fingerprint import layout_fingerprint
from yeto.wire.layout import Layout


class StateKeeper:
    """Keeps the state of one learner; without ``--state-dir`` it does nothing."""

    def __init__(self, config: LearnerConfig, say: Callable[[str], None], num_ranks: int = 1) -> None:
        """Open the folder; the caller closes it.

        Args:
            config: where and how often.
            say: told what a person should know, from any thread.
            num_ranks: of the island.

        Raises:
            ConfigError: the folder cannot be used.
        """
        self._config = config
        self._num_ranks = num_ranks
        self._settings: Mapping[str, Any] = {}
        self._folder = None if config.state_dir is None else StateFolder(config.state_dir, say)
        self._say = say

    @property
    def done(self) -> str | None:
        """What to say instead of training: the run is over, as an earlier process has noted.

        Raises:
            ConfigError: it is, and its result is not in this ``--output-dir``.
        """
        if self._folder is None or (finished := self._folder.done) is None:
            return None
        config, folder = self._config, self._folder.path
        remedy = (
            f"for another run give another --state-dir, or remove {folder}; if the syncer goes on with this "
            f"one (--resume with a larger --total-steps), remove {folder / DONE} alone"
        )
        if not finished.is_in(config.output_dir):
            raise ConfigError(
                f"--state-dir {config.state_dir}: this learner's run is over ({finished.reason}), and its "
                f"result is not in --output-dir {config.output_dir}; {remedy}"
            )
        return f"this learner's run is over ({finished.reason}); {remedy}"

    def restored(self, binding: Mapping[str, Any], layout: Layout) -> SavedState | None:
        """Return the state to go on from; None begins anew.

        Args:
            binding: what all learners of the run share; see ``Task.binding``.
            layout: of what is trained.

        Raises:
            ConfigError: the state was saved with other settings, no set of it is whole, or there is no room
                for the next ones.
        """
        config = self._config
        self._settings = _settings(config, self._num_ranks, binding, layout_fingerprint(layout))
        if self._folder is None:
            return None
        state = self._folder.newest()
        if state is not None:
            assert config.state_dir is not None, "there is a folder"
            state.require_settings(self._settings, config.state_dir)
        self._folder.require_space(_set_bytes(config, layout))
        return state

    def is_due(self, steps: int) -> bool:
        """Whether the state is to be saved after so many optimizer steps."""
        return self._folder is not None and steps % self._config.state_every == 0

    def save(self, loop: Callable[[], SavedLoop], book: FragmentBook, *, wait: bool = False) -> None:
        """Save a copy of the present state.

        Args:
            loop: returns the inner loop's part; called only if there is a folder.
            book: of the fragments.
            wait: until the state is on the disk, or cannot be.
        """
        if self._folder is None:
            return
        self._folder.save(SavedState(settings=self._settings, loop=loop(), book=book.saved()))
        if wait:
            self._folder.flush()

    def finish(self, reason: str) -> None:
        """Note that the run is over for this learner; ``reason`` is for people."""
        if self._folder is None:
            return
        try:
            self._folder.finish(reason, self._config.output_dir)
        except OSError as error:
            self._say(f"--state-dir {self._config.state_dir}: cannot note the end: {error.strerror}")

    def close(self) -> None:
        """Wait for the disk, and let the folder go."""
        if self._folder is not None:
            self._folder.close()


def _set_bytes(config: LearnerConfig, layout: Layout) -> int:
    """Return what the arrays of one set take, which is nearly all of it."""
    # Weights, two moments, the anchor; and what quantisation owes, of two rounds at most.
    arrays = 6 if config.owes_residuals else 4
    return 4 * arrays * sum(fragment.numel for fragment in layout.fragments)


def _settings(
    config: LearnerConfig, num_ranks: int, binding: Mapping[str, Any], fingerprint: bytes
) -> dict[str, Any]:
    """Return what must not differ between two lives of a learner, by the words of an error about it."""
    schedule = {"--max-local-steps": config.max_local_steps} if config.lr_schedule == "cosine" else {}
    return {
        **binding,
        "--learner-id": config.learner_id,
        "number of ranks (torchrun)": num_ranks,
        "--syncer": "some" if config.has_syncer else config.syncer,
        "--learner-budget-steps": config.budget_steps,
        "--inner-lr": config.inner_lr,
        "--weight-decay": config.weight_decay,
        "--warmup-steps": config.warmup_steps,
        "--lr-schedule": config.lr_schedule,
        "--clip-norm": config.clip_norm,
        **schedule,
        # The last one in alphabetical order, for whatever else differs explains it better.
        "what is trained (tensors, --fragments, --fragment-pattern, --matrix-merge)": fingerprint.hex(),
    }

"""What both sides of a comparison share: model, rows, tuning, inner loop, and how many steps a budget is."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

import attrs
from attrs import evolve, frozen
from cyclopts import CycloptsError, convert

from comparing.settings import Arm
from yeto.cli.passing import to_words
from yeto.cli.run_learner import LearnerFlags
from yeto.cli.run_syncer import SyncerFlags
from yeto.errors import ConfigError
from yeto.text.config import TextConfig
from yeto.tuning.rows import open_source


@frozen(kw_only=True)
class Recipe:
    """One fine-tuning, whoever takes its steps."""

    flags: LearnerFlags
    """What every learner is told; place, seed and exchange are left at their defaults."""
    token_budget: int
    """Raw tokens of a run, all devices together."""

    def steps(self, devices: int) -> int:
        """Return the optimizer steps that so many devices share the budget in, rounded up."""
        flags = self.flags
        assert flags.micro_batch_size != "auto", "checked when the recipe was made"
        each = flags.micro_batch_size * flags.grad_accum * flags.seq_len
        return math.ceil(self.token_budget / (each * devices))

    def text_config(self) -> TextConfig:
        """Return what the held-out rows are scored with."""
        return self.flags.text_config()

    def to_json(self) -> dict[str, Any]:
        """Return everything that decides a result, as plain JSON."""
        flags = {
            item.name: getattr(self.flags, item.name)
            for item in attrs.fields(LearnerFlags)
            if item.name != "syncer" and getattr(self.flags, item.name) != item.default
        }
        return {"token_budget": self.token_budget, **{name: _plain(value) for name, value in flags.items()}}

    def baseline(self, seed: int, devices: int, **place: Any) -> LearnerFlags:
        """Return the flags of a synchronous group, which all its ranks have."""
        return evolve(self.flags, seed=seed, max_local_steps=self.steps(devices), **place)

    def learner(self, arm: Arm, seed: int, learner: int, **place: Any) -> LearnerFlags:
        """Return the flags of an arm's learner, which all ranks of its island have.

        Raises:
            ConfigError: the arm asks for what no learner does.
        """
        return evolve(
            self.flags,
            seed=seed,
            learner_id=learner,
            num_learners=arm.learners,
            learner_budget_steps=self.steps(arm.learners * arm.ranks),
            **_typed(LearnerFlags, arm.learner_flags(), arm.name),
            **place,
        )

    def syncer(self, arm: Arm, **place: Any) -> SyncerFlags:
        """Return the flags of an arm's syncer, up to the cut-off.

        A fragment is merged at most once a step, so the session never reaches its total before the budget.

        Raises:
            ConfigError: the arm asks for what no syncer does.
        """
        steps = self.steps(arm.learners * arm.ranks)
        flags = SyncerFlags(
            learners=arm.learners,
            total_steps=(steps + 2) * self._fragments(arm),
            learner_budget_steps=steps,
            **_typed(SyncerFlags, arm.syncer_flags(), arm.name),
            **place,
        )
        flags.config()
        return flags

    def finish(self, arm: Arm, cut_off: int, **place: Any) -> SyncerFlags:
        """Return the flags of the syncer that merges what the cut-off left.

        That is the closing sweep. An arm that has none merges each fragment once more as it merged all the
        time: in an ordinary session of as many rounds as there are fragments.

        Args:
            arm: which.
            cut_off: global step of the checkpoint.
            **place: flags of its own.
        """
        flags = evolve(self.syncer(arm, **place), resume=True)
        if arm.sweeps:
            return evolve(flags, budget_finish=True)
        return evolve(
            flags,
            learner_budget_steps=None,
            total_steps=cut_off + self._fragments(arm),
            # Frozen learners take no steps, so there is none to wait for.
            sync_interval_steps=0.0,
        )

    def _fragments(self, arm: Arm) -> int:
        fragments: int = _typed(LearnerFlags, arm.learner_flags(), arm.name)["fragments"]
        return fragments

    def check(self, arms: Sequence[Arm]) -> None:
        """Refuse what a child would refuse, before any is started.

        Raises:
            ConfigError: a flag of an arm or of the recipe is impossible.
        """
        evolve(self.flags, max_local_steps=1).learner_config()
        self.flags.text_config()
        for arm in arms:
            self.syncer(arm)
            self.learner(arm, 0, 0, syncer="127.0.0.1:1").learner_config()

    def require_sources(self) -> None:
        """Refuse a model and rows that no child could open.

        Of a model that is not named by a path, only loading it tells.

        Raises:
            ConfigError: nothing is there.
            DataError: what is there is damaged.
        """
        flags = self.flags
        if flags.model.startswith((".", "/", "~")) and not os.path.isdir(flags.model):
            raise ConfigError(f"--model {flags.model}: no such folder; name one, or a model of Hugging Face")
        assert flags.eval_data is not None, "a comparison always has held-out rows"
        open_source(flags.data, revision=flags.data_revision, flag="--train-data")
        open_source(flags.eval_data, revision=flags.data_revision, flag="--eval-data")


def words(flags: LearnerFlags | SyncerFlags) -> tuple[str, ...]:
    """Return the command that has these flags."""
    role = "learner" if isinstance(flags, LearnerFlags) else "syncer"
    return ("run", f"--role={role}", *to_words(flags))


def _typed(flags: type[Any], texts: Mapping[str, str], name: str) -> dict[str, Any]:
    """Return flags as a command line would give them: fields and values."""
    hints, values = _HINTS[flags], {}
    for flag, text in texts.items():
        field = flag.replace("-", "_")
        try:
            values[field] = convert(hints[field], [text])
        except CycloptsError as error:
            raise ConfigError(f"{name}: --{flag} {text}: {' '.join(str(error).split())}") from error
    return values


_HINTS = {flags: get_type_hints(flags) for flags in (LearnerFlags, SyncerFlags)}


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool | None) else str(value)

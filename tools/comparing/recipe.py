"""What both sides of a comparison share: model, rows, tuning, inner loop, and how many steps a budget is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import attrs
from attrs import evolve, frozen
from cyclopts import App, CycloptsError, Parameter

from comparing.settings import Arm
from yeto.cli.passing import to_words
from yeto.cli.run_learner import LearnerFlags
from yeto.cli.run_syncer import SyncerFlags
from yeto.errors import ConfigError
from yeto.text.config import TextConfig

_Flags = TypeVar("_Flags")


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
            if getattr(self.flags, item.name) != item.default
        }
        return {"token_budget": self.token_budget, **{name: _plain(value) for name, value in flags.items()}}

    def baseline_words(self, seed: int, devices: int, **place: Any) -> list[str]:
        """Return the command of a synchronous group's rank."""
        flags = evolve(self.flags, syncer="none", seed=seed, max_local_steps=self.steps(devices), **place)
        return ["run", "--role=learner", *to_words(flags)]

    def learner_words(self, arm: Arm, seed: int, learner: int, **place: Any) -> list[str]:
        """Return the command of an arm's learner (of each rank of its island)."""
        exchange = [f"--{flag}={value}" for flag, value in arm.learner_flags().items()]
        flags = parsed(LearnerFlags, [*to_words(self.flags), *exchange], arm.name)
        flags = evolve(
            flags,
            seed=seed,
            learner_id=learner,
            num_learners=arm.learners,
            learner_budget_steps=self.steps(arm.learners * arm.ranks),
            **place,
        )
        return ["run", "--role=learner", *to_words(flags)]

    def syncer_words(self, arm: Arm, **place: Any) -> list[str]:
        """Return the command of an arm's syncer, up to the cut-off.

        A fragment is merged at most once a step, so the session never reaches its total before the budget.
        """
        steps = self.steps(arm.learners * arm.ranks)
        fragments = int(arm.learner_flags()["fragments"])
        words = [f"--{flag}={value}" for flag, value in arm.syncer_flags().items()]
        words += [f"--learners={arm.learners}", f"--total-steps={(steps + 2) * fragments}"]
        flags = evolve(parsed(SyncerFlags, words, arm.name), learner_budget_steps=steps, **place)
        flags.config()
        return ["run", "--role=syncer", *to_words(flags)]

    def finish_words(self, arm: Arm, cut_off: int, **place: Any) -> list[str]:
        """Return the command of the syncer that merges what the cut-off left.

        That is the closing sweep. An arm that has none merges each fragment once more as it merged all the
        time: in an ordinary session of as many rounds as there are fragments.

        Args:
            arm: which.
            cut_off: global step of the checkpoint.
            **place: flags of its own.
        """
        words = [word for word in self.syncer_words(arm, **place) if not word.startswith("--learner-budget")]
        if arm.sweeps:
            steps = self.steps(arm.learners * arm.ranks)
            return [*words, "--resume", f"--learner-budget-steps={steps}", "--budget-finish"]
        words = [w for w in words if not w.startswith(("--total-steps=", "--sync-interval-steps="))]
        total = cut_off + int(arm.learner_flags()["fragments"])
        # Frozen learners take no steps, so there is none to wait for.
        return [*words, "--resume", f"--total-steps={total}", "--sync-interval-steps=0"]

    def check(self, arms: Sequence[Arm]) -> None:
        """Refuse what a child would refuse, before any is started.

        Raises:
            ConfigError: a flag of an arm or of the recipe is impossible.
        """
        evolve(self.flags, max_local_steps=1).learner_config()
        self.flags.text_config()
        for arm in arms:
            self.syncer_words(arm)
            words = self.learner_words(arm, 0, 0, syncer="127.0.0.1:1")
            parsed(LearnerFlags, words[2:], arm.name).learner_config()


def parsed(flags: type[_Flags], words: Sequence[str], name: str) -> _Flags:
    """Read command-line words as a command would.

    Raises:
        ConfigError: it would refuse them; the message begins with ``name``.
    """
    app = App(name=name, help_flags=[], version_flags=[])

    def take(found: Annotated[Any, Parameter(name="*")]) -> Any:
        return found

    take.__annotations__["found"] = Annotated[flags, Parameter(name="*")]
    app.default(take)
    try:
        found: _Flags = app(list(words), exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        raise ConfigError(f"{name}: {' '.join(str(error).split())}") from error
    return found


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool | None) else str(value)

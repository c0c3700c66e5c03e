"""One simulation as the flags say it, and others that differ from it in some of them.

A sweep is a setup with some flags replaced. Values are read by the parser of the command line itself, so a
sweep takes whatever the flag takes and refuses it with the same words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from attrs import Attribute, evolve, frozen
from cyclopts import App, CycloptsError

from yeto.cli.policy import PolicyFlags
from yeto.cli.simulate_flags import (
    LEARNERS_MAX,
    FaultFlags,
    FleetFlags,
    LearnerFlags,
    LengthFlags,
    PolicyPart,
    SyncerMachineFlags,
    WireFlags,
)
from yeto.cli.usage import in_our_words, refuse_what_would_be_changed
from yeto.errors import ConfigError
from yeto.sim.config import LearnerSpec, SimConfig

DEFAULT_SECONDS = 86_400.0
MOST_SECONDS = 30 * 86_400.0
"""Of a run that is to be seen to its end: one that never has its quorum again would have none."""
DEFAULT_LEARNERS = 4
NO_END = 2**31 - 1
"""Rounds of a run whose end is not simulated."""

PARTS: dict[str, Any] = {
    "length": LengthFlags,
    "fleet": FleetFlags,
    "learner": LearnerFlags,
    "wire": WireFlags,
    "policy": PolicyPart,
    "syncer": SyncerMachineFlags,
    "faults": FaultFlags,
}
"""Fields of a setup, and the flags that each holds."""


@frozen(kw_only=True)
class Setup:
    """Everything that one simulation is made of, as flags."""

    length: LengthFlags
    fleet: FleetFlags
    learner: LearnerFlags
    wire: WireFlags
    policy: Any
    syncer: SyncerMachineFlags
    faults: FaultFlags

    @classmethod
    def default(cls) -> Setup:
        """Return what is simulated when no flag is given."""
        return cls(**{name: part() for name, part in PARTS.items()})

    def config(self, seed: int) -> SimConfig:
        """Return the simulation that these flags describe.

        Raises:
            ConfigError: a flag asks for something impossible; the message names it.
        """
        specs = self._specs()
        policy = PolicyFlags(
            learners=len(specs),
            total_steps=NO_END if self.length.total_steps is None else self.length.total_steps,
            **{field.name: getattr(self.policy, field.name) for field in attrs.fields(PolicyPart)},
        )
        until = self.length.duration
        if until is None:
            until = DEFAULT_SECONDS if self.length.total_steps is None else MOST_SECONDS
        push_bytes, broadcast_bytes = self.wire.sizes()
        return SimConfig(
            core=policy.core_config(),
            learners=specs,
            num_fragments=self.wire.fragments,
            push_bytes=push_bytes,
            broadcast_bytes=broadcast_bytes,
            merge_alpha=0.0 if isinstance(self.wire.merge_alpha, str) else self.wire.merge_alpha,
            carries=self.wire.merge_alpha == "carry",
            syncer=self.syncer.spec(),
            faults=self.faults.faults(),
            seed=seed,
            until_seconds=until,
        ).validated()

    def _specs(self) -> tuple[LearnerSpec, ...]:
        """Return every learner: those that --learner describes first, then as the flags say."""
        streams, window = self.wire.wan_streams, self.wire.window_mb
        specs: list[LearnerSpec] = []
        for text in self.fleet.learner:
            count, flags = read_learner(text, self.learner)
            specs += [flags.spec(streams, window)] * count
            if len(specs) > LEARNERS_MAX:
                raise ConfigError(f"--learner describes more than {LEARNERS_MAX:,} learners")
        total = self.fleet.learners
        if total is None:
            total = len(specs) or DEFAULT_LEARNERS
        if len(specs) > total:
            raise ConfigError(f"--learners {total}: --learner describes {len(specs)} already")
        return (*specs, *[self.learner.spec(streams, window)] * (total - len(specs)))

    def replaced(self, values: Mapping[str, str]) -> Setup:
        """Return this setup with some flags set to other values; names without their dashes in front.

        Raises:
            ConfigError: a flag cannot have that value.
            KeyError: there is no such flag (see ``sweepable``).
        """
        changed = self
        for flag, text in values.items():
            part, name = sweepable()[flag]
            value = evolve(getattr(changed, part), **{name: read_flag(flag, text)})
            changed = evolve(changed, **{part: value})
        return changed


def sweepable() -> dict[str, tuple[str, str]]:
    """Return the flags that a sweep can set: without dashes in front, to their place in a setup."""
    return {
        _flag(field): (part, field.name)
        for part, flags in PARTS.items()
        for field in attrs.fields(flags)
        if field.name != "learner"
    }


def read_learner(text: str, base: LearnerFlags) -> tuple[int, LearnerFlags]:
    """Read ``count=4,step-seconds=1.18``; what it does not say is taken from base.

    Raises:
        ConfigError: a name or a value is wrong; the message says what is allowed.
    """
    names = {_flag(field): field.name for field in attrs.fields(LearnerFlags)}
    count, words, given = 1, [], []
    counted = False
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if name not in names and name != "count":
            raise ConfigError(f'--learner "{text}": no {name!r}; it can say count, {", ".join(names)}')
        if not equals or not value:
            raise ConfigError(f'--learner "{text}": {name} needs a value: {name}=VALUE')
        if name != "count":
            words.append(f"--{name}={value}")
            given.append(names[name])
        elif counted:
            raise ConfigError(f'--learner "{text}": count is given twice')
        elif re.fullmatch("[0-9]{1,9}", value) and 1 <= int(value) <= LEARNERS_MAX:
            count, counted = int(value), True
        else:
            raise ConfigError(
                f'--learner "{text}": count={value} must be a whole number from 1 to {LEARNERS_MAX:,}'
            )

    def collect(flags: LearnerFlags = base) -> LearnerFlags:
        return flags

    read = _parsed(collect, words, f'--learner "{text}"')
    return count, evolve(base, **{name: getattr(read, name) for name in given})


def read_flag(flag: str, text: str) -> Any:
    """Return the value of a flag that is said alone, without its dashes in front.

    Raises:
        ConfigError: the flag cannot have that value.
        KeyError: there is no such flag (see ``sweepable``).
    """
    part, name = sweepable()[flag]

    def collect(flags: Any) -> Any:
        return getattr(flags, name)

    collect.__annotations__["flags"] = PARTS[part]
    collect.__defaults__ = (PARTS[part](),)
    return _parsed(collect, [f"--{flag}={text}"], f"--sweep {flag}={text}")


def _parsed(collect: Callable[..., Any], words: Sequence[str], where: str) -> Any:
    """Have words read as they would be on a command line of their own."""
    app = App(help_flags=[], version_flags=[], config=[refuse_what_would_be_changed])
    app.default(collect)
    try:
        return app(words, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        raise ConfigError(f"{where}: {in_our_words(error)}") from error


def _flag(field: Attribute[Any]) -> str:
    return field.name.replace("_", "-")

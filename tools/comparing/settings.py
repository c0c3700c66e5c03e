"""The arms of the comparison, in one table, and the words that make others of them.

An arm is the base settings with a few flags changed. ``direct@H=2,M=4`` is the arm ``direct`` with two more:
a flag of the syncer or of the exchange by its name, or one of the short names below. Flags that say what is
trained belong to both sides and are no arm's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from attrs import evolve, field, frozen

from yeto.cli.policy import PolicyFlags
from yeto.errors import ConfigError

SYNCER: Mapping[str, str] = {
    "sync-interval-steps": "24",
    "pipeline": "2",
    "delta-correction": "heloco",
    "outer": "stock",
    "closing-sweep": "plain",
}
LEARNER: Mapping[str, str] = {
    "fragments": "8",
    "fragment-pattern": "binpack",
    "matrix-merge": "rda",
    "merge-alpha": "0.5",
    "wire-dtype": "bf16",
}
"""The base settings; the quorum is all learners."""

SHORT: Mapping[str, str] = {
    "H": "sync-interval-steps",
    "P": "fragments",
    "alpha": "merge-alpha",
    "sweep": "closing-sweep",
    "correction": "delta-correction",
    "pattern": "fragment-pattern",
    "merge": "matrix-merge",
    "wire": "wire-dtype",
    "tau": "grace-tau",
}


@frozen(kw_only=True)
class Arm:
    """One setting of the comparison."""

    name: str
    what: str
    """What is different, in words."""
    learners: int = 2
    """M."""
    ranks: int = 1
    """G, of each island."""
    slow: float = 1.0
    """The last learner's steps take so many times as long."""
    syncer: Mapping[str, str] = field(factory=dict)
    learner: Mapping[str, str] = field(factory=dict)
    """Flags without their dashes; the base settings where nothing is said."""

    @property
    def baseline(self) -> str:
        """Name of the synchronous group that it is compared with."""
        return baseline_name(self.learners * self.ranks)

    @property
    def sweeps(self) -> bool:
        """Whether it ends with a closing sweep."""
        return self.syncer_flags()["closing-sweep"] != "off"

    def syncer_flags(self) -> dict[str, str]:
        """Return all flags of its syncer that are no place or length."""
        return {"quorum": str(self.learners), **SYNCER, **self.syncer}

    def learner_flags(self) -> dict[str, str]:
        """Return all flags of its learners' exchange."""
        return {**LEARNER, **self.learner}


def baseline_name(ranks: int) -> str:
    """Return the name of a synchronous group; how its ranks would be dealt out to islands is all one."""
    return f"baseline-m{ranks}"


def _arm(name: str, what: str, /, **rest: Any) -> Arm:
    return Arm(name=name, what=what, **rest)


ARMS: Mapping[str, Arm] = {
    arm.name: arm
    for arm in (
        _arm("m2", "stock outer step, H 24, two learners"),
        _arm("m4", "four learners", learners=4),
        _arm("alpha0", "a merge overwrites the local weights", learner={"merge-alpha": "0"}),
        _arm("q4", "deltas in four bits", learner={"wire-dtype": "q4"}),
        _arm(
            "q4-nofeedback",
            "deltas in four bits, what they cannot carry is lost",
            learner={"wire-dtype": "q4", "q4-error-feedback": "false"},
        ),
        _arm("serial", "one round at a time", syncer={"pipeline": "1"}),
        _arm("noheloco", "no push is corrected", syncer={"delta-correction": "none"}),
        _arm("heloco-all", "every push is corrected", syncer={"delta-correction": "heloco-all"}),
        _arm("strided", "fragments by layer", learner={"fragment-pattern": "strided"}),
        _arm("iso", "isotropic merge of matrices", learner={"matrix-merge": "iso"}),
        _arm(
            "direct-rda",
            "outer lr 1, no momentum, radial-directional average, overwriting",
            syncer={"outer-lr": "1", "outer-momentum": "0"},
            learner={"merge-alpha": "0"},
        ),
        _arm(
            "direct",
            "outer lr 1, no momentum, plain average, carry",
            syncer={"outer": "direct"},
            learner={"merge-alpha": "carry"},
        ),
        _arm("normalised", "gain-normalised momentum", syncer={"outer": "normalised"}),
        _arm(
            "auto",
            "the outer step that the coordinator chooses",
            syncer={"outer": "auto"},
            learner={"merge-alpha": "carry"},
        ),
        _arm(
            "stock-off", "no closing sweep: the last merges are stock's own", syncer={"closing-sweep": "off"}
        ),
        _arm("unthrottled", "merges as often as it can", syncer={"sync-interval-steps": "0"}),
    )
}
"""Every named arm, in the order of the report."""

EXCHANGE = frozenset(LEARNER) | {"wan-streams", "q4-error-feedback"}
DECIDED = {"learners", "total-steps", "learner-budget-steps", "budget-finish"}
POLICY = {item.name.replace("_", "-") for item in attrs.fields(PolicyFlags)} - DECIDED


def changed(arm: Arm, changes: Iterable[str]) -> Arm:
    """Return an arm with more of it changed, and a name that says so.

    Args:
        arm: where to begin.
        changes: ``KEY=VALUE`` each.

    Raises:
        ConfigError: a key is no flag of an arm, or a value no number where one is needed.
    """
    said = []
    for change in changes:
        key, equals, value = change.partition("=")
        flag = SHORT.get(key, key)
        if not equals or not value:
            raise ConfigError(f"{arm.name}: {change!r} must be KEY=VALUE")
        if key == "M":
            arm = evolve(arm, learners=_whole(change, value))
        elif key == "G":
            arm = evolve(arm, ranks=_whole(change, value))
        elif key == "slow":
            arm = evolve(arm, slow=_factor(change, value))
        elif flag in EXCHANGE:
            arm = evolve(arm, learner={**arm.learner, flag: value})
        elif flag in POLICY:
            arm = evolve(arm, syncer={**arm.syncer, flag: value})
        else:
            known = ", ".join(["M", "G", "slow", *SHORT])
            raise ConfigError(
                f"{change}: {key} is no setting of an arm; there are {known}, and the flags of the syncer's "
                "policy and of the learners' exchange by their names"
            )
        said.append(f"{key}={value}")
    if not said:
        return arm
    name = arm.name + ("," if "@" in arm.name else "@") + ",".join(said)
    return evolve(arm, name=name, what=f"{arm.what}; {', '.join(said)}")


def chosen(names: str, changes: Iterable[str] = ()) -> list[Arm]:
    """Return the arms that a list of names stands for.

    Args:
        names: ``all``, or arms separated by commas, each with its own changes behind an ``@``:
            ``m2,direct@H=2,M=4`` are two.
        changes: for all of them.

    Raises:
        ConfigError: a name or a change is unknown, or an arm comes twice.
    """
    changes = list(changes)
    if names == "all":
        return [changed(arm, changes) for arm in ARMS.values()]
    arms: list[Arm] = []
    for words in _split(names):
        name, _, own = words.partition("@")
        if name not in ARMS:
            raise ConfigError(f"--settings {name}: unknown; there are all, {', '.join(ARMS)}")
        arms.append(changed(ARMS[name], [*filter(None, own.split(",")), *changes]))
    twice = {arm.name for arm in arms if sum(arm.name == other.name for other in arms) > 1}
    if twice:
        raise ConfigError(f"--settings {', '.join(sorted(twice))}: given twice")
    if not arms:
        raise ConfigError("--settings is empty")
    return arms


def _split(names: str) -> list[str]:
    """Cut at the commas that begin a name: the others belong to the changes before them."""
    parts: list[str] = []
    for word in names.split(","):
        if parts and "=" in word and "@" not in word:
            parts[-1] += "," + word
        else:
            parts.append(word.strip())
    return [part for part in parts if part]


def _whole(change: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise ConfigError(f"{change}: must be a whole number above 0")
    return int(value)


def _factor(change: str, value: str) -> float:
    try:
        factor = float(value)
    except ValueError:
        factor = 0.0
    if not 1.0 <= factor <= 100.0:
        raise ConfigError(f"{change}: must be a number from 1 to 100")
    return factor

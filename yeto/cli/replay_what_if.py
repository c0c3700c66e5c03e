"""``yeto replay --what-if``: the policy as a person writes it, and what it would have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from yeto.cli.replay_print import aligned, print_divergence, print_json, verdict_json
from yeto.cli.replay_round import no_such_round
from yeto.errors import ConfigError
from yeto.tape import RULES_VERSION, Record, Replayer, printable
from yeto.view.what_if import WhatIf
from yeto.view.what_if_attempt import Outcome, Verdict
from yeto.view.what_if_summary import Side, WhatIfSummary, most_changed, outcome_json

SHOWN = 12
"""Attempts in the table of those that change most."""

_NOTE = (
    "each attempt is judged by itself, from its recorded members and answer times: later rounds are not "
    "simulated, though an earlier seal would have opened them earlier"
)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("expected a number") from None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected a whole number") from None


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def read_or_none(text: str) -> Any:
        try:
            return None if text == "none" else read(text)
        except ValueError as error:
            raise ValueError(f"{error} or none") from None

    return read_or_none


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"expected {' or '.join(words)}")
        return text

    return read


POLICY: dict[str, tuple[str, Callable[[str], Any]]] = {
    "grace-ms": ("grace_cap_seconds", lambda text: _number(text) / 1000.0),
    "grace-gamma": ("grace_gamma", _number),
    "grace-tau": ("grace_tau", _number),
    "quorum": ("quorum", _whole),
    "quorum-timeout-s": ("quorum_timeout_seconds", _number),
    "max-base-lag": ("max_base_lag", _or_none(_whole)),
    "max-norm-ratio": ("max_norm_ratio", _or_none(_number)),
    "learner-weight": ("learner_weight", _one_of("tokens2-over-steps", "equal")),
    "closing-sweep": ("closing_sweep", _one_of("plain", "off")),
}
"""The syncer's flags that decide when an attempt is sealed and with whom: their field, and how it is read."""


def parse_policy(text: str) -> dict[str, Any]:
    """Return the settings that ``grace-ms=0,quorum=1`` and the like name.

    Raises:
        ConfigError: a setting is unknown, given twice or has no such value; says what is allowed.
    """
    policy: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if name not in POLICY or not equals:
            raise ConfigError(
                f"--what-if {text}: {part.strip()!r} is no setting; "
                f"give NAME=VALUE with commas between them, of {', '.join(POLICY)}"
            )
        key, read = POLICY[name]
        if key in policy:
            raise ConfigError(f"--what-if {text}: {name} is given twice")
        try:
            policy[key] = read(value)
        except ValueError as error:
            raise ConfigError(f"--what-if {name}={value}: {error}") from None
    return policy


def decide_anew(
    path: Path, records: Iterator[Record], replayer: Replayer, text: str, *, step: int | None, as_json: bool
) -> int:
    """Decide every attempt of a tape anew while it is verified; say what would have been otherwise.

    Args:
        path: the tape.
        records: its records as they are verified.
        replayer: what verifies them.
        text: the policy, as given.
        step: only the attempts of this round; None for all.
        as_json: print JSON.
    """
    fold = WhatIf(parse_policy(text))
    for record in records:
        if replayer.divergence is not None:
            return print_divergence(path, replayer, as_json=as_json)
        if record.seq == 0 and replayer.header.rules_version != RULES_VERSION:
            raise ConfigError(
                f"--what-if: {path} follows rules {replayer.header.rules_version}; only attempts of "
                f"rules {RULES_VERSION} can be decided anew"
            )
        try:
            fold.feed(record, replayer.state)
        except ConfigError as error:
            raise ConfigError(f"--what-if {text}: {error}") from error
    outcomes = [outcome for outcome in fold.outcomes() if step is None or outcome.step == step]
    if step is not None and not outcomes:
        raise no_such_round(step, replayer.state)
    summary = WhatIfSummary(outcomes)
    if as_json:
        print_json(
            {
                **verdict_json(path, replayer),
                "what_if": {
                    "policy": text,
                    "note": _NOTE,
                    "summary": summary.to_json(),
                    "attempts": [outcome_json(outcome) for outcome in outcomes],
                },
            }
        )
    else:
        print(f"{path}: {replayer.records} records, every decision follows from its events\n")
        _print(outcomes, summary, text)
    return 0


def _print(outcomes: list[Outcome], summary: WhatIfSummary, text: str) -> None:
    print(printable(f"what if {text}: {_NOTE}"))
    print()
    print(aligned(_side_rows(summary), left=(0,)))
    print()
    print(aligned(_learner_rows(summary)))
    changed = most_changed(outcomes, SHOWN)
    if not changed:
        print("\nevery attempt ends as it did")
        return
    more = f", the {SHOWN} that change most" if summary.changed > SHOWN else ""
    print(f"\n{summary.changed} of {summary.attempts} attempts end otherwise{more}")
    rows = [("round", "attempt", "record", "opened", "recorded", "what if")]
    rows += [
        (
            str(outcome.step),
            str(outcome.attempt),
            str(outcome.seq),
            f"{outcome.at:.3f} s",
            _ending(outcome.recorded, ()),
            _ending(outcome.other, outcome.estimated),
        )
        for outcome in changed
    ]
    print(aligned(rows, left=(4, 5)))
    for sentence in _footnotes(summary):
        print(sentence)


def _footnotes(summary: WhatIfSummary) -> list[str]:
    notes = []
    if summary.estimated:
        notes.append(
            f"~ {summary.estimated} pushes never arrived on the tape, as their attempt was over or did not "
            "take them; they are taken to arrive one usual upload of their learner after their header"
        )
    met = summary.other.statuses
    for status, sentence in (
        ("open", "the record ends before the attempt is decided"),
        ("not_opened", "too few learners were connected for this quorum"),
        ("not_needed", "an earlier attempt of the round was sealed, or still open, under this policy"),
    ):
        if met[status]:
            notes.append(f"{_WORDS[status]}: {sentence}")
    return ["", *notes] if notes else []


_WORDS = {
    "sealed": "sealed",
    "discarded": "discarded",
    "open": "undecided",
    "not_opened": "not opened",
    "not_needed": "not needed",
}


def _side_rows(summary: WhatIfSummary) -> list[tuple[str, ...]]:
    sides = (summary.recorded, summary.other)
    rows: list[tuple[str, ...]] = [("attempts", "recorded", "what if")]
    for status, word in _WORDS.items():
        if status == "sealed" or any(side.statuses[status] for side in sides):
            rows.append((word, *(_counted(side, status) for side in sides)))
    rows.append(("merged of those asked", *(_percent(side.participation) for side in sides)))
    seconds = [summary.mean_seconds(side) for side in sides]
    rows.append(("mean time to the seal", *("-" if mean is None else f"{mean:.3f} s" for mean in seconds)))
    rows.append(("sealed earlier", "", str(summary.earlier)))
    rows.append(("sealed later", "", str(summary.later)))
    return rows


def _counted(side: Side, status: str) -> str:
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(side.reasons.items()))
    return f"{side.statuses[status]}" + (f" ({reasons})" if status == "discarded" and reasons else "")


def _learner_rows(summary: WhatIfSummary) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("learner", "merges", "what if", "gained", "lost", "contribution", "what if")
    ]
    for learner, part in sorted(summary.learners.items()):
        rows.append(
            (
                str(learner),
                str(part.recorded),
                str(part.other),
                str(part.gained),
                str(part.lost),
                _percent(summary.share(part.recorded_share, summary.recorded)),
                _percent(summary.share(part.other_share, summary.other)),
            )
        )
    return rows


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _ending(verdict: Verdict, estimated: tuple[int, ...]) -> str:
    """One cell: how an attempt ended."""
    if verdict.status == "discarded":
        return f"discarded after {verdict.seconds:.3f} s: {verdict.reason}"
    if verdict.status != "sealed":
        return _WORDS[verdict.status]
    who = " ".join(f"{learner}{'~' if learner in estimated else ''}" for learner in sorted(verdict.weights))
    left = "".join(f", without {learner}" for learner in verdict.left_out)
    return f"sealed after {verdict.seconds:.3f} s with {who}{left}"

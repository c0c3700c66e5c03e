"""What ``yeto replay`` prints: sentences and tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from yeto.core import CoreConfig
from yeto.core.decisions import Decision
from yeto.core.events import Event
from yeto.tape import Difference, Divergence, Header, Record, Replayer, Spread, Summary, describe, printable


def print_json(value: Mapping[str, Any]) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2))


def print_record(record: Record, *, as_json: bool) -> None:
    """Print one record on one line, at once: somebody may be following."""
    print(json.dumps(record_json(record)) if as_json else describe(record), flush=True)


def verdict_json(path: Path, replayer: Replayer) -> dict[str, Any]:
    """Return whether a tape follows the rules, and where it does not, as JSON values."""
    divergence = replayer.divergence
    return {
        "tape": str(path),
        "records": replayer.records,
        "verified": divergence is None,
        "divergence": _divergence_json(divergence) if divergence else None,
        "due": replayer.due,
    }


def print_divergence(path: Path, replayer: Replayer, *, as_json: bool) -> int:
    """Print the first record that the rules do not give, with both sides; return exit code 1."""
    divergence = replayer.divergence
    assert divergence is not None, "asked to print what was not found"
    if as_json:
        print_json(verdict_json(path, replayer))
        return 1
    lines = [
        f"{path}: line {divergence.line} (record {divergence.seq}) diverges: {divergence.reason}",
        f"  the event: {_text(divergence.event)}",
        f"  the tape:  {_text(divergence.recorded)}",
        f"  the rules: {_text(divergence.expected)}",
    ]
    lines += [
        f"  {name}: {_value(recorded)} on the tape, {_value(expected)} by the rules"
        for name, recorded, expected in divergence.fields()
    ]
    print("\n".join(map(printable, lines)))
    return 1


def print_difference(left: Path, right: Path, difference: Difference | None, *, as_json: bool) -> None:
    """Print where two tapes part."""
    if as_json:
        sides = (difference.left, difference.right) if difference else (None, None)
        print_json(
            {
                "equal": difference is None,
                "line": difference.line if difference else None,
                "left": record_json(sides[0]) if sides[0] else None,
                "right": record_json(sides[1]) if sides[1] else None,
            }
        )
    elif difference is None:
        print(f"{left} and {right} hold the same records")
    else:
        print(f"line {difference.line} differs")
        for path, record in ((left, difference.left), (right, difference.right)):
            print(f"  {path}: {_side(record)}")
        for name, mine, theirs in difference.fields():
            for part, a, b in _narrowed(name, mine, theirs):
                print(printable(f"  {part}: {_value(a)} in {left}, {_value(b)} in {right}"))


def _side(record: Record | None) -> str:
    if record is None:
        return "has ended before"
    # What names a run (session, version, clock) was taken out of the header before it was compared.
    return "header" if isinstance(record.body, Header) else describe(record).strip()


def _narrowed(name: str, left: object, right: object) -> list[tuple[str, object, object]]:
    """Of two configurations name the settings that differ, not all of them."""
    if not (isinstance(left, CoreConfig) and isinstance(right, CoreConfig)):
        return [(name, left, right)]
    mine, theirs = attrs.asdict(left), attrs.asdict(right)
    return [(f"{name}.{key}", mine[key], theirs[key]) for key in mine if mine[key] != theirs[key]]


def print_summary(summary: Summary, replayer: Replayer) -> None:
    """Print session, rounds, attempts, learners and refusals."""
    for name, text in _facts(summary, replayer):
        print(f"{name:<10} {printable(text)}")
    print()
    print(_learner_table(summary))
    refusals = [
        (f"learner {learner}, push: {reason}", refusal)
        for (learner, reason), refusal in sorted(summary.refused_pushes.items())
    ]
    refusals += [
        (f"connection: {reason}", refusal) for reason, refusal in sorted(summary.refused_learners.items())
    ]
    if refusals:
        print("\nrefused")
    for what, refusal in refusals:
        print(printable(f"  {what} {_times(refusal.count)}, the last in record {refusal.seq}: {refusal.why}"))


def _facts(summary: Summary, replayer: Replayer) -> list[tuple[str, str]]:
    header, config, terms = replayer.header, replayer.state.config, summary.terms
    fragments = f"{terms.num_fragments} fragments in {terms.dtype}" if terms else "not opened yet"
    if summary.ended is not None:
        end = f"ended with exit code {summary.ended.exit_code}: {summary.ended.why}"
    elif replayer.due:
        due = "1 decision" if replayer.due == 1 else f"{replayer.due} decisions"
        end = f"not ended; {due} of the last event still to come"
    else:
        end = "not ended"
    rounds = f"{summary.step} of {replayer.state.target} committed"
    if summary.no_ops:
        rounds += f", {summary.no_ops} without effect (all weights were 0)"
    if summary.superseded:
        rounds += f", {summary.superseded} more superseded by a restart"
    discarded = ", ".join(f"{reason} {count}" for reason, count in sorted(summary.discarded.items()))
    return [
        ("session", f"{header.session_id}, Yeto {header.software_version}, {header.wall_clock}"),
        ("", f"{config.num_learners} learners, quorum {config.quorum}, {fragments}, {summary.at:.1f} s"),
        *(("", sentence) for sentence in _restarts(summary)),
        ("", end),
        ("rounds", rounds),
        (
            "attempts",
            f"{summary.attempts} opened, {summary.sealed} sealed, {sum(summary.discarded.values())} discarded"
            + (f" ({discarded})" if discarded else ""),
        ),
        ("quorum", _spread(summary.quorum_seconds)),
        ("grace", _spread(summary.grace_seconds)),
        ("merge", _spread(summary.merge_seconds)),
        (
            "staleness",
            ", ".join(
                f"{value}: {count} {'push' if count == 1 else 'pushes'}"
                for value, count in sorted(summary.staleness.items())
            )
            or "-",
        ),
    ]


def _restarts(summary: Summary) -> list[str]:
    """Return one sentence for each restart: from where, and after what."""
    sentences = []
    for event, ended in zip(summary.restarts, summary.endings, strict=True):
        after = "it was cut off" if ended is None else f"exit code {ended.exit_code}: {ended.why}"
        sentences.append(f"restarted at {event.at:.1f} s from step {event.step}, after {after}")
    return sentences


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _learner_table(summary: Summary) -> str:
    rows = [
        ("learner", "merges", "steps", "tokens", "contribution", "staleness", "missed", "left out", "joins")
    ]
    for learner, row in sorted(summary.learners.items()):
        share, stale = summary.contribution(learner), row.staleness
        rows.append(
            (
                str(learner),
                str(row.merges),
                str(row.c_steps),
                str(row.c_tokens),
                "-" if share is None else f"{share:.1%}",
                f"{stale.total / stale.count:.2f}, at most {stale.most:.0f}" if stale.count else "-",
                str(row.missed),
                str(row.left_out),
                str(row.joins),
            )
        )
    return (
        aligned(rows) + "\n(steps and tokens: of every merged push, so each counts once for every fragment)"
    )


def aligned(rows: Sequence[Sequence[str]], *, left: Collection[int] = ()) -> str:
    """Return rows of cells as text; columns stand to the right, but for those in ``left``."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _spread(spread: Spread) -> str:
    if spread.count == 0:
        return "-"
    mean = spread.total / spread.count
    return f"{_times(spread.count)}, mean {mean:.3g} s, {spread.least:.3g} to {spread.most:.3g} s"


def _divergence_json(divergence: Divergence) -> dict[str, Any]:
    return {
        "seq": divergence.seq,
        "line": divergence.line,
        "reason": divergence.reason,
        "event": _body_json(divergence.event),
        "recorded": _body_json(divergence.recorded),
        "expected": _body_json(divergence.expected),
    }


def record_json(record: Record) -> dict[str, Any]:
    """Return a record as JSON values, in the order of its line."""
    cause = {} if record.because is None else {"because": record.because}
    return {
        "seq": record.seq,
        "at": record.at,
        "kind": record.kind,
        **cause,
        **attrs.asdict(record.body),
    }


def _body_json(body: Event | Decision | None) -> dict[str, Any] | None:
    return None if body is None else {"kind": body.kind, **attrs.asdict(body)}


def _text(body: Event | Decision | None) -> str:
    return "nothing" if body is None else json.dumps(_body_json(body))


def _value(value: object) -> str:
    return json.dumps(value, default=attrs.asdict)

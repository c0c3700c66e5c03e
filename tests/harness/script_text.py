"""What a scenario script shows: decisions, events, refusals and the state, each as one line of text.

A line leaves out what can be read elsewhere on it or in the command above it, and nothing that a rule
decides. ``1'2`` is the second connection of learner 1 (``1`` alone its first), ``r5a2`` round 5 attempt
2, ``p0v4`` fragment 0 at version 4. A ``!`` marks a decision that is acted upon only when its record is
on the disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from yeto.core import Phase, State, next_timer
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.parts import Round, Status
from yeto.core.values import Member, Weighted

_GENERATION = re.compile(r"\b[0-9a-f]{16}\b")
_LONG_HEX = re.compile(r"\b[0-9a-f]{17,}\b")


def number(value: float | None) -> str:
    """A time or an amount: the clock's grid is a microsecond, everything else has 6 digits."""
    if value is None:
        return "none"
    return f"{round(value, 6):.15g}" if abs(value) < 1e9 else f"{value:.6g}"


def who(learner: int, generation: str) -> str:
    """A connection of a learner: ``1`` is its first, ``1'2`` its second."""
    dial = int(generation[8:], 16)
    return str(learner) if dial == 1 else f"{learner}'{dial}"


def everybody(members: Iterable[Member]) -> str:
    return " ".join(who(member.learner, member.generation) for member in members) or "nobody"


def ids(learners: Iterable[int]) -> str:
    return " ".join(map(str, learners)) or "nobody"


def sentence(text: str) -> str:
    """A sentence of the coordinator with its generations and digests in the script's words."""
    text = _GENERATION.sub(lambda found: f"{int(found[0][:8], 16)}'{int(found[0][8:], 16)}", text)
    return _LONG_HEX.sub(lambda found: f"{found[0][:4]}..", text)


def _of(record: object) -> str:
    """``r5a2``, from whatever has a step and perhaps an attempt."""
    attempt = getattr(record, "attempt", None)
    return f"r{record.step}" + ("" if attempt is None else f"a{attempt}")  # type: ignore[attr-defined]


def event_line(event: ev.Event) -> str:
    """An event that the script did not name itself: a timer."""
    return event.kind + (f" {_of(event)}" if hasattr(event, "step") else "")


def decision_line(decision: de.Decision) -> str:
    """A decision as one line."""
    fields, reason = _decision(decision)
    mark = "!" if decision.durable else ""
    line = f"{decision.kind}{mark} {fields}".rstrip()
    return f"{line}: {sentence(decision.why)}" if reason else line


def _decision(d: de.Decision) -> tuple[str, bool]:
    """The fields that matter, and whether the sentence says something that they do not."""
    match d:
        case de.SessionOpened():
            return "", True
        case de.SessionReleased():
            return who(d.learner, d.generation), True
        case de.LearnerRefused():
            field = f" {d.field}" if d.field else ""
            verdict = "for good" if d.permanent else "for now"
            return f"{who(d.learner, d.generation)} {d.reason}{field} {verdict}", True
        case de.RoundsStarted():
            return f"{_of(d)} with {ids(d.learners)}", True
        case de.AttemptOpened():
            sweep = ", sweep" if d.sweep else ""
            return (
                f"{_of(d)} p{d.fragment}v{d.base_version} from {everybody(d.members)}, quorum {d.quorum}"
                f"{sweep}, until {number(d.deadline)}"
            ), False
        case de.PushAdmitted():
            return f"{who(d.learner, d.generation)} to {_of(d)}, stale {d.staleness}", False
        case de.PushAccepted():
            return f"{who(d.learner, d.generation)} to {_of(d)}", True
        case de.PushRefused():
            then = ", declined" if d.declined else ", sent again" if d.resend else ""
            return f"{who(d.learner, d.generation)} to {_of(d)}, {d.reason}{then}", True
        case de.QuorumReached():
            return f"{_of(d)} after {number(d.quorum_seconds)} s", False
        case de.GraceOpened():
            return (
                f"{_of(d)} {number(d.grace_seconds)} s until {number(d.deadline)}, gamma {number(d.gamma)}, "
                f"tau {number(d.tau)}, step {number(d.xi_step)}, quorum {number(d.xi_quorum)}, "
                f"sync {number(d.xi_sync)}, cap {number(d.cap)}"
            ), False
        case de.AttemptSealed():
            return _of(d), True
        case de.AttemptDiscarded():
            lost = f", lost {ids(d.lost)}" if d.lost else ""
            retry = "" if d.retry_at is None else f", retry at {number(d.retry_at)}"
            return f"{_of(d)} {d.reason}{lost}{retry}", True
        case de.MergeOrdered():
            how = ", plain average" if d.plain_average else ""
            how += "" if d.momentum_scale is None else f", momentum scaled by {number(d.momentum_scale)}"
            return f"{_of(d)} p{d.fragment}: {'; '.join(map(_weighted, d.responders))}{how}", False
        case de.CommitOrdered():
            sweep = ", sweep" if d.sweep else ""
            no_op = ", no-op" if d.no_op else ""
            return (
                f"{_of(d)} p{d.fragment}, lr {number(d.lr)}, momentum {number(d.momentum)}{sweep}{no_op}",
                False,
            )
        case de.RoundCommitted():
            return _merge(d), d.no_op
        case de.CheckpointOrdered():
            final = ", final" if d.final else ""
            target = "" if d.finish_target is None else f", finish target {d.finish_target}"
            return f"{d.step}{final}{target}", True
        case de.BroadcastOrdered():
            parts = " ".join(f"p{ref.fragment}v{ref.version}" for ref in d.fragments)
            return f"{parts} to {everybody(d.to)}", False
        case de.FinalCutOrdered():
            versions = " ".join(f"p{p}v{version}" for p, version in enumerate(d.versions))
            return f"{d.step}, {versions} to {everybody(d.to)}, awaiting {ids(d.awaited)}", True
        case de.LearnerReleased():
            return who(d.learner, d.generation), False
        case de.SessionEnding():
            return d.phase, True
        case de.SessionEnded():
            mark = ", marked" if d.mark_final else ""
            return f"exit {d.exit_code} at step {d.step}{mark}", True
        case de.Ignored():
            return f"{d.event}, {d.reason}", True
        case _:
            raise AssertionError(f"no line for a decision {d.kind}")


def _weighted(weighted: Weighted) -> str:
    stale = f" stale {weighted.staleness}" if weighted.staleness else ""
    correct = " to be corrected" if weighted.correct else ""
    return f"{who(weighted.learner, weighted.generation)} weighs {number(weighted.weight)}{stale}{correct}"


def _merge(d: de.RoundCommitted) -> str:
    shares = "; ".join(
        f"{who(r.learner, r.generation)} {number(r.contribution)} of norm {number(r.delta_norm)}"
        + (f" stale {r.staleness}" if r.staleness else "")
        + (" corrected" if r.corrected else "")
        for r in d.responders
    )
    missed = f"; missed {ids(d.missed)}" if d.missed else ""
    left_out = f"; left out {ids(d.left_out)}" if d.left_out else ""
    seconds = (
        f"quorum {number(d.quorum_seconds)} s, grace {number(d.grace_seconds)}, "
        f"merge {number(d.merge_seconds)}, sync {number(d.sync_seconds)}"
    )
    return f"{_of(d)} p{d.fragment} v{d.base_version} -> v{d.version}: {shares}{missed}{left_out}; {seconds}"


# The state.


def state_line(state: State, at: float) -> str:
    """Where the session stands, on one line that begins with the time it is."""
    parts = [f"{number(at)} {state.phase} {state.step}/{state.target}{_versions(state)}"]
    parts += [_saved(state)] if _saved(state) else []
    parts += [_round(state, round_) for round_ in state.rounds]
    if state.phase is Phase.PROVISIONAL and state.terms is not None:
        parts.append(f"initial {ids(sorted(state.initial))}")
    if state.phase is Phase.FINALISING:
        parts.append(f"awaiting {ids(sorted(state.awaited))}, acknowledged {ids(sorted(state.acked))}")
    if state.reports:
        parts.append(f"reported {ids(sorted(state.reports))}")
    if state.phase is Phase.ENDED:
        parts.append(f"exit {state.exit_code}")
    else:
        parts.append(f"here {everybody(state.everyone())}")
        timer = next_timer(state)
        parts.append(
            "next nothing" if timer is None else f"next {event_line(timer.event)} at {number(timer.at)}"
        )
    return "= " + " | ".join(parts)


def _versions(state: State) -> str:
    """``v3 v4``; what was not broadcast yet has the last broadcast behind it: ``v4(v2)``."""
    line = ""
    for p, version in enumerate(state.versions):
        sent = state.broadcast[p] if state.broadcast else None
        line += f" v{version}" if sent == version else f" v{version}({'-' if sent is None else f'v{sent}'})"
    return line


def _saved(state: State) -> str:
    """The checkpoint, when there is more to say than that it holds everything committed."""
    if not state.versions or (state.durable == state.step and state.writing is None):
        return ""
    saved = "saved nothing" if state.durable < 0 else f"saved {state.durable}"
    writing = "" if state.writing is None else f", writing {state.writing}"
    due = "" if state.due is None else f", due {state.due}"
    return saved + writing + due


def _round(state: State, round_: Round) -> str:
    line = f"r{round_.step}a{round_.attempt} {round_.status}"
    if round_.status is Status.RETRY:
        return (
            f"{line} at {number(round_.retry_at)}"
            if round_.retry_at is not None
            else f"{line} when {state.quorum} are here"
        )
    if round_.status is not Status.GATHERING:
        return line
    owing = [
        learner
        for learner, member in sorted(round_.members.items())
        if round_.owes(learner, member.generation)
    ]
    line += f" has {ids(sorted(round_.answers))}, wants {ids(owing)}"
    for word, learners in (
        ("uploading", round_.uploads),
        ("second chance", round_.chances),
        ("declined", [learner for learner, declined in round_.gone.items() if declined]),
        ("gone", [learner for learner, declined in round_.gone.items() if not declined]),
    ):
        line += f", {word} {ids(sorted(learners))}" if learners else ""
    line += f", {round_.excused} excused" if round_.excused else ""
    return line

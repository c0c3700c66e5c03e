"""Alerts: what a person should look at, as data, with the numbers that say why.

They are found anew in every moment from the fold alone, so all faces show the same ones, and an alert is over
when its cause is. Each threshold is a name with its reason; where the run itself says what is usual, it is so
many times that.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from yeto.core import Phase
from yeto.storage import size_text
from yeto.view.agreement import mean
from yeto.view.board import Board, Fault
from yeto.view.model import Alert, Live

KINDS = (
    "no_commit",
    "missed_rounds",
    "stalled_learner",
    "norm_spike",
    "non_finite",
    "learners_disagree",
    "merge_inflates",
    "published_ahead",
    "pool_poisoned",
    "checkpoint_failed",
    "disk_space",
    "syncer_gone",
)

NO_COMMIT_TIMES = 5.0
"""Times the usual interval between commits. Retries after a quorum timeout are longer, and worth an alert."""
NO_COMMIT_SECONDS = 60.0
"""But not before a minute: short rounds hang on a hiccup of the network."""

MISSED_ROUNDS = 3
"""Committed rounds in a row that a member gave nothing to. One or two are what the grace is for."""

STALLED_TIMES = 10.0
"""Times the smoothed step time of a learner that its local step has stood still."""
STALLED_SECONDS = 60.0
"""But not before a minute: an evaluation or a save takes its time, and reports come seconds apart."""

RECENT_ROUNDS = 32
"""Rounds for which something that happened once (a spike, a push that was not finite) stays an alert."""

DELTA_COSINE = -0.3
"""Mean cosine between learners' deltas. Late in a run it is about 0, and with --merge-alpha 0.5 somewhat
below: half of what two learners differ in stays with each. Far below, they undo each other."""
EXCESS = 1.02
"""Times sqrt(M), the length that deltas at right angles give a radial-directional average, with room for
noise. Above, the deltas are opposed, and what is made longer is what they do not agree on."""
OFFSET_RATIO = 1.0
"""Lengths of the average delta from the learners' mean to the published model. With momentum it is below 1 as
long as learners can repair it; a model further ahead scores worse than any of them."""

DISK_CHECKPOINTS = 3
"""Room for so many checkpoints: one is written beside the last one, and one more is kept in reserve."""
DISK_BYTES = 2**30
"""And so much in any case: the tape and the logs grow there, too."""


def find_alerts(board: Board, *, now: float, writer: str, live: Live) -> tuple[Alert, ...]:
    """Return what a person should look at, the gravest first.

    Args:
        board: the fold.
        now: the present time of the session.
        writer: whether the tape is being written; see :class:`~yeto.view.model.Moment`.
        live: what is known of the running machine.
    """
    found = [
        *_syncer_gone(board, now, writer),
        *_faults(board),
        *_disk_space(board, now, live),
        *_no_commit(board, now),
        *_missed(board),
        *_stalled(board, now),
        *_disagreement(board),
    ]
    return tuple(sorted(found, key=lambda alert: alert.severity != "critical"))


def no_commit_after(board: Board, least_seconds: float = NO_COMMIT_SECONDS) -> float | None:
    """Return after how long without a commit something is wrong; None while nothing is usual."""
    pace = board.pace()
    return None if pace is None else max(NO_COMMIT_TIMES * pace, least_seconds)


def _syncer_gone(board: Board, now: float, writer: str) -> Iterator[Alert]:
    if writer == "gone" and board.shadow.phase is not Phase.ENDED and board.shadow.config is not None:
        yield Alert(
            kind="syncer_gone",
            subject="syncer",
            severity="critical",
            since=board.at,
            sentence="the session has not ended, and no process on this machine writes its tape",
            remedy="start the syncer again with --resume, unless this is a copy of the tape",
        )


def _no_commit(board: Board, now: float) -> Iterator[Alert]:
    limit = no_commit_after(board)
    if limit is None or board.shadow.phase is not Phase.RUNNING:
        return
    since = board.commit_times[-1]
    if now - since > limit:
        yield Alert(
            kind="no_commit",
            subject="run",
            severity="critical",
            since=since,
            sentence=f"no commit for {now - since:.0f} s; usual are {board.pace():.3g} s",
            remedy="see what the open rounds wait for",
            value=now - since,
            threshold=limit,
        )


def _missed(board: Board) -> Iterator[Alert]:
    shadow = board.shadow
    if shadow.phase is not Phase.RUNNING:
        return
    for learner in sorted(shadow.current):
        missed = shadow.seats[learner].missed_in_a_row
        if missed >= MISSED_ROUNDS:
            yield Alert(
                kind="missed_rounds",
                subject=f"learner {learner}",
                severity="warning",
                since=board.at,
                sentence=f"learner {learner} gave nothing to the last {missed} rounds it was a member of",
                remedy="it is too slow for the grace, or its uplink is: raise --grace-ms, or look at its log",
                value=float(missed),
                threshold=float(MISSED_ROUNDS),
                learner=learner,
            )


def _stalled(board: Board, now: float) -> Iterator[Alert]:
    shadow = board.shadow
    if shadow.phase is not Phase.RUNNING or (shadow.config is not None and shadow.config.budget_finish):
        return
    for learner in sorted(shadow.current):
        seat = shadow.seats[learner]
        if seat.xi_step is None:
            continue
        still, limit = now - seat.report_at, max(STALLED_TIMES * seat.xi_step, STALLED_SECONDS)
        if still > limit:
            yield Alert(
                kind="stalled_learner",
                subject=f"learner {learner}",
                severity="warning",
                since=seat.report_at,
                sentence=f"learner {learner} is connected and stands at local step {seat.local_step} "
                f"for {still:.0f} s; a step took it {seat.xi_step:.3g} s",
                remedy="look at its log: a rank that hangs, rows that do not come, a machine that sleeps",
                value=still,
                threshold=limit,
                learner=learner,
            )


def _faults(board: Board) -> Iterator[Alert]:
    step, spike = board.shadow.step, board.spike
    if board.pool is not None:
        yield _fault(
            "pool_poisoned", "pool", "critical", board.pool, "repair the worker, start with --resume"
        )
    if board.disk is not None:
        yield _fault("checkpoint_failed", "disk", "critical", board.disk, "make room, start with --resume")
    if spike is not None and step - spike.step < RECENT_ROUNDS:
        yield Alert(
            kind="norm_spike",
            subject=f"round {spike.step}",
            severity="warning",
            since=spike.at,
            sentence=f"the merged gradient of round {spike.step} has norm {spike.norm:.3g}, "
            f"{spike.norm / spike.median:.0f} times the median of the rounds before",
            remedy="look at the learners' losses; --max-norm-ratio leaves outliers out",
            value=spike.norm,
            threshold=spike.median,
            step=spike.step,
        )
    for fault in (board.bad_push, board.bad_merge):
        if fault is not None and step + 1 - fault.step < RECENT_ROUNDS:
            whom = "merge" if fault.learner is None else f"learner {fault.learner}"
            yield _fault("non_finite", whom, "warning", fault, "lower --inner-lr, look at its loss and data")


def _disagreement(board: Board) -> Iterator[Alert]:
    """Look at the last few commits together: what a single one tells is noisy."""
    agreement = board.agreement
    if board.shadow.phase is not Phase.RUNNING or not agreement.last:
        return
    since, count = agreement.last[0].at, len(agreement.last)
    cosine = agreement.settled(attrgetter("delta_cosine"), mean)
    if cosine < DELTA_COSINE:
        yield Alert(
            kind="learners_disagree",
            subject="learners",
            severity="warning",
            since=since,
            sentence=f"the learners undo each other's work: the cosine between their deltas is {cosine:.2f} "
            f"in the mean of the last {count} rounds, and about 0 or above where they agree",
            remedy="a longer --sync-interval-steps, --merge-alpha carry or 0 on the learners, or "
            "--outer direct, which needs no agreement",
            value=cosine,
            threshold=DELTA_COSINE,
        )
    excess = agreement.settled(attrgetter("excess"), mean)
    if excess > EXCESS:
        yield Alert(
            kind="merge_inflates",
            subject="merge",
            severity="warning",
            since=since,
            sentence=f"the merged gradient is {excess:.2f} times as long as deltas at right angles make it, "
            f"in the mean of the last {count} rounds: the merge makes longer what the learners do not "
            "agree on",
            remedy="--outer direct, which averages plainly, or a longer --sync-interval-steps",
            value=excess,
            threshold=EXCESS,
        )
    offset = agreement.settled(attrgetter("offset_ratio"), min)
    if offset > OFFSET_RATIO:
        yield Alert(
            kind="published_ahead",
            subject="published model",
            severity="warning",
            since=since,
            sentence=f"the published model has been ahead of the learners' mean by {offset:.2f} average "
            f"deltas or more for the last {count} rounds: it is worse than the learners are",
            remedy="judge and export nothing before the closing sweep; --outer direct or normalised, or a "
            "lower --outer-lr or --outer-momentum",
            value=offset,
            threshold=OFFSET_RATIO,
        )


def _fault(kind: str, subject: str, severity: str, fault: Fault, remedy: str) -> Alert:
    return Alert(
        kind=kind,
        subject=subject,
        severity=severity,
        since=fault.at,
        sentence=fault.message,
        remedy=remedy,
        learner=fault.learner,
        step=fault.step,
    )


def _disk_space(board: Board, now: float, live: Live) -> Iterator[Alert]:
    free = live.disk_free_bytes
    if free is None or board.shadow.phase is Phase.ENDED:
        return
    written = 0 if board.written is None else board.written.written_bytes
    needed = max(DISK_BYTES, DISK_CHECKPOINTS * written)
    if free < needed:
        yield Alert(
            kind="disk_space",
            subject="disk",
            severity="critical",
            since=now,
            sentence=f"{size_text(free)} are free where the checkpoint goes, {size_text(needed)} are what it "
            "may need",
            remedy="make room: the session ends when a checkpoint cannot be written",
            value=float(free),
            threshold=float(needed),
        )

"""A whole run executed again: a fold of its tape that has the payloads beside it.

The tape is read once. Each start of the syncer on it begins with fragments (the initial values, or those of
the checkpoint it resumed from), which are read from the recording and held against the tape. From there
every committed round is executed again and compared, also those that a later start fell back behind: they
were computed, so they can be checked. A start that resumes must begin with the very digests that its step
had on this tape.

Rounds on different fragments do not depend on each other, so each is a job for a thread; a fragment's own
rounds follow one another. Results are taken in the order of the tape, so the first difference is the first
one for any number of threads.

Memory: parameters and momentum of each fragment once, as in the syncer; for each thread the pushes of one
round and a few times its fragment; what the tape says about rounds that are open; 32 bytes for each commit.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from attrs import define, field

from yeto.core import State
from yeto.core.decisions import (
    AttemptDiscarded,
    AttemptSealed,
    CheckpointOrdered,
    CommitOrdered,
    MergeOrdered,
    RoundCommitted,
)
from yeto.core.events import MergeFinished, PushReceived, SessionResumed
from yeto.core.outer import stock_momentum
from yeto.core.values import FragmentMark, Member
from yeto.errors import RecordingError
from yeto.state import FragmentVersion
from yeto.state.manifest import version_at
from yeto.syncer.payloads import Arithmetic, gradient_file, push_file, read_recording
from yeto.syncer.recorded import (
    Absent,
    Difference,
    Differs,
    Push,
    Start,
    check_gradient,
    check_push,
    read_start,
)
from yeto.syncer.reexecute_round import Kind, Outcome, Work, execute
from yeto.tape import Header, Record
from yeto.wire.digest import DIGEST_BYTES


@define(eq=False)
class _Attempt:
    """What the tape has said about an attempt that is not committed yet."""

    received: dict[Member, PushReceived] = field(factory=dict)
    sealed: AttemptSealed | None = None
    plain_average: bool = False
    momentum_scale: float | None = None
    merged: MergeFinished | None = None
    ordered: CommitOrdered | None = None

    def pushes(self) -> tuple[Push, ...]:
        """Return the pushes it was sealed with, in the order of the merge."""
        if self.sealed is None:
            return ()
        return tuple(
            Push(
                sealed=part,
                received=self.received[Member(learner=part.learner, generation=part.generation)],
            )
            for part in self.sealed.responders
        )


class _History:
    """The digests that each fragment had at each step of the present timeline: 32 bytes a commit."""

    def __init__(self, marks: tuple[FragmentMark, ...], step: int) -> None:
        self._first = marks
        self._origin = step
        self._digests = bytearray()

    @property
    def step(self) -> int:
        """The last committed step."""
        return self._origin + len(self._digests) // (2 * DIGEST_BYTES)

    def add(self, committed: RoundCommitted) -> None:
        """Take the next commit."""
        for digest in (committed.params_digest, committed.momentum_digest):
            self._digests += _as_bytes(digest, committed)

    def at(self, step: int) -> tuple[tuple[str, str], ...] | None:
        """Return (params, momentum) digests of every fragment at a step; None when this tape never had it."""
        if not self._origin <= step <= self.step:
            return None
        found = []
        for mark in self._first:
            version = version_at(step, mark.fragment, len(self._first))
            if version <= self._origin:
                found.append((mark.params_digest, mark.momentum_digest))
                continue
            place = (version - self._origin - 1) * 2 * DIGEST_BYTES
            params, momentum = (
                self._digests[start : start + DIGEST_BYTES].hex() for start in (place, place + DIGEST_BYTES)
            )
            found.append((params, momentum))
        return tuple(found)

    def rewind(self, step: int) -> None:
        """Forget the commits above a step."""
        del self._digests[(step - self._origin) * 2 * DIGEST_BYTES :]


class Reexecution:
    """Executes a run again while its tape is read; made by ``reexecuting``."""

    def __init__(self, folder: Path, tape: str, pool: ThreadPoolExecutor, threads: int) -> None:
        self.difference: Difference | None = None
        """The first one, once found; nothing is executed from there on."""
        self.outcomes: Counter[Kind] = Counter()
        """Rounds that came to what the tape says."""
        self.superseded = 0
        """Commits that a later start fell back behind; they are executed all the same."""
        self.not_recorded = 0
        """Commits of starts that were not recorded."""
        self.not_recorded_starts: list[int] = []
        """The records these starts begin with."""
        self.close_to: set[Arithmetic] = set()
        """What computed the iso merges that are close and not equal."""
        self._folder = folder
        self._tape = tape
        self._recording = read_recording(folder)
        self._pool = pool
        self._threads = threads
        self._attempts: dict[tuple[int, int], _Attempt] = {}
        self._history: _History | None = None
        self._start_seq = 0
        self._start: Start | None = None
        self._missing: Differs | None = None
        self._values: list[FragmentVersion] = []
        self._jobs: deque[tuple[Work, Future[Outcome]]] = deque()

    @property
    def rounds(self) -> int:
        """Rounds executed so far."""
        return sum(self.outcomes.values())

    def feed(self, record: Record, state: State) -> None:
        """Take the next record of a tape that is being verified.

        Args:
            record: the record.
            state: the coordinator's state after its event.

        Raises:
            RecordingError: the recording is of another session.
        """
        if self.difference is not None:
            return
        try:
            self._feed(record, state)
        except Differs as differs:
            # Rounds that are still being executed stand before this record.
            self._settle(differs)

    def finish(self) -> None:
        """The tape has ended: take what is still being executed."""
        if self.difference is not None:
            return
        try:
            self._end_start()
        except Differs as differs:
            self._settle(differs)

    def _settle(self, differs: Differs) -> None:
        try:
            self._take(0)
        except Differs as earlier:
            differs = earlier
        self.difference = differs.difference

    def _feed(self, record: Record, state: State) -> None:
        body = record.body
        match body:
            case Header():
                if body.session_id != self._recording.session_id:
                    raise RecordingError(
                        f"{self._folder} is the recording of session {self._recording.session_id}, "
                        f"{self._tape} is the tape of session {body.session_id}; name the folder that this "
                        "run's --record-payloads named"
                    )
            case PushReceived() if body.step > state.step:
                member = Member(learner=body.learner, generation=body.generation)
                self._attempt(body.step, body.attempt).received[member] = body
            case AttemptSealed():
                self._attempt(body.step, body.attempt).sealed = body
            case MergeOrdered():
                attempt = self._attempt(body.step, body.attempt)
                attempt.plain_average, attempt.momentum_scale = body.plain_average, body.momentum_scale
            case MergeFinished() if body.step > state.step:
                self._attempt(body.step, body.attempt).merged = body
            case CommitOrdered():
                self._attempt(body.step, body.attempt).ordered = body
            case AttemptDiscarded():
                self._check_discarded(body.step, body.attempt)
            case RoundCommitted():
                self._commit(body, state)
            case CheckpointOrdered() if body.step == 0 and self._history is None:
                self._begin(0, 0, state)
            case SessionResumed():
                self._resume(record.seq, body, state)
            case _:
                pass

    def _attempt(self, step: int, number: int) -> _Attempt:
        return self._attempts.setdefault((step, number), _Attempt())

    def _begin(self, tape_seq: int, step: int, state: State) -> None:
        """Read the fragments that a start begins with."""
        if self._history is None:
            self._history = _History(state.marks, step)
        self._start_seq, self._start, self._missing = tape_seq, None, None
        recorded = self._recording.start(tape_seq)
        if recorded is None:
            return
        try:
            self._start, self._values = read_start(self._folder, recorded, step, state)
        except Absent as absent:
            # A process that ended before it had written them cannot have committed anything either.
            self._missing = absent

    def _resume(self, tape_seq: int, event: SessionResumed, state: State) -> None:
        self._end_start()
        marks = state.marks
        known = None if self._history is None else self._history.at(event.step)
        if known is None:
            self._history = None
        else:
            assert self._history is not None
            for mark, (params, momentum) in zip(marks, known, strict=True):
                for what, resumed, committed in (
                    ("parameters", mark.params_digest, params),
                    ("momentum", mark.momentum_digest, momentum),
                ):
                    # Before its first commit the tape states no digest of a momentum.
                    if committed and resumed != committed:
                        raise Differs(
                            Difference(
                                what=f"record {tape_seq} resumes from step {event.step} with other {what} "
                                "than were committed",
                                recorded=committed,
                                found=resumed,
                                fragment=mark.fragment,
                            )
                        )
            self.superseded += self._history.step - event.step
            self._history.rewind(event.step)
        self._begin(tape_seq, event.step, state)

    def _end_start(self) -> None:
        """Nothing more comes of this start: finish its rounds, look at what it sealed and never committed."""
        for step, number in sorted(self._attempts):
            self._check_discarded(step, number)
        self._take(0)

    def _check_discarded(self, step: int, number: int) -> None:
        """Check what was recorded of an attempt that was never committed, as far as it was written."""
        attempt = self._attempts.pop((step, number), None)
        if attempt is None or attempt.sealed is None or self._start is None:
            return
        tape_seq, manifest = self._start.tape_seq, self._start.manifest
        for push in attempt.pushes():
            path = push_file(self._folder, tape_seq, step, number, push.member, manifest.dtype)
            check_push(path, push, needed=False)
        path = gradient_file(self._folder, tape_seq, step, number)
        numel = manifest.fragments[attempt.sealed.fragment].numel
        check_gradient(path, numel, attempt.sealed, needed=False)

    def _commit(self, committed: RoundCommitted, state: State) -> None:
        """Hand a committed round to a thread, once that fragment's round before it is done."""
        attempt = self._attempts.pop((committed.step, committed.attempt))
        for key in [key for key in self._attempts if key[0] <= committed.step]:
            del self._attempts[key]
        assert self._history is not None, "rounds are committed when fragments have values"
        self._history.add(committed)
        if self._missing is not None:
            raise self._missing
        if self._start is None:
            self.not_recorded += 1
            if self._start_seq not in self.not_recorded_starts:
                self.not_recorded_starts.append(self._start_seq)
            return
        assert attempt.ordered is not None, "a commit is ordered before it is applied"
        fragment = committed.fragment
        work = Work(
            recording=self._folder,
            tape_seq=self._start.tape_seq,
            arithmetic=self._start.arithmetic,
            dtype=self._start.manifest.dtype,
            layout=self._start.manifest.fragments[fragment].layout(),
            mu=stock_momentum(state.config),
            momentum_scale=attempt.momentum_scale,
            plain_average=attempt.plain_average,
            pushes=attempt.pushes(),
            merged=attempt.merged,
            ordered=attempt.ordered,
            committed=committed,
        )
        busy = [place for place, (job, _) in enumerate(self._jobs) if job.committed.fragment == fragment]
        self._take(min(self._threads - 1, len(self._jobs) - busy[-1] - 1 if busy else self._threads))
        self._jobs.append(
            (work, self._pool.submit(execute, work, self._values[fragment], threads=self._threads))
        )

    def _take(self, left: int) -> None:
        """Take the results of rounds in the order of the tape, until so many are still being executed.

        Raises:
            Differs: the first of them that does.
        """
        while len(self._jobs) > left:
            work, job = self._jobs.popleft()
            try:
                outcome = job.result()
            except Differs:
                self._jobs.clear()  # they stand behind it
                raise
            self._values[work.committed.fragment] = outcome.version
            self.outcomes[outcome.kind] += 1
            if outcome.kind is Kind.ISO_CLOSE:
                self.close_to.add(work.arithmetic)


@contextmanager
def reexecuting(folder: Path, tape: str, *, threads: int) -> Iterator[Reexecution]:
    """Execute a run again on so many threads, torch's own and ours.

    Args:
        folder: the recording.
        tape: the tape's name in messages.
        threads: at least 1; the results do not depend on it.

    Raises:
        RecordingError: the folder holds no recording.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="reexecute")
    try:
        yield Reexecution(folder, tape, pool, threads)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(before)


def _as_bytes(digest: str, committed: RoundCommitted) -> bytes:
    try:
        data = bytes.fromhex(digest)
    except ValueError:
        data = b""
    if len(data) != DIGEST_BYTES:
        raise Differs(
            Difference(
                what=f"{digest!r} on the tape is no digest", step=committed.step, fragment=committed.fragment
            )
        )
    return data

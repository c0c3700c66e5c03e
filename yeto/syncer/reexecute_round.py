"""One round executed again: from the recorded pushes to the digests that must stand on the tape.

Every number that the run wrote down about a round is computed anew and compared: digest, norm and cosine of
each push, norm of the merged gradient, whom the correction turned, and the digests of parameters and
momentum. Averages, RDA, correction and outer step are bit-equal on any machine and for any number of
threads, so anything else is a difference.

Only the decomposition of an iso merge may round otherwise elsewhere. There the recorded gradient is what
the outer step was computed from: it must give the tape's digests bit for bit, and what is computed here must
be the same bits where the same software runs on the same machine, else be within ``CLOSE`` of it, tensor by
tensor. From there on the re-execution goes on from the recorded values, so nothing drifts.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from yeto.core.decisions import CommitOrdered, RoundCommitted
from yeto.core.events import MergeFinished
from yeto.errors import MergeError
from yeto.merge import (
    MergedGradient,
    PushInput,
    apply_outer_step,
    commit_fragment,
    examine_push,
    merge_fragment,
    tensor_digest,
)
from yeto.merge.fragment import decomposes
from yeto.state import FragmentVersion
from yeto.syncer.payloads import Arithmetic, gradient_file, push_file
from yeto.syncer.recorded import Difference, Differs, Push, bad_file, check_gradient, check_push
from yeto.wire import codecs
from yeto.wire.layout import FragmentLayout

CLOSE: Final = 2e-5
"""Largest norm of the error of an iso merge beside the norm of what was recorded."""


class Kind(Enum):
    """What a round came to."""

    EQUAL = "average or RDA, bit-equal"
    ISO_EQUAL = "iso, bit-equal"
    ISO_CLOSE = "iso, close"
    NO_OP = "nothing moved"


@frozen(kw_only=True)
class Work:
    """Everything about one committed round that stands on the tape, and where its payloads are."""

    recording: Path
    tape_seq: int
    """The start it was committed in."""
    arithmetic: Arithmetic
    """What computed it."""
    dtype: str
    layout: FragmentLayout
    mu: float
    """Outer momentum, which the correction scales with where no scale was ordered."""
    momentum_scale: float | None
    """The scale that was."""
    plain_average: bool
    pushes: tuple[Push, ...]
    merged: MergeFinished | None
    """None when all weights were 0."""
    ordered: CommitOrdered
    committed: RoundCommitted

    @property
    def is_iso(self) -> bool:
        """Whether it took a singular value decomposition."""
        return decomposes(self.layout, plain_average=self.plain_average)

    def differs(self, what: str, recorded: object = None, found: object = None) -> Differs:
        """Return that something about the round as a whole differs."""
        here = Arithmetic.here()
        remedy = None
        if here.software_version != self.arithmetic.software_version:
            remedy = (
                f"it was computed by Yeto {self.arithmetic.software_version}, this is "
                f"{here.software_version}: replay it with that one"
            )
        return Differs(
            Difference(
                what=what,
                recorded=recorded,
                found=found,
                remedy=remedy,
                step=self.committed.step,
                attempt=self.committed.attempt,
                fragment=self.committed.fragment,
            )
        )


@frozen(kw_only=True, eq=False)
class Outcome:
    """A round that came to what the tape says."""

    kind: Kind
    version: FragmentVersion


def execute(work: Work, base: FragmentVersion, *, threads: int) -> Outcome:
    """Execute a committed round again.

    Args:
        work: what the tape says about it.
        base: the fragment before it.
        threads: at most so many work at a time; changes no bit.

    Raises:
        Differs: naming the file, learner or digest at which it does.
    """
    inputs = [_examined(work, push, base, threads) for push in work.pushes]
    if work.ordered.no_op:
        _compare(work, base.params_digest, base.momentum_digest)
        return Outcome(kind=Kind.NO_OP, version=_next(work, base, base.params, base.momentum))
    try:
        merged = merge_fragment(
            inputs,
            work.layout,
            base.momentum,
            mu=work.mu,
            momentum_scale=work.momentum_scale,
            plain_average=work.plain_average,
            threads=threads,
        )
    except MergeError as error:
        raise work.differs(f"was merged, and cannot be merged again ({error})") from error
    corrected = tuple(work.pushes[index].sealed.learner for index in merged.corrected)
    assert work.merged is not None, "a commit that moves something was merged"
    if corrected != work.merged.corrected:
        raise work.differs("learners whose push was corrected", list(work.merged.corrected), list(corrected))
    if work.is_iso:
        return _execute_iso(work, base, merged)
    _compare_norm(work, merged)
    ordered = work.ordered
    result = commit_fragment(
        base.params,
        base.momentum,
        merged,
        lr=ordered.lr,
        mu=ordered.momentum,
        sweep=ordered.sweep,
        threads=threads,
    )
    _compare(work, result.params_digest, result.momentum_digest)
    return Outcome(kind=Kind.EQUAL, version=_next(work, base, result.params, result.momentum))


def _examined(work: Work, push: Push, base: FragmentVersion, threads: int) -> PushInput:
    """Read a push, examine it as on its arrival, and return it as the merge takes it."""
    committed = work.committed
    path = push_file(
        work.recording, work.tape_seq, committed.step, committed.attempt, push.member, work.dtype
    )
    data = check_push(path, push, needed=True)
    assert data is not None
    expected = codecs.by_name(work.dtype).encoded_size(work.layout.numel)
    if len(data) != expected:
        raise bad_file(
            path, push.received, "bytes of the push, by the layout of the start", expected, len(data)
        )
    facts = examine_push(data, work.dtype, work.layout.numel, base.momentum, work.layout, threads=threads)
    for what, recorded, found in (
        ("norm of the push", push.received.norm, facts.norm),
        ("cosine of the push to the momentum", push.received.cosine_to_momentum, facts.cosine_to_momentum),
    ):
        if recorded != found:
            raise bad_file(path, push.received, what, recorded, found)
    return PushInput(
        payload=data, dtype=work.dtype, weight=push.sealed.weight, correct=push.sealed.correct, facts=facts
    )


def _execute_iso(work: Work, base: FragmentVersion, merged: MergedGradient) -> Outcome:
    """Hold the gradient computed here against the recorded one, and that one against the tape."""
    committed = work.committed
    path = gradient_file(work.recording, work.tape_seq, committed.step, committed.attempt)
    recorded = check_gradient(path, work.layout.numel, committed, needed=True)
    assert recorded is not None
    ordered = work.ordered
    result = apply_outer_step(
        base.params, base.momentum, recorded, lr=ordered.lr, mu=ordered.momentum, sweep=ordered.sweep
    )
    _compare(work, result.params_digest, result.momentum_digest)
    version = _next(work, base, result.params, result.momentum)
    gradient = merged.gradient
    ours, theirs = tensor_digest(gradient), tensor_digest(recorded)
    if ours == theirs:
        _compare_norm(work, merged)
        return Outcome(kind=Kind.ISO_EQUAL, version=version)
    error = _largest_error(work.layout, gradient, recorded)
    if work.arithmetic == Arithmetic.here() or not error <= CLOSE:
        raise work.differs(f"the iso merge is off by {error:.2g}, digest of its gradient", theirs, ours)
    return Outcome(kind=Kind.ISO_CLOSE, version=version)


def _largest_error(layout: FragmentLayout, computed: Tensor, recorded: Tensor) -> float:
    """Return the largest relative error of any tensor, by norms in f64; infinite beside a zero tensor."""
    largest = 0.0
    for piece in layout.slices():
        left, right = (whole[piece.start : piece.stop].double() for whole in (computed, recorded))
        error, norm = float(torch.linalg.vector_norm(left - right)), float(torch.linalg.vector_norm(right))
        largest = max(largest, error / norm if norm else (float("inf") if error else 0.0))
    return largest


def _compare_norm(work: Work, merged: MergedGradient) -> None:
    assert work.merged is not None, "a commit that moves something was merged"
    if merged.norm != work.merged.gradient_norm:
        raise work.differs("norm of the merged gradient", work.merged.gradient_norm, merged.norm)


def _compare(work: Work, params_digest: str, momentum_digest: str) -> None:
    """Hold what was computed against the ``merge`` record.

    Raises:
        Differs: a digest does.
    """
    committed = work.committed
    if params_digest != committed.params_digest:
        raise work.differs("digest of the parameters", committed.params_digest, params_digest)
    if momentum_digest != committed.momentum_digest:
        raise work.differs("digest of the momentum", committed.momentum_digest, momentum_digest)


def _next(work: Work, base: FragmentVersion, params: Tensor, momentum: Tensor) -> FragmentVersion:
    committed = work.committed
    return FragmentVersion(
        fragment=base.fragment,
        version=committed.version,
        params=params,
        momentum=momentum,
        params_digest=committed.params_digest,
        momentum_digest=committed.momentum_digest,
    )

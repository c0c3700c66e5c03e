"""Small values that events, decisions and state share.

Generations are the 16 lowercase hex digits of a u64 and digests are hex strings: JSON numbers lose bits
above 2**53, and the coordinator never computes with either.

They have no slots: a frozen class with slots takes twice as long to make.
"""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True, order=True, slots=False)
class Member:
    """One connection of one learner: its id and the generation it drew for this dial."""

    learner: int
    generation: str


@frozen(kw_only=True, slots=False)
class SessionTerms:
    """What every learner of a session must agree on, as its HELLO states it."""

    dtype: str
    """``f32``, ``bf16`` or ``q4``."""
    num_fragments: int
    fingerprint: str
    """64 hex digits; names tensors, shapes, modes and their order."""
    contract: str
    """64 hex digits; names model, tuning, seed and number of learners."""
    profile: str | None = None


@frozen(kw_only=True, slots=False)
class LedgerEntry:
    """What one learner has contributed to committed rounds."""

    learner: int
    merges: int
    c_steps: int
    c_tokens: int


@frozen(kw_only=True, slots=False)
class FragmentMark:
    """A fragment at a version, with the digests of its tensors."""

    fragment: int
    version: int
    params_digest: str
    momentum_digest: str


@frozen(kw_only=True, slots=False)
class OuterMark:
    """What the momentum buffer of a fragment has gathered (see :mod:`yeto.core.outer`)."""

    fragment: int
    merges: int
    """Commits that moved it."""
    gain: float
    """What it would hold if each of their gradients had been 1."""


@frozen(kw_only=True, slots=False)
class FragmentVersionRef:
    """A fragment at a version."""

    fragment: int
    version: int


@frozen(kw_only=True, slots=False)
class Weighted:
    """A sealed responder and the weight its push gets in the merge."""

    learner: int
    generation: str
    base_version: int
    staleness: int
    c_steps: int
    c_tokens: int
    weight: float
    correct: bool
    """Whether delta correction is to be applied to this push."""


@frozen(kw_only=True, slots=False)
class Responder:
    """One learner's part in a committed round, as the ``merge`` record states it."""

    learner: int
    generation: str
    base_version: int
    staleness: int
    c_steps: int
    c_tokens: int
    weight: float
    contribution: float
    """Share of the applied weights, in [0, 1]."""
    delta_norm: float
    cosine_to_momentum: float | None
    corrected: bool

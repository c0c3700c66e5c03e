"""The committed fragments: versions that never change, handed out by reference.

A commit makes a new version and puts it in the place of the old one. Whoever took the old one (a broadcast
being encoded, a checkpoint being written, a push being examined) keeps it alive and unchanged for as long
as it is needed, without a lock and without a copy. So a snapshot costs P references, and at most the
versions in use by someone exist beside the current ones.
"""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from yeto.state.fragmentfile import FragmentArrays


@frozen(kw_only=True, eq=False)
class FragmentVersion:
    """One fragment at one version. Its tensors must not be written to."""

    fragment: int
    version: int
    params: Tensor
    """1-D f32 in layout order."""
    momentum: Tensor
    """The Nesterov buffer, same size."""
    params_digest: str
    momentum_digest: str
    lookahead: float | None = None
    """So many times the momentum, added to the parameters, is the point without Nesterov's look-ahead
    (see :mod:`yeto.state.lookahead`); None where that is not known."""

    @classmethod
    def of_arrays(
        cls, fragment: int, version: int, arrays: FragmentArrays, lookahead: float | None = None
    ) -> FragmentVersion:
        """Return a version whose tensors share the memory of arrays."""
        return cls(
            fragment=fragment,
            version=version,
            params=torch.from_numpy(arrays.params.astype(np.float32, copy=False)),
            momentum=torch.from_numpy(arrays.momentum.astype(np.float32, copy=False)),
            params_digest=arrays.params_digest,
            momentum_digest=arrays.momentum_digest,
            lookahead=lookahead,
        )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.params.numel()


class FragmentStore:
    """The current version of every fragment, once it is initialised."""

    def __init__(self, num_fragments: int) -> None:
        """Start with nothing initialised."""
        self._current: list[FragmentVersion | None] = [None] * num_fragments

    def __len__(self) -> int:
        return len(self._current)

    def put(self, version: FragmentVersion) -> None:
        """Make a version the current one of its fragment.

        Versions ascend; only an initial value may be replaced by another before the first commit.
        """
        old = self._current[version.fragment]
        assert version.params.shape == version.momentum.shape == (version.numel,), "fragments are flat"
        if old is not None:
            assert version.numel == old.numel, f"fragment {version.fragment} cannot change its size"
            assert version.version > old.version or version.version == old.version == 0, (
                f"fragment {version.fragment}: version {version.version} does not follow {old.version}"
            )
        self._current[version.fragment] = version

    def current(self, fragment: int) -> FragmentVersion:
        """Return the current version of an initialised fragment.

        Raises:
            KeyError: the fragment has no value yet.
        """
        version = self._current[fragment]
        if version is None:
            raise KeyError(f"fragment {fragment} is not initialised")
        return version

    def missing(self) -> tuple[int, ...]:
        """Return the fragments that are not initialised yet."""
        return tuple(index for index, version in enumerate(self._current) if version is None)

    def snapshot(self) -> tuple[FragmentVersion, ...]:
        """Return the current version of every fragment, in order.

        Raises:
            KeyError: a fragment has no value yet.
        """
        return tuple(self.current(fragment) for fragment in range(len(self._current)))

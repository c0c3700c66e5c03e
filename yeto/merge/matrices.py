"""The merge of an iso fragment one matrix at a time, for decompositions that are computed elsewhere.

``merge_fragment`` does it all in one call. Here the caller takes each averaged matrix as soon as it is there,
has it decomposed wherever that is done, and puts the result back, in any order and while further matrices are
averaged. The average is the same, bit for bit, and so is the result when the same library decomposes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from yeto.errors import MergeError
from yeto.merge.checks import require_f32
from yeto.merge.fragment import PushInput, parts_of
from yeto.merge.memory import empty_floats
from yeto.merge.outer import MergedGradient
from yeto.merge.passes import product_sums
from yeto.merge.reduction import Reduced, reduce_into
from yeto.wire.layout import FragmentLayout


class MatrixMerge:
    """An iso merge under way. Its methods compute, so they belong into a worker thread."""

    def __init__(
        self,
        pushes: Sequence[PushInput],
        layout: FragmentLayout,
        momentum: Tensor,
        *,
        mu: float,
        momentum_scale: float | None = None,
        threads: int | None = None,
    ) -> None:
        """Prepare the merge of one sealed attempt; arguments as for ``yeto.merge.merge_fragment``.

        Raises:
            MergeError: a size or weight does not fit, or the weights sum to 0.
        """
        self._parts = parts_of(
            pushes, layout, momentum, mu=mu, momentum_scale=momentum_scale, radial=False, threads=threads
        )
        self._threads = threads
        self._elements = empty_floats(layout.numel)
        self._views = [
            self._elements[piece.start : piece.stop].view(piece.tensor.shape) for piece in layout.slices()
        ]
        self._reduced: list[Reduced | None] = [None] * len(layout.tensors)

    @property
    def matrices(self) -> tuple[int, ...]:
        """Places in the fragment of the tensors to be decomposed; all others are averages."""
        return tuple(place for place, view in enumerate(self._views) if view.ndim == 2 and view.numel())

    def average(self, place: int) -> Tensor:
        """Return the average of one matrix, in memory that belongs to the merge."""
        self._reduce(place)
        return self._views[place]

    def put(self, place: int, matrix: Tensor) -> None:
        """Put the isotropic merge of an averaged matrix in its place.

        Raises:
            MergeError: it has another dtype or shape.
        """
        view = self._views[place]
        require_f32(f"the decomposed matrix {place}", matrix, view)
        view.copy_(matrix)
        self._reduced[place] = Reduced(1.0, product_sums(view, view).norm ** 2)

    def finish(self) -> MergedGradient:
        """Average what is no matrix, and return the merged gradient of the fragment.

        Raises:
            MergeError: a matrix is not there yet.
        """
        reduced = []
        for place, known in enumerate(self._reduced):
            if known is None and place in self.matrices:
                raise MergeError(f"matrix {place} of the fragment is not decomposed yet")
            reduced.append(known or self._reduce(place))
        return self._parts.merged(self._elements, reduced)

    def _reduce(self, place: int) -> Reduced:
        parts = self._parts
        [reduced] = reduce_into(
            self._elements,
            parts.sources,
            parts.momentum,
            [parts.tensors[place]],
            parts.cut.one(place),
            radial=False,
            threads=self._threads,
        )
        return reduced

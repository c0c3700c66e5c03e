"""Isotropic merge of a matrix (Iso-C, arXiv 2502.04959): every direction of an update counts the same.

The singular values of an averaged update are dominated by what all learners agree on. Replacing each by
their mean keeps the directions and evens out their strength.

A singular value counts as present if it exceeds ``max(m, n) * 2**-23`` times the largest: what is smaller is
rounding noise of f32, and lifting noise to the mean would invent directions. Absent ones still take part in
the mean, as zeros or nearly so.

The decomposition is exact (LAPACK, f32) and runs with one thread: its last bits depend on the number of
threads. They may still differ between machines and library versions, which is why a replay compares such
results at 2e-5 and not bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from yeto.errors import MergeError
from yeto.merge.checks import require_f32

ROUNDING: Final = 2.0**-23
"""Spacing of f32 at 1."""


def isotropic(matrix: Tensor) -> Tensor:
    """Return the matrix with every present singular value replaced by the mean of all min(m, n).

    Args:
        matrix: f32, 2-D, the weighted average of the learners' outer gradients.

    Returns:
        A new m x n matrix; zero for a zero matrix.

    Raises:
        MergeError: not a matrix, not finite, or the decomposition did not converge.
    """
    require_f32("matrix", matrix)
    if matrix.ndim != 2:
        raise MergeError(f"iso merges matrices; this tensor has shape {tuple(matrix.shape)}")
    source = matrix.detach()
    if source.numel() == 0:
        return source.clone()
    with _one_thread():
        try:
            left, values, right = torch.linalg.svd(source, full_matrices=False)
        except RuntimeError as error:  # what LAPACK reports through torch
            raise MergeError(
                f"SVD of a {source.shape[0]} x {source.shape[1]} matrix failed: {error}"
            ) from error
        mean = float(values.double().mean())
        present = values > max(source.shape) * ROUNDING * float(values[0])
        merged: Tensor = (left[:, present] * mean) @ right[present]
        return merged


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run what this thread computes meanwhile on this thread alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

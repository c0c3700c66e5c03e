"""Rows into blocks of exactly ``seq_len`` tokens.

Two rules. A block's weights say which of its tokens are *predicted with loss from the token before them*, so
the first token of a block is never a target, and neither is the first token of a document that must not see
its neighbour: the number of targets of a block is the plain sum of its weights. And nothing disappears in
silence: every window that is left out is counted.

With loss on replies only, a row is cut into windows, and a window without a target is dropped: it would cost
a forward pass and teach nothing. The short tail of a row goes on in a carry that tails share, if it has a
target. With loss on every token, all of them go through the carry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
from attrs import field, frozen

from yeto.text.masks import Encoded


@frozen(kw_only=True, eq=False)
class Block:
    """One packed sequence; every array has shape (seq_len,)."""

    ids: np.ndarray = field(repr=False)
    """Token ids, int32."""
    weights: np.ndarray = field(repr=False)
    """1 where the token is a target of the token before it, uint8."""
    positions: np.ndarray = field(repr=False)
    """Position of each token in its document, int32; a 0 begins a new document."""

    @property
    def targets(self) -> int:
        """Number of targets."""
        return int(self.weights.sum())


@frozen(kw_only=True)
class PackingCounts:
    """What became of the rows so far."""

    rows: int = 0
    blocks: int = 0
    dropped_windows: int = 0
    """Windows, tails and carried blocks without a target."""
    dropped_tokens: int = 0


class Packer:
    """Cuts encoded rows into blocks; what is left of a row waits in the carry for the next one."""

    def __init__(self, seq_len: int, *, documents: bool, windows: bool) -> None:
        """Say how to pack.

        Args:
            seq_len: tokens of a block, at least 2.
            documents: give each document its own positions and boundary; otherwise tokens run on.
            windows: cut windows of a row and drop those without a target; otherwise everything is carried.
        """
        self._seq_len = seq_len
        self._documents = documents
        self._windows = windows
        self._carry: deque[Encoded] = deque()
        self._carried = 0
        self._rows = self._blocks = self._dropped_windows = self._dropped_tokens = 0

    @property
    def counts(self) -> PackingCounts:
        """What became of the rows so far."""
        return PackingCounts(
            rows=self._rows,
            blocks=self._blocks,
            dropped_windows=self._dropped_windows,
            dropped_tokens=self._dropped_tokens,
        )

    @property
    def carry(self) -> tuple[Encoded, ...]:
        """The pieces of documents that wait for a full block, less than ``seq_len`` tokens together."""
        return tuple(self._carry)

    def restore(self, carry: tuple[Encoded, ...]) -> None:
        """Go on from a carry that :attr:`carry` gave."""
        self._carry = deque(carry)
        self._carried = sum(len(piece.ids) for piece in carry)

    def add(self, row: Encoded) -> list[Block]:
        """Add one row and return the blocks that are complete now, in order."""
        self._rows += 1
        blocks = []
        start = 0
        if self._windows:
            for start in range(0, len(row.ids) - self._seq_len + 1, self._seq_len):
                end = start + self._seq_len
                blocks.append(self._block([_slice(row, start, end)]))
            start = len(row.ids) - len(row.ids) % self._seq_len
        tail = row if start == 0 else _slice(row, start, len(row.ids))
        if self._windows and not self._has_target(tail):
            self._drop(len(tail.ids))
        elif len(tail.ids):
            self._carry.append(tail)
            self._carried += len(tail.ids)
        blocks += [self._block(list(pieces)) for pieces in self._full()]
        kept = [block for block in blocks if block.targets]
        for _ in range(len(blocks) - len(kept)):
            self._drop(self._seq_len)
        self._blocks += len(kept)
        return kept

    def _has_target(self, tail: Encoded) -> bool:
        # The carry gives a tail in documents mode no token before its first one.
        return bool(tail.weights[1 if self._documents else 0 :].any())

    def _drop(self, tokens: int) -> None:
        if tokens:
            self._dropped_windows += 1
            self._dropped_tokens += tokens

    def _full(self) -> Iterator[list[Encoded]]:
        """Take blocks out of the carry while there are enough tokens; a document may be cut in two."""
        while self._carried >= self._seq_len:
            pieces: list[Encoded] = []
            room = self._seq_len
            while room:
                piece = self._carry.popleft()
                if len(piece.ids) > room:
                    self._carry.appendleft(_slice(piece, room, len(piece.ids)))
                    piece = _slice(piece, 0, room)
                pieces.append(piece)
                room -= len(piece.ids)
            self._carried -= self._seq_len
            yield pieces

    def _block(self, pieces: list[Encoded]) -> Block:
        ids = np.concatenate([piece.ids for piece in pieces])
        weights = np.concatenate([piece.weights for piece in pieces])
        if self._documents:
            positions = np.concatenate([np.arange(len(piece.ids), dtype=np.int32) for piece in pieces])
        else:
            positions = np.arange(len(ids), dtype=np.int32)
        weights[positions == 0] = 0
        return Block(ids=ids, weights=weights, positions=positions)


def _slice(row: Encoded, start: int, end: int) -> Encoded:
    return Encoded(ids=row.ids[start:end], weights=row.weights[start:end])

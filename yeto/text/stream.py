"""Rows, for ever: shards, epochs, a bounded shuffle, and a position to come back to.

Row i of the source belongs to learner i mod M, and inside the learner to ranks and workers in the same way,
so shares are disjoint without anybody knowing how many rows there are. A stream reads its share in windows of
a bounded number of rows and permutes each window. The permutation depends on (seed, epoch, window) alone;
there is no generator state to carry along, so a position is a handful of numbers and a short carry:

    (epoch, window, cursor of the window's first row, rows taken, blocks taken of the next row, carry)

and coming back to it costs one window, never the file. Windows begin small and double up to the shuffle
buffer: the first block needs the rows of about one block, not a thousand of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from yeto.errors import DataError
from yeto.text.config import TextConfig
from yeto.text.formats import chat_reader
from yeto.text.masks import ChatEncoder, Encoded
from yeto.text.packing import Block, Packer, PackingCounts
from yeto.tuning.rows import Cursor, Row, RowSource
from yeto.tuning.share import Share, no_rows, seat_words

FIRST_WINDOW_ROWS = 16
ENCODE_ROWS = 256
"""Most rows tokenized by one call: enough that the call is paid for, few beside a window."""
ENCODE_TOKENS = 1 << 14
"""About as many tokens come of one call: long rows are tokenized a few at a time, blocks come steadily."""

EncodeRows = Callable[[Sequence[Row]], list[Encoded]]
"""From rows to their tokens and weights, one for each row."""


@frozen(kw_only=True)
class Position:
    """Where a stream stands, right after one of its blocks."""

    epoch: int = 0
    window: int = 0
    """Number of the window inside the epoch."""
    start: Cursor = field(factory=Cursor)
    """Where the window's rows begin in the source."""
    taken: int = 0
    """Rows of the permuted window that are used up."""
    skip: int = 0
    """Blocks of the next row that were given out already."""
    carry: tuple[Encoded, ...] = field(default=(), repr=False, eq=False)
    """Tokens that waited before that next row."""


@frozen(kw_only=True)
class Produced:
    """One block with the position behind it; without a block, the end of a share that gives none."""

    block: Block | None
    position: Position
    counts: PackingCounts


class RowEncoder:
    """From rows to tokens and weights, as a configuration asks for."""

    def __init__(self, config: TextConfig, tokenizer: Any) -> None:
        self._encoder = ChatEncoder(tokenizer, train_on=config.train_on, mask_mode=config.assistant_mask_mode)
        self._read = chat_reader(config)

    def __call__(self, row: Row) -> Encoded:
        """Tokenize one row."""
        return self._encoder.encode(self._read(row))

    def many(self, rows: Sequence[Row]) -> list[Encoded]:
        """Tokenize rows together; the result is that of each by itself."""
        return self._encoder.encode_many([self._read(row) for row in rows])

    def each(self, rows: Iterable[Row]) -> Iterator[Encoded]:
        """Tokenize rows as they come, some together, because that takes less time than one by one."""
        left = iter(rows)
        while some := list(islice(left, ENCODE_ROWS)):
            yield from self.many(some)


def encoder_of(config: TextConfig, tokenizer: Any) -> RowEncoder:
    """Return the function from row to tokens and weights that a configuration asks for."""
    return RowEncoder(config, tokenizer)


def packer_of(config: TextConfig) -> Packer:
    """Return the packer that a configuration asks for."""
    return Packer(
        config.seq_len, documents=config.packing == "documents", windows=config.train_on == "assistant"
    )


def stream_blocks(
    source: RowSource,
    share: Share,
    encode: EncodeRows,
    packer: Packer,
    *,
    seed: int,
    shuffle_buffer: int,
    position: Position | None = None,
) -> Iterator[Produced]:
    """Yield blocks for ever, epoch after epoch.

    Ends, with one :class:`Produced` that has no block, when a whole epoch gave neither a block nor a
    target to wait in the carry; everything else would read for ever and never train.

    Args:
        source: the rows of everybody.
        share: which of them are ours.
        encode: rows to tokens and weights.
        packer: fresh; its carry is set from ``position``.
        seed: root of the permutations.
        shuffle_buffer: most rows of a window.
        position: where to go on; None begins at the first row.

    Raises:
        DataError: a row cannot be read, understood or tokenized.
    """
    position = Position() if position is None else position
    batches = _Batches(encode)
    packer.restore(position.carry)
    while True:
        whole_epoch = position.window == 0 and position.taken == 0 and position.skip == 0
        blocks_before = packer.counts.blocks
        rows = source.rows(position.start, share.rows())
        while window := list(islice(rows, _window_rows(position.window, shuffle_buffer))):
            order = np.random.default_rng([seed, position.epoch, position.window]).permutation(len(window))
            skip = position.skip
            for place, row in batches.encoded(window, order.tolist(), position.taken):
                carry = packer.carry
                blocks = packer.add(row)
                for number in range(skip, len(blocks)):
                    behind = evolve(position, taken=place, skip=number + 1, carry=carry)
                    yield Produced(block=blocks[number], position=behind, counts=packer.counts)
                skip = 0
            after = window[-1].after
            position = Position(epoch=position.epoch, window=position.window + 1, start=after)
        if whole_epoch and packer.counts.blocks == blocks_before and not _has_target(packer.carry):
            yield Produced(block=None, position=position, counts=packer.counts)
            return
        position = Position(epoch=position.epoch + 1)


def nothing_left(config: TextConfig, counts: PackingCounts) -> DataError:
    """Return the error of a share without a single block, with the counts and the remedy."""
    if counts.rows == 0:
        return no_rows(config, config.data)
    return DataError(
        f"--data {config.data}: nothing to train on for {seat_words(config)}: {counts.rows} rows, "
        f"{counts.dropped_windows} windows without a supervised token dropped ({counts.dropped_tokens} "
        f"tokens); raise --seq-len {config.seq_len} if prompts are longer than that, or use --train-on all"
    )


class _Batches:
    """Rows of permuted windows, tokenized some at a time: few at first, for the first block's sake."""

    def __init__(self, encode: EncodeRows) -> None:
        self._encode = encode
        self._together = FIRST_WINDOW_ROWS // 4

    def encoded(self, window: list[Row], order: list[int], taken: int) -> Iterator[tuple[int, Encoded]]:
        """Yield a window's rows in their order, with their places, from place ``taken`` on."""
        while taken < len(window):
            rows = [window[place] for place in order[taken : taken + self._together]]
            encoded = self._encode(rows)
            yield from enumerate(encoded, start=taken)
            taken += len(rows)
            tokens = sum(len(one.ids) for one in encoded)
            enough = len(rows) * ENCODE_TOKENS // max(1, tokens)
            self._together = max(1, min(enough, 2 * self._together, ENCODE_ROWS))


def _window_rows(window: int, shuffle_buffer: int) -> int:
    # The exponent is capped because a long epoch has many windows; 2**40 is above any buffer.
    return int(min(shuffle_buffer, FIRST_WINDOW_ROWS << min(window, 40)))


def _has_target(carry: tuple[Encoded, ...]) -> bool:
    return any(piece.weights.any() for piece in carry)

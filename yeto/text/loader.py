"""Blocks beside training: the same stream, run by worker processes, by a thread, or done beforehand.

All three give the blocks of :func:`yeto.text.stream.stream_blocks` in an order that depends on the settings
alone, never on speed: with several workers, one block of each in turn. Each has a bounded number of finished
blocks waiting, so a slow consumer stops the producers.

A message from one process to another costs the same whatever it holds, so workers send several blocks with
one, and enough of them may wait that a worker need not stop while the other one is in its tokenizer.

Worker processes come from a fork server, not from a fork: this process has threads and perhaps a CUDA
context, and neither survives a fork.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import torch
from attrs import field, frozen
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from yeto.errors import DataError, YetoError
from yeto.text.config import TextConfig
from yeto.text.fork_server import start_fork_server
from yeto.text.masks import Encoded
from yeto.text.packing import Block, PackingCounts
from yeto.text.stream import (
    ENCODE_TOKENS,
    Position,
    Produced,
    encoder_of,
    nothing_left,
    packer_of,
    stream_blocks,
)
from yeto.text.tokenizer import load_tokenizer
from yeto.tuning.beside import beside
from yeto.tuning.progress import with_progress
from yeto.tuning.rows import Cursor, Row, open_source
from yeto.tuning.share import Share, data_seed, share_of

logger = logging.getLogger(__name__)

PREFETCH_BLOCKS = 4
"""Finished blocks that wait for a thread's consumer: enough to hide one slow row, little beside a model."""
PREFETCH_MESSAGES = 4
"""Messages that wait per worker, each with the blocks of about one call of the tokenizer."""


@frozen(kw_only=True)
class LoaderState:
    """Where a loader stands: a position for each of its streams, and whose turn it is."""

    positions: tuple[Position, ...]
    turn: int = 0


@frozen(kw_only=True)
class _Item:
    """What comes out of a stream: something produced, or the words of the error that ended it."""

    stream: int
    produced: Produced | None = None
    failure: str | None = field(default=None)

    @property
    def is_last(self) -> bool:
        """Whether its stream gives nothing behind it."""
        return self.produced is None or self.produced.block is None


_Message = tuple[_Item, ...]
"""Items of one stream, in order."""


class BlockLoader:
    """An endless iterator of blocks that knows its state."""

    def __init__(self, config: TextConfig, tokenizer: Any, state: LoaderState | None = None) -> None:
        """Prepare; nothing is read before the first block is asked for.

        Args:
            config: data, format, packing, sharding and streaming settings.
            tokenizer: the model's, with the template to use.
            state: where to go on, from :attr:`state` of a loader with the same settings.
        """
        self._config = config
        self._tokenizer = tokenizer
        streams = max(1, config.stream_workers) if config.tokenize == "stream" else 1
        self._state = state or LoaderState(positions=(Position(),) * streams)
        self._counts = [PackingCounts()] * streams

    @property
    def state(self) -> LoaderState:
        """Where to go on behind the last block that was given out."""
        return self._state

    @property
    def counts(self) -> PackingCounts:
        """What became of the rows so far, over all streams; a little ahead of the blocks given out."""
        names = ("rows", "blocks", "dropped_windows", "dropped_tokens")
        return PackingCounts(**{name: sum(getattr(one, name) for one in self._counts) for name in names})

    def __iter__(self) -> Iterator[Block]:
        """Yield blocks for ever.

        Raises:
            DataError: a row cannot be used, or this share has nothing to train on.
        """
        # Who goes on from a later pass has counted only a part of the rows.
        told = any(position.epoch > 0 for position in self._state.positions)
        items = self._items()
        try:
            for item in items:
                if item.failure is not None:
                    raise DataError(item.failure)
                produced = item.produced
                assert produced is not None, "an item is a failure or something produced"
                self._counts[item.stream] = produced.counts
                if produced.block is None:
                    continue
                positions = list(self._state.positions)
                positions[item.stream] = produced.position
                turn = (item.stream + 1) % len(positions)
                self._state = LoaderState(positions=tuple(positions), turn=turn)
                if not told and produced.position.epoch > 0:
                    told = True
                    self._tell()
                yield produced.block
        finally:
            # Stops the thread, or lets the worker processes go.
            items.close()
        raise nothing_left(self._config, self.counts)

    def _tell(self) -> None:
        counts = self.counts
        if counts.dropped_windows:
            logger.info(
                "after the first pass over the data: %d rows gave %d blocks; %d windows without a supervised "
                "token were dropped (%d tokens)",
                counts.rows,
                counts.blocks,
                counts.dropped_windows,
                counts.dropped_tokens,
            )

    def _items(self) -> Any:
        if self._config.tokenize == "preload":
            return _in_this_thread(preloaded(self._config, self._tokenizer, self._state.positions[0]))
        if self._config.stream_workers == 0:
            return _beside(open_stream(self._config, self._tokenizer, share_of(self._config), self._state, 0))
        return self._from_workers()

    def _from_workers(self) -> Iterator[_Item]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        start_fork_server()
        messages = DataLoader(
            # Tokenizers whose code came with the model cannot be sent to another process.
            _StreamDataset(
                self._config, None if self._config.trust_remote_code else self._tokenizer, self._state
            ),
            batch_size=None,
            num_workers=self._config.stream_workers,
            collate_fn=_untouched,
            prefetch_factor=PREFETCH_MESSAGES,
            multiprocessing_context=context,
            # Its own generator: the loader draws a seed, and training's random state is not its to use.
            generator=torch.Generator(),
        )
        yield from _in_turns(iter(messages), self._config.stream_workers, self._state.turn)


def open_stream(
    config: TextConfig, tokenizer: Any, share: Share, state: LoaderState, stream: int
) -> Iterator[Produced]:
    """Return one stream of blocks over a share, from where ``state`` says it stood."""
    assert config.data is not None
    return stream_blocks(
        open_source(config.data, revision=config.data_revision),
        share,
        encoder_of(config, tokenizer).many,
        packer_of(config),
        seed=data_seed(config),
        shuffle_buffer=config.shuffle_buffer,
        position=state.positions[stream],
    )


def preloaded(config: TextConfig, tokenizer: Any, position: Position) -> Iterator[Produced]:
    """Tokenize this process's whole share first, with a progress bar, then stream from memory."""
    assert config.data is not None
    source = open_source(config.data, revision=config.data_revision)
    rows = source.rows(Cursor(), share_of(config).rows())
    if config.rank == 0:
        # One rank of an island shows it for all.
        rows = with_progress(rows, "tokenizing rows")
    encoded = list(encoder_of(config, tokenizer).each(rows))
    yield from stream_blocks(
        _Memory(encoded),
        Share(),
        lambda rows: [encoded[row.index] for row in rows],
        packer_of(config),
        seed=data_seed(config),
        shuffle_buffer=config.shuffle_buffer,
        position=position,
    )


class _Memory:
    """Rows that are only numbers: the tokens are in memory already."""

    name = "memory"

    def __init__(self, encoded: list[Encoded]) -> None:
        self._encoded = encoded

    def rows(self, start: Cursor, wanted: range | None = None) -> Iterator[Row]:
        for row in range(start.row, len(self._encoded)):
            if wanted is None or row in wanted:
                yield Row(index=row, value={}, origin=f"row {row}", after=Cursor(row=row + 1))


class _StreamDataset(IterableDataset[_Message]):
    """What a worker process runs: the share of its process, cut once more by worker."""

    def __init__(self, config: TextConfig, tokenizer: Any, state: LoaderState) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._state = state

    def __iter__(self) -> Iterator[_Message]:
        info = get_worker_info()
        assert info is not None, "only worker processes iterate this"
        for ending in (_end_with_trainer, _end_when_asked):
            threading.Thread(target=ending, daemon=True).start()
        _share_cores(info.num_workers)
        # The loader asks worker 0 first, so the stream whose turn it is must be worker 0's.
        stream = (info.id + self._state.turn) % info.num_workers
        return _messages(self._items(stream, info.num_workers), max(1, ENCODE_TOKENS // self._config.seq_len))

    def _items(self, stream: int, streams: int) -> Iterator[_Item]:
        share = share_of(self._config).part(stream, streams)
        try:
            tokenizer = load_tokenizer(self._config) if self._tokenizer is None else self._tokenizer
            # What is loaded by now stays; the collector need not look at it again for every few rows.
            gc.freeze()
            for produced in open_stream(self._config, tokenizer, share, self._state, stream):
                yield _Item(stream=stream, produced=produced)
        except YetoError as error:
            # As words: an exception would arrive wrapped in the worker's traceback.
            yield _Item(stream=stream, failure=str(error))


def _share_cores(workers: int) -> None:
    """Leave the other worker processes their cores; the tokenizer would start a thread for each there is.

    Both variables are read when a tokenizer first has several rows; who set them has decided otherwise.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    if threads == 1:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _messages(items: Iterator[_Item], most: int) -> Iterator[_Message]:
    """Put items together, one at first, for the first block's sake, then twice as many up to ``most``.

    Every stream counts alike, so that none has to wait while another's message is filled.
    """
    size = 1
    while message := tuple(islice(items, size)):
        yield message
        size = min(2 * size, most)


def _in_turns(messages: Iterator[_Message], streams: int, turn: int) -> Iterator[_Item]:
    """Give out one item of each stream in turn, as long as a stream has one.

    Args:
        messages: of all streams, a message of each in turn.
        streams: how many there are.
        turn: the stream that begins.
    """
    waiting: list[deque[_Item]] = [deque() for _ in range(streams)]
    alive = deque((turn + place) % streams for place in range(streams))
    while alive:
        ready = waiting[alive[0]]
        while not ready:
            message = next(messages)
            waiting[message[0].stream].extend(message)
        item = ready.popleft()
        if item.is_last:
            alive.popleft()
        else:
            alive.rotate(-1)
        yield item


def _end_with_trainer() -> None:
    """End this worker process when the process that trains is gone, however it went.

    Torch's own watchdog looks at the parent, which is the fork server here, and that lives on.
    """
    trainer = multiprocessing.parent_process()
    assert trainer is not None, "only worker processes call this"
    trainer.join()
    os._exit(1)


def _end_when_asked() -> None:
    """End this worker process when the process that trains sends SIGTERM; nobody else's is heeded.

    The signal is blocked in every thread here, so it waits for this one. The loader sends it to a worker that
    does not end by itself in time, and would wait for ever for one that never does.
    """
    trainer = multiprocessing.parent_process()
    assert trainer is not None, "only worker processes call this"
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer.pid:
        pass
    os._exit(0)


def _untouched(item: Any) -> Any:
    return item


def _in_this_thread(produced: Iterator[Produced]) -> Iterator[_Item]:
    for one in produced:
        yield _Item(stream=0, produced=one)


def _beside(produced: Iterator[Produced]) -> Iterator[_Item]:
    """Run a stream in a thread, a few blocks ahead."""
    with closing(beside(produced, ahead=PREFETCH_BLOCKS, name="tokenizing")) as ahead:
        yield from _in_this_thread(ahead)

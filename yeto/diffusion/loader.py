"""Batches beside training: the stream of :mod:`yeto.diffusion.stream`, loaded in threads a little ahead.

A position names the settings and the rows that it was reached with, so that a restart with others is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import Any, Final

from attrs import field, frozen
from PIL import Image

from yeto.diffusion.config import DiffusionConfig
from yeto.diffusion.rows import RowReader, folder_of
from yeto.diffusion.stream import Place, stream_batches
from yeto.diffusion.values import Example, RowNeeds
from yeto.errors import DataError
from yeto.tuning.beside import beside
from yeto.tuning.position import SEAT_SETTINGS, RowsRead, row_digest
from yeto.tuning.rows import Cursor, RowSource, open_source
from yeto.tuning.share import data_seed, no_rows, share_of
from yeto.wire.digest import digest

BATCHES_AHEAD: Final = 2
"""Loaded batches that wait: one hides the loading of the next, the second a slow one."""
LOADING_THREADS: Final = 4
"""Decoders of pictures run in parallel; more would take the cores of other ranks."""

SETTINGS: Final = {
    **SEAT_SETTINGS,
    "micro_batch_size": "--micro-batch-size",
    "shuffle_buffer": "--shuffle-buffer",
    "height": "--height",
    "width": "--width",
    "resize_mode": "--resize-mode",
}
"""Fields of ``DiffusionConfig`` that decide which batch is the next one, and what people call them."""


@frozen(kw_only=True)
class LoadedBatch:
    """Rows to train on together, all of one shape."""

    examples: tuple[Example, ...]
    """At least one, at most ``--micro-batch-size``."""
    position: dict[str, Any] = field(repr=False)
    """Where to go on behind it, as JSON."""


class ExampleLoader:
    """An endless iterator of loaded batches."""

    def __init__(self, config: DiffusionConfig, needs: RowNeeds, start: Any = None) -> None:
        """Prepare; look at the first row.

        Args:
            config: which rows, whose they are, and how they are read.
            needs: what the model asks of them.
            start: ``position`` of a batch that an earlier process got; None begins at the beginning.

        Raises:
            ConfigError: the rows cannot be opened, or ``start`` belongs to other rows or other settings.
            DataError: the first row cannot be used, or there is none.
        """
        self._config = config
        self._reader = reader_of(config, needs)
        self._source = _source_of(config)
        self._read = RowsRead(
            settings={name: getattr(config, name) for name in SETTINGS},
            first_row=_first_row(config, self._source, self._reader),
        )
        self._place = Place()
        if start is not None:
            self._read.require_same(start, SETTINGS)
            self._place = Place.from_json(start)

    def __iter__(self) -> Iterator[LoadedBatch]:
        """Yield batches for ever.

        Raises:
            DataError: a row cannot be used.
        """
        with closing(beside(self._loaded(), ahead=BATCHES_AHEAD, name="loading rows")) as batches:
            yield from batches

    def _loaded(self) -> Iterator[LoadedBatch]:
        planned = stream_batches(
            self._source,
            share_of(self._config),
            self._reader,
            batch_size=self._config.micro_batch_size,
            shuffle_buffer=self._config.shuffle_buffer,
            seed=data_seed(self._config),
            place=self._place,
        )
        with ThreadPoolExecutor(LOADING_THREADS, thread_name_prefix="loading rows") as pool:
            for rows, place in planned:
                examples = tuple(pool.map(self._reader.load, rows))
                yield LoadedBatch(examples=examples, position={**self._read.to_json(), **place.to_json()})


def reader_of(config: DiffusionConfig, needs: RowNeeds, data: str | None = None) -> RowReader:
    """Return the reader that a configuration asks for.

    Args:
        config: sizes of images.
        needs: what the model asks of rows.
        data: the source, if not ``--data``.

    Raises:
        ConfigError: the model takes no images of the size that is asked for.
    """
    spec = config.data if data is None else data
    return RowReader(
        needs,
        folder=None if spec is None else folder_of(spec),
        height=config.height,
        width=config.width,
        resize_mode=config.resize_mode,
    )


def first_row(config: DiffusionConfig, needs: RowNeeds) -> str:
    """Load the first row of this process's share; return the digest of what it says.

    Raises:
        ConfigError: the rows cannot be opened.
        DataError: it cannot be used, or there is none.
    """
    return _first_row(config, _source_of(config), reader_of(config, needs))


def heldout_examples(config: DiffusionConfig, needs: RowNeeds) -> Iterator[Example]:
    """Yield the first ``--eval-rows`` rows of ``--eval-data``, one in memory at a time.

    Raises:
        ConfigError: they cannot be opened.
        DataError: one of them cannot be used, or there is none.
    """
    assert config.eval_data is not None
    source = open_source(config.eval_data, revision=config.data_revision, flag="--eval-data")
    reader = reader_of(config, needs, config.eval_data)
    number = 0
    for row in islice(source.rows(Cursor()), config.eval_rows):
        yield reader.load(reader.plan(row))
        number += 1
    if number == 0:
        raise DataError(f"--eval-data {config.eval_data}: it has no rows")


def _source_of(config: DiffusionConfig) -> RowSource:
    assert config.data is not None
    return open_source(config.data, revision=config.data_revision)


def _first_row(config: DiffusionConfig, source: RowSource, reader: RowReader) -> str:
    row = next(source.rows(Cursor(), share_of(config).rows()), None)
    if row is None:
        raise no_rows(config, config.data)
    reader.load(reader.plan(row))
    return row_digest(row, as_json)


def as_json(value: Any) -> Any:
    """Return words for what a table may hold and JSON cannot."""
    if isinstance(value, Image.Image):
        return [value.mode, *value.size, digest(value.tobytes())]
    return digest(bytes(value)) if isinstance(value, bytes | bytearray) else str(value)

"""Latents and prompt embeddings made once, so that training needs neither images nor text encoders.

The rule: a cache is what the encoders give, bit for bit. A row is encoded by itself, so its tensors do not
depend on its neighbours, and a tensor is stored in fewer bits only where that loses none.

A cache is a folder of shards, each with the tensors of some rows, and ``rows.jsonl``, which points at them
and is what ``--data`` takes. A shard is written aside, made durable and renamed; it says which rows it is of,
so whoever runs the same command again keeps every shard whose rows and files have not changed: after a kill
it goes on, and after an addition to the rows it adds. ``rows.jsonl`` is there only while all shards are that
it points at: it is removed before one of them changes, and written last.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import count, islice
from pathlib import Path
from typing import Any, Final, TextIO, TypeVar

import torch
from attrs import frozen
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from yeto.diffusion.cached import MODEL_KEY
from yeto.diffusion.config import DiffusionConfig
from yeto.diffusion.loader import as_json, reader_of
from yeto.diffusion.rows import PlannedRow, RowReader
from yeto.diffusion.values import Conditioning, Encoders, Example, RowNeeds
from yeto.errors import ConfigError, DataError
from yeto.storage import hold, sync_folder
from yeto.tuning.beside import beside
from yeto.tuning.position import row_digest
from yeto.tuning.progress import with_progress
from yeto.tuning.rows import Cursor, Row, open_source
from yeto.wire.digest import digest

T = TypeVar("T")

SHARD_ROWS: Final = 64
"""Rows of a shard: what a kill costs at most, and enough that a folder has not too many files."""
AHEAD: Final = 2
"""Loaded rows that wait for the encoders."""
ROWS_FILE: Final = "rows.jsonl"
SETTINGS_FILE: Final = "cache.settings"
"""JSON, and not called so: a folder of rows would take it for some."""
_SHARD: Final = "shard-{:06d}.safetensors"
_MADE_OF: Final = "yeto_made_of"
"""Entry of a shard's metadata: digest of the rows that it is of, and of the files that they name."""
_ROWS: Final = "yeto_rows"
"""Entry of a shard's metadata: its lines of ``rows.jsonl``."""


@frozen(kw_only=True)
class CacheReport:
    """What is in the folder now."""

    rows_file: Path
    rows: int
    shards: int
    kept: int
    """Shards that were there already."""


def cache_rows(
    config: DiffusionConfig,
    output: Path,
    load: Callable[[DiffusionConfig], tuple[Encoders, RowNeeds]],
    *,
    say: Callable[[str], None] = lambda line: None,
) -> CacheReport:
    """Encode every row of ``--data``.

    Args:
        config: which rows, which model, which size of images.
        output: folder of the cache; made if it is not there, gone on with if it is one.
        load: loads the encoders; called once everything that is cheap has been checked.
        say: takes a line for people.

    Raises:
        ConfigError: a flag is wrong, or the folder is of another cache or in use.
        DataError: a row cannot be used, or the folder cannot be written.
    """
    if config.data is None:
        raise ConfigError("--data is missing: name the rows to cache")
    source = open_source(config.data, revision=config.data_revision)
    first = next(source.rows(Cursor()), None)
    if first is None:
        raise DataError(f"--data {config.data}: it has no rows")
    cheap = reader_of(config, RowNeeds())
    cheap.load(cheap.plan(first))
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output {output}: is a file; name a folder")
    taken = ConfigError(
        f"--output {output}: another process writes there; wait for it, or name another folder"
    )
    try:
        output.mkdir(parents=True, exist_ok=True)
        _require_ours(output)
        with hold(output / ".lock", taken):
            say(f"loading the encoders of {config.model}")
            encoders, needs = load(config)
            _require_settings(output, config, needs)
            writer = _Writer(output, encoders, reader_of(config, needs), needs.model)
            return writer.write(with_progress(source.rows(Cursor()), "caching rows"))
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"--output {output}: cannot write: {error}; the same command goes on with what is there"
        ) from error


class _Writer:
    """Makes the shards of one folder, or keeps them."""

    def __init__(
        self, output: Path, encoders: Encoders, reader: RowReader, model: Mapping[str, str] | None
    ) -> None:
        self._output = output
        self._encoders = encoders
        self._reader = reader
        self._model = json.dumps(dict(model), sort_keys=True) if model else None

    def write(self, rows: Iterator[Row]) -> CacheReport:
        """Make all shards, then the file that points at them."""
        return _durably(self._output / ROWS_FILE, lambda aside: self._write(rows, aside))

    def _write(self, rows: Iterator[Row], rows_file: Path) -> CacheReport:
        # Line by line: of many rows the lines alone would fill the memory.
        with rows_file.open("w", encoding="utf-8") as file:
            return self._shards(rows, file)

    def _shards(self, rows: Iterator[Row], rows_file: TextIO) -> CacheReport:
        written = kept = 0
        for number in count():
            some = list(islice(rows, SHARD_ROWS))
            if not some:
                break
            planned = [self._reader.plan(row) for row in some]
            made_of = _digest_of(some, planned)
            path = self._output / _SHARD.format(number)
            there = _lines_of(path, made_of)
            if there is None:
                self._not_whole()
                lines = self._shard(path, planned, made_of)
            else:
                kept += 1
                lines = there
            written += len(lines)
            rows_file.writelines(f"{line}\n" for line in lines)
        for left in sorted(self._output.glob("shard-*.safetensors")):
            # Of rows that are no more.
            if left.name >= _SHARD.format(number):
                self._not_whole()
                left.unlink()
        return CacheReport(rows_file=self._output / ROWS_FILE, rows=written, shards=number, kept=kept)

    def _not_whole(self) -> None:
        """Take the cache out of use before anything that it points at changes."""
        path = self._output / ROWS_FILE
        if path.exists():
            path.unlink()
            sync_folder(self._output)

    def _shard(self, path: Path, planned: Sequence[PlannedRow], made_of: str) -> list[str]:
        tensors: dict[str, Tensor] = {}
        said: dict[str, dict[str, Any]] = {}
        lines = []
        with closing(beside(map(self._reader.load, planned), ahead=AHEAD, name="loading rows")) as examples:
            for number, example in enumerate(examples):
                latents = self._latents(example)
                line: dict[str, Any] = {} if example.prompt is None else {"prompt": example.prompt}
                line["latents"] = _stored(tensors, path, f"latents.{number}", latents, example)
                # Rows with one prompt share what was made of it.
                words = None if example.prompt is None else said.get(example.prompt)
                if words is None:
                    words = {
                        column: _stored(tensors, path, f"{column}.{number}", tensor, example)
                        for column, tensor in _columns(self._conditioning(example)).items()
                    }
                    if example.prompt is not None:
                        said[example.prompt] = words
                lines.append(json.dumps({**line, **words}, ensure_ascii=False))
        metadata = {_MADE_OF: made_of, _ROWS: "\n".join(lines), "format": "pt"}
        if self._model is not None:
            metadata[MODEL_KEY] = self._model
        _durably(path, lambda aside: save_file(tensors, aside, metadata=metadata))
        return lines

    def _latents(self, example: Example) -> Tensor:
        if example.latents is not None:
            return example.latents
        assert example.pixels is not None, "a row has latents or pixels"
        return self._encoders.latents(example.pixels.unsqueeze(0))[0]

    def _conditioning(self, example: Example) -> Conditioning:
        if example.conditioning is not None:
            return example.conditioning
        assert example.prompt is not None, "a row has a prompt or what was made of it"
        return self._encoders.conditioning([example.prompt])[0]


def lossless(tensor: Tensor) -> Tensor:
    """Return a tensor in the smallest dtype that holds each of its values exactly, on the CPU."""
    tensor = tensor.detach().to("cpu")
    if tensor.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            narrow = tensor.to(dtype)
            if torch.equal(narrow.float(), tensor):
                return narrow.contiguous()
    # A part of a larger tensor would be written with all of it.
    return tensor.clone(memory_format=torch.contiguous_format)


def _stored(
    tensors: dict[str, Tensor], path: Path, name: str, tensor: Tensor, example: Example
) -> dict[str, str]:
    """Add a tensor to a shard; return what a row says of it."""
    if not bool(tensor.isfinite().all()):
        raise DataError(
            f"{example.origin}: the encoders give NaN or infinite values for it; try --base-dtype f32"
        )
    tensors[name] = lossless(tensor)
    return {"file": path.name, "tensor": name}


def _columns(conditioning: Conditioning) -> dict[str, Tensor]:
    columns = {
        "prompt_embeds": conditioning.prompt_embeds,
        "prompt_mask": conditioning.mask,
        "pooled_prompt_embeds": conditioning.pooled,
    }
    return {name: tensor for name, tensor in columns.items() if tensor is not None}


def _digest_of(rows: Sequence[Row], planned: Sequence[PlannedRow]) -> str:
    """Return a digest of what rows say, and of size and time of the files that they name."""
    words = []
    for row, plan in zip(rows, planned, strict=True):
        files = [plan.image] if isinstance(plan.image, Path) else []
        files += [
            tensor.file
            for tensor in (plan.latents, plan.embeds, plan.mask, plan.pooled)
            if tensor is not None and tensor.file is not None
        ]
        stats = [(status.st_size, status.st_mtime_ns) for status in map(os.stat, files)]
        words.append(f"{row_digest(row, as_json)} {stats}")
    return digest("\n".join(words).encode())


def _lines_of(path: Path, made_of: str) -> list[str] | None:
    """Return a shard's lines if it is there, whole, and of these rows."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError):
        return None
    if metadata.get(_MADE_OF) != made_of or _ROWS not in metadata:
        return None
    return str(metadata[_ROWS]).split("\n")


def _require_ours(output: Path) -> None:
    """Refuse a folder with anything in it that is no cache."""
    others = [path.name for path in output.iterdir() if not path.name.startswith(".")]
    if others and not (output / SETTINGS_FILE).exists():
        raise ConfigError(f"--output {output}: has other files in it; name a folder that is new or empty")


def _require_settings(output: Path, config: DiffusionConfig, needs: RowNeeds) -> None:
    """Refuse a cache that was begun with other settings; note those of a new one."""
    now = {
        "model": None if needs.model is None else dict(needs.model),
        "height": config.height,
        "width": config.width,
        "resize_mode": config.resize_mode,
        "base_dtype": config.base_dtype,
    }
    path = output / SETTINGS_FILE
    if not path.exists():
        text = json.dumps({"format_version": 1, **now}, indent=2) + "\n"
        _durably(path, lambda aside: aside.write_text(text, encoding="utf-8"))
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        before = None
    if not isinstance(before, dict) or before.get("format_version") != 1:
        raise ConfigError(f"--output {output}: its {SETTINGS_FILE} cannot be read; name another folder")
    for name, value in now.items():
        if before.get(name) != value:
            flag = f"--{name.replace('_', '-')}"
            said = config.model if name == "model" else "is not given" if value is None else value
            earlier = before.get(name)
            raise ConfigError(
                f"{flag} {said}: the cache in --output {output} was begun "
                f"{'without it' if earlier is None else f'with {earlier}'}; give the same as before, or name "
                "another folder"
            )


def _durably(path: Path, write: Callable[[Path], T]) -> T:
    """Have a file written aside, and renamed when it is on the medium; return what ``write`` returned."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        result = write(aside)
        descriptor = os.open(aside, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)
    return result

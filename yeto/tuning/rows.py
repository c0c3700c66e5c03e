"""Rows out of files: one reader for every source, whatever machine it runs on.

The rule: a row is the same row, with the same number, through every reader. Therefore

* only LF (or CRLF) ends a JSONL row; U+2028, U+2029 and NEL are data, a byte-order mark is not, and blank
  lines are no rows;
* nor is a byte-order mark part of the first column's name, as it is in tables made by tools that kept it;
* a key that a row does not have is never there: Arrow writes a null for it when another row has the key,
  and a chat template that asks "is it defined" would answer wrongly;
* rows are numbered from 0 over all files of a source, files in name order.

JSONL and parquet are read front to back with bounded memory and can be entered in the middle through a
:class:`Cursor`, so neither the first row nor a resumed run waits for the length of a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import fsspec
import msgspec
from attrs import field, frozen

from yeto.errors import ConfigError, DataError
from yeto.tuning.hub import HubError, cause_of, fetch_card, patiently, unreachable_hub

BOM = b"\xef\xbb\xbf"
CHUNK_BYTES = 1 << 20
"""Bytes read at a time: large enough to hide the call, small beside one block's memory."""
PARQUET_BATCH_ROWS = 256
MAX_INTEGER_DIGITS = 4000
"""Longer integers stay text: the interpreter refuses them, and no column that is used holds one."""
EXTENSIONS = (".jsonl", ".ndjson", ".json", ".parquet")
HELD_OUT_NAMES = ("test", "valid", "validation", "val", "dev", "eval", "heldout")


@frozen(kw_only=True)
class Cursor:
    """A place between two rows of a source: the next row is ``row``, found at ``byte`` of file ``file``."""

    row: int = 0
    file: int = 0
    byte: int = 0
    """Byte offset in a JSONL file; number of the row inside the file for every other kind."""
    line: int = 0
    """Lines of the JSONL file before ``byte``."""


@frozen(kw_only=True)
class Row:
    """One row with its number and with words for where it stands."""

    index: int
    value: Mapping[str, Any] = field(repr=False)
    origin: str
    """``chat.jsonl line 17``: what an error message calls this row."""
    after: Cursor
    """Where the following row begins."""


_Reader = Generator[Row, None, Cursor]
"""Yields the rows of one file and returns where the file ended."""


class RowSource(Protocol):
    """A finite, ordered sequence of rows that can be entered at any cursor."""

    name: str
    """What the user called it."""

    def rows(self, start: Cursor, wanted: range | None = None) -> Iterator[Row]:
        """Yield rows from ``start`` to the end; with ``wanted`` only those whose number is in it.

        Raises:
            DataError: a row cannot be read; the message has file and line.
        """
        ...


def open_source(spec: str, *, revision: str | None = None, flag: str = "--data") -> RowSource:
    """Open what a flag names.

    Args:
        spec: a local file or folder (jsonl, json, parquet, ``save_to_disk``), an fsspec URL of a file or
            folder, or a Hugging Face data set id, of which the train split is read.
        revision: commit, branch or tag of a Hugging Face data set.
        flag: named in error messages.

    Raises:
        ConfigError: nothing is there that rows could be read from.
        DataError: what is there is damaged.
    """
    if "://" not in spec and os.path.isdir(spec):
        entries = set(os.listdir(spec))
        if "dataset_dict.json" in entries or {"state.json", "dataset_info.json"} <= entries:
            return _saved_dataset(spec, flag)
    if "://" in spec or os.path.exists(spec):
        return FileSource(spec, flag=flag)
    if spec.endswith(EXTENSIONS) or spec.startswith((".", "/", "~")):
        raise ConfigError(f"{flag} {spec}: no such file or folder")
    return _hub_dataset(spec, revision, flag)


class FileSource:
    """Rows of one file, or of the files of one folder, on any file system that fsspec knows."""

    def __init__(self, spec: str, *, flag: str = "--data") -> None:
        """Find the files.

        Raises:
            ConfigError: there is no such file, its kind is unknown, or the folder has none of a known one.
        """
        self.name = spec
        try:
            self._fs, path = fsspec.core.url_to_fs(spec)
            self._paths = self._folder(path) if self._fs.isdir(path) else [path]
            missing = [path for path in self._paths if not self._fs.exists(path)]
        except Exception as error:
            # A file system is a library of somebody else's, with exceptions of its own.
            raise ConfigError(f"{flag} {spec}: cannot open: {cause_of(error)}") from error
        if not self._paths:
            raise ConfigError(f"{flag} {spec}: no {', '.join(EXTENSIONS)} file in this folder")
        for path in self._paths:
            if not path.lower().endswith(EXTENSIONS):
                raise ConfigError(f"{flag} {spec}: unknown kind of file; known are {', '.join(EXTENSIONS)}")
        if missing:
            raise ConfigError(f"{flag} {spec}: no such file")

    def _folder(self, folder: str) -> list[str]:
        """Return a folder's files in name order: those named train if there are any, never held-out ones.

        Nor hidden ones: such as ``._rows.jsonl``, which holds no rows, lie in folders that were on a Mac.
        """
        paths = sorted(
            path
            for path in self._fs.ls(folder, detail=False)
            if path.lower().endswith(EXTENSIONS) and not os.path.basename(path).startswith(".")
        )
        words = {path: _words(path) for path in paths}
        training = [path for path in paths if "train" in words[path]]
        return training or [path for path in paths if not words[path].intersection(HELD_OUT_NAMES)]

    def rows(self, start: Cursor, wanted: range | None = None) -> Iterator[Row]:
        """Yield the rows from ``start`` on; see :class:`RowSource`."""
        cursor = start
        for number in range(start.file, len(self._paths)):
            path = self._paths[number]
            if number != start.file:
                cursor = Cursor(row=cursor.row, file=number)
            kind = path.lower().rpartition(".")[2]
            if kind == "parquet":
                reader = self._parquet(path, cursor, wanted)
            elif kind == "json" and self._first_byte(path) == b"[":
                reader = self._json_list(path, cursor, wanted)
            else:
                reader = self._json_lines(path, cursor, wanted)
            # A reader returns where its file ended, which counts the rows that nobody wanted.
            try:
                cursor = yield from reader
            except DataError:
                raise
            except Exception as error:
                if "://" not in self.name and not isinstance(error, OSError):
                    raise
                raise DataError(f"{path}: cannot read: {cause_of(error)}") from error

    def _first_byte(self, path: str) -> bytes:
        with self._fs.open(path, "rb") as file:
            head: bytes = file.read(64)
        return head.removeprefix(BOM).lstrip()[:1]

    def _json_lines(self, path: str, cursor: Cursor, wanted: range | None) -> _Reader:
        label = os.path.basename(path)
        row, line, byte = cursor.row, cursor.line, cursor.byte
        with self._fs.open(path, "rb") as file:
            for text in _lines(file, byte):
                line += 1
                byte += len(text)
                # Files that were joined have one in front of each part.
                content = text.removeprefix(BOM).rstrip(b"\n").removesuffix(b"\r")
                if not content.strip():
                    continue
                if wanted is None or row in wanted:
                    origin = f"{label} line {line}"
                    after = Cursor(row=row + 1, file=cursor.file, byte=byte, line=line)
                    yield Row(index=row, value=_parse(content, origin), origin=origin, after=after)
                row += 1
        return Cursor(row=row, file=cursor.file, byte=byte, line=line)

    def _json_list(self, path: str, cursor: Cursor, wanted: range | None) -> _Reader:
        label = os.path.basename(path)
        with self._fs.open(path, "rb") as file:
            content: bytes = file.read().removeprefix(BOM)
        values = _decode(content, label)
        assert isinstance(values, list), "only called for a file that begins with ["
        for place, value in enumerate(values[cursor.byte :], start=cursor.byte):
            row = cursor.row + place - cursor.byte
            if wanted is None or row in wanted:
                origin = f"{label} row {place}"
                after = Cursor(row=row + 1, file=cursor.file, byte=place + 1)
                yield Row(index=row, value=_object(value, origin), origin=origin, after=after)
        return Cursor(row=cursor.row + max(0, len(values) - cursor.byte), file=cursor.file, byte=len(values))

    def _parquet(self, path: str, cursor: Cursor, wanted: range | None) -> _Reader:
        import pyarrow
        import pyarrow.parquet

        label = os.path.basename(path)
        try:
            with self._fs.open(path, "rb") as file:
                table = pyarrow.parquet.ParquetFile(file)
                num_rows = table.metadata.num_rows
                for place, batch, offset in _parquet_places(table, cursor.byte):
                    row = cursor.row + place - cursor.byte
                    if wanted is None or row in wanted:
                        origin = f"{label} row {place}"
                        with _reading(origin):
                            taken = batch.slice(offset, 1).to_pylist()[0]
                        after = Cursor(row=row + 1, file=cursor.file, byte=place + 1)
                        yield Row(index=row, value=table_row(taken), origin=origin, after=after)
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise DataError(f"{label}: not a readable parquet file: {error}") from error
        return Cursor(row=cursor.row + max(0, num_rows - cursor.byte), file=cursor.file, byte=num_rows)


class TableSource:
    """Rows of an Arrow data set that gives every row by its number."""

    def __init__(self, name: str, table: Any) -> None:
        """Wrap ``table``, a ``datasets.Dataset``."""
        self.name = name
        self._table = table

    def rows(self, start: Cursor, wanted: range | None = None) -> Iterator[Row]:
        """Yield the rows from ``start`` on; see :class:`RowSource`."""
        for row in range(start.row, len(self._table)):
            if wanted is None or row in wanted:
                origin = f"{self.name} row {row}"
                with _reading(origin):
                    taken = self._table[row]
                yield Row(index=row, value=table_row(taken), origin=origin, after=Cursor(row=row + 1))


def _parquet_places(table: Any, first: int) -> Iterator[tuple[int, Any, int]]:
    """Yield number, batch and place in it of every row of a parquet file from ``first`` on.

    Groups of rows that lie before are not read.
    """
    begin = 0
    for group in range(table.num_row_groups):
        end = begin + table.metadata.row_group(group).num_rows
        if first < end:
            for batch in table.iter_batches(PARQUET_BATCH_ROWS, row_groups=[group]):
                for offset in range(max(0, first - begin), batch.num_rows):
                    yield begin + offset, batch, offset
                begin += batch.num_rows
        begin = end


@contextmanager
def _reading(origin: str) -> Iterator[None]:
    """Say of a row that is taken out of a table what is wrong with it; only then it shows.

    Raises:
        DataError: it cannot be read, or one of its texts is none.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(
            f"{origin}: not UTF-8 (byte {error.start} of a text); write its texts as UTF-8"
        ) from error
    except Exception as error:
        # Tables are a library of somebody else's, and a damaged one may raise anything there.
        raise DataError(f"{origin}: cannot read: {cause_of(error)}") from error


def table_row(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row of a table as if it had been read from JSON."""
    return {key.removeprefix("\ufeff"): part for key, part in without_nulls(value).items()}


def without_nulls(value: Any) -> Any:
    """Return a value without the object keys that hold null, at any depth; lists keep their nulls."""
    if isinstance(value, Mapping):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [without_nulls(part) for part in value]
    return value


def _saved_dataset(folder: str, flag: str) -> RowSource:
    import datasets

    try:
        loaded = datasets.load_from_disk(folder)
    except Exception as error:
        raise DataError(f"{flag} {folder}: not a readable save_to_disk folder: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded:
            raise ConfigError(f"{flag} {folder}: no train split, only {', '.join(sorted(loaded))}")
        loaded = loaded["train"]
    return TableSource(os.path.basename(os.path.normpath(folder)), loaded)


def _hub_dataset(name: str, revision: str | None, flag: str) -> RowSource:
    failed = f"{flag} {name}: no such local file, and as a Hugging Face data set it failed"
    cause = unreachable_hub(name, revision=revision, repo_type="dataset")
    if cause is not None:
        raise ConfigError(f"{failed}: {cause}")
    import datasets

    def load() -> Any:
        return datasets.load_dataset(name, split="train", revision=fetch_card(name, revision))

    try:
        return TableSource(name, patiently(load))
    except HubError as error:
        # Absent files, no such repository, no train split, no network, a damaged file: all of them end the
        # run here, and the library's own sentence is the best one there is.
        raise ConfigError(f"{failed}: {error}") from error


def _words(path: str) -> set[str]:
    stem = os.path.basename(path).rpartition(".")[0].lower()
    return set("".join(letter if letter.isalnum() else " " for letter in stem).split())


def _lines(file: Any, start: int) -> Iterator[bytes]:
    """Yield the lines of a binary file from byte ``start``, each with its LF; only LF ends a line."""
    if start:
        file.seek(start)
    rest = b""
    while chunk := file.read(CHUNK_BYTES):
        pieces = (rest + chunk).split(b"\n")
        rest = pieces.pop()
        for piece in pieces:
            yield piece + b"\n"
    if rest:
        yield rest


def _integer(digits: str) -> int | str:
    return int(digits) if len(digits) <= MAX_INTEGER_DIGITS else digits


_DECODER = json.JSONDecoder(parse_int=_integer)


def _decode(content: bytes, origin: str, remedy: str = "") -> Any:
    try:
        # Four times as fast, and it understands nothing differently: it only understands less.
        return msgspec.json.decode(content)
    except (msgspec.MsgspecError, RecursionError):
        return _decode_slowly(content, origin, remedy)


def _decode_slowly(content: bytes, origin: str, remedy: str) -> Any:
    """Decode also what strict readers refuse (NaN, huge integers), and say in words what is wrong."""
    try:
        return _DECODER.decode(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{origin}: not UTF-8 (byte {error.start} of the text); save the file as UTF-8"
        ) from error
    except ValueError as error:
        raise DataError(f"{origin}: not JSON: {error}{remedy}") from error
    except RecursionError as error:
        raise DataError(f"{origin}: nested too deeply") from error


def _parse(content: bytes, origin: str) -> Mapping[str, Any]:
    return _object(_decode(content, origin, "; every line holds one row, whole"), origin)


def _object(value: Any, origin: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{origin}: a row is a JSON object, this is {type(value).__name__}")
    return value

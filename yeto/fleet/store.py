"""A *store*: objects under one URI, in an object store or a folder, through fsspec.

Only what every object store has is asked of it: put a whole object, get one, list names, remove one. Nothing
is appended to, renamed or locked there. On a folder of this machine an object is written beside its name and
renamed, so that also there it is whole or absent.

Stores fail in ways of their own, each with errors of its library. Here all of them become ``StorageError``,
which says whether trying again may help.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from yeto.errors import ConfigError, YetoError
from yeto.storage import sync_folder

T = TypeVar("T")

ASIDE: Final = ".part"
"""Suffix of an object that is being written, in a folder."""

_HOPELESS: Final = (PermissionError, NotADirectoryError, IsADirectoryError, NotImplementedError)
"""What no waiting mends: a key without the right, a taken name, something that a store cannot do."""

_HOPELESS_NUMBERS: Final = (errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS)
"""The same, of errors that have no class of their own."""


class StorageError(YetoError):
    """The store did not do what it was asked; ``hopeless`` when waiting will not change that."""

    def __init__(self, message: str, *, hopeless: bool = False) -> None:
        super().__init__(message)
        self.hopeless = hopeless


class NoObject(StorageError):
    """There is no object of that name, or not even the bucket."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hopeless=True)


class Store:
    """The objects under one URI; names are relative to it, with ``/`` between their parts."""

    def __init__(self, uri: str, *, flag: str = "--to") -> None:
        """Find the file system; nothing is asked of the store yet.

        Args:
            uri: a folder, or ``s3://bucket/prefix``, ``gs://...``, whatever fsspec knows.
            flag: what gave it, for messages.

        Raises:
            ConfigError: the scheme is unknown, or its package is missing.
        """
        import fsspec

        if not uri:
            raise ConfigError(f"{flag} is empty; name a folder, or a URI such as s3://bucket/run")
        self.uri = uri
        try:
            self._fs, root = fsspec.core.url_to_fs(uri)
        except ImportError as error:
            raise ConfigError(f"{flag} {uri}: {error}") from error
        except ValueError as error:
            raise ConfigError(
                f"{flag} {uri}: {error}; name a folder, or a URI such as s3://bucket/run"
            ) from error
        self._root = str(root).rstrip("/")
        self._is_folder = "file" in self._protocols()

    @property
    def folder(self) -> Path | None:
        """Where it is on this machine; None for what is elsewhere."""
        return Path(self._root) if self._is_folder else None

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the names and bytes of the objects in a folder; none when there is no such folder.

        Raises:
            StorageError: the store refuses.
        """
        place = self._place(folder)

        def listing() -> list[dict[str, Any]]:
            self._fs.invalidate_cache()
            try:
                return list(self._fs.ls(place, detail=True))
            except FileNotFoundError:
                return []

        found = {}
        for entry in self._asked(f"list {folder}", listing):
            name = str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
            if entry.get("type") == "file" and not name.endswith(ASIDE):
                found[f"{folder}/{name}"] = int(entry.get("size") or 0)
        return found

    def put_file(self, name: str, path: Path) -> None:
        """Make an object of a local file.

        Raises:
            FileNotFoundError: the local file has gone.
            StorageError: the store refuses.
        """
        path.stat()
        if self._is_folder:
            self._asked(f"write {name}", lambda: self._into_folder(name, lambda to: _copied(path, to)))
        else:
            self._asked(f"write {name}", lambda: self._fs.put_file(str(path), self._place(name)))

    def put(self, name: str, data: bytes) -> None:
        """Make an object of bytes.

        Raises:
            StorageError: the store refuses.
        """
        if self._is_folder:
            self._asked(f"write {name}", lambda: self._into_folder(name, lambda to: to.write_bytes(data)))
        else:
            self._asked(f"write {name}", lambda: self._fs.pipe_file(self._place(name), data))

    def get(self, name: str, bytes_max: int) -> bytes:
        """Return the bytes of a small object.

        Raises:
            NoObject: there is none.
            StorageError: it is larger than ``bytes_max``, or the store refuses.
        """
        self._require_size(name, bytes_max)
        data = self._asked(f"read {name}", lambda: bytes(self._fs.cat_file(self._place(name))))
        if len(data) > bytes_max:
            raise StorageError(f"{self.uri}: {name} is larger than {bytes_max} bytes", hopeless=True)
        return data

    def get_file(self, name: str, path: Path, bytes_max: int) -> None:
        """Write an object to a new local file.

        Raises:
            NoObject: there is none.
            StorageError: it is larger than ``bytes_max``, or the store or this machine's disk refuses.
        """
        self._require_size(name, bytes_max)
        self._asked(f"read {name}", lambda: self._fs.get_file(self._place(name), str(path)))

    def remove(self, name: str) -> None:
        """Remove an object; one that is gone already is as good.

        Raises:
            StorageError: the store refuses.
        """

        def removed() -> None:
            try:
                self._fs.rm_file(self._place(name))
            except FileNotFoundError:
                return

        self._asked(f"remove {name}", removed)

    def size(self, name: str) -> int:
        """Return the bytes of an object, as the store says now.

        Raises:
            NoObject: there is none.
            StorageError: it is no file, or the store refuses.
        """

        def asked() -> dict[str, Any]:
            self._fs.invalidate_cache()
            return dict(self._fs.info(self._place(name)))

        found = self._asked(f"look at {name}", asked)
        if found.get("type") != "file":
            # Reading a pipe or a device would never end.
            raise StorageError(f"{self.uri}: {name} is no file", hopeless=True)
        return int(found.get("size") or 0)

    def sweep(self, folder: str, is_ours: Callable[[str], bool]) -> None:
        """Remove what writers that were killed left half written; nobody may be writing there.

        Args:
            folder: where.
            is_ours: says whether an object of this name may be one of theirs.

        Raises:
            StorageError: the system refuses.
        """
        if self._is_folder:
            for aside in sorted(Path(self._place(folder)).glob(f"*{ASIDE}")):
                if is_ours(f"{folder}/{aside.name.removesuffix(ASIDE)}"):
                    self._asked(f"remove {aside.name}", aside.unlink)

    def _require_size(self, name: str, bytes_max: int) -> None:
        size = self.size(name)
        if size > bytes_max:
            raise StorageError(f"{self.uri}: {name} has {size} bytes, it may have {bytes_max}", hopeless=True)

    def _place(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _protocols(self) -> tuple[str, ...]:
        protocol = self._fs.protocol
        return (protocol,) if isinstance(protocol, str) else tuple(protocol)

    def _into_folder(self, name: str, write: Callable[[Path], object]) -> None:
        target = Path(self._place(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(target.name + ASIDE)
        write(aside)
        _synced(aside)
        os.replace(aside, target)
        sync_folder(target.parent)

    def _asked(self, what: str, ask: Callable[[], T]) -> T:
        with self._told(what):
            return ask()

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NoObject(f"{self.uri}: cannot {what}: it is not there ({_said(error)})") from error
        except _HOPELESS as error:
            raise StorageError(f"{self.uri}: cannot {what}: {_said(error)}", hopeless=True) from error
        except Exception as error:
            # Each store's library has errors of its own, and not all of them are of the system's kind.
            hopeless = isinstance(error, OSError) and error.errno in _HOPELESS_NUMBERS
            raise StorageError(f"{self.uri}: cannot {what}: {_said(error)}", hopeless=hopeless) from error


def _copied(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def _synced(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

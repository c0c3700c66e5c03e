"""Pushing: what a syncer has made durable on its disk, copied to a store while it goes on.

The order is that of a checkpoint, one storey higher: fragment files, then the manifest that names them, then
the tape, then the index that makes a copy of all these. Whatever stops a push in between leaves the copy that
was there, and what it had written is of use to the next. Only once a copy is complete is tidied up what no
kept copy names.

A fragment file may vanish while it is being copied, because a newer version took its place; with a slow
store that would happen time and again, and no copy would ever be complete. So the files of the checkpoint
that is being copied are held by a second name (a hard link) until they are.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Final

from attrs import frozen

from yeto.errors import CheckpointError, ConfigError, YetoError
from yeto.fleet.mirror_copies import (
    COPIES,
    COPIES_KEPT,
    FOLDERS,
    FORMAT_VERSION,
    Index,
    Segment,
    encode_index,
    fragment_object,
    index_numbers,
    index_object,
    is_ours,
    manifest_object,
    newest_copies,
    read_index,
)
from yeto.fleet.mirror_tape import LocalTape, TapeCut, kept
from yeto.fleet.store import NoObject, StorageError, Store
from yeto.state import Manifest
from yeto.state.digested import IncompleteCheckpoint, stated_digest
from yeto.state.fragmentfile import file_bytes, read_params
from yeto.state.manifest import (
    FRAGMENTS_FOLDER,
    MANIFEST_BYTES_MAX,
    decode_manifest,
    manifest_at,
    manifest_file,
    manifest_steps,
)

LOOKS_MAX: Final = 16
"""Times that a push starts over because the checkpoint it began with was replaced under its hands."""


@frozen(kw_only=True)
class Pushed:
    """What one push did."""

    index: Index
    objects: int
    """Objects written, the index not counted."""
    bytes: int
    seconds: float


class OtherWriter(YetoError):
    """Somebody else writes copies at the same place."""


def held_folder(checkpoint: Path) -> Path:
    """Return the folder with the second names of a checkpoint's files; what is in it is removed."""
    return checkpoint.with_name(f".{checkpoint.name}.held")


class Pusher:
    """Keeps one mirror up to date; knows what is there, so that nothing is copied twice."""

    def __init__(self, store: Store, checkpoint: Path, tape: Path, say: Callable[[str], None]) -> None:
        """Take the places; nothing is looked at yet.

        Args:
            store: where the mirror is.
            checkpoint: the checkpoint folder of a syncer that may be running.
            tape: its tape.
            say: gets a line for what a person should know.
        """
        self._store = store
        self._folder = checkpoint
        self._pins = held_folder(checkpoint)
        self._tape = LocalTape(tape)
        self._tape_path = tape
        self._say = say
        self._known = False
        self._there: dict[str, int] = {}
        self._copies: list[tuple[Index, Manifest | None]] = []
        """The kept ones, newest first, with their manifests where these can be read."""
        self._number = 0
        self._tried: tuple[Index, Manifest | None] | None = None
        """The copy whose index was written last, if it was."""
        self._verified = 0
        """Which reading of the tape begins with the segments of the newest copy."""
        self._written = 0
        self._written_bytes = 0

    def push(self) -> Pushed | None:
        """Make a copy of the newest checkpoint and of the tape; None when there is nothing new.

        Raises:
            StorageError: the store does not do it, now or ever.
            CheckpointError: the newest checkpoint is damaged.
            TapeError: the tape is.
            ConfigError: the mirror is of another run.
            OtherWriter: somebody else writes there.
        """
        began = time.monotonic()
        self._written = self._written_bytes = 0
        self._tape.read_on()
        session = self._tape.session_id
        if session is None:
            return None
        if not self._known:
            self._look_around(session)
        for _ in range(LOOKS_MAX):
            found = self._newest()
            if found is None:
                return None
            manifest, data = found
            if self._is_newest(manifest, data):
                return None
            try:
                self._push_checkpoint(manifest, data)
            except IncompleteCheckpoint:
                # Replaced meanwhile, and no second name could be given to its files.
                self._tape.read_on()
                continue
            finally:
                shutil.rmtree(self._pins, ignore_errors=True)
            return self._push_set(session, manifest, data, began)
        return None

    def _look_around(self, session: str) -> None:
        """Find out what is there, of this run or another."""
        shutil.rmtree(self._pins, ignore_errors=True)
        for folder in (*FOLDERS, COPIES):
            self._store.sweep(folder, is_ours)
        copies, passed_over, number = newest_copies(self._store, most=COPIES_KEPT)
        for sentence in passed_over:
            self._say(f"passed over: {sentence}")
        for index in copies:
            if index.session_id != session:
                raise ConfigError(
                    f"--to {self._store.uri}: holds the mirror of another run (session {index.session_id}, "
                    f"this one is {session}); name an empty place"
                )
        self._copies = [(index, self._manifest_there(index)) for index in copies]
        self._number = number
        sizes = [item for folder in FOLDERS for item in self._store.sizes(folder).items()]
        self._there = {name: size for name, size in sizes if is_ours(name)}
        self._known = True

    def _manifest_there(self, index: Index) -> Manifest | None:
        try:
            return decode_manifest(
                self._store.get(index.manifest_object, MANIFEST_BYTES_MAX), index.manifest_object
            )
        except CheckpointError as error:
            self._say(f"passed over: {error}")
        except StorageError as error:
            if not error.hopeless:
                raise
            self._say(f"passed over: {error}")
        return None

    def _newest(self) -> tuple[Manifest, bytes] | None:
        """Return the newest checkpoint of which the tape tells.

        One that the tape does not know yet was written a moment ago, and its record is about to follow.
        """
        for step in manifest_steps(self._folder):
            try:
                manifest, data = manifest_at(self._folder / manifest_file(step))
            except IncompleteCheckpoint:
                continue  # removed meanwhile, or cut off by a crash: an earlier one may do
            if self._tape.tells_of(manifest):
                return manifest, data
        return None

    def _is_newest(self, manifest: Manifest, data: bytes) -> bool:
        if not self._copies:
            return False
        last = self._copies[0][0]
        same = (last.step, last.manifest_digest) == (manifest.step, stated_digest(data))
        return same and last.tape_bytes == self._tape.end

    def _push_checkpoint(self, manifest: Manifest, data: bytes) -> None:
        missing = [
            entry
            for entry in manifest.fragments
            if self._there.get(fragment_object(entry)) != file_bytes(entry.numel)
        ]
        # All get their second name first: copying one may take long.
        held = {entry.fragment: self._hold(entry.file) for entry in missing}
        for entry in missing:
            # What is damaged here must not take the place of what was sound.
            read_params(held[entry.fragment], entry)
            path = held[entry.fragment] / entry.file
            try:
                self._store.put_file(fragment_object(entry), path)
            except (FileNotFoundError, NoObject) as error:
                if path.exists():
                    raise
                raise IncompleteCheckpoint(f"{path}: the file has gone") from error
            self._wrote(fragment_object(entry), file_bytes(entry.numel))
        name = manifest_object(manifest.step, stated_digest(data))
        if self._there.get(name) != len(data):
            self._store.put(name, data)
            self._wrote(name, len(data))

    def _hold(self, file: str) -> Path:
        """Give a file of the checkpoint a second name; return the folder to find it in.

        Raises:
            IncompleteCheckpoint: it has gone.
        """
        (self._pins / FRAGMENTS_FOLDER).mkdir(parents=True, exist_ok=True)
        try:
            os.link(self._folder / file, self._pins / file)
        except FileNotFoundError as error:
            raise IncompleteCheckpoint(f"{self._folder / file}: the file has gone") from error
        except OSError:
            return self._folder  # a file system without hard links
        return self._pins

    def _push_set(self, session: str, manifest: Manifest, data: bytes, began: float) -> Pushed | None:
        # Copying took its time, and the tape went on.
        self._tape.read_on()
        if self._tape.session_id != session or not self._tape.tells_of(manifest):
            raise TapeCut(f"{self._tape_path}: was cut back to before the checkpoint of step {manifest.step}")
        segments = self._push_tape()
        numbers = self._numbers()
        index = Index(
            format_version=FORMAT_VERSION,
            number=self._number + 1,
            session_id=session,
            step=manifest.step,
            manifest_digest=stated_digest(data),
            segments=segments,
        )
        self._tried = index, manifest
        self._store.put(index_object(index.number), encode_index(index))
        self._number, self._verified = index.number, self._tape.reading
        self._copies = [(index, manifest), *self._copies][:COPIES_KEPT]
        self._tidy(numbers)
        return Pushed(
            index=index,
            objects=self._written,
            bytes=self._written_bytes,
            seconds=time.monotonic() - began,
        )

    def _numbers(self) -> list[int]:
        """Return the numbers of the copies that are there.

        Raises:
            OtherWriter: the newest is not by this process.
        """
        numbers = index_numbers(self._store.sizes(COPIES))
        newest = max(numbers, default=0)
        if newest <= self._number:
            return numbers
        if self._tried is None or read_index(self._store, newest) != self._tried[0]:
            raise OtherWriter(
                f"--to {self._store.uri}: somebody else wrote copy {newest} there, the last of this process "
                f"was {self._number}; one mirror is for one syncer: end the other, or name another place"
            )
        # The store did it and could not say so.
        self._number = newest
        self._copies = [self._tried, *self._copies][:COPIES_KEPT]
        return numbers

    def _push_tape(self) -> tuple[Segment, ...]:
        """Copy what is new of the tape; return all its segments."""
        before = self._copies[0][0].segments if self._copies else ()
        # What was taken away there is copied anew, and what follows it: no copy would be whole without.
        before = tuple(takewhile(lambda one: self._there.get(one.object) == one.bytes, before))
        try:
            # What this process has not seen the tape begin with is compared, once.
            same = before if self._verified == self._tape.reading else self._tape.unchanged(before)
            new = []
            for segment, lines in self._tape.cut(same):
                if self._there.get(segment.object) != segment.bytes:
                    self._store.put(segment.object, lines)
                    self._wrote(segment.object, segment.bytes)
                new.append(segment)
        except OSError as error:
            raise TapeCut(f"{self._tape_path}: cannot be read: {error.strerror}") from error
        return (*kept(same), *new) if new else tuple(same)

    def _tidy(self, numbers: list[int]) -> None:
        """Remove what no kept copy names: first the indexes, then what they named."""
        staying = {index.number for index, _ in self._copies}
        for number in numbers:
            if number not in staying:
                self._store.remove(index_object(number))
        named = set()
        for index, manifest in self._copies:
            named |= {index.manifest_object, *(segment.object for segment in index.segments)}
            named |= {fragment_object(entry) for entry in (manifest.fragments if manifest else ())}
        for name in sorted(self._there.keys() - named):
            self._store.remove(name)
            del self._there[name]

    def _wrote(self, name: str, size: int) -> None:
        self._there[name] = size
        self._written += 1
        self._written_bytes += size

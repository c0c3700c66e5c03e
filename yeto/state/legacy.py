"""Readers for the older single-file checkpoints, which open for ever.

All integers are little-endian. Version 3 is

    u32 magic | u8 backend | fingerprint[32] | u64 step | u32 P
    | P x {u64 version, u64 numel, f32 params[numel], f32 momentum[numel]}
    | u32 n | n x {u32 learner, u64 merges, u64 steps, u64 tokens}
    | fingerprint[32] | optionally u32 0x52544353 and contract[32]

Version 2 has the backend but no fingerprint, version 1 neither; both end after the ledger. None of them says
which tensors a fragment consists of.

The files have no checksum. What protects the reader is that every count is held against the bytes that are
left before anything is allocated, and that the last byte read must be the last of the file.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Final

import attrs
import numpy as np
from attrs import frozen

from yeto.errors import CheckpointError
from yeto.state.checkpoint import Checkpoint, check_cut
from yeto.state.digested import open_file
from yeto.state.fragmentfile import FragmentArrays, examined
from yeto.state.manifest import ISO_BACKENDS, MAGICS, LedgerEntry
from yeto.state.store import FragmentVersion
from yeto.wire.digest import digest
from yeto.wire.tensorbytes import Values

CONTRACT_MAGIC: Final = 0x52544353

_FRAGMENT_BYTES_MIN: Final = 16
"""Of a fragment without a value; a count that the file has no room for is refused before anything is made."""
_LEDGER_ENTRY: Final = struct.Struct("<IQQQ")


@frozen(kw_only=True)
class OlderFragment:
    """One fragment of a single file, and where in it its values begin: parameters, then momentum."""

    fragment: int
    version: int
    numel: int
    offset: int
    params_digest: str
    momentum_digest: str


Take = Callable[[int, int, FragmentArrays], None]
"""Gets number, version and values of a fragment."""


def read_single_file(path: Path) -> Checkpoint:
    """Read a checkpoint of an older format, whole.

    Raises:
        CheckpointError: it ends too early or too late, claims what cannot be, or holds a value that is not
            finite; the message names the offset and what was being read there.
    """
    versions: list[FragmentVersion] = []
    facts, _ = scan_single_file(path, lambda *read: versions.append(FragmentVersion.of_arrays(*read)))
    return attrs.evolve(facts, fragments=tuple(versions))


def scan_single_file(path: Path, take: Take | None = None) -> tuple[Checkpoint, tuple[OlderFragment, ...]]:
    """Check a checkpoint of an older format, with no more than one fragment of it in memory.

    Args:
        path: the file.
        take: gets each fragment as it is read; None keeps none.

    Returns:
        What the file says, without fragments, and where these are.

    Raises:
        CheckpointError: as ``read_single_file``.
    """
    try:
        with open_file(path) as file:
            return _read(_Cursor(file, path), take)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def read_older_params(path: Path, part: OlderFragment, ahead: float = 0.0) -> Values:
    """Read the parameters of one fragment that ``scan_single_file`` has found.

    Args:
        path: the file.
        part: the fragment.
        ahead: as for ``read_params``; the files do not say how much, so it can only be 0.

    Raises:
        CheckpointError: the file is another one than it was then.
    """
    assert ahead == 0.0, "nobody knows the look-ahead of an older file"
    try:
        with open_file(path) as file:
            file.seek(part.offset)
            params = np.empty(part.numel, dtype="<f4")
            file.readinto(params.view(np.uint8).data)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if digest(params) != part.params_digest:
        raise CheckpointError(f"{path}: was changed while it was read")
    return params


class _Cursor:
    """A position in the file; every read says what it is for."""

    def __init__(self, file: BufferedReader, path: Path) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self.path = path
        self.offset = 0

    @property
    def left(self) -> int:
        return self._size - self.offset

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: offset {self.offset}: {problem}")

    def need(self, count: int, what: str) -> None:
        if count > self.left:
            raise self.error(f"{what} takes {count} bytes, {self.left} are left")

    def take(self, count: int, what: str) -> bytes:
        self.need(count, what)
        data = self._file.read(count)
        self.offset += count
        return data

    def unsigned(self, count: int, what: str) -> int:
        return int.from_bytes(self.take(count, what), "little")

    def floats(self, numel: int, what: str) -> Values:
        self.need(4 * numel, what)
        array = np.empty(numel, dtype="<f4")
        self._file.readinto(array.view(np.uint8).data)
        self.offset += 4 * numel
        return array


def _read(cursor: _Cursor, take: Take | None) -> tuple[Checkpoint, tuple[OlderFragment, ...]]:
    version = MAGICS[cursor.unsigned(4, "the magic number")]
    backend: str | None = None
    fingerprint: bytes | None = None
    contract: bytes | None = None
    if version >= 2:
        number = cursor.unsigned(1, "the iso backend")
        if number >= len(ISO_BACKENDS):
            raise cursor.error(f"iso backend {number} before this offset is unknown")
        backend = ISO_BACKENDS[number]
    if version >= 3:
        fingerprint = cursor.take(32, "the layout fingerprint")
    step = cursor.unsigned(8, "the global step")
    fragments = _fragments(cursor, take)
    ledger = _ledger(cursor)
    if version >= 3:
        if cursor.take(32, "the second layout fingerprint") != fingerprint:
            raise cursor.error("the two layout fingerprints before this offset differ")
        if cursor.left:
            if cursor.unsigned(4, "the contract's magic number") != CONTRACT_MAGIC:
                raise cursor.error("what follows the fingerprint is no session contract")
            contract = cursor.take(32, "the session contract")
    if cursor.left:
        raise cursor.error(f"{cursor.left} bytes too many after the end")
    try:
        check_cut(step, [(part.fragment, part.version) for part in fragments])
    except CheckpointError as error:
        raise CheckpointError(f"{cursor.path}: {error}") from error
    facts = Checkpoint(
        step=step,
        fragments=(),
        layout=None,
        ledger=ledger,
        dtype=None,
        iso_backend=backend,
        fingerprint=None if fingerprint is None else fingerprint.hex(),
        contract=None if contract is None else contract.hex(),
        software_version=None,
        format=f"file-v{version}",
    )
    return facts, fragments


def _fragments(cursor: _Cursor, take: Take | None) -> tuple[OlderFragment, ...]:
    count = cursor.unsigned(4, "the number of fragments")
    if count == 0:
        raise cursor.error("the number of fragments before this offset is 0")
    cursor.need(count * _FRAGMENT_BYTES_MIN, f"a list of {count} fragments")
    fragments = []
    for fragment in range(count):
        version = cursor.unsigned(8, f"the version of fragment {fragment}")
        numel = cursor.unsigned(8, f"the size of fragment {fragment}")
        cursor.need(8 * numel, f"fragment {fragment} of {numel} elements")
        start = cursor.offset
        params = cursor.floats(numel, f"params of fragment {fragment}")
        momentum = cursor.floats(numel, f"momentum of fragment {fragment}")
        arrays = examined(params, momentum, f"{cursor.path}: offset {start}: fragment {fragment}")
        fragments.append(
            OlderFragment(
                fragment=fragment,
                version=version,
                numel=numel,
                offset=start,
                params_digest=arrays.params_digest,
                momentum_digest=arrays.momentum_digest,
            )
        )
        if take is not None:
            take(fragment, version, arrays)
    return tuple(fragments)


def _ledger(cursor: _Cursor) -> tuple[LedgerEntry, ...]:
    count = cursor.unsigned(4, "the number of ledger entries")
    cursor.need(count * _LEDGER_ENTRY.size, f"a ledger of {count} entries")
    entries: dict[int, LedgerEntry] = {}
    for _ in range(count):
        learner, merges, steps, tokens = _LEDGER_ENTRY.unpack(
            cursor.take(_LEDGER_ENTRY.size, "a ledger entry")
        )
        if learner in entries:
            raise cursor.error(f"the ledger has learner {learner} twice")
        entries[learner] = LedgerEntry(learner=learner, merges=merges, c_steps=steps, c_tokens=tokens)
    return tuple(entries[learner] for learner in sorted(entries))

"""What a mirror consists of: complete *copies*, each a checkpoint and the tape that tells of it.

::

    fragments/f0003-v00000017-<params digest>-<momentum digest>.safetensors
    manifests/manifest-<step>-<digest>.json
    tape/<first byte>-<digest>.jsonl       so many bytes of the tape, up to the end of a line
    copies/<number>.json                   the index of a copy, written last

The name of an object says what is in it. So an object that is there need not be written again, no object is
ever replaced by another, and a version that a run commits anew after it fell back does not meet its
predecessor. A copy exists from the moment its index does; whoever is cut off before leaves those before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import attrs
from attrs import frozen

from yeto.errors import CheckpointError
from yeto.fleet.store import StorageError, Store
from yeto.state.digested import decode_digested, encode_digested
from yeto.state.manifest import ManifestFragment
from yeto.state.strict import NotStrict, structure

FORMAT_VERSION: Final = 1

FRAGMENTS, MANIFESTS, TAPE, COPIES = "fragments", "manifests", "tape", "copies"
FOLDERS: Final = (FRAGMENTS, MANIFESTS, TAPE)
"""Of what copies are made of."""

INDEX_BYTES_MAX: Final = 64 << 20
"""No index is larger: it has a line of a hundred bytes for every few MiB of tape."""

SEGMENT_BYTES_MAX: Final = 64 << 20
"""No piece of a tape is longer: it is read whole. Ours have 8 MiB, and what is left of the line there."""

COPIES_KEPT: Final = 2
"""Newest copies that stay: one may turn out damaged."""

_NUMBER: Final = re.compile(rf"{COPIES}/([0-9]{{12}})\.json")
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")
_OURS: Final = re.compile(
    rf"{FRAGMENTS}/f[0-9]{{4,}}-v[0-9]{{8,}}-{_DIGEST.pattern}-{_DIGEST.pattern}\.safetensors"
    rf"|{MANIFESTS}/manifest-[0-9]+-{_DIGEST.pattern}\.json"
    rf"|{TAPE}/[0-9]{{16,}}-{_DIGEST.pattern}\.jsonl"
    rf"|{_NUMBER.pattern}"
)


@frozen(kw_only=True)
class Segment:
    """Some bytes of the tape, which end with a line."""

    start: int
    """Byte of the tape that it begins with."""
    bytes: int
    digest: str

    @property
    def end(self) -> int:
        """First byte behind it."""
        return self.start + self.bytes

    @property
    def object(self) -> str:
        """Name of its object."""
        return f"{TAPE}/{self.start:016}-{self.digest}.jsonl"


@frozen(kw_only=True)
class Index:
    """One copy."""

    format_version: int = FORMAT_VERSION
    number: int
    """Copies are counted from 1; the highest is the newest."""
    session_id: str
    """Of the tape's header: a mirror is of one run."""
    step: int
    manifest_digest: str
    """The one in the manifest's last line."""
    segments: tuple[Segment, ...]
    """The tape from its first byte on, without gaps."""

    @property
    def tape_bytes(self) -> int:
        """Length of the tape."""
        return self.segments[-1].end if self.segments else 0

    @property
    def manifest_object(self) -> str:
        """Name of the manifest's object."""
        return manifest_object(self.step, self.manifest_digest)


def manifest_object(step: int, digest: str) -> str:
    """Return the name of the object of a manifest."""
    return f"{MANIFESTS}/manifest-{step}-{digest}.json"


def fragment_object(entry: ManifestFragment) -> str:
    """Return the name of the object of a fragment version."""
    digests = f"{entry.params_digest}-{entry.momentum_digest}"
    return f"{FRAGMENTS}/f{entry.fragment:04}-v{entry.version:08}-{digests}.safetensors"


def index_object(number: int) -> str:
    """Return the name of the object of an index."""
    return f"{COPIES}/{number:012}.json"


def is_ours(name: str) -> bool:
    """Return whether an object of this name is a mirror's; what has another is somebody else's, and stays."""
    return _OURS.fullmatch(name) is not None


def index_numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers of all copies among the names of objects, newest first."""
    found = (_NUMBER.fullmatch(name) for name in names)
    return sorted((int(match[1]) for match in found if match is not None), reverse=True)


def encode_index(index: Index) -> bytes:
    """Return the bytes of an index; their last line is a digest of what stands before it."""
    return encode_digested(attrs.asdict(index))


def read_index(store: Store, number: int) -> Index:
    """Return an index, checked in itself.

    Raises:
        CheckpointError: it is damaged, or says what none can say.
        StorageError: it cannot be read.
    """
    name = index_object(number)
    where = f"{store.uri}/{name}"
    value = decode_digested(store.get(name, INDEX_BYTES_MAX), where, "index")
    version = value.get("format_version") if type(value) is dict else None
    if type(version) is int and version != FORMAT_VERSION:
        raise CheckpointError(f"{where}: format version {version}; this software reads {FORMAT_VERSION}")
    try:
        index = structure(value, Index)
    except NotStrict as error:
        raise CheckpointError(f"{where}: {error}") from error
    _check(index, number, where)
    return index


def _check(index: Index, number: int, where: str) -> None:
    """Check what types cannot say; what is right here cannot lead a reader to another place."""
    checks = [
        (index.number == number, f"is of copy {index.number}"),
        (index.step >= 0, f"step {index.step} is negative"),
        (_DIGEST.fullmatch(index.manifest_digest) is not None, "manifest_digest is not 32 hex digits"),
        (bool(index.segments), "there is no tape"),
    ]
    begin = 0
    for place, segment in enumerate(index.segments):
        checks += [
            (
                segment.start == begin and segment.bytes > 0,
                f"segments[{place}]: does not follow byte {begin}",
            ),
            (segment.bytes <= SEGMENT_BYTES_MAX, f"segments[{place}]: {segment.bytes} bytes are too many"),
            (_DIGEST.fullmatch(segment.digest) is not None, f"segments[{place}]: no digest of 32 hex digits"),
        ]
        begin = segment.end
    for good, message in checks:
        if not good:
            raise CheckpointError(f"{where}: {message}")


def newest_copies(store: Store, *, most: int) -> tuple[list[Index], list[str], int]:
    """Return the newest copies whose indexes are sound.

    Args:
        store: where.
        most: at most so many of them.

    Returns:
        The copies, newest first; a sentence for each index that was passed over; and the highest number that
        any index has, 0 without one.

    Raises:
        StorageError: the store refuses, for now or for good.
    """
    numbers = index_numbers(store.sizes(COPIES))
    found: list[Index] = []
    passed_over: list[str] = []
    for number in numbers:
        if len(found) == most:
            break
        try:
            found.append(read_index(store, number))
        except CheckpointError as error:
            passed_over.append(str(error))
        except StorageError as error:
            if not error.hopeless:
                raise
            passed_over.append(str(error))
    return found, passed_over, max(numbers, default=0)

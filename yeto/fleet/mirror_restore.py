"""Restoring: the newest complete copy of a mirror, onto a disk that has nothing of a run.

Nothing gets its name before all of it is there and was checked: every digest of every fragment, the manifest,
every segment of the tape, each of its lines, and that the tape tells of this very checkpoint. A copy of which
something is missing or damaged is passed over, and that is said, with the reason. Then the checkpoint folder
is renamed first and the tape second; a restore that was cut off between the two ends its work at the next
start.

That there is nothing to restore is no error: it is how every run begins. That there is something and none of
it can be used is one, because whoever began anew there would overwrite it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from attrs import frozen

from yeto.errors import CheckpointError, TapeError
from yeto.fleet.mirror_copies import COPIES, Index, Segment, fragment_object, index_numbers, read_index
from yeto.fleet.store import StorageError, Store
from yeto.state import Manifest
from yeto.state.digested import stated_digest
from yeto.state.fragmentfile import file_bytes, read_fragment
from yeto.state.manifest import (
    FRAGMENTS_FOLDER,
    MANIFEST_BYTES_MAX,
    ManifestFragment,
    decode_manifest,
    manifest_file,
    manifest_steps,
)
from yeto.storage import sync_folder
from yeto.tape import Header, Mark, Record, find_past, read
from yeto.wire.digest import digest


@frozen(kw_only=True)
class Restored:
    """What was restored."""

    index: Index
    records: int
    """Records of the tape."""
    passed_over: tuple[str, ...]
    """A sentence for each newer copy that could not be used."""


def restore(store: Store, checkpoint: Path, tape: Path, say: Callable[[str], None]) -> Restored | None:
    """Restore the newest complete copy.

    Args:
        store: the mirror.
        checkpoint: where the checkpoint folder is to be.
        tape: where the tape is to be.
        say: gets a line for what a person should know.

    Returns:
        None when there is nothing to restore: no copy was ever completed, or a run is there already.

    Raises:
        CheckpointError: there are copies and none can be used, or half of a run is in the way.
        StorageError: the store refuses.
    """
    aside = restoring(checkpoint), restoring(tape)
    if _is_occupied(checkpoint, tape, aside, say):
        return None
    numbers = index_numbers(store.sizes(COPIES))
    if not numbers:
        say(f"{store.uri}: no copy was ever completed here; there is nothing to restore")
        return None
    if tape.exists():
        raise CheckpointError(
            f"{tape}: is there without a checkpoint, and {store.uri} has one to restore; move the tape away"
        )
    passed_over: list[str] = []
    for number in numbers:
        _clear(*aside)
        try:
            index = read_index(store, number)
            records = _fetch(store, index, *aside)
        except (CheckpointError, TapeError, StorageError) as error:
            if isinstance(error, StorageError) and not error.hopeless:
                raise
            passed_over.append(f"copy {number} is passed over: {error}")
            say(passed_over[-1])
            continue
        os.rename(aside[0], checkpoint)
        sync_folder(checkpoint.absolute().parent)
        _take_tape(aside[1], tape)
        return Restored(index=index, records=records, passed_over=tuple(passed_over))
    _clear(*aside)
    raise CheckpointError(f"{store.uri}: there are copies and none can be used: {'; '.join(passed_over)}")


def restoring(place: Path) -> Path:
    """Return the name under which a checkpoint or a tape is brought back; what has it is removed."""
    return place.with_name(f"{place.name}.restoring")


def _is_occupied(checkpoint: Path, tape: Path, aside: tuple[Path, Path], say: Callable[[str], None]) -> bool:
    """Return whether there is a checkpoint already; ends what a restore that was cut off has begun.

    Raises:
        CheckpointError: something else has the name.
    """
    if not checkpoint.exists():
        return False
    if checkpoint.is_dir() and not manifest_steps(checkpoint):
        raise CheckpointError(f"{checkpoint}: is in the way and holds no checkpoint; move it away")
    if not tape.exists() and aside[1].exists() and not aside[0].exists():
        _take_tape(aside[1], tape)
        say(f"{tape}: the restore that was cut off is complete now")
    else:
        say(f"{checkpoint}: there is a checkpoint already; nothing is restored")
    return True


def _take_tape(aside: Path, tape: Path) -> None:
    os.rename(aside, tape)
    sync_folder(tape.absolute().parent)


def _clear(folder: Path, tape: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    tape.unlink(missing_ok=True)


def _fetch(store: Store, index: Index, folder: Path, tape: Path) -> int:
    """Bring a copy here and check all of it; return the records of its tape.

    Raises:
        CheckpointError: something of the checkpoint is damaged, or the tape is not that of it.
        TapeError: a line of the tape is.
        StorageError: an object is missing, or the store refuses.
    """
    manifest, data = _manifest(store, index)
    fragments = folder / FRAGMENTS_FOLDER
    fragments.mkdir(parents=True)
    for entry in manifest.fragments:
        _fetch_fragment(store, entry, folder)
    for name in (manifest_file(manifest.step), "manifest.json"):
        (folder / name).write_bytes(data)
        _sync(folder / name)
    for place in (fragments, folder):
        sync_folder(place)
    tape.parent.mkdir(parents=True, exist_ok=True)
    with tape.open("xb") as file:
        for segment in index.segments:
            file.write(_lines(store, segment))
        file.flush()
        os.fsync(file.fileno())
    return _check_tape(tape, index, manifest)


def _manifest(store: Store, index: Index) -> tuple[Manifest, bytes]:
    name = index.manifest_object
    data = store.get(name, MANIFEST_BYTES_MAX)
    manifest = decode_manifest(data, f"{store.uri}/{name}")
    if (manifest.step, stated_digest(data)) != (index.step, index.manifest_digest):
        raise CheckpointError(f"{store.uri}/{name}: is another manifest than copy {index.number} names")
    return manifest, data


def _fetch_fragment(store: Store, entry: ManifestFragment, folder: Path) -> None:
    name = fragment_object(entry)
    store.get_file(name, folder / entry.file, file_bytes(entry.numel))
    try:
        read_fragment(folder, entry)
    except CheckpointError as error:
        raise CheckpointError(f"{store.uri}/{name}: {error}") from error
    _sync(folder / entry.file)


def _lines(store: Store, segment: Segment) -> bytes:
    data = store.get(segment.object, segment.bytes)
    if len(data) != segment.bytes or digest(data) != segment.digest:
        raise CheckpointError(f"{store.uri}/{segment.object}: is not the tape from byte {segment.start} on")
    return data


def _check_tape(tape: Path, index: Index, manifest: Manifest) -> int:
    count, session = 0, None

    def counted() -> Iterator[Record]:
        nonlocal count, session
        for record in read(tape):
            count += 1
            if isinstance(record.body, Header):
                session = record.body.session_id
            yield record

    digests = {entry.fragment: entry.params_digest for entry in manifest.fragments}
    mark = Mark(step=manifest.step, digests=digests, seq=manifest.tape_seq)
    if find_past(counted(), mark) is None:
        raise CheckpointError(f"the tape of copy {index.number} does not tell of its checkpoint")
    if session != index.session_id:
        raise CheckpointError(
            f"the tape of copy {index.number} is of session {session}, not {index.session_id}"
        )
    return count


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

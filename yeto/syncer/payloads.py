"""The recording of a run's payloads: with it and the tape, every merge can be executed again, bit for bit.

The tape knows which push was merged with which weight, and the digest of all that came of it. What it lacks
are the bytes, and they are here: the fragments that a start of the syncer began with, and every push that an
attempt was sealed with, as it came from the wire. Nothing else is needed but the layout and the iso backend,
which the start's manifest has.

::

    DIR/
      recording.json                                    whose recording this is; what computed each start
      recording.lock                                    held by the syncer that writes to it
      start-0/                                          a start of the syncer, by its record on the tape
        checkpoint/manifest-0.json, fragments/...       what it began with; written as a checkpoint is
        round-00000001/
          attempt-1-learner-0-0011223344556677.bf16     a push: learner, generation, its wire bytes
          attempt-1.gradient                            the merged gradient, for iso merges only

Iso merges may differ in their last bits elsewhere; with the gradient that was computed here they can be held
against what another machine computes. The tape does not know its digest, so the file ends with it.

Every file is written aside, fsynced and renamed, so one that has its name is whole. Numbers become names by
formatting and a generation only when it is 16 hex digits: nothing that a peer said, or that stands on a tape,
can lead out of the folder.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import attrs
import torch
from attrs import frozen

from yeto import __version__
from yeto.core.values import Member
from yeto.errors import CheckpointError, RecordingError
from yeto.state import Checkpoint
from yeto.state.checkpoint import manifest_of
from yeto.state.digested import decode_digested, encode_digested, read_bounded
from yeto.state.files import BytesLike, Disk, write_aside, writing
from yeto.state.fragmentfile import file_parts
from yeto.state.manifest import FRAGMENTS_FOLDER, encode_manifest, manifest_file
from yeto.state.strict import NotStrict, structure
from yeto.storage import hold
from yeto.wire.digest import digest

FORMAT_VERSION: Final = 1

RECORDING_FILE: Final = "recording.json"
LOCK_FILE: Final = "recording.lock"

RECORDING_BYTES_MAX: Final = 64 << 20
"""A start takes a few hundred bytes; nobody starts a syncer a hundred thousand times."""

REMEDY: Final = (
    "the tape and the last checkpoint are intact: make room and go on with --resume, or without "
    "--record-payloads if the run matters more than its recording"
)

_GENERATION: Final = re.compile(r"[0-9a-f]{16}")


@frozen(kw_only=True)
class Arithmetic:
    """What computed: where these agree, iso merges must agree bit for bit, too."""

    software_version: str
    torch_version: str
    iso_backend: str
    device: str
    """Where matrices are decomposed; several are separated by commas."""
    machine: str

    @classmethod
    def here(cls, *, iso_backend: str = "scalar", device: str = "cpu") -> Arithmetic:
        """Return what computes in this process, or for it."""
        return cls(
            software_version=__version__,
            torch_version=torch.__version__,
            iso_backend=iso_backend,
            device=device,
            machine=f"{platform.machine()}, {_processor()}, {torch.backends.cpu.get_cpu_capability()}",
        )


@frozen(kw_only=True)
class RecordedStart:
    """One start of the syncer that was recorded."""

    tape_seq: int
    """The record it begins with: 0, the header, or a ``session_resumed``."""
    step: int
    """Global steps that were committed by then."""
    arithmetic: Arithmetic


@frozen(kw_only=True)
class Recording:
    """What ``recording.json`` says."""

    format_version: int
    session_id: str
    """Of the tape's header."""
    starts: tuple[RecordedStart, ...]

    def start(self, tape_seq: int) -> RecordedStart | None:
        """Return the start that begins with a record; None when it was not recorded."""
        return next((start for start in self.starts if start.tape_seq == tape_seq), None)


def read_recording(folder: Path) -> Recording:
    """Read whose recording a folder is.

    Raises:
        RecordingError: it is none, or damaged.
    """
    path = folder / RECORDING_FILE
    if not path.exists():
        raise RecordingError(
            f"{folder}: holds no recording ({RECORDING_FILE} is missing); name the folder that was given to "
            "--record-payloads"
        )
    try:
        value = decode_digested(read_bounded(path, RECORDING_BYTES_MAX), str(path), "recording")
        version = value.get("format_version") if type(value) is dict else None
        if type(version) is int and version != FORMAT_VERSION:
            raise RecordingError(f"{path}: format version {version}; this software reads {FORMAT_VERSION}")
        return structure(value, Recording)
    except NotStrict as error:
        raise RecordingError(f"{path}: {error}") from error
    except CheckpointError as error:
        raise RecordingError(f"{error}; bring it back from a copy of the recording") from error


def checkpoint_folder(folder: Path, tape_seq: int) -> Path:
    """Return where the fragments are that a start began with."""
    return folder / f"start-{tape_seq:d}" / "checkpoint"


def push_file(folder: Path, tape_seq: int, step: int, attempt: int, member: Member, dtype: str) -> Path:
    """Return where a push is recorded.

    Args:
        folder: the recording.
        tape_seq: the start it belongs to.
        step: round.
        attempt: attempt of that round.
        member: whose push it is.
        dtype: session dtype.

    Raises:
        RecordingError: the generation is not 16 hex digits, so it must not become a name.
    """
    if _GENERATION.fullmatch(member.generation) is None:
        raise RecordingError(f"round {step}: {member.generation!r} is no generation of a learner")
    name = f"attempt-{attempt:d}-learner-{member.learner:d}-{member.generation}.{dtype}"
    return _round_folder(folder, tape_seq, step) / name


def gradient_file(folder: Path, tape_seq: int, step: int, attempt: int) -> Path:
    """Return where the merged gradient of an iso merge is recorded.

    Its bytes are little-endian f32 in layout order, then the 16 bytes of their digest.
    """
    return _round_folder(folder, tape_seq, step) / f"attempt-{attempt:d}.gradient"


class RecordingFolder:
    """A recording that is being written; made by ``open_recording``. Its methods wait for the disk."""

    def __init__(self, folder: Path, recording: Recording, disk: Disk) -> None:
        self.path = folder
        self._recording = recording
        self._disk = disk
        self._tape_seq = -1

    def begin(self, tape_seq: int, step: int, arithmetic: Arithmetic) -> None:
        """Note that a start begins, with this record of the tape.

        Raises:
            RecordingError: the system refuses.
        """
        self._tape_seq = tape_seq
        # A start whose first record was lost with the tail of its tape leaves an entry of the same number.
        starts = [start for start in self._recording.starts if start.tape_seq != tape_seq]
        starts.append(RecordedStart(tape_seq=tape_seq, step=step, arithmetic=arithmetic))
        self._recording = attrs.evolve(self._recording, starts=tuple(starts))
        with self._writing():
            write_aside(
                self._disk, self.path / RECORDING_FILE, [encode_digested(attrs.asdict(self._recording))]
            )
            self._disk.sync_folder(self.path)

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write what the start begins with: the fragments first, the manifest that names them last.

        Raises:
            RecordingError: the system refuses.
        """
        folder = checkpoint_folder(self.path, self._tape_seq)
        manifest = manifest_of(checkpoint)
        with self._writing():
            self._make(folder / FRAGMENTS_FOLDER)
            for version, entry in zip(checkpoint.fragments, manifest.fragments, strict=True):
                parts = file_parts(version.params.detach().numpy(), version.momentum.detach().numpy())
                write_aside(self._disk, folder / entry.file, parts)
            self._disk.sync_folder(folder / FRAGMENTS_FOLDER)
            write_aside(self._disk, folder / manifest_file(manifest.step), [encode_manifest(manifest)])
            self._disk.sync_folder(folder)

    def write_pushes(
        self, step: int, attempt: int, dtype: str, pushes: Iterable[tuple[Member, BytesLike]]
    ) -> None:
        """Write the pushes that an attempt was sealed with.

        Raises:
            RecordingError: the system refuses.
        """
        self._write(
            (push_file(self.path, self._tape_seq, step, attempt, member, dtype), [data])
            for member, data in pushes
        )

    def write_gradient(self, step: int, attempt: int, gradient: BytesLike) -> None:
        """Write the merged gradient of an iso merge.

        Raises:
            RecordingError: the system refuses.
        """
        path = gradient_file(self.path, self._tape_seq, step, attempt)
        self._write([(path, [gradient, bytes.fromhex(digest(gradient))])])

    def _write(self, files: Iterable[tuple[Path, list[BytesLike]]]) -> None:
        """Write files of one folder and make their names durable."""
        with self._writing():
            folder = None
            for path, parts in files:
                folder = path.parent
                self._make(folder)
                write_aside(self._disk, path, parts)
            if folder is not None:
                self._disk.sync_folder(folder)

    def _make(self, folder: Path) -> None:
        """Make a folder below the recording's, with durable names."""
        if not folder.is_dir():
            if folder.parent != self.path:
                self._make(folder.parent)
            self._disk.make_folder(folder)
            self._disk.sync_folder(folder.parent)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with writing(self.path, REMEDY):
                yield
        except CheckpointError as error:
            raise RecordingError(f"--record-payloads: {error}") from error


@contextmanager
def open_recording(folder: Path, session_id: str, *, disk: Disk | None = None) -> Iterator[RecordingFolder]:
    """Open a folder to record into, and hold it for this process.

    A new folder is made. One that holds the recording of this session is added to. One of another session
    is refused, unless it holds no push yet: a run that never got to its first round leaves nothing to audit.

    Raises:
        RecordingError: it holds something else, is used by another syncer, or cannot be written.
    """
    disk = disk or Disk()
    taken = RecordingError(
        f"--record-payloads {folder}: another syncer records there; stop it or name another folder"
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = hold(folder / LOCK_FILE, taken)
    except OSError as error:
        raise RecordingError(
            f"--record-payloads {folder}: cannot be used: {error.strerror or error}; name another folder"
        ) from error
    with lock:
        yield RecordingFolder(folder, _fitting(folder, session_id), disk)


def _fitting(folder: Path, session_id: str) -> Recording:
    """Return the session's recording in a folder, a new one if there is none.

    Raises:
        RecordingError: the folder holds something else.
    """
    empty = Recording(format_version=FORMAT_VERSION, session_id=session_id, starts=())
    if not (folder / RECORDING_FILE).exists():
        others = sorted(
            path.name for path in folder.iterdir() if not path.name.startswith(("recording.", "start-"))
        )
        if others or any(folder.glob("start-*/round-*")):
            raise RecordingError(
                f"--record-payloads {folder}: is not empty and holds no recording "
                f"({', '.join(others[:3]) or RECORDING_FILE + ' is missing'}); name a new folder"
            )
        return empty
    found = read_recording(folder)
    if found.session_id == session_id:
        return found
    if any(folder.glob("start-*/round-*")):
        raise RecordingError(
            f"--record-payloads {folder}: holds the payloads of session {found.session_id}, this one is "
            f"{session_id}; name a new folder"
        )
    return empty


def _round_folder(folder: Path, tape_seq: int, step: int) -> Path:
    return folder / f"start-{tape_seq:d}" / f"round-{step:08d}"


def _processor() -> str:
    """Return the name of the processor as far as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass  # not a Linux
    return platform.processor() or "unknown processor"

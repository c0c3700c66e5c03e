"""What a recording holds, held against the tape: a push, a merged gradient, what a start began with.

Whatever is read here is judged before it is used. A file that is missing, or that holds other bytes than the
tape says, is a *difference*: where tape, recording and re-execution part, in words that name the file, the
round, the fragment and the learner, and say what helps.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from yeto.core import State
from yeto.core.decisions import AttemptSealed, RoundCommitted
from yeto.core.events import PushReceived
from yeto.core.values import Member, Weighted
from yeto.errors import CheckpointError
from yeto.state import FragmentVersion, Manifest, read_manifest
from yeto.state.digested import IncompleteCheckpoint
from yeto.state.fragmentfile import read_fragment_file
from yeto.state.manifest import manifest_file
from yeto.syncer.payloads import Arithmetic, RecordedStart, checkpoint_folder
from yeto.wire.digest import DIGEST_BYTES, digest

RESTORE: Final = "bring it back from a copy of the recording"


def _said(value: object) -> str | None:
    return None if value is None else str(value)


@frozen(kw_only=True)
class Difference:
    """Where tape, recording and re-execution part first."""

    what: str
    """What differs, in words."""
    recorded: str | None = field(default=None, converter=_said)
    """What the tape says, or the recording where the tape does not."""
    found: str | None = field(default=None, converter=_said)
    """What was found or computed instead."""
    file: str | None = None
    """The file at fault, if it is a file."""
    remedy: str | None = None
    step: int | None = None
    attempt: int | None = None
    fragment: int | None = None
    learner: int | None = None

    @property
    def sentence(self) -> str:
        """The difference in one line."""
        names = (("round", self.step), ("fragment", self.fragment), ("learner", self.learner))
        where = ", ".join(f"{name} {number}" for name, number in names if number is not None)
        text = f"{where}: {self.what}" if where else self.what
        if self.recorded is not None or self.found is not None:
            text += f": recorded {self.recorded}, found {self.found}"
        text = text if self.file is None else f"{self.file}: {text}"
        return text if self.remedy is None else f"{text}; {self.remedy}"


class Differs(Exception):
    """A difference was found; nothing behind it means anything."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.sentence)
        self.difference = difference


class Absent(Differs):
    """What a start begins with was not written, or was removed."""


@frozen(kw_only=True)
class Push:
    """A push as the tape knows it."""

    sealed: Weighted
    """Its part in the merge."""
    received: PushReceived
    """What was found when it arrived."""

    @property
    def member(self) -> Member:
        """Whose push it is."""
        return Member(learner=self.sealed.learner, generation=self.sealed.generation)


@frozen(kw_only=True, eq=False)
class Start:
    """A start of the syncer whose fragments have been read."""

    tape_seq: int
    arithmetic: Arithmetic
    manifest: Manifest


def check_push(path: Path, push: Push, *, needed: bool) -> memoryview | None:
    """Read a recorded push and hold it against the digest on the tape.

    Args:
        path: its file.
        push: what the tape says.
        needed: whether it was committed; one of a discarded attempt may not have been written.

    Returns:
        Its wire bytes; None if it is not there and need not be.

    Raises:
        Differs: it is missing, or other bytes.
    """
    try:
        data = _read(path, push.received.payload_bytes)
    except FileNotFoundError:
        if not needed:
            return None
        raise bad_file(path, push.received, "the recorded push is missing") from None
    except OSError as error:
        what = f"the recorded push cannot be read ({error.strerror or error})"
        raise bad_file(path, push.received, what) from error
    found = digest(data)
    if found != push.received.digest:
        what = "the push was changed after it was recorded, its digest differs"
        raise bad_file(path, push.received, what, push.received.digest, found)
    return data


def check_gradient(
    path: Path, numel: int, of: AttemptSealed | RoundCommitted, *, needed: bool
) -> Tensor | None:
    """Read the merged gradient of an iso merge and hold it against the digest that it ends with.

    Args:
        path: its file.
        numel: elements of the fragment.
        of: whose gradient it is.
        needed: whether it was committed.

    Returns:
        1-D f32; None if it is not there and need not be.

    Raises:
        Differs: it is missing, or not what was recorded.
    """
    size = 4 * numel
    try:
        data = _read(path, size + DIGEST_BYTES)
    except FileNotFoundError:
        if not needed:
            return None
        raise bad_file(path, of, "the recorded gradient is missing") from None
    except OSError as error:
        raise bad_file(
            path, of, f"the recorded gradient cannot be read ({error.strerror or error})"
        ) from error
    found, stated = digest(data[:size]), bytes(data[size:]).hex()
    if found != stated:
        raise bad_file(
            path, of, "the gradient was changed after it was recorded, its digest differs", stated, found
        )
    return torch.from_numpy(np.frombuffer(data[:size], dtype="<f4").astype(np.float32, copy=False))


def read_start(
    recording: Path, recorded: RecordedStart, step: int, state: State
) -> tuple[Start, list[FragmentVersion]]:
    """Read the fragments that a start began with, and hold them against the tape.

    Args:
        recording: the folder.
        recorded: the start.
        step: committed steps by then.
        state: the coordinator's, by then.

    Raises:
        Absent: they were never written whole, or were removed.
        Differs: they are not what the tape says.
    """
    folder = checkpoint_folder(recording, recorded.tape_seq)
    path = folder / manifest_file(step)
    try:
        manifest = read_manifest(path)
    except IncompleteCheckpoint as error:
        raise Absent(_bad_start(path, str(error).removeprefix(f"{path}: "))) from error
    except CheckpointError as error:
        raise Differs(_bad_start(path, str(error).removeprefix(f"{path}: "))) from error
    terms = state.terms
    assert terms is not None, "fragments have values when a session is open"
    for what, stated, told in (
        ("dtype", manifest.dtype, terms.dtype),
        ("layout fingerprint", manifest.layout_fingerprint, terms.fingerprint),
        ("session contract", manifest.session_contract, terms.contract),
        ("number of fragments", len(manifest.fragments), len(state.marks)),
    ):
        if stated != told:
            raise Differs(_bad_start(path, what, told, stated))
    values = []
    for entry, mark in zip(manifest.fragments, state.marks, strict=True):
        file = folder / entry.file
        try:
            arrays = read_fragment_file(file, entry.numel)
        except CheckpointError as error:
            reason = str(error).removeprefix(f"{file}: ")
            raise Differs(_bad_start(file, reason, fragment=entry.fragment)) from error
        for what, found, told in (
            ("parameters", arrays.params_digest, mark.params_digest),
            ("momentum", arrays.momentum_digest, mark.momentum_digest or entry.momentum_digest),
        ):
            if found != told:
                raise Differs(_bad_start(file, f"digest of the {what}", told, found, entry.fragment))
        values.append(FragmentVersion.of_arrays(entry.fragment, entry.version, arrays))
    start = Start(tape_seq=recorded.tape_seq, arithmetic=recorded.arithmetic, manifest=manifest)
    return start, values


def bad_file(
    path: Path,
    of: PushReceived | AttemptSealed | RoundCommitted,
    what: str,
    recorded: object = None,
    found: object = None,
) -> Differs:
    """Return that a file of a round is not what the tape says of it."""
    return Differs(
        Difference(
            what=what,
            recorded=recorded,
            found=found,
            file=str(path),
            remedy=RESTORE,
            step=of.step,
            attempt=of.attempt,
            fragment=of.fragment,
            learner=of.learner if isinstance(of, PushReceived) else None,
        )
    )


def _bad_start(
    path: Path, what: str, recorded: object = None, found: object = None, fragment: int | None = None
) -> Difference:
    return Difference(
        what=what, recorded=recorded, found=found, file=str(path), fragment=fragment, remedy=RESTORE
    )


def _read(path: Path, size: int) -> memoryview:
    """Return a file's bytes; one byte more than ``size`` at most, so that a wrong file costs no memory.

    Raises:
        OSError: the system refuses.
    """
    with path.open("rb") as file:
        buffer = np.empty(min(os.fstat(file.fileno()).st_size, size + 1), dtype=np.uint8)
        count = file.readinto(buffer.data)
    return buffer.data[:count]

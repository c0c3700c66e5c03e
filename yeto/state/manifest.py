"""The manifest: what one checkpoint consists of, as JSON, readable without any tensor library.

A checkpoint is a folder. ``manifest-<step>.json`` names one file for every fragment, with the digests of the
tensors inside, so a manifest and the files it names are either exactly the state after ``step`` commits or
provably not. The last line of a manifest is the digest of all the bytes before it; so a changed byte cannot
pass for a smaller ledger or another setting.

Two kinds of trouble are told apart. **Incomplete**: a file is missing or shorter than it must be, as a copy
that was cut short leaves it; the checkpoint before it is then as good as any. **Damaged**: everything is
there and something is wrong; nobody can say what else is, so it is an error and a person decides.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
from attrs import frozen

from yeto.errors import CheckpointError
from yeto.state.digested import (
    IncompleteCheckpoint,
    decode_digested,
    encode_digested,
    open_file,
    read_bounded,
)
from yeto.state.lookahead import derived
from yeto.state.strict import NotStrict, structure
from yeto.wire.layout import FragmentLayout, Layout, MergeMode, TensorSpec

FORMAT_VERSION: Final = 3

ISO_BACKENDS: Final = ("scalar", "torch-svd")
"""Backends of the iso merge; a manifest and the older files store the index."""

MAGICS: Final = {0xD1705A80: 3, 0xD1705A7F: 2, 0xD1705A7E: 1}
"""First four bytes, little-endian, of the older checkpoints, which are single files: to their version."""

FRAGMENTS_FOLDER: Final = "fragments"

FRESH_LOOKS_MAX: Final = 16
"""Times that a reader starts over because the folder changed under it. A writer that outruns it so often
commits faster than a checkpoint can be read, and then the older ones should be kept (``--keep-every``)."""

MANIFEST_BYTES_MAX: Final = 64 << 20
"""No manifest is larger: a million tensor shapes take 20 MiB, a training manifest at most 1 MiB."""

_MANIFEST_NAME: Final = re.compile(r"manifest-(0|[1-9][0-9]*)\.json")
_FRAGMENT_NAME: Final = re.compile(r"f([0-9]{4,})-v([0-9]{8,})\.safetensors")


@frozen(kw_only=True)
class LedgerEntry:
    """What one learner has contributed to committed rounds."""

    learner: int
    merges: int
    c_steps: int
    c_tokens: int


@frozen(kw_only=True)
class OuterMark:
    """What the momentum buffer of one fragment has gathered; the coordinator goes on counting from it."""

    fragment: int
    merges: int
    """Commits that moved it."""
    gain: float
    """What it would hold if each of their gradients had been 1."""


@frozen(kw_only=True)
class ManifestFragment:
    """One fragment of a checkpoint."""

    fragment: int
    version: int
    file: str
    """Path inside the folder."""
    numel: int
    mode: str
    """``avg``, ``rda`` or ``iso``."""
    shapes: tuple[tuple[int, ...], ...]
    """One a tensor, in layout order; their names are in the training manifest."""
    params_digest: str
    momentum_digest: str
    lookahead: float | None = None
    """So many times the momentum, added to the parameters, is the point without Nesterov's look-ahead; None
    where that was not kept."""

    def layout(self) -> FragmentLayout:
        """Return the fragment's tensors, without names."""
        return FragmentLayout(
            mode=MergeMode[self.mode.upper()],
            tensors=tuple(TensorSpec(name="", shape=shape) for shape in self.shapes),
        )


@frozen(kw_only=True)
class Manifest:
    """Everything a checkpoint says, but for the tensors."""

    format_version: int
    software_version: str
    step: int
    """Committed global steps."""
    iso_backend: int
    """Index into ``ISO_BACKENDS``."""
    dtype: str
    """Session dtype: ``f32``, ``bf16`` or ``q4``."""
    layout_fingerprint: str
    """Hex of the 32 bytes of HELLO."""
    session_contract: str
    """Hex of the 32 bytes of HELLO."""
    profile: str | None = None
    fragments: tuple[ManifestFragment, ...]
    ledger: tuple[LedgerEntry, ...]
    settings: dict[str, Any]
    """The syncer's policy at the time of writing."""
    tape_file: str | None = None
    tape_seq: int | None = None
    """Sequence number of the checkpoint's ``checkpoint_ordered`` record."""
    finish_target: int | None = None
    """Target step of a budget finish, once one began."""
    training_manifest: dict[str, Any] | None = None
    """What the learners stated about model and tuning, if they did."""
    outer_marks: tuple[OuterMark, ...] | None = None
    """One a fragment, in order; None in a manifest from before there were any."""

    @property
    def layout(self) -> Layout:
        """Sizes and modes of all fragments; tensors have no names here."""
        return Layout(fragments=tuple(fragment.layout() for fragment in self.fragments))

    @property
    def lookaheads(self) -> tuple[float | None, ...]:
        """The look-ahead of each fragment, from the settings where it was not kept."""
        from_settings = derived(
            self.settings,
            [fragment.version for fragment in self.fragments],
            marks=self.outer_marks,
            finish_target=self.finish_target,
        )
        return tuple(
            told if fragment.lookahead is None else fragment.lookahead
            for fragment, told in zip(self.fragments, from_settings, strict=True)
        )


def version_at(step: int, fragment: int, num_fragments: int) -> int:
    """Return the version that a fragment has after ``step`` commits: the contiguous cut."""
    first = fragment + 1
    return 0 if step < first else first + (step - first) // num_fragments * num_fragments


def commits_at(step: int, fragment: int, num_fragments: int) -> int:
    """Return how often a fragment was committed in the first ``step`` commits."""
    return max(0, (step - fragment - 1) // num_fragments + 1)


def fragment_file(fragment: int, version: int) -> str:
    """Return the path of a fragment's file inside the folder."""
    return f"{FRAGMENTS_FOLDER}/f{fragment:04d}-v{version:08d}.safetensors"


def parse_fragment_file(name: str) -> tuple[int, int] | None:
    """Return (fragment, version) of a file name in the fragments folder, None for any other name."""
    match = _FRAGMENT_NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]))


def manifest_file(step: int) -> str:
    """Return the name of the manifest of a step."""
    return f"manifest-{step}.json"


def manifest_steps(folder: Path) -> list[int]:
    """Return the steps of all manifests in a folder, newest first; none if there is no such folder."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = [_MANIFEST_NAME.fullmatch(name) for name in names]
    return sorted((int(match[1]) for match in matches if match is not None), reverse=True)


def is_single_file(path: Path) -> bool:
    """Return whether a file begins like a checkpoint of one of the older formats."""
    with open_file(path) as file:
        first = file.read(4)
    return len(first) == 4 and int.from_bytes(first, "little") in MAGICS


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest file: one key a line, the digest last.

    Raises:
        CheckpointError: the settings or the training manifest hold what JSON does not have.
    """
    try:
        return encode_digested(attrs.asdict(manifest))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the manifest of step {manifest.step} cannot be written: {error}") from error


def decode_manifest(data: bytes, name: str) -> Manifest:
    """Return the manifest in a file's bytes, checked in itself.

    Args:
        data: the whole file.
        name: what to call it in messages, usually its path.

    Raises:
        IncompleteCheckpoint: the file ends too early.
        CheckpointError: it is damaged, or says what no checkpoint can say; the message names the field.
    """
    value = decode_digested(data, name, "manifest")
    version = value.get("format_version") if type(value) is dict else None
    if type(version) is int and version != FORMAT_VERSION:
        raise CheckpointError(f"{name}: format version {version}; this software reads {FORMAT_VERSION}")
    try:
        manifest = structure(value, Manifest)
    except NotStrict as error:
        raise CheckpointError(f"{name}: {error}") from error
    _check(manifest, name)
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Read a manifest; of a folder, the newest. No tensor is read and nothing is checked against files.

    Raises:
        IncompleteCheckpoint: it is missing or ends too early.
        CheckpointError: it cannot be read or is damaged.
    """
    path = Path(path)
    if path.is_dir():
        steps = manifest_steps(path)
        if not steps:
            raise IncompleteCheckpoint(f"{path}: there is no manifest-<step>.json in this folder")
        path = path / manifest_file(steps[0])
    elif not path.exists():
        raise IncompleteCheckpoint(f"{path}: there is no checkpoint, neither a folder nor a manifest")
    elif is_single_file(path):
        raise CheckpointError(f"{path}: an older checkpoint in a single file, which has no manifest")
    return manifest_at(path)[0]


def manifest_at(path: Path) -> tuple[Manifest, bytes]:
    """Return the manifest in a file, and the file's bytes.

    Raises:
        IncompleteCheckpoint: it is missing or ends too early.
        CheckpointError: it is damaged, or is of another step than its name says: what is kept and what is
            tidied away goes by the names.
    """
    data = read_bounded(path, MANIFEST_BYTES_MAX)
    manifest = decode_manifest(data, str(path))
    named = _MANIFEST_NAME.fullmatch(path.name)
    if named is not None and named[1] != str(manifest.step):
        raise CheckpointError(
            f"{path}: is the manifest of step {manifest.step}; give it back its name, "
            f"{manifest_file(manifest.step)}"
        )
    return manifest, data


def _check(manifest: Manifest, name: str) -> None:
    """Check what types cannot say.

    Raises:
        CheckpointError: naming the field.
    """
    count = len(manifest.fragments)
    checks = [
        (manifest.step >= 0, f"step {manifest.step} is negative"),
        (count >= 1, "there are no fragments"),
        (manifest.iso_backend in range(len(ISO_BACKENDS)), f"iso_backend {manifest.iso_backend} is unknown"),
        (manifest.dtype in ("f32", "bf16", "q4"), f"dtype {manifest.dtype} is unknown"),
        (_is_hex(manifest.layout_fingerprint, 64), "layout_fingerprint is not 64 hex digits"),
        (_is_hex(manifest.session_contract, 64), "session_contract is not 64 hex digits"),
        (_ascending([entry.learner for entry in manifest.ledger]), "ledger: learners do not ascend from 0"),
    ]
    if manifest.outer_marks is not None:
        marked = [mark.fragment for mark in manifest.outer_marks]
        checks.append((marked == list(range(count)), "outer_marks: not one for each fragment, in order"))
        checks += [
            (
                _may_be(mark, commits := commits_at(manifest.step, mark.fragment, count)),
                f"outer_marks[{mark.fragment}]: {mark.merges} merges with a gain of {mark.gain} cannot be "
                f"after {commits} commits",
            )
            for mark in manifest.outer_marks
        ]
    for place, entry in enumerate(manifest.fragments):
        where = f"fragments[{place}]"
        version = version_at(manifest.step, place, count)
        sizes = [math.prod(shape) for shape in entry.shapes]
        checks += [
            (entry.fragment == place, f"{where}: fragment {entry.fragment} is out of place"),
            (
                entry.version == version,
                f"{where}: version {entry.version}, but after {manifest.step} steps it is {version}",
            ),
            (entry.file == fragment_file(place, entry.version), f"{where}: file {entry.file!r} is misnamed"),
            (entry.mode.upper() in MergeMode.__members__, f"{where}: mode {entry.mode!r} is unknown"),
            (
                all(side >= 0 for shape in entry.shapes for side in shape) and sum(sizes) == entry.numel,
                f"{where}: numel {entry.numel} is not what the shapes sum to",
            ),
            (
                _is_hex(entry.params_digest, 32) and _is_hex(entry.momentum_digest, 32),
                f"{where}: a digest is not 32 hex digits",
            ),
            (
                entry.lookahead is None or 0.0 <= entry.lookahead < math.inf,
                f"{where}: a look-ahead of {entry.lookahead} cannot be",
            ),
        ]
    for good, message in checks:
        if not good:
            raise CheckpointError(f"{name}: {message}")


def _may_be(mark: OuterMark, commits: int) -> bool:
    """Return whether a fragment with so many commits can have these counters.

    A commit multiplies the gain by a momentum below 1 and adds 1.
    """
    gained = 1.0 <= mark.gain <= mark.merges if mark.merges else mark.gain == 0.0
    return 0 <= mark.merges <= commits and gained


def _is_hex(text: str, digits: int) -> bool:
    return re.fullmatch(r"[0-9a-f]*", text) is not None and len(text) == digits


def _ascending(ids: Sequence[int]) -> bool:
    return all(a < b for a, b in zip([-1, *ids], ids, strict=False))

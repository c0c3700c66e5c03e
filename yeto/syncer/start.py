"""The start: everything that can be wrong is found before anything changes.

A fresh start must not find files of an earlier run. A resumed one reads its checkpoint with every digest
checked, compares the settings, finds the checkpoint on its tape, and asks the rules whether such a session
can go on; only then does anything get onto the tape. All that the coordinator has to know of the past is
one event, ``session_resumed`` (``yeto.syncer.past``).

This blocks on files: it runs before there is anybody whom that could hold up.
"""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs
from attrs import frozen

from yeto import __version__
from yeto.core import CoreConfig, State, initial_state, step
from yeto.core.decisions import SessionOpened
from yeto.core.events import CheckpointWritten, SessionResumed
from yeto.core.outer import with_numbers
from yeto.errors import CheckpointError, ConfigError
from yeto.state import (
    Checkpoint,
    checkpoint_at,
    checkpoint_lock,
    has_checkpoint,
    has_orphans,
    read_checkpoint,
    remove_superseded,
    require_space,
    validate_resume,
    validate_single_file,
)
from yeto.syncer.config import StartMode, SyncerConfig
from yeto.syncer.past import (
    find_past,
    last_checkpoint,
    resume_tape,
    resumed_event,
    unknown_terms,
    wall_clock,
)
from yeto.syncer.payloads import Arithmetic, RecordingFolder, open_recording
from yeto.tape import Header, Past, TapeWriter, read

log = logging.getLogger("yeto.syncer")


@frozen(kw_only=True)
class Start:
    """What a run begins with. The tape is open to write on and locked, as is the checkpoint."""

    state: State
    tape: TapeWriter
    begin_at: float
    """Session seconds that the clock goes on from."""
    checkpoint: Checkpoint | None = None
    resumed: SessionResumed | None = None
    """The first event to feed, unstamped."""
    older: Checkpoint | None = None
    """In place of both: a single file whose tensors the first learner is to state."""
    recording: RecordingFolder | None = None
    """Open to write to and locked; of a resumed start it has the fragments already."""


@contextmanager
def prepare(config: SyncerConfig) -> Iterator[Start]:
    """Check and open everything on disk; close it at the end of the block.

    Raises:
        ConfigError: files of an earlier run are in the way, or settings cannot go with the checkpoint.
        CheckpointError: the checkpoint is missing, damaged, or belongs to another tape.
        TapeError: the tape is damaged or in use.
        RecordingError: the payloads cannot be recorded where they are wanted.
    """
    path = config.checkpoint_path
    if path.suffix == ".json" and path.is_file():
        # Its lock would be another than the folder's, and the next checkpoint could not be written.
        raise ConfigError(
            f"--checkpoint-path {path}: a run goes on in a whole folder; name {path.parent}, "
            "and move the manifests after this one out of it"
        )
    with ExitStack() as held:
        held.enter_context(checkpoint_lock(config.checkpoint_path))
        there = has_checkpoint(checkpoint_at(config.checkpoint_path))
        if not there:
            _require_none_lost(config)
        if config.start is StartMode.RESUME and not there:
            raise CheckpointError(
                f"--resume: there is no checkpoint at {config.checkpoint_path}; "
                "begin without --resume, or name it with --checkpoint-path"
            )
        if there and config.start is StartMode.FRESH:
            raise ConfigError(
                f"{config.checkpoint_path} holds the checkpoint of an earlier run; "
                "go on with it (--resume) or name another one (--checkpoint-path)"
            )
        yield _resumed(config, held) if there else _fresh(config, held)


def _require_none_lost(config: SyncerConfig) -> None:
    """Refuse to begin where a checkpoint has been: what is left of it may be all that is left of a run."""
    if config.event_tape.exists():
        step = last_checkpoint(config.event_tape)
        if step is not None:
            raise ConfigError(
                f"{config.checkpoint_path}: there is no checkpoint, but {config.event_tape} tells of that of "
                f"step {step}: bring it back from a copy, or name where it is (--checkpoint-path); to begin "
                "anew, move both away"
            )
    elif has_orphans(config.checkpoint_path):
        raise ConfigError(
            f"{config.checkpoint_path}: there are fragments of an earlier run and no manifest: bring the "
            "manifests back from a copy, or move the folder away to begin anew"
        )


def _fresh(config: SyncerConfig, held: ExitStack) -> Start:
    if config.event_tape.exists():
        if config.start is StartMode.FRESH:
            raise ConfigError(
                f"{config.event_tape} is the tape of an earlier run, of which there is no checkpoint at "
                f"{config.checkpoint_path}; --resume-or-start sets it aside, or name another (--event-tape)"
            )
        _set_aside(config.event_tape)
    header = _header(config.core)
    recording = _recording(config, held, header)
    if recording is not None:
        recording.begin(tape_seq=0, step=0, arithmetic=_arithmetic(config))
    tape = held.enter_context(TapeWriter.create(config.event_tape, header))
    return Start(state=initial_state(config.core), tape=tape, begin_at=0.0, recording=recording)


def _recording(config: SyncerConfig, held: ExitStack, header: Header) -> RecordingFolder | None:
    """Open the recording of the session of this tape, when one is wanted."""
    if config.record_payloads is None:
        return None
    return held.enter_context(open_recording(config.record_payloads, header.session_id))


def _arithmetic(config: SyncerConfig) -> Arithmetic:
    """Return what computes the merges of this start."""
    if config.svd is None:
        return Arithmetic.here(iso_backend=config.iso_backend)
    here = Arithmetic.here(iso_backend=config.iso_backend, device=",".join(config.svd.devices))
    if config.svd.python == sys.executable:
        return here
    return attrs.evolve(here, torch_version=f"that of {config.svd.python}")


def _resumed(config: SyncerConfig, held: ExitStack) -> Start:
    wait_for = config.core.quorum if config.resume_wait_for is None else config.resume_wait_for
    core = attrs.evolve(config.core, wait_for=wait_for)
    checkpoint = read_checkpoint(checkpoint_at(config.checkpoint_path))
    if checkpoint.layout is None:
        return _older(config, held, core, checkpoint)
    for notice in checkpoint.notices:
        log.warning("%s", notice)
    changes = validate_resume(
        checkpoint, settings=attrs.asdict(with_numbers(core)), iso_backend=config.iso_backend
    )
    require_space(config.checkpoint_path, sum(version.numel for version in checkpoint.fragments))
    state = initial_state(core)
    header, past = _header(core), Past(checkpoint_seq=None)
    tape, begin_at, torn_bytes = None, 0.0, 0
    if config.event_tape.exists():
        tape, tail, past = resume_tape(config.event_tape, checkpoint)
        held.enter_context(tape)
        header, begin_at, torn_bytes = tail.header, tail.last_at, tail.torn_bytes
    elif checkpoint.tape_file is not None and config.event_tape.name == Path(checkpoint.tape_file).name:
        raise CheckpointError(
            f"{config.event_tape}, the tape of this checkpoint, is missing; "
            "bring it back, or name a new one to go on without its history (--event-tape)"
        )
    event = resumed_event(checkpoint, core, past)
    # The rules have a word too (--total-steps, for one): ask them before anything is written.
    after, _ = step(state, event)
    recording = _recording(config, held, header)
    if recording is not None:
        # Of a new tape, the record behind the header.
        tape_seq = 1 if tape is None else tape.next_seq
        recording.begin(tape_seq, checkpoint.step, arithmetic=_arithmetic(config))
        recording.write_checkpoint(checkpoint)
    # Of a start that is refused, nothing holds of what it would have gone on with.
    if torn_bytes:
        log.warning("%s ended in the middle of a record; it is cut back", config.event_tape)
    if changes:
        log.info("settings changed since the checkpoint: %s", "; ".join(map(str, changes)))
    _say_what_is_restored(checkpoint, event, after.target)
    remove_superseded(config.checkpoint_path, checkpoint.step)
    if tape is None:
        tape = held.enter_context(TapeWriter.create(config.event_tape, header))
    return Start(
        state=state,
        tape=tape,
        begin_at=begin_at,
        checkpoint=checkpoint,
        resumed=event,
        recording=recording,
    )


def _older(config: SyncerConfig, held: ExitStack, core: CoreConfig, checkpoint: Checkpoint) -> Start:
    """Return the start from a single file, of which the rest is asked when a learner states its tensors."""
    if config.record_payloads is not None:
        raise ConfigError(
            f"--record-payloads: {config.checkpoint_path} is an older single file, which a recording cannot "
            "begin with; go on without it until the next checkpoint is written, then resume with it"
        )
    validate_single_file(
        checkpoint, settings=attrs.asdict(with_numbers(core)), iso_backend=config.iso_backend
    )
    require_space(config.checkpoint_path, sum(version.numel for version in checkpoint.fragments))
    state = initial_state(core)
    step(state, resumed_event(checkpoint, core, Past(checkpoint_seq=None), unknown_terms(checkpoint)))
    if config.event_tape.exists():
        _require_nothing_after(config, checkpoint)
        # Whatever it tells was never in a checkpoint.
        _set_aside(config.event_tape)
    tape = held.enter_context(TapeWriter.create(config.event_tape, _header(core)))
    log.info(
        "%s is a checkpoint of an older format (%s) at step %d; the first learner that connects is to state "
        "which tensors it holds",
        checkpoint_at(config.checkpoint_path),
        checkpoint.format,
        checkpoint.step,
    )
    return Start(state=state, tape=tape, begin_at=0.0, older=checkpoint)


def _require_nothing_after(config: SyncerConfig, checkpoint: Checkpoint) -> None:
    """Refuse an older single file where a tape tells that the run has gone on from it, or is another one."""
    opened, written = False, None
    for record in read(config.event_tape):
        opened = opened or isinstance(record.body, SessionOpened)
        if isinstance(record.body, CheckpointWritten):
            written = record.body.step
    if written is not None:
        raise ConfigError(
            f"{checkpoint_at(config.checkpoint_path)} is of step {checkpoint.step}, but {config.event_tape} "
            f"tells of the checkpoint of step {written}: bring that back from a copy, or name where it is "
            "(--checkpoint-path); to begin anew from the older file, move the tape away"
        )
    if opened:
        # It is an earlier start from this file, or it stops here.
        find_past(config.event_tape, checkpoint)


def _say_what_is_restored(checkpoint: Checkpoint, event: SessionResumed, target: int) -> None:
    """Name what is as it was and what begins anew: a resume that keeps silent leaves people guessing."""
    log.info(
        "restored: step %d, parameters and momentum of %d fragments, contributions of %d learners, training "
        "manifest %s; rounds that were open, deadlines and pace begin anew",
        checkpoint.step,
        len(checkpoint.fragments),
        len(checkpoint.ledger),
        "none" if checkpoint.training_manifest is None else "as stated",
    )
    if checkpoint.step == target and not event.awaited:
        log.info(
            "this run has ended: all %d rounds are committed; to train on, give a higher --total-steps",
            target,
        )


def _header(core: CoreConfig) -> Header:
    return Header(
        software_version=__version__,
        wall_clock=wall_clock(),
        session_id=uuid.uuid4().hex,
        config=core,
    )


def _set_aside(tape: Path) -> None:
    """Rename the tape of a run that never reached its first checkpoint, so that nothing was lost with it."""
    number = 1
    while (aside := tape.with_name(f"{tape.name}.{number}")).exists():
        number += 1
    tape.rename(aside)
    log.warning("%s never reached a checkpoint; it was renamed to %s", tape, aside)

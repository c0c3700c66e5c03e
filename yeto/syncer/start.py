"""The start: everything that can be wrong is found before anything changes.

A fresh start must not find files of an earlier run. A resumed one reads its checkpoint with every digest
checked, compares the settings, finds the checkpoint on its tape, and asks the rules whether such a session
can go on; only then does anything get onto the tape. All that the coordinator has to know of the past is
one event, ``session_resumed``.

This blocks on files: it runs before there is anybody whom that could hold up.
"""

from __future__ import annotations

import datetime
import logging
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs
from attrs import frozen

from yeto import __version__
from yeto.core import CoreConfig, State, initial_state, step
from yeto.core.events import SessionResumed
from yeto.core.values import FragmentMark, LedgerEntry, SessionTerms
from yeto.errors import CheckpointError, ConfigError
from yeto.state import (
    Checkpoint,
    checkpoint_lock,
    has_checkpoint,
    read_checkpoint,
    remove_superseded,
    require_space,
    validate_resume,
)
from yeto.syncer.config import StartMode, SyncerConfig
from yeto.syncer.past import Past, find_past
from yeto.syncer.pump import UNSTAMPED
from yeto.tape import Header, TapeWriter

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


@contextmanager
def prepare(config: SyncerConfig) -> Iterator[Start]:
    """Check and open everything on disk; close it at the end of the block.

    Raises:
        ConfigError: files of an earlier run are in the way, or settings cannot go with the checkpoint.
        CheckpointError: the checkpoint is missing, damaged, or belongs to another tape.
        TapeError: the tape is damaged or in use.
    """
    with ExitStack() as held:
        held.enter_context(checkpoint_lock(config.checkpoint_path))
        there = has_checkpoint(config.checkpoint_path)
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


def _fresh(config: SyncerConfig, held: ExitStack) -> Start:
    if config.event_tape.exists():
        if config.start is StartMode.FRESH:
            raise ConfigError(
                f"{config.event_tape} is the tape of an earlier run, of which there is no checkpoint at "
                f"{config.checkpoint_path}; --resume-or-start sets it aside, or name another (--event-tape)"
            )
        _set_aside(config.event_tape)
    tape = held.enter_context(TapeWriter.create(config.event_tape, _header(config.core)))
    return Start(state=initial_state(config.core), tape=tape, begin_at=0.0)


def _resumed(config: SyncerConfig, held: ExitStack) -> Start:
    wait_for = config.core.quorum if config.resume_wait_for is None else config.resume_wait_for
    core = attrs.evolve(config.core, wait_for=wait_for)
    checkpoint = read_checkpoint(config.checkpoint_path)
    for notice in checkpoint.notices:
        log.warning("%s", notice)
    changes = validate_resume(checkpoint, settings=attrs.asdict(core), iso_backend=config.iso_backend)
    if changes:
        log.info("settings changed since the checkpoint: %s", "; ".join(map(str, changes)))
    require_space(config.checkpoint_path, sum(version.numel for version in checkpoint.fragments))
    state = initial_state(core)
    if config.event_tape.exists():
        tape, tail = TapeWriter.resume(config.event_tape)
        held.enter_context(tape)
        if tail.cut_bytes:
            log.warning("%s ended in the middle of a record; it was cut back", config.event_tape)
        event, begin_at = _event(checkpoint, core, find_past(config.event_tape, checkpoint)), tail.last_at
    elif checkpoint.tape_file is not None and config.event_tape.name == Path(checkpoint.tape_file).name:
        raise CheckpointError(
            f"{config.event_tape}, the tape of this checkpoint, is missing; "
            "bring it back, or name a new one to go on without its history (--event-tape)"
        )
    else:
        tape = None
        event, begin_at = _event(checkpoint, core, Past(checkpoint_seq=None)), 0.0
    # The rules have a word too (--total-steps, for one): ask them before anything is written.
    step(state, attrs.evolve(event, at=begin_at))
    remove_superseded(config.checkpoint_path, checkpoint.step)
    if tape is None:
        tape = held.enter_context(TapeWriter.create(config.event_tape, _header(core)))
    return Start(state=state, tape=tape, begin_at=begin_at, checkpoint=checkpoint, resumed=event)


def _event(checkpoint: Checkpoint, core: CoreConfig, past: Past) -> SessionResumed:
    """Return what the coordinator is told of a checkpoint that a resume may take."""
    dtype, fingerprint, contract = checkpoint.dtype, checkpoint.fingerprint, checkpoint.contract
    assert dtype is not None, "only our own format is resumed"
    assert fingerprint is not None
    assert contract is not None
    return SessionResumed(
        at=UNSTAMPED,
        wall_clock=_wall_clock(),
        config=core,
        terms=SessionTerms(
            dtype=dtype,
            num_fragments=len(checkpoint.fragments),
            fingerprint=fingerprint,
            contract=contract,
            profile=checkpoint.profile,
        ),
        step=checkpoint.step,
        fragments=tuple(
            FragmentMark(
                fragment=version.fragment,
                version=version.version,
                params_digest=version.params_digest,
                momentum_digest=version.momentum_digest,
            )
            for version in checkpoint.fragments
        ),
        ledger=tuple(LedgerEntry(**attrs.asdict(entry)) for entry in checkpoint.ledger),
        checkpoint_seq=past.checkpoint_seq,
        awaited=past.awaited,
        acked=past.acked,
        finish_target=checkpoint.finish_target,
    )


def _header(core: CoreConfig) -> Header:
    return Header(
        software_version=__version__,
        wall_clock=_wall_clock(),
        session_id=uuid.uuid4().hex,
        config=core,
    )


def _wall_clock() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _set_aside(tape: Path) -> None:
    """Rename the tape of a run that never reached its first checkpoint, so that nothing was lost with it."""
    # Opening it to write shows that no other process does, and that it is a tape.
    TapeWriter.resume(tape)[0].close()
    number = 1
    while (aside := tape.with_name(f"{tape.name}.{number}")).exists():
        number += 1
    tape.rename(aside)
    log.warning("%s never reached a checkpoint; it was renamed to %s", tape, aside)

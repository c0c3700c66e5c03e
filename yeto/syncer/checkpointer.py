"""Checkpoints: a cut by reference, written by one task, reported back as a fact.

An order is turned into a checkpoint at the moment of the decision: fragment versions never change, so the
cut is a tuple of references and later commits cannot get into it. Its writing begins when the order's record
is durable, so no checkpoint knows of a commit that the tape has lost. The coordinator has one checkpoint
written at a time and lets nothing leave that is not in one.

A write that fails changes nothing of what is on disk. The fact that it failed names the path and the space
that is left; the coordinator then ends the session.
"""

from __future__ import annotations

from typing import NoReturn

import attrs
import trio

from yeto import __version__
from yeto.core import State
from yeto.core.decisions import CheckpointOrdered
from yeto.core.events import CheckpointFailed, CheckpointWritten, Event
from yeto.core.outer import with_numbers
from yeto.errors import CheckpointError
from yeto.state import (
    Checkpoint,
    LedgerEntry,
    OuterMark,
    checkpoint_at,
    remove_final_marker,
    require_space,
    take_over,
    write_checkpoint,
    write_final_marker,
)
from yeto.syncer.config import SyncerConfig
from yeto.syncer.pump import UNSTAMPED, Act
from yeto.syncer.receivers import Facts
from yeto.syncer.recorder import Recorder
from yeto.syncer.session import Session


class Checkpointer:
    """Writes the checkpoints of one run."""

    def __init__(
        self, *, config: SyncerConfig, session: Session, facts: Facts, recorder: Recorder | None = None
    ) -> None:
        """Write what ``session`` holds to where ``config`` says; ``recorder`` gets the first of a run."""
        self._recorder = recorder
        self._config = config
        self._session = session
        self._facts = facts
        self._orders, self._queue = trio.open_memory_channel[Checkpoint](1)

    def order(self, order: CheckpointOrdered, *, seq: int, state: State) -> Act:
        """Take the cut that an order means, now; return what has it written.

        Args:
            order: the decision.
            seq: number of its record.
            state: the state after the decision, whose ledger belongs to this cut.
        """
        checkpoint = self._cut(order, seq, state)
        if self._recorder is not None:
            self._recorder.begin(checkpoint)

        async def act() -> None:
            # The coordinator waits for the last one before it orders the next.
            self._orders.send_nowait(checkpoint)

        return act

    async def run(self) -> NoReturn:
        """Write what is ordered, one after the other."""
        while True:
            checkpoint = await self._queue.receive()
            began = trio.current_time()
            fact: Event
            try:
                size = await trio.to_thread.run_sync(self._write, checkpoint)
                fact = CheckpointWritten(
                    at=UNSTAMPED,
                    step=checkpoint.step,
                    written_bytes=size,
                    seconds=round(trio.current_time() - began, 6),
                )
            except CheckpointError as error:
                fact = CheckpointFailed(at=UNSTAMPED, step=checkpoint.step, message=str(error))
            await self._facts.tell(fact)

    async def mark(self, step: int) -> None:
        """Write the final marker: every awaited learner holds the cut of this step."""
        await trio.to_thread.run_sync(write_final_marker, self._config.checkpoint_path, step)

    def unmark(self) -> None:
        """Take away the marker of an earlier run, before this one goes beyond it."""
        remove_final_marker(self._config.checkpoint_path)

    def _write(self, checkpoint: Checkpoint) -> int:
        if checkpoint.step == 0:
            require_space(self._config.checkpoint_path, sum(part.numel for part in checkpoint.fragments))
        path = self._config.checkpoint_path
        # The run goes on from an older single file: the first folder takes its place.
        write = take_over if checkpoint_at(path).is_file() else write_checkpoint
        return write(path, checkpoint, keep_every=self._config.keep_every)

    def _cut(self, order: CheckpointOrdered, seq: int, state: State) -> Checkpoint:
        terms = self._session.require_terms()
        manifest = self._session.manifest
        return Checkpoint(
            step=order.step,
            fragments=self._session.store.snapshot(),
            ledger=tuple(
                LedgerEntry(**attrs.asdict(state.ledger[learner])) for learner in sorted(state.ledger)
            ),
            settings=attrs.asdict(with_numbers(state.config)),
            dtype=terms.stated.dtype,
            layout=terms.layout,
            iso_backend=self._config.iso_backend,
            fingerprint=terms.stated.fingerprint,
            contract=terms.stated.contract,
            profile=terms.stated.profile,
            training_manifest=None if manifest is None else manifest.to_dict(),
            tape_file=str(self._config.event_tape),
            tape_seq=seq,
            finish_target=order.finish_target,
            outer_marks=tuple(OuterMark(**attrs.asdict(mark)) for mark in state.outer_marks),
            software_version=__version__,
        )

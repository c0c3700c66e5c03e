"""Where what a learner sends goes: facts to the pump, tensors to who wants them.

A group knows these three and nothing of who stands behind them, so a connection can be reasoned about, and
tested, without rounds or tapes.
"""

from __future__ import annotations

from typing import Protocol

from attrs import frozen

from yeto.core.decisions import Decision
from yeto.core.events import Event
from yeto.core.values import Member
from yeto.wire.contract import TrainingManifest
from yeto.wire.messages import InitHeader, PushHeader
from yeto.wire.striping import Buffer


class Facts(Protocol):
    """Where events go: the pump."""

    async def tell(self, event: Event) -> None:
        """Queue an event."""

    async def ask(self, event: Event) -> tuple[Decision, ...]:
        """Queue an event and return what was decided about it."""


class Pushes(Protocol):
    """Where pushes go: the rounds."""

    def push_buffer(self, member: Member, head: PushHeader, size: int) -> Buffer | None:
        """Return the buffer of an admitted push, owned by its attempt; None when that is gone."""

    async def push_arrived(self, member: Member, head: PushHeader, buffer: Buffer) -> None:
        """Take a push that is there whole; what takes long is done elsewhere."""


class FirstValues(Protocol):
    """Where initial values and training manifests go."""

    def init_buffer(self, member: Member, head: InitHeader, size: int) -> Buffer | None:
        """Return the buffer of an initial value; None when none is wanted."""

    def init_arrived(self, member: Member, head: InitHeader, buffer: Buffer) -> None:
        """Take an initial value that is there whole."""

    def waits_for(self, member: Member) -> bool:
        """Whether initial values are wanted of this member, and nothing of them has come."""

    def manifest_arrived(self, manifest: TrainingManifest) -> None:
        """Take a training manifest that hashes to its learner's contract."""


@frozen(kw_only=True)
class Receivers:
    """Where everything goes that a learner sends."""

    facts: Facts
    pushes: Pushes
    first_values: FirstValues

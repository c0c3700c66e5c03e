"""Sockets that have not said who they are: few, not for long, and with little to hold.

Until its first frame is whole and true, a socket is a stranger, whatever its TLS says. Strangers are bounded

* **in number**. When all places are taken, the one that has been silent longest goes, then the one that has
  been told longest ago why it is not wanted. Whoever has something to say says it at once, so sockets that
  say nothing, however many come, cannot keep learners out, which they would if the newest had to go;
* **in time**, by the caller;
* **in bytes**. A first frame of up to 64 KiB is read as it comes. A larger one is the layout of thousands of
  tensors: two of them are read at a time, the others wait in their senders. So strangers hold 64 * 64 KiB and
  2 * 16 MiB, 36 MiB together, and those that begin a huge frame and never end it delay nothing but other
  huge frames.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext
from typing import Final

import trio
from attrs import define

from yeto.errors import ProtocolError
from yeto.link import LinkClosed
from yeto.wire.frames import MAGIC, MessageType

log = logging.getLogger("yeto.syncer")

SMALL_BYTES: Final = 64 * 1024
"""First frames up to here wait for nobody: a HELLO of 8,000 tensors, or 2,700 of the isotropic merge."""

LARGE_AT_A_TIME: Final = 2
"""Larger first frames that are in memory together; to send 16 MiB takes a learner a second or two."""

TLS_HANDSHAKE: Final = 0x16
"""First byte of a TLS connection."""

FRAME: Final = MAGIC & 0xFF
"""First byte of one without TLS."""

TYPE_AT: Final = 4
"""Where in its first frame the type is, behind the magic."""


class TransportMismatch(ProtocolError):
    """The peer speaks TLS and this syncer does not, or the other way round."""

    def __init__(self, text: str, *, is_data_stream: bool = False) -> None:
        """Say so, and whether it is a data stream: that is not told, its learner hears it on control."""
        super().__init__(text)
        self.is_data_stream = is_data_stream


@define(eq=False)
class Newcomer:
    """A stranger that has a place."""

    peer: str
    """Address, for the log."""
    displaced: bool = False
    """Whether it was closed to make room."""


class Newcomers:
    """The places for strangers, and what they may hold together."""

    def __init__(self, places: int) -> None:
        """Offer so many places."""
        self._places = places
        self._present: set[Newcomer] = set()
        # Longest wait first; their scopes end the wait.
        self._silent: dict[Newcomer, trio.CancelScope] = {}
        self._leaving: dict[Newcomer, trio.CancelScope] = {}
        self._large = trio.Semaphore(LARGE_AT_A_TIME)

    @contextmanager
    def place(self, peer: str) -> Iterator[Newcomer | None]:
        """Take a place as long as the block lasts; None when there is none."""
        if len(self._present) >= self._places and not self.make_room():
            log.warning("%s: all places for newcomers (%d) are taken; connection closed", peer, self._places)
            yield None
            return
        newcomer = Newcomer(peer)
        self._present.add(newcomer)
        try:
            yield newcomer
        finally:
            self._present.discard(newcomer)

    @contextmanager
    def waiting_aside(self, newcomer: Newcomer) -> Iterator[None]:
        """Leave the place to others as long as the block lasts: who has said who it is, and has to wait."""
        self._present.discard(newcomer)
        try:
            yield
        finally:
            self._present.add(newcomer)

    def silent(self, newcomer: Newcomer, seconds: float) -> AbstractContextManager[trio.CancelScope]:
        """Wait in the block for a newcomer to say who it is, as long as it has time and its place."""
        return _waiting(self._silent, newcomer, seconds)

    def leaving(self, newcomer: Newcomer, seconds: float) -> AbstractContextManager[trio.CancelScope]:
        """Wait in the block for one that is not wanted to have read why, likewise."""
        return _waiting(self._leaving, newcomer, seconds)

    def make_room(self) -> bool:
        """Close the stranger that can best be done without; False when there is none."""
        for waiting, reason in (
            (self._silent, "did not say who it is before others came"),
            (self._leaving, "took its time to leave while others came"),
        ):
            if waiting:
                newcomer = next(iter(waiting))
                newcomer.displaced = True
                log.warning("%s %s; connection closed", newcomer.peer, reason)
                self._present.discard(newcomer)
                waiting.pop(newcomer).cancel()
                return True
        return False

    def memory(self, size: int) -> AbstractAsyncContextManager[object]:
        """Return what a first frame of so many bytes is to be read and decoded in."""
        return nullcontext() if size <= SMALL_BYTES else self._large


@contextmanager
def _waiting(
    waiting: dict[Newcomer, trio.CancelScope], newcomer: Newcomer, seconds: float
) -> Iterator[trio.CancelScope]:
    """Keep a newcomer among those that can be displaced, for as long as the block waits for it."""
    with trio.move_on_after(seconds) as scope:
        waiting[newcomer] = scope
        try:
            yield scope
        finally:
            waiting.pop(newcomer, None)


async def check_transport(raw: trio.SocketStream, *, tls: bool) -> None:
    """Look at the first bytes of a connection, without taking them.

    Raises:
        TransportMismatch: it speaks TLS where there is none, or frames where there is TLS.
        LinkClosed: the connection ended before.
    """
    try:
        first = await raw.socket.recv(TYPE_AT + 1, trio.socket.MSG_PEEK)
    except OSError as error:
        raise LinkClosed(f"receiving failed: {error}") from error
    if not first:
        raise LinkClosed("the peer closed the connection")
    if first[0] == TLS_HANDSHAKE and not tls:
        raise TransportMismatch(
            "it speaks TLS, this syncer does not; start the syncer with --tls-cert and --tls-key, "
            "or the learner without --tls-ca"
        )
    if first[0] == FRAME and tls:
        raise TransportMismatch(
            "this syncer speaks TLS only; give every learner --tls-ca",
            is_data_stream=first[TYPE_AT:] == bytes([MessageType.DATA_HELLO]),
        )

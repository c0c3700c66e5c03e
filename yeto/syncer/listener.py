"""The door: sockets come in, introduce themselves in time, and become parts of groups, or go.

Until a socket has said who it is, it is a stranger (`yeto.syncer.newcomers`): a place, a time and few bytes
are all it gets, its TLS handshake included. With a key a HELLO is authenticated before one field of it is
parsed, and a data socket joins only the generation of an authenticated HELLO.

Whom to take and whom to refuse is the coordinator's to say. Refused here are only bytes that are no HELLO,
HELLOs that are not authentic, and more of them than anybody has reason to send; each costs one line of log
with the peer's address, and nobody else notices.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final

import trio

from yeto.core.decisions import LearnerRefused
from yeto.core.events import HelloReceived, LearnerJoined, LearnerLeft
from yeto.core.values import Member, SessionTerms
from yeto.errors import ProtocolError
from yeto.link import (
    FrameStream,
    LinkClosed,
    LinkRefused,
    TlsContext,
    Traffic,
    accept_tls,
    set_socket_options,
)
from yeto.link.framing import underlying_socket
from yeto.syncer.adoption import Adoption
from yeto.syncer.allowances import Allowances
from yeto.syncer.config import Bounds
from yeto.syncer.group import LearnerGroup, read_manifest
from yeto.syncer.newcomers import Newcomer, Newcomers, TransportMismatch, check_transport
from yeto.syncer.pump import UNSTAMPED
from yeto.syncer.receivers import Receivers
from yeto.syncer.registry import Registry
from yeto.syncer.session import EXPLAINED, Session
from yeto.wire.auth import MAC_BYTES
from yeto.wire.contract import TrainingManifest
from yeto.wire.errors import AuthenticationError
from yeto.wire.frames import BytesLike, MessageType
from yeto.wire.hello import Hello
from yeto.wire.legality import HANDSHAKE, MANIFEST_BYTES_MAX
from yeto.wire.messages import DataHello, ErrorMessage, format_generation

log = logging.getLogger("yeto.syncer")

PIECE_BYTES: Final = 64 * 1024
"""How much of a first frame is read at a time: nothing is allocated because of what a stranger claims."""

LOOK_SECONDS: Final = 0.05
"""Between two looks for the end of a connection."""

UNWANTED_MAC: Final = (
    "the HELLO is authenticated, but this syncer has no key; give it the learners' --auth-key-file"
)
"""Text of the ERROR for a learner that has a key while the syncer has none."""


def read_hello(payload: BytesLike, key: bytes | None) -> Hello:
    """Read a HELLO, and tell a mac that nobody asked for from a malformed frame.

    Raises:
        AuthenticationError: one side has a key that the other has not.
        ProtocolError: it is no HELLO.
    """
    try:
        return Hello.decode(payload, key)
    except AuthenticationError:
        raise
    except ProtocolError:
        if key is None and _reads_without_mac(payload):
            raise AuthenticationError(UNWANTED_MAC) from None
        raise


def terms_of(hello: Hello) -> SessionTerms:
    """Return what a HELLO states of the session, as the coordinator knows it."""
    return SessionTerms(
        dtype=hello.dtype,
        num_fragments=len(hello.layout.fragments),
        fingerprint=hello.fingerprint.hex(),
        contract=hello.contract.hex(),
        profile=None if hello.profile is None else hello.profile.hex(),
    )


def _reads_without_mac(payload: BytesLike) -> bool:
    try:
        Hello.decode(memoryview(payload)[:-MAC_BYTES])
    except ProtocolError:
        return False
    return True


class Listener:
    """Serves accepted sockets; one instance for all listening addresses."""

    def __init__(
        self,
        *,
        session: Session,
        registry: Registry,
        receivers: Receivers,
        auth_key: bytes | None,
        tls: TlsContext | None,
        num_learners: int,
        bounds: Bounds,
        adoption: Adoption | None = None,
    ) -> None:
        """Bring groups into ``registry`` and their facts to the pump; ``adoption`` sees HELLOs before it."""
        self._session = session
        self._adoption = adoption
        self._registry = registry
        self._receivers = receivers
        self._facts = receivers.facts
        self._auth_key = auth_key
        self._tls = tls
        self._bounds = bounds
        self._newcomers = Newcomers(bounds.pending_handshakes)
        # The last one is for all ids that there are not.
        self._allowances = tuple(Allowances() for _ in range(num_learners + 1))
        self._traffic = tuple(Traffic() for _ in range(num_learners + 1))

    def traffic(self) -> tuple[tuple[int, int], ...]:
        """Return the bytes received from and sent to each learner on all its connections; any thread may."""
        return tuple((one.received, one.sent) for one in self._traffic[:-1])

    def make_room(self) -> bool:
        """Close a stranger, if there is one."""
        return self._newcomers.make_room()

    async def serve(self, raw: trio.SocketStream) -> None:
        """Serve one accepted socket until it is over; the caller closes it then."""
        try:
            set_socket_options(raw)
        except OSError as error:
            log.debug("a connection was lost before it was served: %s", error)
            return
        plain = FrameStream(raw)
        with self._newcomers.place(plain.peer) as newcomer:
            group = None if newcomer is None else await self._introduced(raw, plain, newcomer)
        if group is None:
            return
        if underlying_socket(group.control.stream) is raw.socket:
            await self._attend(group)
        else:
            # Its life is the group's now; the socket must stay open until that has ended.
            await group.ended.wait()

    async def _introduced(
        self, raw: trio.SocketStream, plain: FrameStream, newcomer: Newcomer
    ) -> LearnerGroup | None:
        """Return the group that a socket starts or joins, or None when it is to be closed."""
        stream = plain
        try:
            with self._newcomers.silent(newcomer, self._bounds.handshake_seconds) as scope:
                await check_transport(raw, tls=self._tls is not None)
                if self._tls is not None:
                    stream = FrameStream(await accept_tls(raw, self._tls))
                introduced = await self._first_frame(stream)
        except (AuthenticationError, TransportMismatch) as error:
            if isinstance(error, TransportMismatch) and error.is_data_stream:
                await self._wait_for_end(stream, newcomer)
                return None
            log.warning("%s: %s; connection closed", newcomer.peer, error)
            await self._say_goodbye(stream, str(error), newcomer)
            return None
        except ProtocolError as error:
            log.warning("%s: %s; connection closed", newcomer.peer, error)
            return None
        except LinkRefused as error:
            log.warning("%s: %s; connection closed", newcomer.peer, error)
            # The alert that says so must not be lost behind what the peer has sent meanwhile.
            with self._newcomers.leaving(newcomer, self._bounds.farewell_seconds):
                await plain.close_after_peer(self._bounds.farewell_seconds)
            return None
        except LinkClosed as error:
            log.debug("%s: %s", newcomer.peer, error)
            return None
        if scope.cancelled_caught:
            if not newcomer.displaced:
                # A data socket waits for a group that was refused; when its learner has left, all is well.
                level = logging.DEBUG if await stream.ended() else logging.WARNING
                text = "%s did not say in time who it is, or not truly; connection closed"
                log.log(level, text, newcomer.peer)
            return None
        if isinstance(introduced, Hello):
            return await self._greet(stream, introduced, newcomer)
        return introduced

    async def _first_frame(self, stream: FrameStream) -> Hello | LearnerGroup:
        """Read who it is: a HELLO, or the group that a data socket was attached to."""
        header = await stream.read_header()
        HANDSHAKE.check(header)
        async with self._newcomers.memory(header.length):
            payload = bytearray()
            while len(payload) < header.length:
                payload += await stream.read_exact(min(PIECE_BYTES, header.length - len(payload)))
            if header.type is MessageType.HELLO:
                return self._metered(read_hello(payload, self._auth_key), stream.peer)
        data = DataHello.decode(payload)
        # It may overtake the HELLO of its own group, which travels on another socket.
        group = await self._registry.wait_for(
            Member(learner=data.learner, generation=format_generation(data.generation))
        )
        group.attach(data.stream, stream)
        return group

    def _allowances_of(self, hello: Hello) -> Allowances:
        return self._allowances[min(hello.learner, len(self._allowances) - 1)]

    def _metered(self, hello: Hello, peer: str) -> Hello:
        """Return a HELLO that may be told to the coordinator.

        Raises:
            LinkClosed: there were too many; it may come again later.
        """
        allowance = self._allowances_of(hello).of_dial(hello.generation)
        if not allowance.take():
            if allowance.refused == 1:
                log.warning(
                    "%s: learner %d dials too often (%g times at once, %g a second); connections closed",
                    peer,
                    hello.learner,
                    allowance.rate.burst,
                    allowance.rate.per_second,
                )
            raise LinkClosed("it dials too often")
        return hello

    async def _greet(self, stream: FrameStream, hello: Hello, newcomer: Newcomer) -> LearnerGroup | None:
        """Tell the coordinator of a HELLO; return the group it started, or None when it was refused."""
        group = LearnerGroup(
            stream,
            hello,
            receivers=self._receivers,
            allowances=self._allowances_of(hello),
            bounds=self._bounds,
            traffic=self._traffic[min(hello.learner, len(self._traffic) - 1)],
        )
        # Known before the coordinator hears of it, so that whatever it decides finds the group.
        registered = self._registry.add(group)
        # A fleet that comes back all at once would have every place taken by those who wait here.
        with self._newcomers.waiting_aside(newcomer):
            given_up = await self._given_up(stream, group)
        if given_up:
            log.info("%s: it had given up this dial; connection closed", group.name)
            self._registry.remove(group)
            group.ended.set()
            return None
        terms = terms_of(hello)
        misfit = None if self._adoption is None else await self._adoption.look_at(hello, terms)
        if misfit is not None:
            log.warning("%s refused: %s", group.name, misfit)
            self._registry.remove(group)
            try:
                await self._say_goodbye(stream, misfit, newcomer)
            finally:
                group.ended.set()
            return None
        refusal = await self._refusal(group, terms)
        if refusal is None and registered and self._session.fits(hello):
            return group
        self._registry.remove(group)
        try:
            if refusal is not None:
                await self._turn_away(stream, group, refusal, newcomer)
            else:
                reason = "its HELLO states other sizes than the session, under the same fingerprint"
                log.warning("%s: %s; connection closed", group.name, reason)
                await self._left(group, reason)
        finally:
            # Only now: the end of its data sockets must not overtake the reason on the control socket.
            group.ended.set()
        return None

    async def _refusal(self, group: LearnerGroup, terms: SessionTerms) -> LearnerRefused | None:
        """Tell the coordinator of a HELLO; return why it is refused, if it is."""
        learner, generation = group.member.learner, group.member.generation
        decisions = await self._facts.ask(
            HelloReceived(
                at=UNSTAMPED, learner=learner, generation=generation, address=group.address, terms=terms
            )
        )
        for decision in decisions:
            # What it decides may turn others away as well.
            if isinstance(decision, LearnerRefused) and (decision.learner, decision.generation) == (
                learner,
                generation,
            ):
                return decision
        return None

    async def _given_up(self, stream: FrameStream, group: LearnerGroup) -> bool:
        """Whether the learner of a HELLO has left already: its dial must not close the group of the next one.

        To close that by mistake would be for good: it is told of two processes with one id. So before it is
        closed this waits a moment for the end of the dial, which comes behind all that was said in it. Who
        comes back and really finds its old connection still here loses that moment.
        """
        until = trio.current_time() + self._bounds.second_look_seconds
        while not await stream.ended():
            if trio.current_time() >= until or not self._registry.has_other(group):
                return False
            await trio.sleep(LOOK_SECONDS)
        return True

    async def _turn_away(
        self, stream: FrameStream, group: LearnerGroup, refusal: LearnerRefused, newcomer: Newcomer
    ) -> None:
        text = refusal.why
        if refusal.permanent:
            if refusal.field in EXPLAINED:
                text = self._session.explain(refusal, await self._manifest(stream, group.hello))
            await self._say_goodbye(stream, text, newcomer)
        log.warning("%s refused: %s", group.name, text)

    async def _manifest(self, stream: FrameStream, hello: Hello) -> TrainingManifest | None:
        """Return the training manifest that follows a HELLO, when it comes in time."""
        with trio.move_on_after(self._bounds.manifest_seconds):
            try:
                header = await stream.read_header()
                if header.type is MessageType.MANIFEST and header.length <= MANIFEST_BYTES_MAX:
                    return await read_manifest(hello, await stream.read_exact(header.length))
            except (LinkClosed, ProtocolError) as error:
                log.debug("%s: no manifest: %s", stream.peer, error)
        return None

    async def _wait_for_end(self, stream: FrameStream, newcomer: Newcomer) -> None:
        """Let the peer hang up first: the end of a data stream must not overtake what control is told."""
        with self._newcomers.leaving(newcomer, self._bounds.farewell_seconds), suppress(LinkClosed):
            while True:
                await stream.discard(PIECE_BYTES)

    async def _say_goodbye(self, stream: FrameStream, text: str, newcomer: Newcomer) -> None:
        """Send an ERROR and give the peer time to read it."""
        error = ErrorMessage(text=text)
        with self._newcomers.leaving(newcomer, self._bounds.farewell_seconds):
            try:
                await stream.send(error.TYPE, error.encode())
            except LinkClosed:
                return
            await stream.close_after_peer(self._bounds.farewell_seconds)

    async def _attend(self, group: LearnerGroup) -> None:
        """Serve a group that the coordinator has taken, and tell it when the group joins and leaves."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._join, group)
                reason = await group.run()
                nursery.cancel_scope.cancel()
        finally:
            self._registry.remove(group)
            group.ended.set()
        log.info("%s left: %s", group.name, reason)
        await self._left(group, reason)

    async def _join(self, group: LearnerGroup) -> None:
        with trio.move_on_after(self._bounds.handshake_seconds):
            await group.completed()
            await self._facts.tell(
                LearnerJoined(at=UNSTAMPED, learner=group.member.learner, generation=group.member.generation)
            )
            log.info("%s joined with %d data streams", group.name, group.hello.num_streams)
            return
        group.refuse(f"not all of its {group.hello.num_streams} data streams came in time", permanent=False)

    async def _left(self, group: LearnerGroup, reason: str) -> None:
        await self._facts.tell(
            LearnerLeft(
                at=UNSTAMPED,
                learner=group.member.learner,
                generation=group.member.generation,
                reason=reason,
            )
        )

"""The door: sockets come in, introduce themselves in time, and become parts of groups, or go.

Until a socket has said who it is, it is a stranger. Strangers are bounded in number, in time and in bytes,
and nothing is allocated because of what they claim: a first frame is read piece by piece, as it arrives.
With a key a HELLO is authenticated before one field of it is parsed, and a data socket joins only the
generation of an authenticated HELLO.

Whom to take and whom to refuse is the coordinator's to say. Refused here are only bytes that are no HELLO
and HELLOs that are not authentic; each costs one line of log with the peer's address, and nobody else
notices.
"""

from __future__ import annotations

import logging
from typing import Final

import trio

from yeto.core.decisions import LearnerRefused
from yeto.core.events import HelloReceived, LearnerJoined, LearnerLeft
from yeto.core.values import Member, SessionTerms
from yeto.errors import ProtocolError
from yeto.link import FrameStream, LinkClosed, set_socket_options
from yeto.syncer.config import Bounds
from yeto.syncer.group import LearnerGroup, read_manifest
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
"""How much of a first frame is read at a time: what a stranger can make us hold before it has sent it."""


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
        bounds: Bounds,
    ) -> None:
        """Bring groups into ``registry`` and their facts to the pump."""
        self._session = session
        self._registry = registry
        self._receivers = receivers
        self._facts = receivers.facts
        self._auth_key = auth_key
        self._bounds = bounds
        self._strangers: set[FrameStream] = set()
        # Those among them that have said nothing yet, longest silence first.
        self._silent: dict[FrameStream, trio.CancelScope] = {}

    async def serve(self, raw: trio.SocketStream) -> None:
        """Serve one accepted socket until it is closed; Trio closes it when this returns."""
        if len(self._strangers) >= self._bounds.pending_handshakes and not self._make_room():
            log.warning(
                "a connection was closed: all places for newcomers (%d) are taken", len(self._strangers)
            )
            return
        try:
            set_socket_options(raw)
        except OSError as error:
            log.debug("a connection was lost before it was served: %s", error)
            return
        # A TLS handshake would wrap the stream here, inside the same limits.
        stream = FrameStream(raw)
        self._strangers.add(stream)
        try:
            group = await self._introduced(stream)
        finally:
            self._strangers.discard(stream)
        if group is None:
            return
        if group.control is stream:
            await self._attend(group)
        else:
            # Its life is the group's now; the socket must stay open until that has ended.
            await group.ended.wait()

    def _make_room(self) -> bool:
        """Close the stranger that has been silent longest; False when none of them is silent.

        Whoever has something to say says it at once. So sockets that say nothing, however many come, cannot
        keep learners out, which they would if the newest had to go.
        """
        if not self._silent:
            return False
        longest = next(iter(self._silent))
        others = len(self._strangers)
        log.warning("%s did not say who it is before %d others came; connection closed", longest.peer, others)
        self._strangers.remove(longest)
        self._silent.pop(longest).cancel()
        return True

    async def _introduced(self, stream: FrameStream) -> LearnerGroup | None:
        """Return the group that a socket starts or joins, or None when it is to be closed."""
        peer = stream.peer
        introduced: Hello | LearnerGroup | None = None
        displaced = False
        try:
            with trio.move_on_after(self._bounds.handshake_seconds) as scope:
                self._silent[stream] = scope
                try:
                    introduced = await self._first_frame(stream)
                finally:
                    displaced = self._silent.pop(stream, None) is None
        except AuthenticationError as error:
            log.warning("%s: %s; connection closed", peer, error)
            await self._say_goodbye(stream, str(error))
            return None
        except ProtocolError as error:
            log.warning("%s: %s; connection closed", peer, error)
            return None
        except LinkClosed as error:
            log.debug("%s: %s", peer, error)
            return None
        if introduced is None and not displaced:
            # A data socket waits for a group that was refused; when its learner has left, all is well.
            level = logging.DEBUG if await stream.ended() else logging.WARNING
            log.log(level, "%s did not say in time who it is, or not truly; connection closed", peer)
        if isinstance(introduced, Hello):
            return await self._greet(stream, introduced)
        return introduced

    async def _first_frame(self, stream: FrameStream) -> Hello | LearnerGroup:
        """Read who it is: a HELLO, or the group that a data socket was attached to."""
        header = await stream.read_header()
        HANDSHAKE.check(header)
        payload = bytearray()
        while len(payload) < header.length:
            payload += await stream.read_exact(min(PIECE_BYTES, header.length - len(payload)))
        if header.type is MessageType.HELLO:
            return read_hello(payload, self._auth_key)
        data = DataHello.decode(payload)
        # It may overtake the HELLO of its own group, which travels on another socket.
        group = await self._registry.wait_for(
            Member(learner=data.learner, generation=format_generation(data.generation))
        )
        group.attach(data.stream, stream)
        return group

    async def _greet(self, stream: FrameStream, hello: Hello) -> LearnerGroup | None:
        """Tell the coordinator of a HELLO; return the group it started, or None when it was refused."""
        if await stream.ended():
            # A dial that its learner has given up must not close the group of the next one.
            return None
        group = LearnerGroup(stream, hello, receivers=self._receivers, bounds=self._bounds)
        # Known before the coordinator hears of it, so that whatever it decides finds the group.
        registered = self._registry.add(group)
        decisions = await self._facts.ask(
            HelloReceived(
                at=UNSTAMPED,
                learner=group.member.learner,
                generation=group.member.generation,
                address=group.address,
                terms=SessionTerms(
                    dtype=hello.dtype,
                    num_fragments=len(hello.layout.fragments),
                    fingerprint=hello.fingerprint.hex(),
                    contract=hello.contract.hex(),
                    profile=None if hello.profile is None else hello.profile.hex(),
                ),
            )
        )
        refusal = next(
            (
                decision
                for decision in decisions
                if isinstance(decision, LearnerRefused)
                and (decision.learner, decision.generation) == (group.member.learner, group.member.generation)
            ),
            None,
        )
        if refusal is None and registered and self._session.fits(hello):
            return group
        self._registry.remove(group)
        try:
            if refusal is not None:
                await self._turn_away(stream, group, refusal)
            else:
                reason = "its HELLO states other sizes than the session, under the same fingerprint"
                log.warning("%s: %s; connection closed", group.name, reason)
                await self._left(group, reason)
        finally:
            # Only now: the end of its data sockets must not overtake the reason on the control socket.
            group.ended.set()
        return None

    async def _turn_away(self, stream: FrameStream, group: LearnerGroup, refusal: LearnerRefused) -> None:
        text = refusal.why
        if refusal.permanent:
            if refusal.field in EXPLAINED:
                text = self._session.explain(refusal, await self._manifest(stream, group.hello))
            await self._say_goodbye(stream, text)
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

    async def _say_goodbye(self, stream: FrameStream, text: str) -> None:
        """Send an ERROR and give the peer time to read it."""
        error = ErrorMessage(text=text)
        with trio.move_on_after(self._bounds.farewell_seconds):
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

"""What a syncer's door tells a learner that does not mean to come in.

The protocol has no message for that and needs none. The door judges a HELLO before anybody else hears of it,
and tells by how it turns one away. So two HELLOs are made that no syncer takes: nothing of them reaches the
coordinator or the tape, and no learner is replaced by them.

* The *stale* one is of a version that nobody speaks, with this learner's mac. The mac is compared before any
  field is looked at: ERROR says that the keys differ, an end without a word that they do not.
  Whatever stands behind the version is not read, so it can be long: round trip and bandwidth are its times.
* The *false* one is of today's version and has 32 bytes behind it that are nobody's mac. A syncer with a key
  answers that with ERROR, one without answers that it has none; whatever else listens there says neither.
"""

from __future__ import annotations

import os
import statistics
import struct
from typing import Final

import trio
from attrs import frozen

from yeto.learner.last_words import refusal
from yeto.link import Dialler, LinkClosed, LinkRefused
from yeto.wire.auth import MAC_BYTES, REFUSAL, hello_mac
from yeto.wire.frames import PROTOCOL_VERSION, MessageType
from yeto.wire.hello import HASH_BYTES, HELLO_BYTES_MAX, Hello, HelloFragment, HelloLayout
from yeto.wire.layout import MergeMode
from yeto.wire.legality import Legality
from yeto.wire.messages import ERROR_BYTES_MAX, ErrorMessage

NOBODYS_VERSION: Final = 0xFFFF
"""Of a stale HELLO; the greatest there can be, so it stays nobody's."""

NOBODYS_LEARNER: Final = 2**32 - 1
"""Of a false HELLO: no syncer has so many learners."""

ANSWER_SECONDS: Final = 10.0
"""Within which a question is asked and answered; a syncer reads a first frame no longer."""

ROUND_TRIPS: Final = 3
"""Stale HELLOs whose median is the round trip."""

FIRST_BYTES: Final = 64 * 1024
"""Of the first HELLO that measures bandwidth."""

GROWTH: Final = (2, 16)
"""How many times longer the next one is, at least and at most: so long that it should be enough."""

ENOUGH_SECONDS: Final = (0.5, 3.0)
"""Least and most that one must take for its rate to be believed: ten round trips, within these. A connection
begins slowly and is twice as fast after each round trip, so a shorter one shows that beginning. One that
takes twice the most still arrives in the time that a syncer gives it."""

ENOUGH_ROUND_TRIPS: Final = 10
"""After so many a connection that doubles with each is a thousand times as fast as it began."""

_ANSWER: Final = Legality("learner, answer to a HELLO", {MessageType.ERROR: (0, ERROR_BYTES_MAX)})


@frozen(kw_only=True)
class Answer:
    """How the door turned a HELLO away."""

    error: bytes | None
    """Payload of its ERROR; None when it closed the connection without one."""
    seconds: float
    """From the first byte of the HELLO to the answer."""


@frozen(kw_only=True)
class Rate:
    """How fast one connection carried bytes to the syncer, its slow beginning included."""

    bytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """The rate."""
        return self.bytes / self.seconds


class Probe:
    """Asks at one address, each time on a fresh connection; used inside ``trio.run``."""

    def __init__(self, dialler: Dialler, key: bytes | None) -> None:
        """Prepare.

        Args:
            dialler: opens the connections.
            key: this learner's.
        """
        self._dialler = dialler
        self._key = key

    async def authenticate(self) -> bool:
        """Return whether the syncer asks for a key; it takes this learner's, if it does.

        Raises:
            PermanentFailure: it does not, or one side has a key and the other has none.
            LinkRefused: one side does not take the other's TLS.
            LinkClosed: no answer, or what answers is no syncer of this protocol.
            ProtocolError: what answers speaks something else.
        """
        answer = await self._ask(stale_hello(self._key))
        if answer.error is not None:
            raise refusal(answer.error)
        answer = await self._ask(false_hello())
        if answer.error is None:
            raise LinkClosed(
                f"what listens there takes connections and closes them, which no syncer of protocol version "
                f"{PROTOCOL_VERSION} does"
            )
        asks = ErrorMessage.decode(answer.error).text == REFUSAL
        if self._key is not None and not asks:
            raise refusal(answer.error)
        return asks

    async def round_trip(self) -> float:
        """Return the seconds from a short HELLO to its answer; ``authenticate`` was before.

        Raises:
            LinkClosed: no answer.
        """
        return statistics.median([await self._pass(stale_hello(self._key)) for _ in range(ROUND_TRIPS)])

    async def rate(self, round_trip_seconds: float) -> Rate:
        """Return how fast one connection carries bytes to the syncer; takes some 2 to 10 seconds at most.

        Raises:
            LinkClosed: not even the first HELLO arrived in the time that a syncer gives it.
        """
        least, most = ENOUGH_SECONDS
        enough = min(max(least, ENOUGH_ROUND_TRIPS * round_trip_seconds), most)
        size = FIRST_BYTES
        while True:
            took = await self._pass(stale_hello(self._key, size))
            # The end of what was sent is where the answer's way back begins.
            seconds = max(took - round_trip_seconds, took / 2)
            if seconds >= enough or size >= HELLO_BYTES_MAX:
                return Rate(bytes=size, seconds=seconds)
            least_growth, most_growth = GROWTH
            growth = min(max(least_growth, round(1.5 * enough / seconds)), most_growth)
            size = min(growth * size, HELLO_BYTES_MAX)

    async def _pass(self, hello: bytes) -> float:
        """Return how long a stale HELLO took, all of which arrived."""
        answer = await self._ask(hello)
        if answer.error is not None:
            raise refusal(answer.error)
        return answer.seconds

    async def _ask(self, hello: bytes) -> Answer:
        with trio.move_on_after(ANSWER_SECONDS):
            stream = await self._dialler.open()
            try:
                begun = trio.current_time()
                await stream.send(MessageType.HELLO, hello)
                error: bytes | None = None
                try:
                    header = await stream.read_header()
                    _ANSWER.check(header)
                    error = await stream.read_exact(header.length, "an ERROR")
                except LinkRefused:
                    raise
                except LinkClosed as end:
                    # With a cause it is the network's: the syncer may not have read all.
                    if end.__cause__ is not None:
                        raise
                return Answer(error=error, seconds=trio.current_time() - begun)
            finally:
                await stream.close()
        raise LinkClosed(
            f"{len(hello):,} bytes were not answered within {ANSWER_SECONDS:.0f} s: the link was lost, or is "
            "too slow"
        )


def stale_hello(key: bytes | None, size: int = 0) -> bytes:
    """Return the payload of a HELLO that is true and of no use.

    Args:
        key: this learner's.
        size: bytes of the payload, if it is to be longer than it has to be.
    """
    body = struct.pack("<H", NOBODYS_VERSION)
    mac_bytes = 0 if key is None else MAC_BYTES
    # Random, because a link may compress.
    body += os.urandom(max(0, size - len(body) - mac_bytes))
    return body if key is None else body + hello_mac(key, body)


def false_hello() -> bytes:
    """Return the payload of a HELLO with a mac that is nobody's.

    It states a profile: read without a key, its last 32 bytes can then be nothing but a mac.
    """
    hello = Hello(
        learner=NOBODYS_LEARNER,
        generation=1,
        dtype="f32",
        layout=HelloLayout(fragments=(HelloFragment(mode=MergeMode.AVG, numels=(1,)),)),
        fingerprint=bytes(HASH_BYTES),
        contract=bytes(HASH_BYTES),
        profile=bytes(HASH_BYTES),
        num_streams=0,
    )
    return hello.encode() + bytes(MAC_BYTES)

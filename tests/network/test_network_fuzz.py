"""Anything in any order on the sockets of a running syncer: it lives, and the others go on.

A guest with the right contract, a wrong one or none at all dials, joins streams that are or are not its own,
sends frames that are legal, nearly legal or nonsense, whole or in part, and hangs up or does not. Its pushes
are for rounds that are really open, so what they say gets as far as anything a learner says. Two healthy
learners must go on committing, the tape must replay, and the syncer's next start must go on from its
checkpoint.
"""

import contextlib
import socket
import struct
import tempfile
from pathlib import Path

import attrs
import numpy as np
import trio
from fake_learner import FakeLearner
from hypothesis import given, settings
from hypothesis import strategies as st
from syncer_runs import BOUNDS, bodies, fakes, make_config, running, until

from yeto.core import decisions as de
from yeto.wire import messages
from yeto.wire.frames import MessageType, encode_header
from yeto.wire.hello import HelloFragment, HelloLayout
from yeto.wire.layout import MergeMode
from yeto.wire.messages import COUNTER_MAX

NUMEL = {0: 40, 1: 58, 2: 58}
GUEST = 2
QUICK = attrs.evolve(BOUNDS, handshake_seconds=5.0, manifest_seconds=0.1, farewell_seconds=0.1)

counters = st.sampled_from([0, 1, 2, 7, 2**31, COUNTER_MAX, COUNTER_MAX + 1, 2**64 - 1])
small = st.sampled_from([0, 1, 2, 3, 2**32 - 1])


def frame(kind, payload, claimed=None):
    return encode_header(kind, len(payload) if claimed is None else claimed) + payload


@st.composite
def pushes(draw):
    """A push: fields as the open round has them, but for some; values that may be no numbers."""
    return {
        "kind": "push",
        "fragment": draw(st.sampled_from([0, 1, 2, 2, 9])),
        "learner": draw(st.sampled_from([GUEST, GUEST, GUEST, 0])),
        "wrong_step": draw(st.sampled_from([0, 0, 0, 1, 2**40])),
        "attempt": draw(st.sampled_from([None, None, 1, 2, 0, 2**32 - 1])),
        "base": draw(st.sampled_from([None, None, 0, COUNTER_MAX, 2**53])),
        "local_step": draw(counters),
        "c_steps": draw(small),
        "c_tokens": draw(counters),
        "value": draw(st.sampled_from([0.0, 0.01, -1e30, 3e38, float("nan"), float("inf")])),
        "short": draw(st.sampled_from([0, 0, 0, 0, 4])),
        "sliced": draw(st.booleans()),
        "number": draw(st.sampled_from([None, None, 0, 5000, 2**64 - 1])),
    }


@st.composite
def small_frames(draw):
    """A frame of any type with a payload that may fit it."""
    kind = draw(st.sampled_from(MessageType))
    payload = draw(
        st.one_of(
            st.builds(lambda a, b: struct.pack("<IQ", a, b), small, counters),
            st.builds(lambda a, b: struct.pack("<HQ", a, b), st.sampled_from([0, 1, 2]), counters),
            st.builds(lambda a: struct.pack("<Q", a), counters),
            st.binary(max_size=60),
            st.just(b'{"binding":{},"merge_alpha":0.5,"fragments":[]}'),
        )
    )
    claimed = draw(st.sampled_from([None, None, None, 0, 2**22 + 24, 2**40, 2**64 - 1]))
    return {"kind": "bytes", "data": frame(kind, payload, claimed)}


ACTIONS = st.one_of(
    st.fixed_dictionaries(
        {
            "kind": st.just("dial"),
            "learner": st.sampled_from([GUEST, GUEST, GUEST, GUEST, 3, 2**32 - 1]),
            "generation": st.integers(1, 40),
            "streams": st.sampled_from([0, 0, 1, 2, 256]),
            "wrong": st.sampled_from([None, None, None, "dtype", "contract", "sizes", "huge"]),
            "complete": st.booleans(),
        }
    ),
    st.fixed_dictionaries(
        {"kind": st.just("join"), "generation": st.integers(1, 5), "stream": st.sampled_from([1, 2, 3, 256])}
    ),
    pushes(),
    pushes(),
    small_frames(),
    st.fixed_dictionaries({"kind": st.just("bytes"), "data": st.binary(min_size=1, max_size=80)}),
    st.fixed_dictionaries({"kind": st.sampled_from(["close", "reset", "cut"])}),
)
HONEST = {"kind": "dial", "learner": GUEST, "generation": 99, "streams": 1, "wrong": None, "complete": True}
SCRIPTS = st.lists(st.tuples(ACTIONS, st.integers(0, 7)), min_size=4, max_size=24)
"""What the guest does behind an honest dial, each with the socket that it does it on."""


class Guest:
    """Whoever dials: its sockets, and what it knows of the rounds from a healthy learner."""

    def __init__(self, address, healthy):
        self.address = address
        self.healthy = healthy
        self.open = []
        self.sent = 0
        self._numbers = 0
        self._dialled = FakeLearner(learner=GUEST, layout=healthy.layout)

    async def play(self, script):
        for action, which in [(HONEST, 0), *script]:
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError, OSError):
                await self._do(action, which)
            # A learner that has dialled is in the next round; the healthy answer that in their time.
            await trio.sleep(0.06 if action["kind"] == "dial" else 0.0)

    async def _do(self, action, which):
        match action["kind"]:
            case "dial":
                await self._dial(action)
            case "join":
                await self._join(action["generation"], action["stream"])
            case "push":
                await self._send(which, self._push(action))
            case "bytes":
                await self._send(which, action["data"])
            case "cut":
                await self._send(which, frame(MessageType.HEARTBEAT, bytes(12))[:-3])
                await self._close(which)
            case "close":
                await self._close(which)
            case "reset" if self.open:
                stream = self.open[which % len(self.open)]
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                await self._close(which)

    async def _dial(self, action):
        self._dialled.generation = action["generation"]
        self._dialled.num_streams = action["streams"]
        hello = attrs.evolve(self._dialled.hello(), learner=action["learner"])
        match action["wrong"]:
            case "dtype":
                hello = attrs.evolve(hello, dtype="q4")
            case "contract":
                hello = attrs.evolve(hello, contract=bytes(32))
            case "sizes" | "huge":
                numel = 2**40 if action["wrong"] == "huge" else 41
                part = HelloFragment(mode=MergeMode.AVG, numels=(numel,))
                hello = attrs.evolve(hello, layout=HelloLayout(fragments=(part,) * 3))
        stream = await self._connect()
        await stream.send_all(frame(hello.TYPE, hello.encode()))
        self._numbers = 0
        if action["complete"]:
            for index in range(1, min(action["streams"], 3) + 1):
                await self._join(action["generation"], index)

    async def _join(self, generation, index):
        stream = await self._connect()
        hello = messages.DataHello(learner=GUEST, generation=generation, stream=index)
        await stream.send_all(frame(hello.TYPE, hello.encode()))

    async def _connect(self):
        stream = await trio.open_tcp_stream(self.address.host, self.address.port)
        self.open.append(stream)
        return stream

    async def _send(self, which, data):
        """Send on one of the sockets; the syncer need not read it all, nor at once."""
        if self.open:
            with trio.move_on_after(0.05):
                await self.open[which % len(self.open)].send_all(data)
                self.sent += len(data)

    async def _close(self, which):
        if self.open:
            await self.open.pop(which % len(self.open)).aclose()

    def _push(self, action):
        fragment = action["fragment"]
        pull = next((p for p in reversed(self.healthy.pulls) if p.fragment == fragment), None)
        step, attempt = (1, 1) if pull is None else (pull.step, pull.attempt)
        base = self.healthy._anchors.get(fragment, 0) if action["base"] is None else action["base"]
        head = struct.pack(
            "<IIQIQQIQ",
            action["learner"],
            fragment,
            step + action["wrong_step"],
            attempt if action["attempt"] is None else action["attempt"],
            base,
            action["local_step"],
            action["c_steps"],
            action["c_tokens"],
        )
        tensor = np.full(NUMEL.get(fragment, 40), action["value"], np.float32).tobytes()
        inner = frame(MessageType.PUSH_FRAGMENT, head + tensor[: len(tensor) - action["short"]])
        if not action["sliced"]:
            return inner
        number = self._numbers if action["number"] is None else action["number"]
        self._numbers += 1
        return frame(MessageType.CHUNK, struct.pack("<QQQ", number, len(inner), 0) + inner)


async def think(learner, pull):
    """Leave the guest time to answer, too."""
    await trio.sleep(0.03)
    return True


async def committed(learner, more):
    """Wait until a learner has got so many more broadcasts."""
    wanted = len(learner.versions) + more
    await until(lambda: len(learner.versions) >= wanted)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(SCRIPTS)
async def test_whatever_a_guest_does_the_others_go_on(script):
    with tempfile.TemporaryDirectory() as folder:
        core = {"num_learners": 3, "total_steps": 10**6, "checkpoint_every": 3}
        config = make_config(Path(folder), bounds=QUICK, **core)
        steady = fakes(before_push=think)
        async with running(config, *steady) as run:
            await committed(steady[0], 4)
            guest = Guest(run.address, steady[0])
            await guest.play(script)
            await committed(steady[0], 4)
            for stream in guest.open:
                await stream.aclose()
            await committed(steady[0], 2)
        assert [learner.dials for learner in steady] == [1, 1]
        resumed = make_config(Path(folder), bounds=QUICK, resume=True, **core)
        async with running(resumed, *(again := fakes())):
            await committed(again[0], 5)
        for commit in bodies(config.event_tape, de.RoundCommitted):
            assert {0, 1} <= {responder.learner for responder in commit.responders} | set(commit.missed)

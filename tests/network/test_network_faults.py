"""What one learner's network does is felt by that learner alone."""

import math

import attrs
import numpy as np
import pytest
from fake_learner import FakeLearner, small_layout
from fault_proxy import fault_proxy
from faults import DOWN, Corrupt, Rate
from syncer_runs import BOUNDS, bodies, fakes, held_back, make_config, running, until
from tls_authority import Authority

from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.wire.frames import MessageType

M = MessageType
GUEST = 2


def at_push(offset):
    return {"frame": M.PUSH_FRAGMENT, "at": offset}


CORRUPT = [
    # Which byte is turned over, and the beginning of what the syncer says about it.
    (at_push(1), "frame header: magic 0xd1703fde"),
    (at_push(4), "frame header: unknown message type 246"),
    (at_push(10), "CHUNK of 280375465083"),
    (at_push(15), "message 16711680 is too far ahead"),
    (at_push(21), "slice of 221 bytes at offset 0 of message 0 (34 bytes)"),
    (at_push(31), "CHUNK: offset 16711680 must lie below"),
    (at_push(38), "frame header: magic"),
    (at_push(41), "frame header: unknown message type 251"),
    (at_push(42), "PUSH_FRAGMENT of 47 bytes"),
    (at_push(50), "PUSH_FRAGMENT: learner 253 on the connection of learner 2"),
    (at_push(54), "PUSH_FRAGMENT: fragment 255"),
    (at_push(65), "PUSH_FRAGMENT: step"),
    ({"frame": M.HEARTBEAT, "at": 13}, "HEARTBEAT: learner 253 on the connection of learner 2"),
    ({"frame": M.HEARTBEAT, "at": 24}, "HEARTBEAT: local_step"),
]


async def test_a_corrupt_byte_ends_its_group_and_no_other(tmp_path):
    config = make_config(tmp_path, num_learners=3, total_steps=3, final_ack_timeout_seconds=0.2)
    steady = fakes()
    told = held_back(steady)

    def reasons():
        return [left.reason for left in bodies(config.event_tape, ev.LearnerLeft) if left.learner == GUEST]

    async def push(guest):
        head, tensor = guest.push_message(steady[0].pulls[0], 0)
        guest.group.outbox.put(head, tensor, order=(1,))

    async with (
        running(config, *steady) as run,
        fault_proxy((run.address.host, run.address.port)) as proxy,
    ):
        await until(lambda: all(learner.pulls for learner in steady))
        for count, (where, _) in enumerate(CORRUPT, start=1):
            proxy.declare(Corrupt(learner=GUEST, **where))
            guest = FakeLearner(learner=GUEST, num_streams=1, on_connected=push)
            await guest.run(proxy.host, proxy.port)
            await until(lambda count=count: len(reasons()) == count)
        told.set()
        await run.end()
    assert [learner.dials for learner in steady] == [1, 1]
    assert [commit.step for commit in bodies(config.event_tape, de.RoundCommitted)] == [1, 2, 3]
    for reason, (where, expected) in zip(reasons(), CORRUPT, strict=True):
        assert reason.startswith(expected), where


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    authority = Authority(tmp_path_factory.mktemp("tls"))
    return authority.server(), authority.client()


async def test_with_tls_no_byte_can_be_changed(tmp_path, tls):
    """Not one of a tensor either, which nothing else protects."""
    server, client = tls
    config = make_config(tmp_path, num_learners=3, total_steps=3, final_ack_timeout_seconds=0.2, tls=server)
    steady = fakes(tls=client)
    guest = FakeLearner(learner=GUEST, num_streams=0, tls=client)

    async def wait(learner, pull):
        await until(lambda: guest.closed)
        return True

    for learner in steady:
        learner.before_push = wait
    async with (
        running(config, *steady) as run,
        fault_proxy((run.address.host, run.address.port), Corrupt(at=2_500)) as proxy,
    ):
        await until(lambda: all(learner.pulls for learner in steady))

        async def push(guest):
            for number in range(60):
                guest.group.outbox.put_control(
                    M.HEARTBEAT, bytes([GUEST, 0, 0, 0]) + number.to_bytes(8, "little")
                )

        guest.on_connected = push
        await guest.run(proxy.host, proxy.port)
        await run.end()
    assert [learner.dials for learner in steady] == [1, 1]
    (left,) = (left for left in bodies(config.event_tape, ev.LearnerLeft) if left.learner == GUEST)
    assert "bad record mac" in left.reason


async def test_a_slow_reader_has_a_way_of_its_own(tmp_path, skipping_clock):
    """By the time it has got one broadcast whole, the others have had all of theirs."""
    layout = small_layout(num_fragments=2, numel=1 << 20)
    config = make_config(
        tmp_path,
        bounds=attrs.evolve(BOUNDS, silence_seconds=math.inf),
        num_learners=3,
        total_steps=6,
        final_ack_timeout_seconds=3600.0,
        closing_sweep="off",
    )
    steady = fakes(layout=layout)
    for learner in steady:
        learner.initial = [np.zeros(part.numel, np.float32) for part in layout.fragments]
    steady[1].initial = None
    slow = FakeLearner(learner=GUEST, layout=layout, num_streams=1)
    rate = Rate(frame=M.BCAST_FRAGMENT, direction=DOWN, bytes_per_second=200_000)
    async with (
        running(config) as run,
        fault_proxy((run.address.host, run.address.port), rate) as proxy,
    ):
        run.nursery.start_soon(slow.run, proxy.host, proxy.port)
        for learner in steady:
            run.join(learner)
        await until(lambda: len(bodies(config.event_tape, ev.FinalAckReceived)) == 2)
        await until(lambda: [len(learner.versions) for learner in steady] == [8, 8])
        assert len(slow.versions) <= 1
        # The slow one would have its final cut in a minute.
        skipping_clock.jump(config.core.final_ack_timeout_seconds)
        assert await run.end() == 3
    assert [learner.dials for learner in (*steady, slow)] == [1, 1, 1]
    (ended,) = bodies(config.event_tape, de.SessionEnded)
    assert f"learner {GUEST}" in ended.why

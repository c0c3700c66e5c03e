"""Peers that lie, flood, stop or leave in the middle: the run of the others never notices.

What may be lied about is a layout, a length, a slice, a header, an identity. Every one of these runs ends as
if the liar had not been there, and the tape of each replays.
"""

import contextlib
import functools
import json
import struct
import threading

import attrs
import numpy as np
import pytest
import trio
from dialled import dial
from fake_learner import FakeLearner
from syncer_runs import HANGS_SECONDS, bodies, fakes, held_back, make_config, on_tape, running, until

from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.link import LinkClosed
from yeto.wire.frames import HEADER_BYTES, SLICE_BYTES, MessageType, encode_header
from yeto.wire.hello import HelloFragment, HelloLayout
from yeto.wire.layout import MergeMode
from yeto.wire.legality import MANIFEST_BYTES_MAX
from yeto.wire.messages import FRAGMENT_NUMEL_MAX, ChunkHeader, InitHeader


async def test_a_layout_of_terabytes_ends_its_own_group(tmp_path, monkeypatch):
    """Learner 0 opens the session, so it may claim any size; its first value finds no memory."""
    empty = np.empty

    @functools.wraps(empty)  # whose docstring numpy wants to find when parts of it are loaded late
    def as_most_systems(shape, *how, **more):
        """Some promise memory that they do not have."""
        if isinstance(shape, int) and shape > FRAGMENT_NUMEL_MAX:
            raise MemoryError
        return empty(shape, *how, **more)

    monkeypatch.setattr("yeto.link.inbox.np.empty", as_most_systems)
    config = make_config(tmp_path, total_steps=3)
    liar = FakeLearner(learner=0, num_streams=0, generation=7)
    huge = HelloLayout(fragments=(HelloFragment(mode=MergeMode.AVG, numels=(FRAGMENT_NUMEL_MAX,)),))
    payload_bytes = InitHeader.BYTES + 4 * FRAGMENT_NUMEL_MAX
    inner = encode_header(MessageType.INIT_PARAMS, payload_bytes) + InitHeader(fragment=0).encode()
    chunk = ChunkHeader(message_id=0, total=HEADER_BYTES + payload_bytes, offset=0)
    async with running(config) as run:
        (control,) = await dial(run.address.host, run.address.port, 0)
        await control.send(MessageType.HELLO, attrs.evolve(liar.hello(), layout=huge).encode())
        with contextlib.suppress(LinkClosed):  # the syncer need not read the whole slice
            await control.send(MessageType.CHUNK, chunk.encode(), inner, bytes(SLICE_BYTES - len(inner)))
        await until(on_tape(config, ev.LearnerLeft))
        await control.close()
        for learner in fakes():
            run.join(learner)
        assert await run.end() == 0
    assert bodies(config.event_tape, ev.LearnerLeft)[0].reason.startswith("no memory for a tensor of ")


async def left_by(tmp_path, say):
    """Return why a guest was sent away who says something while the two learners that are needed are there.

    Args:
        tmp_path: folder of the run, which is whole and ends as if the guest had not been there.
        say: told the guest, whose group is complete; puts frames on its way.
    """
    config = make_config(tmp_path, num_learners=3, total_steps=3, final_ack_timeout_seconds=0.2)
    guest = FakeLearner(learner=2, sends_manifest=False)
    steady = fakes()

    async def wait(learner, pull):
        await until(lambda: guest.closed)
        return True

    async def connected(guest):
        say(guest)

    guest.on_connected = connected
    for learner in steady:
        learner.before_push = wait
    async with running(config, *steady) as run:
        await until(lambda: all(learner.pulls for learner in steady))
        run.join(guest)
        await run.end()
    assert [learner.dials for learner in steady] == [1, 1]
    assert [commit.step for commit in bodies(config.event_tape, de.RoundCommitted)] == [1, 2, 3]
    (left,) = (left for left in bodies(config.event_tape, ev.LearnerLeft) if left.learner == 2)
    return left.reason


def manifest_bytes(binding):
    return json.dumps({"binding": binding, "fragments": [], "merge_alpha": 0.5}).encode()


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"[" * MANIFEST_BYTES_MAX, "MANIFEST: no strict JSON (nested too deeply)"),
        (
            manifest_bytes({"a": [[[[[[[[1]]]]]]]]}),
            "MANIFEST: nested too deeply, at most 8 levels are allowed",
        ),
        (b'{"a":' + b"9" * 900_000 + b"}", "MANIFEST: no strict JSON (Exceeds the limit"),
        (manifest_bytes({}), "MANIFEST: fragments must be a list that is not empty"),
        (manifest_bytes({"k" * 900_000: 1.5}), "MANIFEST: binding.kkk"),
        (
            manifest_bytes({"model\nlearner 0 left": 1.5}),
            "MANIFEST: binding.model\\nlearner 0 left: 1.5 is a float",
        ),
    ],
    ids=["brackets", "levels", "digits", "empty", "key", "line"],
)
async def test_a_manifest_that_is_none_is_told_in_a_sentence(tmp_path, payload, reason, caplog):
    told = await left_by(
        tmp_path, lambda guest: guest.group.outbox.put_control(MessageType.MANIFEST, payload)
    )
    assert told.startswith(reason)
    assert len(told) < 600
    (line,) = (r.getMessage() for r in caplog.records if "broke the protocol" in r.getMessage())
    assert told in line
    assert "\n" not in line


async def test_a_second_manifest_ends_the_group(tmp_path):
    def say(guest):
        for _ in range(2):
            guest.group.outbox.put_control(MessageType.MANIFEST, guest.manifest.encode())

    assert (await left_by(tmp_path, say)).startswith("MANIFEST: it was sent before")


async def test_nobody_waits_for_the_reading_of_a_manifest(tmp_path, monkeypatch):
    """It can have tens of thousands of tensors; here it takes as long as the whole run of the others."""
    over = threading.Event()
    monkeypatch.setattr("yeto.syncer.group.checked_manifest", lambda hello, payload: over.wait(HANGS_SECONDS))
    config = make_config(tmp_path, num_learners=3, total_steps=3, wait_for=3, final_ack_timeout_seconds=0.2)
    guest = FakeLearner(learner=2, on_connected=None)
    steady = fakes(sends_manifest=False)

    async def never(learner, pull):
        return False

    guest.before_push = never
    try:
        async with running(config, *steady, guest) as run:
            assert await run.end() == 3
    finally:
        over.set()
    assert [commit.step for commit in bodies(config.event_tape, de.RoundCommitted)] == [1, 2, 3]


def frame(kind, payload, claimed=None):
    return encode_header(kind, len(payload) if claimed is None else claimed) + payload


def chunk(number, total, offset, data):
    return frame(MessageType.CHUNK, struct.pack("<QQQ", number, total, offset) + data)


def push(learner=2, fragment=0, step=1, attempt=1, numel=40):
    head = struct.pack("<IIQIQQIQ", learner, fragment, step, attempt, 0, 1, 1, 1)
    return frame(MessageType.PUSH_FRAGMENT, head + bytes(4 * numel))


WHOLE = push()
LIES = {
    # What is said on a data stream, and the beginning of what the syncer says about it.
    frame(MessageType.PUSH_FRAGMENT, b"", 2**40): "PUSH_FRAGMENT of 1099511627776 bytes is not legal",
    frame(MessageType.CHUNK, b"", 2**64 - 1): "CHUNK of 18446744073709551615 bytes is not legal",
    frame(MessageType.MANIFEST, b"{}"): "MANIFEST is not legal here (syncer, data stream)",
    frame(MessageType.SHUTDOWN, b""): "SHUTDOWN is not legal",
    chunk(0, len(WHOLE), 0, WHOLE) * 2: "message 0 was already complete",
    chunk(0, len(WHOLE), 5, WHOLE[5:]): "CHUNK: offset 5 must be a multiple",
    chunk(0, len(WHOLE), SLICE_BYTES, b"x"): "CHUNK: offset 4194304 must lie below",
    chunk(0, 2**63, 0, WHOLE): "CHUNK: total 9223372036854775808 must be",
    chunk(0, len(WHOLE), 0, WHOLE[:-1]): "slice of 220 bytes at offset 0",
    chunk(0, len(WHOLE) + 1, 0, WHOLE + b"x"): "PUSH_FRAGMENT of 208 bytes does not fit",
    chunk(2**64 - 1, len(WHOLE), 0, WHOLE): "message 18446744073709551615 is too far ahead",
    chunk(0, 37 + len(WHOLE), 0, chunk(0, len(WHOLE), 0, WHOLE)): "CHUNK is not legal here (syncer, sliced",
    chunk(
        0, len(WHOLE), 0, frame(MessageType.PUSH_FRAGMENT, WHOLE[HEADER_BYTES:], 2**40)
    ): "PUSH_FRAGMENT of 10",
    push(learner=0): "PUSH_FRAGMENT: learner 0 on the connection of learner 2",
    push(fragment=3): "PUSH_FRAGMENT: fragment 3 must be below 3",
    push(step=2**53): "PUSH_FRAGMENT: step 9007199254740992 must be",
    push(attempt=0): "PUSH_FRAGMENT: attempt 0 must be",
    push(numel=41): "PUSH_FRAGMENT: 164 tensor bytes, fragment 0 has 160",
    bytes(HEADER_BYTES): "frame header: magic",
    WHOLE[:100]: "the peer closed the connection in the middle of a frame",
    chunk(0, len(WHOLE), 0, WHOLE)[:100]: "the peer closed the connection in the middle of a frame",
}


async def test_every_lie_ends_its_group_and_no_other(tmp_path):
    config = make_config(tmp_path, num_learners=3, total_steps=3, final_ack_timeout_seconds=0.2)
    steady = fakes()
    told = held_back(steady)

    def reasons():
        return [left.reason for left in bodies(config.event_tape, ev.LearnerLeft) if left.learner == 2]

    async with running(config, *steady) as run:
        await until(lambda: all(learner.pulls for learner in steady))
        for count, lie in enumerate(LIES, start=1):
            guest = FakeLearner(learner=2, num_streams=1)
            await guest.connect(run.address.host, run.address.port)
            await guest.streams[1].stream.send_all(lie)
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await guest.streams[1].stream.send_eof()
            await until(lambda count=count: len(reasons()) == count)
            await guest.hang_up()
        told.set()
        await run.end()
    assert [learner.dials for learner in steady] == [1, 1]
    assert [commit.step for commit in bodies(config.event_tape, de.RoundCommitted)] == [1, 2, 3]
    for reason, expected in zip(reasons(), LIES.values(), strict=True):
        assert reason.startswith(expected)

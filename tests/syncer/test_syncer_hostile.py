"""Peers that lie, flood, stop or leave in the middle: the run of the others never notices.

What may be lied about is a layout, a length, a slice, a header, an identity. Every one of these runs ends as
if the liar had not been there, and the tape of each replays.
"""

import contextlib

import attrs
import numpy as np
from fake_learner import FakeLearner
from syncer_runs import bodies, fakes, make_config, on_tape, running, until

from yeto.core import events as ev
from yeto.link import LinkClosed, dial
from yeto.wire.frames import HEADER_BYTES, SLICE_BYTES, MessageType, encode_header
from yeto.wire.hello import HelloFragment, HelloLayout
from yeto.wire.layout import MergeMode
from yeto.wire.messages import FRAGMENT_NUMEL_MAX, ChunkHeader, InitHeader


async def test_a_layout_of_terabytes_ends_its_own_group(tmp_path, monkeypatch):
    """Learner 0 opens the session, so it may claim any size; its first value finds no memory."""
    empty = np.empty

    def as_most_systems(size, dtype):
        """Some promise memory that they do not have."""
        if size > FRAGMENT_NUMEL_MAX:
            raise MemoryError
        return empty(size, dtype=dtype)

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

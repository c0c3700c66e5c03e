"""Which encoding a learner gets: the outer step's own, or one made when somebody first wants it."""

import torch
import trio
from syncer_runs import HANGS_SECONDS

from yeto.core.values import FragmentVersionRef, Member, SessionTerms
from yeto.merge import tensor_digest
from yeto.state import FragmentVersion
from yeto.syncer.broadcasts import ENCODINGS_PER_FRAGMENT, Broadcasts
from yeto.syncer.registry import Registry
from yeto.syncer.session import Session
from yeto.wire import bf16
from yeto.wire.hello import HelloFragment, HelloLayout
from yeto.wire.layout import MergeMode

MEMBER = Member(learner=1, generation="0000000000000007")


class Listening:
    """A group that notes what it is told to send."""

    member = MEMBER

    def __init__(self):
        self.said = []

    def broadcast(self, fragment, version, tensor, *, again=False):
        self.said.append((version, bytes(tensor), again))

    def pull(self, fragment, step, attempt):
        self.said.append("pull")


def version(number):
    params = torch.full((5,), float(number))
    return FragmentVersion(
        fragment=0,
        version=number,
        params=params,
        momentum=torch.zeros(5),
        params_digest=tensor_digest(params),
        momentum_digest=tensor_digest(torch.zeros(5)),
    )


def opened():
    """Return broadcasts of a session with one fragment, its store, and a learner that is there."""
    session, registry, group = Session(), Registry(), Listening()
    layout = HelloLayout(fragments=(HelloFragment(mode=MergeMode.AVG, numels=(5,)),))
    session.open(
        SessionTerms(dtype="bf16", num_fragments=1, fingerprint="0" * 64, contract="0" * 64), layout, None
    )
    registry.add(group)
    heavy = trio.CapacityLimiter(1)
    return Broadcasts(session=session, registry=registry, heavy=heavy), session.store, group


async def publish(broadcasts, number):
    await broadcasts.publish((FragmentVersionRef(fragment=0, version=number),), (MEMBER,))()


async def test_the_encoding_of_the_outer_step_is_what_is_sent():
    broadcasts, store, group = opened()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(broadcasts.run)
        store.put(version(0))
        await publish(broadcasts, 0)
        with trio.fail_after(HANGS_SECONDS):
            while len(group.said) < 1:
                await trio.sleep(0.001)
        store.put(version(1))
        broadcasts.keep(version(1), memoryview(b"made by the outer step"))
        await publish(broadcasts, 1)
        with trio.fail_after(HANGS_SECONDS):
            while len(group.said) < 2:
                await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    assert group.said == [
        (0, bf16.encode(version(0).params.numpy()), False),
        (1, b"made by the outer step", False),
    ]


async def test_what_is_published_can_be_repeated_however_many_commits_wait():
    broadcasts, store, group = opened()
    for number in range(1, 8):
        store.put(version(number))
        broadcasts.keep(version(number), memoryview(b"%d" % number))
        if number == 2:
            await publish(broadcasts, number)
    broadcasts.repeat(MEMBER, 0, 9, 1)
    assert group.said == [(2, b"2", True), "pull"]
    assert len(broadcasts._encoded[0]) == ENCODINGS_PER_FRAGMENT + 1

"""A real learner and a real syncer with a network between them that misbehaves.

Wherever the link breaks, and however, the run ends as if it had not: every round committed, the final cut on
both sides, exit code 0. Learner 0 is whole, its training thread included, and reaches the syncer through the
proxy; learner 1 is a fake with a link of its own, and never notices.
"""

import contextlib
import math
import threading
import time

import pytest
import trio
from fake_learner import FakeLearner
from fault_proxy import fault_proxy
from faults import DOWN, UP, Corrupt, Cut, Delay, Freeze, HalfOpen, Hold, Lose
from learner_fakes import TinyTask, config
from learner_runs import Run
from syncer_runs import BOUNDS, HANGS_SECONDS, bodies, hurrying, make_config, running, until

from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.layout import build_layout
from yeto.learner.fragments import named_shapes
from yeto.link.group import HEARTBEAT_SECONDS
from yeto.wire.digest import digest
from yeto.wire.frames import MessageType

ROUNDS = 6


def pace(batch):
    """A step takes a few milliseconds, as if there were something to compute."""
    time.sleep(0.02)


class Played:
    """What became of a run."""

    def __init__(self, config, proxy, island, fake):
        self.config = config
        self.proxy = proxy
        self.island = island
        self.fake = fake

    def bodies(self, kind):
        return bodies(self.config.event_tape, kind)

    @property
    def left(self):
        """Why each connection of learner 0 ended, as the syncer saw it."""
        return [left.reason for left in self.bodies(ev.LearnerLeft) if left.learner == 0]

    @property
    def dials(self):
        return sum(hello.learner == 0 for hello in self.bodies(ev.HelloReceived))


@contextlib.asynccontextmanager
async def staged(folder, *faults, streams=2, bounds=BOUNDS, **core):
    """A syncer, learner 1, and learner 0 behind a proxy with these faults."""
    config_of_run = make_config(folder, total_steps=ROUNDS, bounds=bounds, **core)
    task = TinyTask(rows_per_batch=3, gate=pace)
    layout = build_layout(named_shapes(task.trainable_parameters()), fragments=2)
    fake = FakeLearner(learner=1, layout=layout, binding=task.binding())
    async with (
        running(config_of_run, fake) as run,
        fault_proxy((run.address.host, run.address.port), *faults) as proxy,
    ):
        settings = config(
            syncer=proxy.address,
            num_learners=2,
            output_dir=folder / "out",
            log_jsonl=folder / "log.jsonl",
            wan_streams=streams,
        )
        island = Run(settings, task)
        run.nursery.start_soon(island.run)
        yield run, Played(config_of_run, proxy, island, fake)


async def played(folder, *faults, **settings):
    """Play a run to its end; check that it is whole."""
    async with staged(folder, *faults, **settings) as (run, result):
        assert await run.end() == 0
        outcome = await result.island.expect_end()
    assert outcome.exit_code == 0
    assert result.fake.dials == 1
    assert [commit.step for commit in result.bodies(de.RoundCommitted)] == [*range(1, ROUNDS + 1)]
    names = [fragment.tensors[0].name for fragment in result.fake.layout.fragments]
    mine = result.island.task.trainable_parameters()
    assert [digest(mine[name].detach().numpy().tobytes()) for name in names] == result.fake.final_digests()
    return result


async def test_without_a_fault_one_dial_is_enough(tmp_path):
    result = await played(tmp_path)
    assert result.dials == 1


M = MessageType


@pytest.fixture
def quick_farewells(monkeypatch):
    """Nobody waits long for a dead connection to read why it was closed."""
    monkeypatch.setattr("yeto.link.group.LINGER_SECONDS", 0.3)


PHASES = {
    "hello": {"frame": M.HELLO, "at": 20},
    "data hello": {"frame": M.DATA_HELLO, "nth": 2},
    "manifest": {"frame": M.MANIFEST, "at": 30},
    "in the last init": {"frame": M.INIT_PARAMS, "nth": 2, "at": -1},
    "behind the last init": {"frame": M.INIT_PARAMS, "nth": 2, "at": None},
    "first broadcast": {"frame": M.BCAST_FRAGMENT, "direction": DOWN},
    "in a broadcast": {"frame": M.BCAST_FRAGMENT, "direction": DOWN, "nth": 4, "at": 60},
    "behind a pull": {"frame": M.PULL_REQ, "direction": DOWN, "nth": 3, "at": None},
    "in a push": {"frame": M.PUSH_FRAGMENT, "nth": 3, "at": 110},
    "behind a push": {"frame": M.PUSH_FRAGMENT, "nth": 3, "at": None},
    "in the final cut": {"frame": M.FINAL_FRAGMENT, "direction": DOWN, "nth": 2, "at": 50},
    "in the final manifest": {"frame": M.FINAL_MANIFEST, "direction": DOWN, "at": 20},
    "before the ack": {"frame": M.FINAL_ACK},
}
UNHEARD = ("hello", "data hello", "manifest", "in the last init", "behind the last init")
"""Where the syncer may see one dial only: it need not have read of the first before that was lost."""


@pytest.mark.parametrize("phase", PHASES)
async def test_a_link_lost_in_any_phase_is_dialled_again(tmp_path, phase):
    result = await played(tmp_path, Lose(**PHASES[phase]))
    assert result.proxy.count(M.HELLO) == 2
    assert result.dials == 2 or phase in UNHEARD


@pytest.mark.parametrize("phase", ["behind the last init", "in a push", "in the final cut"])
async def test_one_stream_that_ends_takes_its_group_along(tmp_path, phase):
    result = await played(tmp_path, Cut(**PHASES[phase]))
    assert result.proxy.count(M.HELLO) == 2
    assert result.dials == 2 or phase in UNHEARD


@pytest.mark.parametrize("how", [Lose, Cut])
async def test_a_syncer_that_is_gone_behind_the_ack_is_not_waited_for_long(tmp_path, monkeypatch, how):
    """It has what it wanted, and the learner the result; only the SHUTDOWN never came."""
    monkeypatch.setattr("yeto.learner.client.FINAL_PATIENCE_SECONDS", 0.5)
    result = await played(tmp_path, how(frame=M.FINAL_ACK, at=None))
    notices = [notice["text"] for notice in result.island.log("notice")]
    assert notices.count("the syncer did not confirm the end in time; the final cut is saved") == 1


@pytest.mark.parametrize("phase", ["behind the last init", "behind a pull", "in the final manifest"])
async def test_a_connection_that_the_syncer_takes_for_alive_is_superseded(tmp_path, quick_farewells, phase):
    """The learner's end is gone and its FIN with it; long before silence tells, the same learner is back."""
    result = await played(tmp_path, HalfOpen(**PHASES[phase]))
    assert result.dials == 2
    refused = [refused for refused in result.bodies(de.LearnerRefused) if refused.learner == 0]
    assert [refused.reason for refused in refused] == ["superseded"]


async def test_the_hello_of_an_abandoned_dial_does_not_close_the_one_that_lives(tmp_path):
    """It was held up on its way, the training manifest behind it and its end behind that.

    Taken for a second process with the same id, the living learner would be sent away for good.
    """
    held = Hold(frame=M.HELLO, learner=0)
    async with staged(tmp_path, held, Cut(frame=M.DATA_HELLO, at=None)) as (run, result):
        arrived = trio.Event()

        async def wait(fake, pull):
            await arrived.wait()
            return True

        result.fake.before_push = wait
        await until(lambda: result.proxy.count(M.PULL_REQ, DOWN, learner=0))
        (abandoned,) = (pipe for pipe in result.proxy.pipes if pipe.gates[UP])
        held.thaw()
        await until(lambda: abandoned not in result.proxy.pipes)
        arrived.set()
        assert await run.end() == 0
        assert (await result.island.expect_end()).exit_code == 0
    assert result.dials == 1
    assert len(result.island.log("link")) == 5
    assert not result.bodies(de.LearnerRefused)


async def test_a_syncer_that_something_between_answers_for_is_dialled_again(
    tmp_path, monkeypatch, quick_farewells
):
    """Whatever the learner sends is taken, and nothing ever comes back."""
    monkeypatch.setattr("yeto.learner.connection.SILENCE_SECONDS", 1.0)
    # Where no round is open, whose next attempt would come later than the learner is patient here.
    result = await played(tmp_path, HalfOpen(deaf=("learner", "syncer"), **PHASES["in the final cut"]))
    assert result.dials >= 2
    downs = [link["detail"] for link in result.island.log("link") if link["link"] == "down"]
    assert downs[0] == "no byte on the control stream for 1 s"


@pytest.mark.parametrize("phase", ["in a broadcast", "behind a pull"])
async def test_a_corrupt_byte_at_the_learner_ends_the_connection_and_not_the_learner(tmp_path, phase):
    where = PHASES[phase] | {"at": 4}
    result = await played(tmp_path, Corrupt(**where))
    assert result.dials == 2
    downs = [link["detail"] for link in result.island.log("link") if link["link"] == "down"]
    assert "frame header: unknown message type" in downs[0]


async def test_a_pull_that_overtakes_a_broadcast_is_held(tmp_path):
    """Round 3 is pulled on the control stream while the merge of round 1 is still on its way on another."""

    def pulled(direction, frame):
        return (direction, frame.kind) == (DOWN, M.PULL_REQ) and frame.numbers("IQ") == (0, 3)

    # The third broadcast, behind the two first ones.
    held = Hold(frame=M.BCAST_FRAGMENT, direction=DOWN, nth=3, until=pulled)
    result = await played(tmp_path, held)
    assert held.thawed.is_set()
    assert result.dials == 1
    offered = [o for o in result.bodies(ev.PushOffered) if (o.learner, o.step) == (0, 3)]
    assert [(o.fragment, o.base_version) for o in offered] == [(0, 1)]
    assert not result.bodies(de.PushRefused)


async def test_a_slow_way_is_a_way(tmp_path):
    ways = [
        Delay(frame=hello, nth=nth, direction=UP, seconds=0.03)
        for hello, nth in ((M.HELLO, 1), (M.DATA_HELLO, 1), (M.DATA_HELLO, 2))
    ]
    result = await played(tmp_path, *ways)
    assert result.dials == 1


def beating(fake):
    """Have a fake show signs of life as often as these tests ask for."""

    async def beat(learner):
        while True:
            learner.beat()
            await trio.sleep(0.2)

    fake.on_connected = beat


async def test_an_idle_link_lives_on_heartbeats_alone(tmp_path, skipping_clock):
    """Nothing is to be exchanged for longer than silence is put up with."""
    async with staged(tmp_path, quorum_timeout_seconds=1e9) as (run, result):

        async def wait(fake, pull):
            if pull.step == 3:
                beats = result.proxy.count(M.HEARTBEAT)
                began = trio.current_time()
                async with hurrying(skipping_clock, HEARTBEAT_SECONDS):
                    await until(lambda: result.proxy.count(M.HEARTBEAT) >= beats + 18, math.inf)
                assert trio.current_time() > began + BOUNDS.silence_seconds
            return True

        beating(result.fake)
        result.fake.before_push = wait
        assert await run.end(math.inf) == 0
        assert (await result.island.expect_end()).exit_code == 0
    assert result.dials == 1


@pytest.mark.parametrize("work", ["loss", "save"])
async def test_work_that_outlasts_silence_is_slow_and_not_dead(tmp_path, skipping_clock, work):
    """Whatever keeps the training thread: heartbeats do not come from there."""
    patience = {"quorum_timeout_seconds": 1e9, "final_ack_timeout_seconds": 1e9}
    async with staged(tmp_path, **patience) as (run, result):
        beating(result.fake)
        begun, enough = threading.Event(), threading.Event()
        task = result.island.task
        do = getattr(task, work)

        def take_long(*args):
            begun.set()
            assert enough.wait(HANGS_SECONDS)
            return do(*args)

        setattr(task, work, take_long)
        await until(begun.is_set, math.inf)
        began = trio.current_time()
        async with hurrying(skipping_clock, HEARTBEAT_SECONDS):
            await until(lambda: trio.current_time() > began + 1.5 * BOUNDS.silence_seconds, math.inf)
        enough.set()
        assert await run.end(math.inf) == 0
        assert (await result.island.expect_end()).exit_code == 0
    assert result.dials == 1


async def test_a_freeze_is_ridden_out(tmp_path):
    result = await played(tmp_path, Freeze(seconds=0.3, **PHASES["in a push"]))
    assert result.dials == 1


async def test_a_freeze_that_lasts_is_the_end_of_a_connection_and_of_nothing_else(tmp_path, skipping_clock):
    frozen = Freeze(**PHASES["in a push"])
    async with staged(tmp_path, frozen, quorum_timeout_seconds=1e9) as (run, result):
        beating(result.fake)
        await frozen.happened.wait()
        async with hurrying(skipping_clock, HEARTBEAT_SECONDS):
            await until(lambda: result.left, math.inf)
        frozen.thaw()
        assert await run.end() == 0
        assert (await result.island.expect_end()).exit_code == 0
    assert result.left[0] == "no byte on the control stream for 60 s"
    assert result.dials == 2


class Chance:
    """Chance that never waits, and remembers between what it was to choose."""

    def __init__(self):
        self.limits = []

    def uniform(self, low, high):
        assert low == 0.0
        self.limits.append(high)
        return low


async def test_dials_back_off_with_full_jitter_and_anew_after_a_good_connection(tmp_path, monkeypatch):
    """Lost before a word of the syncer, a connection was good for nothing."""
    chance = Chance()
    monkeypatch.setattr("learner_runs.NoWait", lambda: chance)
    early = [Lose(frame=M.HELLO, nth=nth, at=20) for nth in range(1, 8)]
    result = await played(tmp_path, *early, Lose(**PHASES["behind a pull"]))
    assert chance.limits == [1, 2, 4, 8, 16, 30, 30, 1]
    assert result.dials == 2

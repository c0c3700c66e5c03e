"""The parts of a simulation, each alone: the disk's lag, links, steps."""

import random

import pytest

from yeto.core import CoreConfig
from yeto.core.events import StopRequested
from yeto.errors import TapeError
from yeto.sim import Faults, LearnerSpec
from yeto.sim.agenda import Agenda, Deviates, chance, spell
from yeto.sim.network import Connection, Delays, Lane, SharedRate
from yeto.sim.pace import Pace
from yeto.sim.tape import SimTape
from yeto.tape import Header, TapeWriter, read

HEADER = Header(
    software_version="0",
    wall_clock="2000",
    session_id="s",
    config=CoreConfig(num_learners=1, total_steps=1, quorum=1, wait_for=1),
)


def play(agenda, until=float("inf")):
    """Do what is planned."""
    while agenda.heap and agenda.heap[0][0] <= until:
        agenda.now, _, deed, details = agenda.heap[0]
        del agenda.heap[0]
        agenda.heap.sort()
        deed(*details)


class TestAgenda:
    def test_time_then_order_of_planning(self):
        agenda, done = Agenda(), []
        agenda.at(2.0, done.append, "c")
        agenda.at(1.0, done.append, "a")
        agenda.after(1.0, done.append, "b")
        play(agenda)
        assert done == ["a", "b", "c"]

    def test_what_is_late_happens_now(self):
        agenda, done = Agenda(), []
        agenda.at(5.0, lambda: agenda.at(1.0, lambda: done.append(agenda.now)))
        play(agenda)
        assert done == [5.0]

    def test_chance_is_split_by_concern(self):
        assert chance(1, "a").random() == chance(1, "a").random()
        assert chance(1, "a").random() != chance(1, "b").random()
        assert chance(1, "a").random() != chance(2, "a").random()

    def test_what_is_drawn_ahead_is_what_would_be_drawn_one_by_one(self):
        deviates, rng = Deviates(random.Random(3)), random.Random(3)
        for _ in range(5 * Deviates.BLOCK):
            assert deviates.draw() == rng.gauss(0.0, 1.0)

    def test_never_is_infinite(self):
        assert spell(random.Random(0), None) == float("inf")


class TestTape:
    @pytest.fixture
    def tape(self, tmp_path):
        tape = SimTape(tmp_path / "tape", fsync_seconds=1.0)
        tape.begin(HEADER)
        yield tape
        tape.close()

    @staticmethod
    def append(tape, at, signal="SIGTERM"):
        tape.append_event(StopRequested(at=at, signal=signal))
        return tape.durable_at(at)

    def test_what_comes_during_an_fsync_goes_out_with_the_next(self, tape):
        assert self.append(tape, 0.0) == 1.0
        assert self.append(tape, 0.5) == 2.0
        assert self.append(tape, 0.75) == 2.0
        assert tape.durable_seq(0.99) == 0
        assert tape.durable_seq(1.0) == 1
        assert self.append(tape, 1.5) == 3.0
        assert tape.durable_seq(2.0) == 3
        assert self.append(tape, 9.0) == 10.0

    def test_a_disk_without_delay(self, tmp_path):
        tape = SimTape(tmp_path / "quick", fsync_seconds=0.0)
        tape.begin(HEADER)
        assert [self.append(tape, 1.0), self.append(tape, 1.0), self.append(tape, 2.0)] == [1.0, 1.0, 2.0]
        assert tape.durable_seq(2.0) == 3
        tape.close()

    def test_a_crash_cuts_anywhere_behind_what_is_durable(self, tmp_path):
        ends, torn = set(), 0
        for seed in range(60):
            path = tmp_path / f"tape-{seed}"
            tape = SimTape(path, fsync_seconds=1.0)
            tape.begin(HEADER)
            for at in (0.0, 2.0, 2.25, 2.5):
                self.append(tape, at)
            tail = tape.crash(2.75, random.Random(seed))
            writer, found = TapeWriter.resume(path)
            writer.close()
            assert (found.last_seq, found.last_at) == (tail.last_seq, tail.last_at)
            ends.add(tail.last_seq)
            torn += found.torn_bytes > 0
            tape.resume()
            self.append(tape, 3.0, "SIGINT")
            tape.close()
            records = list(read(path))
            assert [record.seq for record in records] == list(range(tail.last_seq + 2))
            assert records[-1].body.signal == "SIGINT"
        assert ends == {1, 2, 3, 4}
        assert torn > 30

    def test_without_a_path_a_crash_cuts_between_records(self):
        tape = SimTape(None, fsync_seconds=1.0)
        tape.begin(HEADER)
        self.append(tape, 0.0)
        self.append(tape, 2.0)
        assert tape.crash(2.5, random.Random(1)).last_seq in (1, 2)

    def test_it_replaces_nothing(self, tmp_path):
        (tmp_path / "tape").write_text("mine")
        with pytest.raises(TapeError, match="exists already"):
            SimTape(tmp_path / "tape", fsync_seconds=0.0)
        with pytest.raises(TapeError, match="cannot make the tape"):
            SimTape(tmp_path / "nowhere" / "tape", fsync_seconds=0.0)


class World:
    """A link of one learner: latency 1 s, 10 bytes a second, and twice that at the syncer."""

    def __init__(self, faults=None, **spec):
        self.agenda = Agenda()
        self.arrived = []
        self.notes = []
        spec = LearnerSpec(**{"latency_seconds": 1.0, "latency_jitter": 0.0, **spec})
        self.delays = Delays(
            spec, faults or Faults(), random.Random(0), lambda: self.agenda.now >= 100.0, self.notes.append
        )
        self.shared = SharedRate(20.0)

    def lane(self):
        return Lane(self.agenda, 10.0, self.shared, self.delays)

    def arrive(self, what):
        self.arrived.append((self.agenda.now, what))


class TestLane:
    def test_one_after_the_other(self):
        world = World()
        lane = world.lane()
        for name in "ab":
            lane.put(name, 20, world.arrive, world.arrive, name)
        play(world.agenda)
        assert world.arrived == [(1.0, "a"), (3.0, "a"), (3.0, "b"), (5.0, "b")]
        assert lane.num_bytes == 40

    def test_the_newest_of_a_fragment_takes_the_place_of_what_waits(self):
        world = World()
        lane = world.lane()
        for key, name in (("p", "first"), ("p", "old"), ("q", "other"), ("p", "new")):
            lane.put(key, 10, None, world.arrive, name)
        play(world.agenda)
        assert world.arrived == [(2.0, "first"), (3.0, "new"), (4.0, "other")]

    def test_the_syncer_has_one_rate_for_all(self):
        world = World()
        for name in "abcd":
            world.lane().put(0, 20, None, world.arrive, name)
        play(world.agenda)
        assert world.arrived == [(3.0, "a"), (3.0, "b"), (4.0, "c"), (5.0, "d")]

    def test_what_waits_for_a_lane_that_closes_is_not_sent(self):
        world = World()
        lane = world.lane()
        lane.put(0, 10, None, world.arrive, "under way")
        lane.put(1, 10, None, world.arrive, "waits")
        lane.is_open = False
        play(world.agenda)
        assert world.arrived == [(2.0, "under way")], "whoever it arrives at looks whether it is open"


class TestConnection:
    @staticmethod
    def connect(world):
        return Connection(
            0,
            7,
            client=None,
            process=1,
            agenda=world.agenda,
            up=world.lane(),
            down=world.lane(),
            delays=world.delays,
        )

    def test_control_messages_keep_their_order_even_when_one_is_late(self):
        world = World(Faults(late=0.5, late_seconds=10.0))
        connection = self.connect(world)
        for number in range(20):
            world.agenda.at(float(number), connection.send_up, lambda _, number: world.arrive(number), number)
        play(world.agenda)
        assert [number for _, number in world.arrived] == list(range(20))
        assert 5 < len(world.notes) < 15
        assert world.arrived[-1][0] >= 20.0

    def test_nothing_is_late_once_the_time_of_faults_is_over(self):
        world = World(Faults(late=1.0))
        world.agenda.now = 100.0
        assert world.delays.draw() == 1.0
        assert not world.notes

    def test_what_is_on_the_way_when_it_breaks_is_lost(self):
        world = World()
        connection = self.connect(world)
        connection.send_up(lambda _: world.arrive("up"))
        connection.send_down(lambda _: world.arrive("down"))
        world.agenda.at(0.5, connection.break_off)
        play(world.agenda)
        assert not world.arrived
        assert not connection.was_heard

    def test_jitter_is_as_wide_as_it_says(self):
        world = World(latency_jitter=0.25)
        delays = [world.delays.draw() for _ in range(4000)]
        mean = sum(delays) / len(delays)
        deviation = (sum((delay - mean) ** 2 for delay in delays) / len(delays)) ** 0.5
        assert mean == pytest.approx(1.0, abs=0.02)
        assert deviation == pytest.approx(0.25, rel=0.05)


class TestPace:
    def test_steps_do_not_depend_on_who_asks_when(self):
        spec = LearnerSpec(step_seconds=2.0, step_jitter=0.3)
        once, often = Pace(spec, Deviates(random.Random(3))), Pace(spec, Deviates(random.Random(3)))
        once.start(1.0)
        often.start(1.0)
        assert once.advance(1000.0, 10**9) == sum(often.advance(at, 10**9) for at in range(1001))
        assert once.boundary == often.boundary
        assert once.stepped_seconds == pytest.approx(often.stepped_seconds)

    def test_no_more_than_asked_for(self):
        pace = Pace(LearnerSpec(step_seconds=1.0, step_jitter=0.0), Deviates(random.Random(0)))
        pace.start(0.0)
        assert pace.advance(10.0, 4) == 4
        assert pace.boundary == 5.0

    def test_a_step_that_is_not_finished_is_lost(self):
        pace = Pace(LearnerSpec(step_seconds=1.0, step_jitter=0.0), Deviates(random.Random(0)))
        pace.start(0.0)
        assert pace.advance(2.5, 99) == 2
        pace.stop()
        assert not pace.is_running
        assert pace.advance(9.0, 99) == 0
        pace.start(9.0)
        assert pace.boundary == 10.0
        assert pace.stepped_seconds == 2.0

    def test_a_stretch_has_one_pace(self):
        pace = Pace(
            LearnerSpec(step_seconds=1.0, step_jitter=0.0, phase_jitter=0.2), Deviates(random.Random(0))
        )
        pace.new_stretch()
        pace.start(0.0)
        length = pace.boundary
        assert length != 1.0
        pace.advance(length, 1)
        assert pace.boundary == pytest.approx(2.0 * length)

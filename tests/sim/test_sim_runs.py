"""Whole simulations: what they write, what they measure, and that nothing but the seed decides."""

from itertools import pairwise

import pytest
from attrs import evolve, fields

from yeto.core import CoreConfig, Phase
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.errors import ConfigError, TapeError
from yeto.sim import Faults, LearnerSpec, Operator, SimConfig, SyncerSpec, simulate
from yeto.sim.run import Simulation
from yeto.tape import read, replay

STEADY = LearnerSpec(step_seconds=1.0, step_jitter=0.0, latency_jitter=0.0)


def config(num_learners=3, *, learner=STEADY, faults=None, syncer=None, operator=None, **core):
    settings = {"total_steps": 40, "quorum": num_learners, "wait_for": num_learners, **core}
    return SimConfig(
        core=CoreConfig(num_learners=num_learners, **settings),
        learners=(learner,) * num_learners,
        num_fragments=4,
        faults=faults or Faults(),
        syncer=syncer or SyncerSpec(),
        operator=operator or Operator(),
    )


@pytest.mark.parametrize("jitter", [0.0, 0.3])
@pytest.mark.parametrize("latency", [0.02, 3.0])
def test_carried_work_is_merged_exactly_once(jitter, latency):
    """Without losses there is no other fate: merged, or still local when the final cut comes."""
    learner = evolve(STEADY, step_jitter=jitter, latency_seconds=latency)
    settings = config(learner=learner, grace_cap_seconds=100.0, grace_tau=100.0)
    blended = simulate(settings)
    assert all("between" in learner.lost_tokens for learner in blended.learners)
    carried = simulate(evolve(settings, carries=True))
    for learner in carried.learners:
        assert set(learner.lost_tokens) <= {"local"}
        assert learner.merged_tokens + learner.lost_tokens.get("local", 0) == 4 * learner.tokens
    assert carried.merged_share > blended.merged_share


def with_learner(settings, number, **changes):
    learners = list(settings.learners)
    learners[number] = evolve(learners[number], **changes)
    return evolve(settings, learners=tuple(learners))


STORMY = evolve(
    config(
        4,
        learner=LearnerSpec(
            step_seconds=0.5,
            mean_up_seconds=60.0,
            mean_repair_seconds=5.0,
            keeps_state=0.5,
            state_every_steps=10,
            mean_link_seconds=40.0,
            mean_outage_seconds=2.0,
        ),
        faults=Faults(not_finite=0.05, duplicate=0.1, late=0.1, half_open=0.5, until_seconds=400.0),
        syncer=SyncerSpec(mean_up_seconds=60.0, mean_restart_seconds=5.0, older_checkpoint=0.3),
        quorum=2,
        total_steps=60,
        checkpoint_every=3,
        final_ack_timeout_seconds=120.0,
    ),
    until_seconds=5000.0,
    push_bytes=100_000,
    broadcast_bytes=100_000,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("quiet") / "tape"


@pytest.fixture(scope="module")
def result(path):
    return simulate(config(), tape=path)


class TestAQuietRun:
    def test_it_ends_with_the_final_cut(self, result):
        assert (result.exit_code, result.step) == (0, 40)

    def test_its_tape_replays(self, result, path):
        replayed = replay(path)
        assert replayed.divergence is None
        assert replayed.state.phase is Phase.ENDED
        assert replayed.records == result.records
        assert sum(isinstance(record.body, ev.Event) for record in read(path)) == result.events

    def test_everybody_steps_all_the_time(self, result):
        assert result.goodput == pytest.approx(1.0, abs=0.03)
        assert result.uptime == pytest.approx(1.0, abs=0.03)
        for learner in result.learners:
            assert learner.stepping_share == pytest.approx(learner.steps / result.seconds)

    def test_everybody_is_merged_every_time(self, result):
        assert result.participation == 1.0
        assert (result.attempts, result.discarded) == (40, 0)
        assert [learner.merges for learner in result.learners] == [40, 40, 40]
        assert result.merges_per_hour == pytest.approx(40 * 3600 / result.seconds)

    def test_tokens_add_up(self, result):
        for learner in result.learners:
            assert learner.tokens == learner.steps * STEADY.tokens_per_step
            assert learner.merged_tokens + sum(learner.lost_tokens.values()) == 4 * learner.tokens
        merged = sum(learner.merged_tokens for learner in result.learners)
        assert result.merged_share == merged / (4 * sum(learner.tokens for learner in result.learners))

    def test_the_ledger_and_the_account_agree(self, result, path):
        for learner in result.learners:
            assert replay(path).state.ledger[learner.learner].c_tokens == learner.merged_tokens

    def test_bytes(self, result):
        settings = config()
        final = 2 * 4 * settings.broadcast_bytes
        initial = 4 * settings.broadcast_bytes
        for learner in result.learners:
            sent = 40 * settings.push_bytes + (initial if learner.learner == 0 else 0)
            assert learner.sent_bytes == sent
            assert learner.received_bytes == (4 + 40) * settings.broadcast_bytes + final

    def test_the_sync_interval_is_kept(self, result, path):
        opened = [record.at for record in read(path) if isinstance(record.body, de.AttemptOpened)]
        between = [later - earlier for earlier, later in pairwise(opened[4:])]
        assert sum(between) / len(between) == pytest.approx(24 * 1.0 / 4, rel=0.1)


def test_a_newcomer_that_waits_for_its_first_weights_holds_nobody_back(tmp_path):
    """They take it half a minute, which is not how long its steps are."""
    settings = config(quorum=2, wait_for=2, total_steps=60, sync_interval_steps=8.0, closing_sweep="off")
    settings = with_learner(settings, 2, joins_at=60.0, down_rate=4 * settings.broadcast_bytes / 30.0)
    simulate(settings, tape=tmp_path / "tape")
    records = list(read(tmp_path / "tape"))
    opened = [record.at for record in records if isinstance(record.body, de.AttemptOpened)]
    first = next(r.at for r in records if isinstance(r.body, ev.Heartbeat) and r.body.learner == 2)
    assert 90.0 < first < opened[-1]
    # Every two seconds, and up to a grace more.
    assert max(later - earlier for earlier, later in pairwise(opened)) < 4.0


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not(tmp_path):
    results = [
        simulate(evolve(STORMY, seed=seed), tape=tmp_path / name)
        for name, seed in (("a", 5), ("b", 5), ("c", 6))
    ]
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c
    assert results[0] == results[1] != results[2]


def test_writing_a_tape_changes_nothing_when_nothing_crashes(tmp_path):
    assert simulate(config(), tape=tmp_path / "tape") == simulate(config())


class Facts:
    """Looks at every event of a run as it was made."""

    def __init__(self):
        self.kinds = set()

    def told(self, seq, event, decisions, after):
        assert list(vars(event)) == [field.name for field in fields(type(event))], event
        self.kinds.add(type(event))

    def ignore(self, *details):
        pass

    began = line = acted = stopped = resuming = ignore


def test_a_storm_replays_and_ends(tmp_path):
    facts = Facts()
    simulation = Simulation(STORMY, tape=tmp_path / "tape", observer=facts)
    result = simulation.run()
    simulation.close()
    assert len(facts.kinds) > 12
    assert replay(tmp_path / "tape").divergence is None
    assert result.exit_code == 0
    kinds = {type(record.body) for record in read(tmp_path / "tape")}
    assert {ev.SessionResumed, ev.LearnerLeft, de.PushRefused, de.LearnerRefused} <= kinds
    fates = set().union(*(learner.lost_tokens for learner in result.learners))
    assert {"between", "died", "rolled_back", "superseded"} <= fates


def test_one_learner_s_failures_do_not_shift_another_s_steps():
    quiet = evolve(
        config(learner=evolve(STEADY, step_jitter=0.2), quorum=1, total_steps=10**6), until_seconds=500.0
    )
    stormy = with_learner(quiet, 1, mean_up_seconds=40.0, mean_repair_seconds=10.0)
    (one, other, _), (same, less, _) = (simulate(settings).learners for settings in (quiet, stormy))
    assert (one.steps, one.stepping_share) == (same.steps, pytest.approx(same.stepping_share))
    assert other.steps > less.steps


def test_dead_time_is_no_goodput():
    settings = evolve(config(quorum=1), until_seconds=4000.0)
    settings = with_learner(settings, 2, mean_up_seconds=200.0, mean_repair_seconds=200.0)
    result = simulate(evolve(settings, core=evolve(settings.core, total_steps=10**6)))
    assert result.exit_code is None
    assert result.seconds == 4000.0
    assert 0.25 < result.learners[2].stepping_share < 0.75
    assert result.goodput == pytest.approx((2 + result.learners[2].stepping_share) / 3, abs=0.01)
    assert result.uptime == pytest.approx(1.0, abs=0.01)


def test_uptime_counts_learners_up_to_the_quorum():
    settings = evolve(config(quorum=3), until_seconds=2000.0)
    settings = with_learner(settings, 2, mean_up_seconds=200.0, mean_repair_seconds=200.0)
    result = simulate(evolve(settings, core=evolve(settings.core, total_steps=10**6)))
    assert result.uptime == pytest.approx(result.learners[2].stepping_share, abs=0.02)


def test_lockstep_waits_for_the_slowest():
    slow = evolve(STEADY, step_seconds=2.0)
    settings = config(2, pipeline=1, sync_interval_steps=0.0, closing_sweep="off")
    settings = evolve(settings, learners=(STEADY, slow), num_fragments=1, push_bytes=1, broadcast_bytes=1)
    free = simulate(settings)
    lockstep = simulate(
        evolve(settings, learners=tuple(evolve(spec, lockstep=True) for spec in settings.learners))
    )
    assert free.goodput == pytest.approx(1.0, abs=0.05)
    assert lockstep.learners[0].stepping_share < 0.5
    assert lockstep.learners[0].steps == pytest.approx(lockstep.learners[1].steps, abs=2)


def test_late_joins_and_early_leaves():
    settings = config(quorum=1, wait_for=1, total_steps=30)
    settings = with_learner(with_learner(settings, 1, joins_at=60.0), 2, leaves_at=60.0)
    result = simulate(settings)
    assert result.exit_code == 0
    whole, late, early = (learner.steps for learner in result.learners)
    assert late == pytest.approx(whole - 60, abs=3)
    assert early == pytest.approx(60, abs=3)


def test_a_stop_is_resumed_by_its_supervisor(tmp_path):
    operator = Operator(stops_at=(50.0,))
    result = simulate(config(operator=operator), tape=tmp_path / "tape")
    assert result.exit_code == 0
    ends = [record.body.exit_code for record in read(tmp_path / "tape") if record.kind == "session_ended"]
    assert ends == [4, 0]
    alone = simulate(config(operator=evolve(operator, restarts_after=())))
    assert alone.exit_code == 4


def test_a_budget_and_its_finish(tmp_path):
    settings = config(
        learner_budget_steps=60,
        operator=Operator(budget_finish=True),
        syncer=SyncerSpec(mean_restart_seconds=2.0),
    )
    result = simulate(settings, tape=tmp_path / "tape")
    assert result.exit_code == 0
    assert [learner.steps for learner in result.learners] == [60, 60, 60]
    bodies = [record.body for record in read(tmp_path / "tape")]
    (resumed,) = (body for body in bodies if isinstance(body, ev.SessionResumed))
    assert result.step == resumed.step + settings.num_fragments
    sweep = [body for body in bodies if isinstance(body, de.RoundCommitted) and body.step > resumed.step]
    assert {part.c_steps for body in sweep for part in body.responders} == {60}
    for learner in result.learners:
        assert set(learner.lost_tokens) <= {"between", "frozen", "discarded", "refused:out_of_round"}


def test_a_slow_upload_holds_the_quorum_deadline_back(tmp_path):
    settings = config(2, quorum_timeout_seconds=70.0, total_steps=2, closing_sweep="off", pipeline=1)
    size = settings.push_bytes
    settings = with_learner(settings, 1, up_rate=size / 130.0)
    result = simulate(settings, tape=tmp_path / "tape")
    assert (result.exit_code, result.discarded) == (0, 0)
    assert any(isinstance(record.body, ev.UploadProgress) for record in read(tmp_path / "tape"))


def test_progress_goes_to_one():
    told = []
    simulate(config(total_steps=200), progress=told.append)
    assert told == sorted(told)
    assert len(told) > 2
    assert told[-1] == 1.0


def test_memory_does_not_grow_with_the_run():
    from yeto.sim.run import Simulation

    sizes = []
    for seconds in (600.0, 2400.0):
        settings = config(
            4,
            quorum=2,
            total_steps=10**6,
            learner=evolve(STEADY, mean_link_seconds=100.0, mean_outage_seconds=5.0),
            syncer=SyncerSpec(mean_up_seconds=300.0, mean_restart_seconds=5.0),
        )
        simulation = Simulation(evolve(settings, until_seconds=seconds))
        simulation.run()
        account = simulation.world.account
        sizes.append(
            len(account._waiting)
            + len(account._commits)
            + len(account._pushes)
            + len(simulation.world.agenda.heap)
            + len(simulation.syncer.registry)
        )
    assert sizes[1] < sizes[0] + 100


class TestWhatIsRefused:
    def test_a_tape_that_exists(self, tmp_path):
        (tmp_path / "tape").write_text("")
        with pytest.raises(TapeError, match="exists already"):
            simulate(config(), tape=tmp_path / "tape")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"learners": (STEADY,)}, "1 learners described, --learners 3"),
            ({"num_fragments": 0}, "--fragments 0"),
            ({"push_bytes": 0}, "push bytes 0"),
            ({"until_seconds": 0.0}, "--duration 0.0"),
            ({"core": CoreConfig(num_learners=3, total_steps=1, quorum=4, wait_for=4)}, "--quorum 4"),
        ],
    )
    def test_settings_out_of_range(self, changes, message):
        with pytest.raises(ConfigError, match=message):
            simulate(evolve(config(), **changes))

    def test_a_lockstep_learner_with_a_budget(self):
        settings = with_learner(config(learner_budget_steps=9), 0, lockstep=True)
        with pytest.raises(ConfigError, match="lockstep"):
            simulate(settings)

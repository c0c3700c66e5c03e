"""A syncer that dies at any moment, and the one that goes on."""

import attrs
import numpy as np
import pytest
from fake_learner import FakeLearner
from syncer_runs import bodies, fakes, make_config, on_tape, running, until, verify

from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.errors import CheckpointError, ConfigError
from yeto.state import read_checkpoint, read_final_marker, read_manifest
from yeto.state.manifest import manifest_file, manifest_steps
from yeto.syncer.config import StartMode
from yeto.syncer.start import prepare


@pytest.mark.parametrize("at_step", [1, 4])
async def test_killed_and_resumed(tmp_path, at_step):
    config = make_config(tmp_path)
    first = fakes(reconnects=True)
    async with running(config, *first) as run:
        await until(on_tape(config, de.RoundCommitted, at_step))
        run.stop()
        await run.ended.wait()
    stored = read_checkpoint(config.checkpoint_path)

    resumed = make_config(tmp_path, resume=True)
    learners = fakes(reconnects=True)
    async with running(resumed, *learners) as run:
        assert await run.end() == 0
    (event,) = bodies(config.event_tape, ev.SessionResumed)
    written = [fact.step for fact in bodies(config.event_tape, ev.CheckpointWritten) if fact.at < event.at]
    assert event.step == stored.step >= max(written)
    # What was broadcast is never lost.
    assert stored.step >= max(version for learner in first for _, version in learner.versions)
    assert {mark.params_digest for mark in event.fragments} == {v.params_digest for v in stored.fragments}
    assert learners[0].final_digests() == learners[1].final_digests()
    final = read_checkpoint(config.checkpoint_path)
    assert final.step == 6
    assert learners[0].final_digests() == [version.params_digest for version in final.fragments]
    assert any(version.momentum.abs().sum() > 0 for version in final.fragments)


@pytest.mark.parametrize(("outer", "dtype"), [("stock", "f32"), ("normalised", "q4")])
async def test_what_follows_a_resume_is_what_would_have_followed_without_it(tmp_path, outer, dtype):
    """All that a merge takes comes back, also what normalised momentum counts: its bits are a twin's."""

    def delta_of(learner):
        def make(pull, numel):
            rng = np.random.default_rng((learner, pull.step, pull.fragment))
            return (0.01 * rng.standard_normal(numel)).astype(np.float32)

        return make

    def learners():
        return [
            FakeLearner(learner, make_delta=delta_of(learner), dtype=dtype, reconnects=True)
            for learner in range(2)
        ]

    # Every push is corrected by the momentum: one that did not come back would show at once.
    policy = {"total_steps": 16, "delta_correction": "heloco-all", "outer": outer}
    (tmp_path / "twin").mkdir()
    (tmp_path / "killed").mkdir()
    twin = make_config(tmp_path / "twin", **policy)
    async with running(twin, *learners()) as run:
        assert await run.end() == 0

    killed = make_config(tmp_path / "killed", **policy)
    async with running(killed, *learners()) as run:
        await until(on_tape(killed, de.RoundCommitted, 5))
        run.stop()
        await run.ended.wait()
    stopped_at = read_checkpoint(killed.checkpoint_path).step
    resumed = make_config(tmp_path / "killed", resume=True, **policy)
    async with running(resumed, *learners()) as run:
        assert await run.end() == 0

    def results(config):
        steps = bodies(config.event_tape, ev.OuterStepApplied)
        return {(step.step, step.params_digest, step.momentum_digest) for step in steps}

    assert results(resumed) == results(twin)
    assert len(results(twin)) == 16
    assert stopped_at < 16
    ends = [read_checkpoint(config.checkpoint_path) for config in (twin, resumed)]
    assert ends[0].outer_marks == ends[1].outer_marks
    assert [part.lookahead for part in ends[0].fragments] == [part.lookahead for part in ends[1].fragments]


@pytest.mark.parametrize("lost", ["the end of a fragment", "a fragment", "the end of the manifest"])
async def test_a_run_goes_on_from_the_checkpoint_before_a_torn_one(tmp_path, caplog, lost):
    config = make_config(tmp_path)
    async with running(config, *fakes()) as run:
        await until(on_tape(config, de.RoundCommitted, 4))
        run.stop()
        await run.ended.wait()
    folder = config.checkpoint_path
    newest, (manifest, before) = read_manifest(folder), map(manifest_file, manifest_steps(folder))
    torn = folder / newest.fragments[(newest.step - 1) % 3].file
    if lost == "a fragment":
        torn.unlink()
    else:
        path = folder / manifest if lost == "the end of the manifest" else torn
        path.write_bytes(path.read_bytes()[:-1])
    async with running(make_config(tmp_path, resume=True), *fakes()) as run:
        assert await run.end() == 0
    assert f"the checkpoint of step {newest.step} is incomplete and was passed over" in caplog.text
    (event,) = bodies(config.event_tape, ev.SessionResumed)
    assert manifest_file(event.step) == before
    # What was committed above it counts no more, and is committed anew.
    assert verify(config.event_tape).state.step == read_checkpoint(config.checkpoint_path).step == 6


async def test_killed_in_every_phase(tmp_path):
    """Learners dial again and again while the syncer falls over in phase after phase."""
    config = attrs.evolve(make_config(tmp_path, total_steps=12), start=StartMode.RESUME_OR_START)
    phases = [
        (ev.HelloReceived, 1),
        (ev.FragmentInitialised, 2),
        (de.CheckpointOrdered, 1),
        (ev.PushOffered, 1),
        (de.MergeOrdered, 3),
        (de.CommitOrdered, 5),
        (de.RoundCommitted, 7),
        (de.FinalCutOrdered, 1),
    ]
    for kind, count in phases:
        learners = fakes(reconnects=True)
        async with running(config, *learners) as run:
            await until(lambda kind=kind, count=count: on_tape(config, kind, count)() or run.exit_code == 0)
            run.stop()
    async with running(config, *fakes()) as run:
        assert await run.end() == 0
    state = verify(config.event_tape).state
    assert state.step == 12
    assert sum(entry.merges for entry in state.ledger.values()) == 24


async def test_resuming_twice_is_resuming_once(tmp_path):
    config = make_config(tmp_path)
    async with running(config, *fakes()) as run:
        await until(on_tape(config, de.RoundCommitted, 2))
        run.stop()
    before = read_checkpoint(config.checkpoint_path)
    resume = make_config(tmp_path, resume=True)
    for _ in range(2):
        async with running(resume):
            pass
    first, second = bodies(config.event_tape, ev.SessionResumed)
    assert attrs.evolve(first, at=0.0, wall_clock="") == attrs.evolve(second, at=0.0, wall_clock="")
    assert read_checkpoint(config.checkpoint_path).digest == before.digest


async def test_a_resumed_final_cut_awaits_only_who_still_owes_its_ack(tmp_path):
    config = make_config(tmp_path, total_steps=3)
    learners = fakes()
    learners[1].acknowledges = False
    async with running(config, *learners) as run:
        await until(on_tape(config, ev.FinalAckReceived))
        run.stop()
    resume = make_config(tmp_path, resume=True, total_steps=3, mark_final_checkpoint=True)
    late = FakeLearner(learner=1, layout=learners[0].layout)
    async with running(resume, late) as run:
        assert await run.end() == 0
    (event,) = bodies(config.event_tape, ev.SessionResumed)
    assert (event.awaited, event.acked) == ((1,), (0,))
    assert read_final_marker(config.checkpoint_path) == 3

    # A higher total goes on from there, and the mark is taken away before the next round.
    longer = make_config(tmp_path, resume=True, total_steps=4)
    async with running(longer, *fakes()) as run:
        assert await run.end() == 0
    assert read_final_marker(config.checkpoint_path) is None
    assert read_checkpoint(config.checkpoint_path).step == 4


async def test_what_stands_in_the_way_of_a_start_is_named(tmp_path):
    config = make_config(tmp_path)
    with (
        pytest.raises(CheckpointError, match="--resume: there is no checkpoint"),
        prepare(make_config(tmp_path, resume=True)),
    ):
        pass
    async with running(config, *fakes()) as run:
        await until(on_tape(config, ev.CheckpointWritten, 3))
        run.stop()
    with (
        pytest.raises(ConfigError, match=r"holds the checkpoint of an earlier run.*--resume"),
        prepare(config),
    ):
        pass
    elsewhere = attrs.evolve(config, checkpoint_path=tmp_path / "other.ckpt")
    with pytest.raises(ConfigError, match=r"other.ckpt: there is no checkpoint, but"), prepare(elsewhere):
        pass
    for changed, message in (
        ({"total_steps": 1}, "--total-steps 1: the checkpoint is at step"),
        ({"num_learners": 3, "wait_for": 3}, "--learners: the checkpoint has 2"),
    ):
        with (
            pytest.raises((CheckpointError, ConfigError), match=message),
            prepare(make_config(tmp_path, resume=True, **changed)),
        ):
            pass
    # None of these refusals has left a trace.
    assert not bodies(config.event_tape, ev.SessionResumed)

    other_tape = tmp_path / "other"
    other_tape.mkdir()
    strangers = fakes()
    strangers[0].initial[0] += 1
    async with running(make_config(other_tape), *strangers) as run:
        await until(on_tape(run.config, ev.CheckpointWritten, 2))
        run.stop()
    resume = make_config(tmp_path, resume=True)
    foreign = attrs.evolve(resume, event_tape=other_tape / "events.jsonl")
    with pytest.raises(CheckpointError, match="is not the tape of this checkpoint"), prepare(foreign):
        pass
    config.event_tape.rename(tmp_path / "moved.jsonl")
    with pytest.raises(CheckpointError, match="the tape of this checkpoint, is missing"), prepare(resume):
        pass


async def test_a_manifest_is_no_place_for_a_run_to_go_on_in(tmp_path):
    config = make_config(tmp_path)
    async with running(config, *fakes()) as run:
        await until(on_tape(config, ev.CheckpointWritten, 3))
        run.stop()
    before = sorted(path.name for path in tmp_path.rglob("*"))
    (older, newest) = sorted(config.checkpoint_path.glob("manifest-*.json"))
    named = attrs.evolve(make_config(tmp_path, resume=True), checkpoint_path=older)
    with pytest.raises(ConfigError, match=r"in a whole folder; name .*state\.ckpt, and move"), prepare(named):
        pass
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    newest.rename(tmp_path / newest.name)
    step = read_checkpoint(config.checkpoint_path).step
    async with running(make_config(tmp_path, resume=True), *fakes()) as run:
        assert await run.end() == 0
    assert bodies(config.event_tape, ev.SessionResumed)[-1].step == step


async def test_a_lost_checkpoint_is_no_new_beginning(tmp_path):
    """However it is started, no tape is renamed and no fragment removed: a run may be saved with them."""
    config = make_config(tmp_path)
    async with running(config, *fakes()) as run:
        await until(on_tape(config, ev.CheckpointWritten, 3))
        run.stop()
    folder, away = config.checkpoint_path, tmp_path / "away"
    away.mkdir()
    step = bodies(config.event_tape, ev.CheckpointWritten)[-1].step
    told = rf"there is no checkpoint, but .*events.jsonl tells of that of step {step}: .*move both away"

    def refused(match):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        for mode in StartMode:
            with pytest.raises(ConfigError, match=match), prepare(attrs.evolve(config, start=mode)):
                pass
        after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert {path: after[path] for path in after if path.suffix != ".lock"} == {
            path: before[path] for path in before if path.suffix != ".lock"
        }

    for manifest in folder.glob("manifest-*.json"):
        manifest.rename(away / manifest.name)
    refused(told)
    tape = config.event_tape.rename(away / "events.jsonl")
    refused("fragments of an earlier run and no manifest")
    folder.rename(away / folder.name)
    tape.rename(config.event_tape)
    refused(told)
    config.event_tape.rename(tape)
    with prepare(config) as start:
        assert start.checkpoint is None


async def test_what_a_first_checkpoint_leaves_half_done_is_no_run(tmp_path):
    config = make_config(tmp_path)
    left = config.checkpoint_path / "fragments" / "f0000-v00000000.safetensors"
    left.parent.mkdir(parents=True)
    left.touch()
    async with running(config, *fakes()) as run:
        assert await run.end() == 0


async def test_a_new_tape_may_be_named(tmp_path):
    config = make_config(tmp_path)
    async with running(config, *fakes()) as run:
        await until(on_tape(config, de.RoundCommitted, 2))
        run.stop()
    fresh_tape = attrs.evolve(make_config(tmp_path, resume=True), event_tape=tmp_path / "second.jsonl")
    async with running(fresh_tape):
        pass
    # That it went on from a checkpoint is all that the second tape says of any.
    elsewhere = attrs.evolve(fresh_tape, checkpoint_path=tmp_path / "nowhere.ckpt")
    with pytest.raises(ConfigError, match=r"second.jsonl tells of that of step \d"), prepare(elsewhere):
        pass
    # Its checkpoint is still the one of the first tape; the second one begins with it.
    async with running(fresh_tape, *fakes()) as run:
        assert await run.end() == 0
    first, second = bodies(fresh_tape.event_tape, ev.SessionResumed)
    assert first.checkpoint_seq is None
    assert second.step == first.step


async def test_two_syncers_cannot_share_files(tmp_path):
    config = make_config(tmp_path)
    async with running(config):
        with pytest.raises(CheckpointError, match="another syncer is using this checkpoint"), prepare(config):
            pass


async def test_resume_or_start_begins_when_nothing_was_ever_saved(tmp_path):
    config = attrs.evolve(make_config(tmp_path), start=StartMode.RESUME_OR_START)
    async with running(config) as run:
        run.stop()
    async with running(config, *fakes()) as run:
        assert await run.end() == 0
    assert (tmp_path / "events.jsonl.1").exists()

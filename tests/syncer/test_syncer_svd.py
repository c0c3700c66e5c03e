"""Runs whose matrices are decomposed by a pool: the end, a broken pool, a stop, and a resume."""

import functools
import json
import os
import re
import signal

import attrs
import numpy as np
import pytest
import trio
from fake_learner import FakeLearner, small_layout
from svd_stand_in import BAD_ROWS, SERVE, bad, let_go, notes, settings_of, workers
from syncer_runs import bodies, make_config, on_tape, running, until, verify

from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.errors import ConfigError
from yeto.state import read_checkpoint, read_final_marker
from yeto.state.manifest import manifest_file
from yeto.syncer.app import serve
from yeto.syncer.config import StartMode
from yeto.syncer.start import prepare
from yeto.syncer.svd_settings import SvdSettings
from yeto.wire.layout import FragmentLayout, Layout, MergeMode, TensorSpec

HOLD = "hold('gate')\nanswer(number, rows, cols, data)"
SLOW = (BAD_ROWS, 5)


def pooled(folder, svd, *, resume=False, **core):
    """Return the settings of a run with a pool."""
    config = make_config(folder, resume=resume, **({"total_steps": 9, "delta_correction": "none"} | core))
    core = attrs.evolve(config.core, svd_pool=True)
    return attrs.evolve(config, core=core, iso_backend="torch-svd", svd=svd).validated()


def layout_of(*shapes):
    """Return a layout of an averaged fragment and an iso fragment for each shape."""
    fragments = [FragmentLayout(mode=MergeMode.AVG, tensors=(TensorSpec(name="embed", shape=(40,)),))]
    fragments += [
        FragmentLayout(mode=MergeMode.ISO, tensors=(TensorSpec(name=f"layers.{p}", shape=shape),))
        for p, shape in enumerate(shapes)
    ]
    return Layout(fragments=tuple(fragments))


def learners_of(layout, count=2, **settings):
    """Learners whose push to a round depends on nothing but the round."""
    return [
        FakeLearner(
            learner=learner,
            layout=layout,
            make_delta=lambda pull, numel, learner=learner: np.random.default_rng(
                [pull.step, learner]
            ).standard_normal(numel, np.float32),
            **settings,
        )
        for learner in range(count)
    ]


def place_of(tape, kind, **fields):
    """Return where on the tape a record of a class with these fields is."""
    for place, body in enumerate(bodies(tape)):
        if isinstance(body, kind) and all(getattr(body, name) == value for name, value in fields.items()):
            return place
    raise AssertionError(f"no {kind.__name__} {fields}")


async def test_two_real_workers_to_the_final_cut_and_no_resume_by_the_other_backend(tmp_path):
    layout = small_layout(mode=MergeMode.ISO)
    (tmp_path / "scalar").mkdir()
    scalar = make_config(tmp_path / "scalar", total_steps=9, delta_correction="none")
    async with running(scalar, *learners_of(layout)) as run:
        assert await run.end() == 0

    config = pooled(tmp_path, SvdSettings(devices=("cpu:0", "cpu:1")))
    learners = learners_of(layout)
    async with running(config, *learners) as run:
        assert len(workers()) == 2
        for child in workers():
            open_files = [os.readlink(f"/proc/{child.pid}/fd/{each}") for each in range(5)]
            assert {name.partition(":")[0] for name in open_files} == {"pipe", "/dev/null"}
            assert child.num_fds() == 5  # neither sockets nor locks
        assert await run.end() == 0
    assert not workers()
    tape = config.event_tape
    order = [
        place_of(tape, de.SessionEnding, phase="final"),
        place_of(tape, ev.SvdPoolDrained),
        place_of(tape, de.CheckpointOrdered, step=9, final=True),
        place_of(tape, de.FinalCutOrdered),
    ]
    assert order == sorted(order)

    checkpoint, same = read_checkpoint(config.checkpoint_path), read_checkpoint(scalar.checkpoint_path)
    assert json.loads((config.checkpoint_path / manifest_file(9)).read_text())["iso_backend"] == 1
    digests = [version.params_digest for version in checkpoint.fragments]
    assert learners[0].final_digests() == digests
    # On the processor a worker computes the very bits that this process does.
    assert digests == [version.params_digest for version in same.fragments]
    assert (checkpoint.iso_backend, same.iso_backend) == ("torch-svd", "scalar")

    for other, of, message in (
        (scalar, config, "has torch-svd, this start has scalar"),
        (config, scalar, "has scalar, this start has torch-svd"),
    ):
        files = {"checkpoint_path": of.checkpoint_path, "event_tape": of.event_tape}
        resumed = attrs.evolve(other, start=StartMode.RESUME, **files)
        with pytest.raises(ConfigError, match=f"--iso-backend: the checkpoint {message}"), prepare(resumed):
            raise AssertionError("it began")


async def test_rounds_are_decomposed_side_by_side_and_committed_in_order(tmp_path):
    """The matrix of round 2 takes longer than that of round 3, on the other device."""
    config = pooled(tmp_path, bad(tmp_path, HOLD, devices=("cpu:0", "cpu:1")))
    async with running(config, *learners_of(layout_of(SLOW, (12, 5)))) as run:
        await until(lambda: any(fact.step == 3 for fact in bodies(config.event_tape, ev.MergeFinished)))
        assert [commit.step for commit in bodies(config.event_tape, de.RoundCommitted)] == [1]
        let_go(tmp_path)
        assert await run.end() == 0
    merged = [fact.step for fact in bodies(config.event_tape, ev.MergeFinished)]
    assert merged.index(3) < merged.index(2)
    assert [commit.step for commit in bodies(config.event_tape, de.RoundCommitted)] == list(range(1, 10))
    began = [line for line in notes(tmp_path) if line.endswith((": 13 x 5", ": 12 x 5"))][:2]
    assert len({line.split()[0] for line in began}) == 2


async def test_a_poisoned_pool_ends_the_run_and_a_resume_goes_on_with_new_workers(tmp_path):
    body = """
for number, rows, cols, data in requests():
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    answer(number, rows, cols, data)
"""
    config = pooled(tmp_path, settings_of(tmp_path, body))
    learners = learners_of(layout_of((10, 5), (12, 5)))
    async with running(config, *learners) as run:
        assert await run.end() == 1
    assert not workers()
    assert not any(learner.released for learner in learners)
    tape = config.event_tape
    (poisoned,) = bodies(tape, ev.SvdPoolPoisoned)
    assert re.fullmatch(
        r"SVD worker 0 on cpu, request 3 \(1[02] x 5\): was killed by SIGKILL", poisoned.message
    )
    (ended,) = bodies(tape, de.SessionEnded)
    # What was known to be durable when it ended: a checkpoint that was on its way may be told afterwards.
    story = bodies(tape)
    durable = max(fact.step for fact in story[: story.index(ended)] if isinstance(fact, ev.CheckpointWritten))
    assert (ended.exit_code, ended.mark_final) == (1, False)
    assert f"the SVD pool failed for good ({poisoned.message}); the checkpoint of step {durable}" in ended.why
    assert durable <= read_checkpoint(config.checkpoint_path).step <= verify(tape).state.step <= 4

    resumed = pooled(tmp_path, settings_of(tmp_path), resume=True)
    async with running(resumed, *learners_of(layout_of((10, 5), (12, 5)))) as run:
        assert await run.end() == 0
    assert read_checkpoint(config.checkpoint_path).step == 9


async def test_a_pool_that_cannot_be_drained_publishes_no_cut_off_checkpoint(tmp_path):
    """The budget ends while a matrix runs that nobody wants any more, and its worker never answers."""
    config = pooled(
        tmp_path,
        bad(tmp_path, "hold('never')", drain_seconds=0.3),
        total_steps=90,
        learner_budget_steps=40,
        checkpoint_every=0,
    )
    learners = learners_of(layout_of(SLOW))
    async with running(config, *learners) as run:
        await until(lambda: any(line.endswith(": 13 x 5") for line in notes(tmp_path)))
        # That of round 2; round 1 is nobody's to decompose, and may come later on a busy machine.
        await until(lambda: bodies(config.event_tape, de.RoundCommitted))
        for learner in learners:
            learner.report_budget(40)
        assert await run.end() == 1
    assert not workers()
    tape = config.event_tape
    (poisoned,) = bodies(tape, ev.SvdPoolPoisoned)
    assert "still holds 1 matrices after 0.3 s of draining" in poisoned.message
    assert "SVD worker 0 on cpu is at request 1 (13 x 5)" in poisoned.message
    assert verify(tape).state.step == 1
    assert [order.step for order in bodies(tape, de.CheckpointOrdered)] == [0]
    assert read_checkpoint(config.checkpoint_path).step == 0
    assert read_final_marker(config.checkpoint_path) is None


async def test_a_budget_is_cut_off_behind_the_drain(tmp_path):
    config = pooled(
        tmp_path, settings_of(tmp_path), total_steps=90, learner_budget_steps=40, checkpoint_every=0
    )
    learners = learners_of(layout_of(SLOW))
    async with running(config, *learners) as run:
        await until(on_tape(config, de.RoundCommitted, 4))
        for learner in learners:
            learner.report_budget(40)
        assert await run.end() == 0
    assert not workers()
    tape = config.event_tape
    step = verify(tape).state.step
    order = [
        place_of(tape, de.SessionEnding, phase="budget"),
        place_of(tape, ev.SvdPoolDrained),
        place_of(tape, de.CheckpointOrdered, step=step, final=True),
    ]
    assert order == sorted(order)
    assert read_checkpoint(config.checkpoint_path).step == step >= 4


@pytest.mark.parametrize("dies", [False, True])
async def test_a_stop_waits_for_no_matrix_and_leaves_no_worker(tmp_path, dies):
    """A worker that dies meanwhile does not make it wait, either."""
    deed, seconds = ("hold('gate')\nsys.exit(1)", 600.0) if dies else ("hold('never')", 0.2)
    config = pooled(tmp_path, bad(tmp_path, deed), stop_budget_seconds=seconds, pipeline=1)
    codes = []

    async def run(task_status):
        codes.append(await serve(config, watch_signals=True, task_status=task_status))

    async with trio.open_nursery() as nursery:
        address = await nursery.start(run)
        for learner in learners_of(layout_of(SLOW)):
            nursery.start_soon(learner.run, address.host, address.port)
        await until(lambda: any(line.endswith(": 13 x 5") for line in notes(tmp_path)))
        signal.raise_signal(signal.SIGTERM)
        await until(on_tape(config, ev.StopRequested))
        let_go(tmp_path)
        await until(lambda: codes)
        nursery.cancel_scope.cancel()
    assert codes == [4]
    assert not workers()
    tape = config.event_tape
    assert read_checkpoint(config.checkpoint_path).step == verify(tape).state.step == 1
    if dies:
        assert place_of(tape, ev.SvdPoolPoisoned) < place_of(tape, ev.MergeFailed, step=2)


async def test_a_worker_of_no_use_shows_before_anything_is_written_or_anybody_let_in(tmp_path):
    config = pooled(tmp_path, settings_of(tmp_path, "sys.exit('no such device')"))

    def check(error):
        return "no such device" in str(error) and "check --iso-worker-devices" in str(error)

    files = {path.name for path in tmp_path.iterdir()}
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, check=check), flatten_subgroups=True):
        await serve(config)
    assert {path.name for path in tmp_path.iterdir()} == files == {"python"}


async def test_nobody_is_let_in_before_the_workers_have_answered(tmp_path):
    config = pooled(tmp_path, settings_of(tmp_path, "hold('gate')\n" + SERVE))
    begun = trio.Event()

    async def run(nursery):
        await nursery.start(functools.partial(serve, config))
        begun.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, nursery)
        await until(workers)
        assert not config.event_tape.exists()
        assert not begun.is_set()
        let_go(tmp_path)
        await begun.wait()
        assert config.event_tape.exists()
        nursery.cancel_scope.cancel()
    assert not workers()

"""``yeto run --role supervisor``: what ends a run without its marker, and how the same command goes on."""

import os
import signal

import psutil
import pytest
import trio
from supervised import SECONDS_MAX, frugal, records, supervised

from yeto.core.decisions import RoundCommitted, SessionEnded
from yeto.core.events import SessionResumed
from yeto.state import final_marker_path, read_checkpoint, read_final_marker, write_final_marker
from yeto.state.manifest import read_manifest
from yeto.tape import replay

LEARNERS, BUDGET = 6, 20
QUICK = {"learner_budget_steps": BUDGET, "sync_interval_steps": 0}
"""Fakes take no time for a step, so nothing is throttled by them."""

pytestmark = [pytest.mark.timeout(2 * SECONDS_MAX)]


def workers_of(supervisor):
    """Return the SVD workers of a supervisor's syncer."""
    children = psutil.Process(supervisor.process.pid).children(recursive=True)
    return [child for child in children if "yeto.merge.svd_worker" in child.cmdline()]


async def test_a_worker_that_is_killed_ends_the_run_without_a_marker(tmp_path):
    """One that somebody left there is taken away, too."""
    write_final_marker(tmp_path / "state.ckpt", 7)
    async with trio.open_nursery() as nursery, supervised(tmp_path, **QUICK, iso_worker_devices="cpu") as run:
        port = await run.port()
        (worker,) = workers_of(run)
        told = trio.Event()

        async def until_told(learner, pull):
            await told.wait()
            return True

        for number in range(LEARNERS):
            nursery.start_soon(frugal(number, BUDGET, before_push=until_told).run, "127.0.0.1", port)
        await run.until(lambda: read_checkpoint_step(run) == 0)
        worker.kill()
        told.set()
        assert await run.end() == 1
        nursery.cancel_scope.cancel()
    assert run.complaint().startswith("yeto: phase 1: the SVD pool failed for good (SVD worker 0 on cpu")
    assert "killed by SIGKILL" in run.complaint()
    assert not final_marker_path(run.checkpoint).exists()
    (end,) = records(run.tape, SessionEnded)
    assert end.exit_code == 1


def read_checkpoint_step(run):
    return read_manifest(run.checkpoint).step if (run.checkpoint / "manifest.json").exists() else None


async def test_a_run_is_stopped_loses_a_learner_and_its_supervisor_and_ends_with_a_proof(tmp_path):
    """Five starts of one command: what each left is where the next one goes on."""
    flags = QUICK | {"iso_backend": "scalar"}

    async def start(learners, meanwhile, **others):
        """Start the command and these learners; return it and its exit code."""
        async with trio.open_nursery() as nursery, supervised(tmp_path, **(flags | others)) as run:
            port = await run.port()
            for learner in learners:
                nursery.start_soon(learner.run, "127.0.0.1", port)
            await meanwhile(run)
            code = await run.end()
            nursery.cancel_scope.cancel()
        return run, code

    async def stop(run):
        await run.until(lambda: len(records(run.tape, RoundCommitted)) >= 3)
        run.process.send_signal(signal.SIGTERM)

    learners = [frugal(number, BUDGET) for number in range(LEARNERS)]
    run, code = await start(learners, stop)
    assert (code, run.complaint()) == (4, "stopped in phase 1; the same command goes on from here")
    assert not final_marker_path(run.checkpoint).exists()
    stopped_at = read_checkpoint(run.checkpoint).step
    assert stopped_at >= 3

    # It goes on from there, and loses a learner for good in the second phase.
    async def nothing(run):
        pass

    learners[5].stays = lambda: learners[5].c_steps != BUDGET
    run, code = await start(learners, nothing, start_timeout_s=8)
    assert code == 3
    assert run.complaint() == (
        "yeto: phase 2: learner 5 away for 8 s (--start-timeout-s) and needed; start it again and resume, "
        "the checkpoint is valid"
    )
    assert "cut off at step" in run.said()
    assert not final_marker_path(run.checkpoint).exists()
    resumed = records(run.tape, SessionResumed)
    assert [body.config.budget_finish for body in resumed] == [False, True]
    assert resumed[0].step == stopped_at

    # The supervisor is killed in the second phase; its syncer does not outlive it.
    async def kill(run):
        (syncer,) = psutil.Process(run.process.pid).children()
        os.kill(run.process.pid, signal.SIGKILL)
        gone, left = await trio.to_thread.run_sync(lambda: psutil.wait_procs([syncer], timeout=SECONDS_MAX))
        assert (gone, left) == ([syncer], [])

    run, code = await start([], kill)
    assert code == -signal.SIGKILL
    assert not final_marker_path(run.checkpoint).exists()

    # And once more, to the end.
    learners = [frugal(number, BUDGET, c_steps=BUDGET) for number in range(LEARNERS)]
    run, code = await start(learners, nothing)
    assert code == 0, run.said()
    step = read_final_marker(run.checkpoint)
    assert step == read_checkpoint(run.checkpoint).step == resumed[1].step + 3
    assert replay(run.tape).divergence is None
    assert all(learner.released for learner in learners)
    await check_what_a_finished_run_says(tmp_path, flags, run, step)


async def check_what_a_finished_run_says(tmp_path, flags, run, step):
    """The same command verifies once more; the flags of another run are refused; damage takes the marker."""
    async with supervised(tmp_path, **flags) as again:
        assert await again.end() == 0
    assert again.said().splitlines()[-2:] == [
        "verifying tape and checkpoint",
        f"done: step {step}, verified and marked as final beside {run.checkpoint}",
    ]
    async with supervised(tmp_path, **(flags | {"learner_budget_steps": 21})) as wrong:
        assert await wrong.end() == 2
    assert wrong.complaint() == (
        f"yeto: --learner-budget-steps 21: the run of {run.tape} has {BUDGET}; "
        "give the same, or name other files"
    )
    assert read_final_marker(run.checkpoint) == step
    fragment = max((run.checkpoint / "fragments").iterdir())
    data = bytearray(fragment.read_bytes())
    data[-5] ^= 1
    fragment.write_bytes(data)
    async with supervised(tmp_path, **flags) as damaged:
        assert await damaged.end() == 1
    assert f"{fragment}: digest of momentum is" in damaged.complaint()
    assert not final_marker_path(run.checkpoint).exists()

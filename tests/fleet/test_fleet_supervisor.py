"""``yeto run --role supervisor``: what ends a run without its marker, and how the same command goes on."""

import contextlib
import re
import signal
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
import trio
from supervised import SECONDS_MAX, frugal, records, supervised

from yeto.core.decisions import SessionEnded
from yeto.core.events import SessionResumed
from yeto.errors import EXIT_STOPPED
from yeto.fleet import supervisor
from yeto.state import final_marker_path, read_checkpoint, read_final_marker, write_final_marker
from yeto.state.guards import lock_file
from yeto.state.manifest import manifest_steps
from yeto.storage import hold
from yeto.tape import replay

LEARNERS, BUDGET = 6, 20

pytestmark = [pytest.mark.timeout(2 * SECONDS_MAX)]


def child_of(run, word):
    """Return the process below a supervisor that has a word in its command; None while there is none."""
    for child in psutil.Process(run.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if word in child.cmdline():
                return child
    return None


async def test_what_ends_a_run_leaves_no_marker_and_the_same_command_goes_on(tmp_path):
    """A worker is killed, a learner is lost, the supervisor is stopped and killed; then the run is proved."""
    flags = {"learner_budget_steps": BUDGET, "sync_interval_steps": 0, "iso_worker_devices": "cpu"}
    # One that somebody left there is taken away, too.
    write_final_marker(tmp_path / "state.ckpt", 7)

    async def start(learners, meanwhile=None, **others):
        """Start the command and these learners; return it and its exit code."""
        async with trio.open_nursery() as nursery, supervised(tmp_path, **(flags | others)) as run:
            if learners:
                port = await run.port()
                for learner in learners:
                    nursery.start_soon(learner.run, "127.0.0.1", port)
            if meanwhile is not None:
                await meanwhile(run)
            code = await run.end()
            nursery.cancel_scope.cancel()
        assert final_marker_path(run.checkpoint).exists() == (code == 0)
        return run, code

    # A worker of the first phase is killed.
    told = trio.Event()

    async def until_told(learner, pull):
        await told.wait()
        return True

    async def kill_a_worker(run):
        await run.until(lambda: manifest_steps(run.checkpoint) == [0])
        child_of(run, "yeto.merge.svd_worker").kill()
        told.set()

    run, code = await start(
        [frugal(n, BUDGET, before_push=until_told) for n in range(LEARNERS)], kill_a_worker
    )
    assert code == 1
    # On a busy machine its death is noticed by the first that asks it for something.
    assert re.fullmatch(
        r"yeto: phase 1: the SVD pool failed for good "
        r"\(SVD worker 0 on cpu(, request \d \(10 x 4\))?: was killed by SIGKILL\); "
        r"the checkpoint of step 0 is the last valid one; repair the worker and start with --resume",
        run.complaint(),
    )

    # The first phase goes on, and in the second a learner is lost for good.
    learners = [frugal(number, BUDGET) for number in range(LEARNERS)]
    learners[5].stays = lambda: learners[5].c_steps != BUDGET
    run, code = await start(learners, start_timeout_s=6)
    assert code == 3
    assert run.complaint() == (
        "yeto: phase 2: learner 5 away for 6 s (--start-timeout-s) and needed; start it again and resume, "
        "the checkpoint is valid"
    )
    assert "cut off at step" in run.said()
    first, second = records(run.tape, SessionResumed)
    assert (first.step, first.config.budget_finish, second.config.budget_finish) == (0, False, True)
    assert second.step > 0

    # The supervisor is killed, and stopped, while the syncer of the second phase is starting.
    async def signalled(run, number):
        await run.until(lambda: child_of(run, "--role=syncer") is not None)
        syncer = child_of(run, "--role=syncer")
        run.process.send_signal(number)
        gone, left = await trio.to_thread.run_sync(lambda: psutil.wait_procs([syncer], timeout=SECONDS_MAX))
        assert (gone, left) == ([syncer], [])

    run, code = await start([], partial(signalled, number=signal.SIGKILL))
    assert code == -signal.SIGKILL
    run, code = await start([], partial(signalled, number=signal.SIGTERM))
    assert (code, run.complaint()) == (4, "stopped in phase 2; the same command goes on from here")

    # And once more, to the end.
    learners = [frugal(number, BUDGET, c_steps=BUDGET) for number in range(LEARNERS)]
    run, code = await start(learners)
    assert code == 0, run.said()
    step = read_final_marker(run.checkpoint)
    assert step == read_checkpoint(run.checkpoint).step == second.step + 3
    assert [body.exit_code for body in records(run.tape, SessionEnded)] == [1, 0, 3, 0]
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


def a_run(folder, say):
    """Return a run of which nothing is there yet."""
    return supervisor.Supervised(
        num_learners=6,
        budget=9,
        port=0,
        syncer_words=(),
        say=say,
        checkpoint=folder / "state",
        tape=folder / "tape",
        log=folder / "log",
        ready_file=folder / "ready",
    )


async def test_a_stop_while_an_earlier_syncer_is_still_saving_begins_nothing(tmp_path):
    said = []

    def say(line):
        said.append(line)
        if "still saving" in line:
            signal.raise_signal(signal.SIGTERM)

    run = a_run(tmp_path, say)
    # What is there is of a run that was over: only a look at everything may take its marker away.
    write_final_marker(run.checkpoint, 7)
    with hold(lock_file(run.checkpoint), OSError()):
        assert await supervisor._Supervisor(run).run() == EXIT_STOPPED
    assert said[1:] == ["stopped; the same command goes on from here"]
    assert read_final_marker(run.checkpoint) == 7


async def test_only_the_syncer_that_listens_is_shown(monkeypatch, tmp_path, autojump_clock):
    """The tape ends with the session before, and where that died it does not say so."""
    said, ready = [], tmp_path / "ready"
    watched = supervisor._Supervisor(a_run(tmp_path, said.append))
    before = SimpleNamespace(phase="running", learners=(), step=7, wait=None, now=0.0)
    monkeypatch.setattr(supervisor, "OwnRun", lambda _: SimpleNamespace(moment=lambda: before))
    monkeypatch.setattr(supervisor, "waited", lambda *_: "waiting")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watched._show, "phase 1")
        await trio.sleep(2.5 * supervisor.LINE_SECONDS)
        assert said == ["phase 1: the syncer is starting"]
        ready.touch()
        await trio.sleep(2 * supervisor.LINE_SECONDS)
        assert said[1:] == ["phase 1: 7 rounds committed; waiting"]
        watched._keeper.stopping.set()
        ready.unlink()
    assert len(said) == 2

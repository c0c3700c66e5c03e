"""A process that runs out of file descriptors: it says so once, lives, and goes on when there are some."""

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from syncer_runs import HANGS_SECONDS, bodies, fakes, until, verify

from yeto.core import decisions as de
from yeto.syncer.acceptor import RESERVED_DESCRIPTORS

CHILD = Path(__file__).parent.parent / "harness" / "hungry_syncer.py"


@contextlib.asynccontextmanager
async def hungry_syncer(folder, limit):
    """A syncer of two learners in a process of so many descriptors; yields process, address and its log."""
    files = {"ready_file": "ready.json", "checkpoint_path": "state.ckpt", "event_tape": "events.jsonl"}
    flags = {name: str(folder / file) for name, file in files.items()}
    flags |= {"learners": 2, "total_steps": 12, "port": 0, "sync_interval_steps": 0}
    log = folder / "log"
    with log.open("wb") as file:
        process = await trio.lowlevel.open_process(
            [sys.executable, str(CHILD), str(limit), json.dumps(flags)], stderr=file
        )
    try:
        await until((folder / "ready.json").exists)
        address = json.loads((folder / "ready.json").read_text())
        yield process, (address["host"], address["port"]), log.read_text
    finally:
        process.kill()
        await process.wait()


async def connects(address):
    """Return a connection, which the system makes even if nobody accepts it."""
    return await trio.open_tcp_stream(*address)


async def closed_by_peer(stream):
    with contextlib.suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            pass
    await stream.aclose()


async def test_strangers_give_way_to_learners_and_files_find_descriptors(tmp_path):
    """64 descriptors: 32 are for connections, and 60 strangers want them."""
    learners = fakes()
    async with hungry_syncer(tmp_path, 64) as (process, address, log), trio.open_nursery() as nursery:
        strangers = [await connects(address) for _ in range(60)]
        for learner in learners:
            nursery.start_soon(learner.run, *address)
        with trio.fail_after(HANGS_SECONDS):
            assert await process.wait() == 0
        for stranger in strangers:
            await stranger.aclose()
        assert "did not say who it is before others came" in log()
    assert all(learner.released and learner.dials == 1 for learner in learners)
    assert len(bodies(tmp_path / "events.jsonl", de.RoundCommitted)) == 12
    verify(tmp_path / "events.jsonl")


async def test_none_left_in_accept_is_said_once_and_survived(tmp_path):
    learners, go_on = fakes(reconnects=True), trio.Event()

    async def hold(learner, pull):
        if pull.step >= 3:
            await go_on.wait()
        return True

    for learner in learners:
        learner.before_push = hold
    async with hungry_syncer(tmp_path, 100) as (process, address, log), trio.open_nursery() as nursery:
        for learner in learners:
            nursery.start_soon(learner.run, *address)
        # Everything that is written for the rounds before is written.
        await until(lambda: all(learner.versions.count((1, 2)) for learner in learners))
        process.send_signal(signal.SIGUSR1)
        await until(lambda: "took" in log())
        waiting = [await connects(address) for _ in range(5)]
        await until(lambda: "no more connections" in log())
        await trio.sleep(1.0)  # ten times the pause between two tries
        assert (
            log().count("no more connections: the system has no descriptor for one more (Too many open") == 1
        )
        assert "Traceback" not in log()
        process.send_signal(signal.SIGUSR2)
        await until(lambda: "connections are accepted again" in log())
        go_on.set()
        with trio.fail_after(HANGS_SECONDS):
            assert await process.wait() == 0
        for stream in waiting:
            await closed_by_peer(stream)
    assert [learner.dials for learner in learners] == [1, 1]
    verify(tmp_path / "events.jsonl")


def in_a_process(limits, expression):
    """Evaluate an expression in a process with these limits of open files."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, {limits})\n"
        "from yeto.syncer.acceptor import *\nraise_descriptor_limit()\n"
        f"print({expression})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANGS_SECONDS
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("limits", "left"), [((64, 64), 32), ((256, 256), 128), ((256, 1000), 1000 - RESERVED_DESCRIPTORS)]
)
def test_the_limit_is_raised_as_far_as_it_goes_and_some_are_kept(limits, left):
    assert in_a_process(limits, "sockets_max()") == str(left)

"""The SVD pool over real child processes: order, permits, drain, and everything that poisons it."""

import logging
import os
import signal
import subprocess
import sys
import weakref

import attrs
import numpy as np
import psutil
import pytest
import torch
import trio
from svd_stand_in import (
    BAD_ROWS,
    SERVE,
    bad,
    gone,
    let_go,
    matrix,
    notes,
    settings_of,
    stand_in,
    wait_until_dead,
    workers,
)
from syncer_runs import HANGS_SECONDS, until

from yeto.errors import ConfigError, SvdPoolError
from yeto.merge import isotropic
from yeto.syncer.svd_pool import svd_pool
from yeto.syncer.svd_settings import SvdSettings

HOLD = "hold('gate')\nanswer(number, rows, cols, data)"


class Asking:
    """Matrices that are with the pool, each asked for by a task of its own."""

    def __init__(self, pool, nursery):
        self.pool = pool
        self.order = []
        self.results = {}
        self.failures = {}
        self.scopes = {}
        self._nursery = nursery

    async def ask(self, *rows):
        """Ask for matrices, each named by its rows, in this order."""
        for each in rows:
            self.scopes[each] = trio.CancelScope()
            self._nursery.start_soon(self._ask, each)
            await trio.testing.wait_all_tasks_blocked(0.01)

    async def _ask(self, rows):
        with self.scopes[rows]:
            try:
                self.results[rows] = await self.pool.isotropic(matrix(rows))
                self.order.append(rows)
            except SvdPoolError as error:
                self.failures[rows] = str(error)


async def begun(folder, rows):
    """Wait until a worker has a matrix."""
    await until(lambda: any(f": {rows} x" in line for line in notes(folder)))


# Numbers, and the processes themselves.


async def test_real_workers_give_the_bits_of_this_process_until_one_is_killed(tmp_path):
    settings = SvdSettings(devices=("cpu:0", "cpu:1")).validated()
    shapes = [(1, 1), (300, 200), (64, 64), (3, 500), (40, 7)]
    results = {}

    async def ask(pool, shape):
        results[shape] = await pool.isotropic(matrix(*shape))

    lock = (tmp_path / "lock").open("w")
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with svd_pool(settings) as pool:
        pids = [worker.pid for worker in pool.workers]
        for pid in pids:
            # Neither sockets nor locks of this process, nor the pipes of the other worker.
            open_files = [os.readlink(f"/proc/{pid}/fd/{each}") for each in os.listdir(f"/proc/{pid}/fd")]
            assert {name.partition(":")[0] for name in open_files} == {"pipe", "/dev/null"}, open_files
            assert len({name for name in open_files if name.startswith("pipe")}) == 3
            assert os.getsid(pid) == pid
        async with trio.open_nursery() as nursery:
            for shape in shapes:
                nursery.start_soon(ask, pool, shape)
        for shape in shapes:
            expected = isotropic(torch.from_numpy(matrix(*shape))).numpy()
            np.testing.assert_array_equal(results[shape], expected)

        processes = [psutil.Process(pid) for pid in pids]
        before = [process.cpu_times().user for process in processes]
        async with trio.open_nursery() as nursery:
            failed = []

            async def ask_for_long():
                with pytest.raises(SvdPoolError) as error:
                    await pool.isotropic(matrix(3000, 3000))
                failed.append(str(error.value))

            nursery.start_soon(ask_for_long)
            busy = await _busy(processes, before)
            busy.kill()
        name = pool.workers[processes.index(busy)].name
        assert failed == [f"{name}, request 6 (3000 x 3000): was killed by SIGKILL"]
    assert gone(pids)
    lock.close()
    for listener in listeners:
        await listener.aclose()


async def _busy(processes, before):
    """Return the process that has begun to compute."""
    with trio.fail_after(HANGS_SECONDS):
        while True:
            for process, seconds in zip(processes, before, strict=True):
                if process.cpu_times().user > seconds + 0.3:
                    return process
            await trio.sleep(0.02)


ORPHAN = """
import sys, numpy, trio
from yeto.syncer.svd_pool import svd_pool
from yeto.syncer.svd_settings import SvdSettings
async def main():
    async with svd_pool(SvdSettings(devices=("cpu",)).validated()) as pool, trio.open_nursery() as nursery:
        print(pool.workers[0].pid, flush=True)
        await pool.isotropic(numpy.random.default_rng(0).standard_normal((4000, 4000)).astype("f4"))
trio.run(main)
"""


def test_a_worker_in_the_middle_of_a_decomposition_dies_with_its_syncer():
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    with parent:
        pid = int(parent.stdout.readline())
        worker = psutil.Process(pid)
        before = worker.cpu_times().user
        while worker.cpu_times().user < before + 0.5:  # it is at it, for minutes
            assert parent.poll() is None
        parent.kill()
    wait_until_dead(pid)


def test_an_idle_worker_ends_by_itself_when_stdin_ends(tmp_path):
    """The other way a worker learns of the syncer's death, wherever there is no notice of the kernel."""
    settings = settings_of(tmp_path)
    program = f"""
import trio
from yeto.syncer.svd_pool import svd_pool
from yeto.syncer.svd_settings import SvdSettings
async def main():
    async with svd_pool(SvdSettings(devices=("cpu",), python={settings.python!r})) as pool:
        print(pool.workers[0].pid, flush=True)
        await trio.sleep_forever()
trio.run(main)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    with parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_until_dead(pid)


# Order, permits, drain.


async def test_one_worker_takes_jobs_in_the_order_of_their_admission(tmp_path):
    async with svd_pool(bad(tmp_path, HOLD)) as pool, trio.open_nursery() as nursery:
        asking = Asking(pool, nursery)
        await asking.ask(BAD_ROWS, 9, 3, 7, 2, 8)
        assert pool.admitted == 6
        let_go(tmp_path)
        await until(lambda: len(asking.order) == 6)
        assert asking.order == [BAD_ROWS, 9, 3, 7, 2, 8]
        assert pool.admitted == 0
    for rows in asking.order:
        np.testing.assert_array_equal(asking.results[rows], matrix(rows))


async def test_two_devices_overlap_jobs_of_uneven_size(tmp_path):
    settings = bad(tmp_path, HOLD, devices=("cpu:0", "cpu:1"))
    async with svd_pool(settings) as pool, trio.open_nursery() as nursery:
        asking = Asking(pool, nursery)
        await asking.ask(BAD_ROWS)
        await begun(tmp_path, BAD_ROWS)
        await asking.ask(2, 3, 4)
        await until(lambda: len(asking.order) == 3)
        assert asking.order == [2, 3, 4]  # while the long one runs
        let_go(tmp_path)
        await until(lambda: len(asking.order) == 4)
    assert asking.order[-1] == BAD_ROWS
    (held,) = {line.split()[0] for line in notes(tmp_path) if f"{BAD_ROWS} x" in line}
    served = {line.split()[0] for line in notes(tmp_path) if line.endswith((": 2 x 5", ": 3 x 5", ": 4 x 5"))}
    assert served == {"cpu:0", "cpu:1"} - {held}


async def test_permits_bound_what_is_queued_and_running_together(tmp_path):
    settings = bad(tmp_path, HOLD, queue_capacity=3)
    async with svd_pool(settings) as pool, trio.open_nursery() as nursery:
        asking = Asking(pool, nursery)
        await asking.ask(BAD_ROWS, 2, 3, 4, 5)
        await begun(tmp_path, BAD_ROWS)
        assert pool.admitted == 3

        asking.scopes[2].cancel()  # it is queued: its permit goes to the next at once
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert pool.admitted == 3
        asking.scopes[BAD_ROWS].cancel()  # it runs: its permit is free when the worker has answered
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert pool.admitted == 3
        await asking.ask(6)

        let_go(tmp_path)
        await until(lambda: len(asking.order) == 4)
        assert asking.order == [3, 4, 5, 6]
        assert pool.admitted == 0
    assert not any(line.endswith(": 2 x 5") for line in notes(tmp_path))
    assert any(line.endswith(f": {BAD_ROWS} x 5") for line in notes(tmp_path))


async def test_jobs_given_up_in_the_queue_let_any_number_of_others_in(tmp_path):
    settings = bad(tmp_path, HOLD, queue_capacity=2)
    async with svd_pool(settings) as pool, trio.open_nursery() as nursery:
        asking = Asking(pool, nursery)
        await asking.ask(BAD_ROWS)
        await begun(tmp_path, BAD_ROWS)
        for rows in range(20, 30):
            await asking.ask(rows)
            assert pool.admitted == 2
            asking.scopes[rows].cancel()
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert pool.admitted == 1
        await asking.ask(2)
        let_go(tmp_path)
        await until(lambda: len(asking.order) == 2)
        assert asking.order == [BAD_ROWS, 2]


async def test_an_idle_worker_keeps_neither_the_last_matrix_nor_its_result(tmp_path):
    async with svd_pool(settings_of(tmp_path)) as pool:
        given = matrix(7)
        got = await pool.isotropic(given)
        kept = [weakref.ref(given), weakref.ref(got)]
        del given, got
        await trio.testing.wait_all_tasks_blocked()
        assert [each() is None for each in kept] == [True, True]


async def test_what_a_worker_is_started_with(tmp_path):
    """Its device, and the limit that both ends look at."""
    body = "note(' '.join(sys.argv[1:]))" + SERVE
    async with svd_pool(settings_of(tmp_path, body, frame_bytes_max=200)):
        started = "-m yeto.merge.svd_worker --device cpu --frame-bytes-max 200"
        assert started in notes(tmp_path)


async def test_drain_waits_for_queued_and_running_and_admits_nothing_more(tmp_path):
    settings = bad(tmp_path, HOLD, queue_capacity=2)
    async with svd_pool(settings) as pool, trio.open_nursery() as nursery:
        pids = [worker.pid for worker in pool.workers]
        asking = Asking(pool, nursery)
        await asking.ask(BAD_ROWS, 2, 3)  # the last one still waits for admission
        drained = trio.Event()

        async def drain():
            await pool.drain()
            drained.set()

        nursery.start_soon(drain)
        await trio.testing.wait_all_tasks_blocked(0.01)
        await asking.ask(4)
        assert "takes no more matrices" in asking.failures[4]
        assert not drained.is_set()
        let_go(tmp_path)
        with trio.fail_after(HANGS_SECONDS):
            await drained.wait()
        assert asking.order == [BAD_ROWS, 2]
        assert "takes no more matrices" in asking.failures[3]
        assert pool.failure is None
        await until(lambda: gone(pids))


async def test_a_pool_that_is_not_drained_in_time_is_poisoned(tmp_path):
    settings = bad(tmp_path, HOLD, drain_seconds=0.2)
    async with svd_pool(settings) as pool, trio.open_nursery() as nursery:
        asking = Asking(pool, nursery)
        await asking.ask(BAD_ROWS)
        await begun(tmp_path, BAD_ROWS)
        asking.scopes[BAD_ROWS].cancel()
        for _ in range(2):
            with pytest.raises(SvdPoolError) as failed:
                await pool.drain()
            assert str(failed.value) == pool.failure
    assert pool.failure == (
        "the SVD pool still holds 1 matrices after 0.2 s of draining (--iso-worker-drain-timeout-s): "
        "SVD worker 0 on cpu is at request 1 (13 x 5)"
    )


# Poison.

DEEDS = {
    "os.kill(os.getpid(), signal.SIGKILL)": "was killed by SIGKILL",
    "print('out of cheese', file=sys.stderr)\nsys.exit(3)": "ended with exit code 3 (it said: out of cheese)",
    "sys.exit(0)": "ended with exit code 0",
    "give(frame(number, rows, cols, len(data)) + data[:8])\nsys.exit(0)": (
        "ended with exit code 0 after 56 bytes of its answer"
    ),
    "os.close(1)\nhold('never')": "closed its pipe",
    "time.sleep(600)": "no answer within 0.5 s of its admission (--iso-worker-request-timeout-s)",
    "answer(number, cols, rows, data)": "does not keep the protocol: it answered with a matrix of 5 x 13",
    "answer(number + 1, rows, cols, data)": "does not keep the protocol: it answered request {next}",
    "answer(number, rows, cols, data[:-4])": "does not keep the protocol: it answered with 256 bytes and the",
    "give(b'Warning: low on memory\\n')\nhold('never')": (
        "does not keep the protocol: it wrote b'Warning: low on memory\\n', which no answer begins with"
    ),
    "refuse(number, 6, 'out of memory')": "answered failed: out of memory",
    "refuse(number, 7, 'NaN')": "answered result not finite: NaN",
    "answer(number, rows, cols, struct.pack('<f', float('nan')) + data[4:])": (
        "answered with a matrix that is not finite"
    ),
}


@pytest.mark.parametrize(("deed", "what"), DEEDS.items(), ids=lambda text: text[:30])
async def test_the_first_failure_is_kept_for_everybody_and_for_ever(tmp_path, deed, what, caplog):
    seconds = 0.5 if "600" in deed else 60.0
    settings = bad(tmp_path, "hold('gate')\n" + deed, queue_capacity=3, request_seconds=seconds)
    async with svd_pool(settings) as pool, trio.open_nursery() as nursery:
        pids = [worker.pid for worker in pool.workers]
        asking = Asking(pool, nursery)
        await asking.ask(BAD_ROWS, 2, 3, 4)  # one runs, two are queued, one waits for admission
        let_go(tmp_path)
        with trio.fail_after(HANGS_SECONDS):
            await pool.poisoned.wait()
        await until(lambda: len(asking.failures) == 4)
        await asking.ask(5)
        with pytest.raises(SvdPoolError) as failed:
            await pool.drain()
        assert {*asking.failures.values(), str(failed.value)} == {pool.failure}
        assert pool.failure.startswith(f"SVD worker 0 on cpu, request 1 (13 x 5): {what.format(next=2)}")
        assert not asking.results
        await until(lambda: gone(pids))
        assert caplog.messages.count(pool.failure) == 1


async def test_a_failure_of_one_worker_ends_all_of_them(tmp_path):
    settings = bad(tmp_path, "hold('gate')\nsys.exit(1)", devices=("cpu:0", "cpu:1", "cpu:2"))
    async with svd_pool(settings) as pool, trio.open_nursery() as nursery:
        pids = [worker.pid for worker in pool.workers]
        asking = Asking(pool, nursery)
        await asking.ask(2, BAD_ROWS)
        await until(lambda: asking.order == [2])
        let_go(tmp_path)
        with trio.fail_after(HANGS_SECONDS):
            await pool.poisoned.wait()
        await until(lambda: gone(pids))
    assert "request 2 (13 x 5): ended with exit code 1" in pool.failure


async def test_a_worker_that_dies_with_nothing_to_do_is_noticed(tmp_path):
    async with svd_pool(settings_of(tmp_path, devices=("cpu:4",))) as pool:
        os.kill(pool.workers[0].pid, signal.SIGKILL)
        with trio.fail_after(HANGS_SECONDS):
            await pool.poisoned.wait()
        assert pool.failure == "SVD worker 0 on cpu:4: was killed by SIGKILL"


async def test_the_wait_in_the_queue_counts(tmp_path):
    """The second one is begun when its time is over already, however quick the worker is with it."""
    async with svd_pool(bad(tmp_path, HOLD)) as pool, trio.open_nursery() as nursery:
        asking = Asking(pool, nursery)
        await asking.ask(BAD_ROWS)
        pool._settings = attrs.evolve(pool._settings, request_seconds=0.01)
        await asking.ask(2)
        await trio.sleep(0.02)
        assert pool.failure is None
        let_go(tmp_path)
        with trio.fail_after(HANGS_SECONDS):
            await pool.poisoned.wait()
        await until(lambda: asking.failures)
    assert asking.order == [BAD_ROWS]
    assert "request 2 (2 x 5): no answer within" in pool.failure


async def test_a_job_that_was_given_up_still_has_its_deadline(tmp_path):
    # In which the worker has to begin with it, too.
    settings = bad(tmp_path, "time.sleep(600)", request_seconds=2.0)
    async with svd_pool(settings) as pool, trio.open_nursery() as nursery:
        asking = Asking(pool, nursery)
        await asking.ask(BAD_ROWS)
        await begun(tmp_path, BAD_ROWS)
        asking.scopes[BAD_ROWS].cancel()
        with trio.fail_after(HANGS_SECONDS):
            await pool.poisoned.wait()
    assert "request 1 (13 x 5): no answer within 2 s of its admission" in pool.failure


async def test_a_matrix_above_the_limit_says_how_to_raise_it(tmp_path):
    async with svd_pool(settings_of(tmp_path, frame_bytes_max=200)) as pool:
        np.testing.assert_array_equal(await pool.isotropic(matrix(10)), matrix(10))
        with pytest.raises(SvdPoolError, match=r"11 x 5 .* raise --iso-worker-frame-mib"):
            await pool.isotropic(matrix(11))


async def test_the_end_of_the_block_kills_what_runs(tmp_path):
    async with trio.open_nursery() as nursery:
        async with svd_pool(bad(tmp_path, HOLD)) as pool:
            pids = [worker.pid for worker in pool.workers]
            asking = Asking(pool, nursery)
            await asking.ask(BAD_ROWS)
            await begun(tmp_path, BAD_ROWS)
        assert gone(pids)
        await until(lambda: asking.failures)
    assert asking.failures == {BAD_ROWS: "the SVD pool was stopped"}


# The start.

STARTS = {
    "time.sleep(600)": "worker 0 on cpu, request 0 (1 x 1): was not ready within 0.5 s (--iso-worker-start",
    "raise ModuleNotFoundError('No module named torch')": (
        "SVD worker 0 on cpu, request 0 (1 x 1): ended with exit code 1 "
        "(it said: ModuleNotFoundError: No module named torch)"
    ),
    "print('hello')\nsys.stdout.flush()\nhold('never')": "does not keep the protocol: it wrote b'hello\\n'",
    "for number, rows, cols, data in requests():\n    answer(number, rows, cols, struct.pack('<f', 0.2))": (
        "SVD worker 0 on cpu: cannot compute, it makes 0.2"
    ),
    "for number, rows, cols, data in requests():\n    refuse(number, 6, 'no such device')": "no such device",
}


@pytest.mark.parametrize(("body", "what"), STARTS.items(), ids=lambda text: text[:20])
async def test_a_worker_of_no_use_shows_before_the_block_begins(tmp_path, body, what):
    settings = settings_of(tmp_path, body, startup_seconds=0.5 if "600" in body else HANGS_SECONDS)
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, check=lambda error: what in str(error))):
        async with svd_pool(settings):
            raise AssertionError("it began")
    assert not workers()


async def test_one_bad_device_among_good_ones_is_named_and_the_good_ones_end(tmp_path):
    body = "if DEVICE == 'cuda:1':\n    sys.exit('no such device')\n" + SERVE
    settings = settings_of(tmp_path, body, devices=("cuda:0", "cuda:1", "cuda:2"))

    def check(error):
        return "SVD worker 1 on cuda:1" in str(error) and "check --iso-worker-devices" in str(error)

    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, check=check)):
        async with svd_pool(settings):
            raise AssertionError("it began")
    assert not workers()


async def test_a_program_that_cannot_be_executed_is_named(tmp_path):
    settings = settings_of(tmp_path)
    stand_in(tmp_path).write_text("#!/no/such/program\n")
    with pytest.RaisesGroup(
        pytest.RaisesExc(ConfigError, match=r"cannot be started with .*/python: No such")
    ):
        async with svd_pool(settings):
            raise AssertionError("it began")


async def test_workers_see_none_of_the_settings_of_the_syncer(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "yeto.syncer")
    monkeypatch.setenv("YETO_ISLAND_HMAC_KEY", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    body = (
        "print(sorted(name for name in os.environ if name[:4] in ('YETO', 'CUDA')), file=sys.stderr)" + SERVE
    )
    async with svd_pool(settings_of(tmp_path, body)):
        await until(lambda: "CUDA_VISIBLE_DEVICES" in caplog.text)
    assert "SVD worker 0 on cpu: ['CUDA_VISIBLE_DEVICES']" in caplog.messages

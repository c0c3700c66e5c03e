"""``--state-dir`` in whole learners: over sockets to a scripted syncer, and in processes that are killed."""

import json
import resource
import shutil
import signal
import time

import numpy as np
import pytest
from fake_syncer import fake_syncer
from learner_fakes import TinyTask, config, eventually
from syncer_runs import make_config, running

from yeto.errors import ConfigError
from yeto.learner.app import run_learner
from yeto.learner.mailbox import Stop
from yeto.learner.saved import SavedState

STILL = {"inner_lr": 1e-30, "weight_decay": 0.0}
"""Steps that count but do not move a weight."""


@pytest.fixture
def state(tmp_path):
    return {"state_dir": tmp_path / "state", "state_every": 1}


async def stopped(syncer, learn, *, steps, **changes):
    """Train so many steps from the learner's own INIT, and stop; return what the syncer had sent."""
    async with learn(syncer, **changes) as run:
        link = await syncer.connection()
        inits = await link.expect_inits()
        link.broadcast_all(0, inits)
        for _ in range(steps):
            await run.step()
        await eventually(lambda: run.gate.is_closed)
        link.shutdown()
        await eventually(lambda: run.learner._arrivals.stopping)
        run.gate.open()
        assert (await run.expect_end()).exit_code == 4
        return inits


async def test_a_restarted_learner_goes_on_and_holds_what_it_may_have_pushed(learn, state):
    async with fake_syncer() as syncer:
        inits = await stopped(syncer, learn, steps=3, **state, **STILL)
        async with learn(syncer, **state, **STILL) as run:
            link = await syncer.connection()
            offered = await link.expect_inits()
            assert all(map(np.array_equal, offered, inits)), (
                "those of the beginning, for a syncer without any"
            )
            link.broadcast_all(0, inits)
            await run.arrived(broadcasts=2)
            run.gate.allow()
            await eventually(lambda: run.gate.is_closed)
            # P is 2. What it pushed after saving nobody knows, so only the first rounds may ask version 0.
            link.pull(0, 3)
            link.pull(1, 2)
            await run.step(pulls=2)
            head, _ = await link.expect("push")
            assert (head.fragment, head.step, head.base_version) == (1, 2, 0)
            assert (head.local_step, head.c_steps, head.c_tokens) == (5, 5, 150), "what was saved counts"
            link.broadcast(0, 1, inits[0])
            await run.arrived(broadcasts=1)
            run.gate.allow()
            await run.step()
            head, _ = await link.expect("push")
            assert (head.fragment, head.step, head.base_version, head.c_steps) == (0, 3, 1, 1)
            assert "resumed at local step 3" in run.output.getvalue()


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("learner_id", [0, 1])
async def test_state_of_one_run_does_not_get_into_another(learn, state, learner_id):
    """A run begun anew with the folders of the last one: nobody waits for ever, and nothing is lost."""
    state["state_every"] = 1000
    ids = {"learner_id": learner_id, "num_learners": 2}
    async with fake_syncer() as syncer:
        async with learn(syncer, **ids, **state) as run:
            link = await syncer.connection()
            inits = await link.expect_inits() if learner_id == 0 else [np.zeros(n) for n in link.numels]
            link.broadcast_all(0, inits)
            await run.step()
            await eventually(lambda: run.gate.is_closed)
            link.broadcast(1, 2, inits[1] + 1)
            await run.arrived(broadcasts=1)
            run.gate.allow()
            await eventually(lambda: run.gate.is_closed)
            link.shutdown()
            await eventually(lambda: run.learner._arrivals.stopping)
            run.gate.open()
            await run.expect_end()
        saved = contents(state["state_dir"])
        async with learn(syncer, **ids, **state) as run:
            link = await syncer.connection()
            if learner_id == 0:
                # What a syncer without values waits for.
                assert all(map(np.array_equal, await link.expect_inits(), inits))
            link.broadcast_all(0, inits)
            await run.arrived(broadcasts=2)
            run.gate.open()
            with pytest.raises(ConfigError) as caught:
                await run.expect_end()
        assert str(caught.value) == (
            f"--state-dir {state['state_dir']}: its state is of global step 2, and the syncer at "
            f"{syncer.address} is at the beginning of a run, of a new one or back at its first checkpoint; "
            "to begin with it, move the folder away; to go on with what was saved, start the syncer of that "
            "run with --resume"
        )
        assert contents(state["state_dir"]) == saved


async def test_a_run_that_is_further_on_takes_no_weight_of_another(learn, tmp_path):
    """Two runs of one setting and other weights; the second is further on when it gets state of the first."""
    one = {"num_learners": 1, "quorum": 1, "wait_for": 1, "total_steps": 10**6, "sync_interval_steps": 1.0}
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()

    def joining(syncer, state, seed):
        address = f"127.0.0.1:{syncer.address.port}"
        return learn(None, address=address, free=True, seed=seed, state_dir=tmp_path / state, **STILL)

    async def trained(run, until):
        await eventually(lambda: run.progress.global_step >= until)
        run.learner._arrivals.stop(Stop(exit_code=4, reason="stopped"))
        assert (await run.expect_end()).exit_code == 4
        return run.progress.global_step

    async with running(make_config(tmp_path / "first", **one)) as syncer, joining(syncer, "a", 1) as run:
        come_to = await trained(run, 4)
    async with running(make_config(tmp_path / "second", **one)) as syncer:
        async with joining(syncer, "b", 0) as run:
            await trained(run, come_to + 3)
        async with joining(syncer, "a", 1) as run:
            await trained(run, come_to + 4)
    local = run.task.flat().numpy()
    assert np.allclose(local, TinyTask(seed=0).flat().numpy(), rtol=0, atol=1e-12)
    said = run.output.getvalue()
    assert said.count("the weights saved here give way to the syncer's") == 1
    assert "resumed at local step" in said


def test_a_disk_that_fills_up_costs_sets_and_not_the_training(tmp_path, capfd):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Filling(TinyTask):
        """From the third step on no file may become as large as a set."""

        def loss(self, batch):
            if self.batches_given == 3:
                while not (tmp_path / "state" / "set-00000001").exists():
                    time.sleep(0.001)
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
            return super().loss(batch)

    settings = config(
        syncer="none",
        output_dir=tmp_path / "out",
        max_local_steps=6,
        state_dir=tmp_path / "state",
        state_every=2,
    )
    try:
        assert run_learner(settings, lambda: Filling(rows_per_batch=4)) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capfd.readouterr().err
    assert "cannot save local step 6: File too large; step 2 is saved, training goes on" in said
    assert "Traceback" not in said
    assert (tmp_path / "out" / "weights.json").exists()
    (kept,) = (tmp_path / "state").glob("set-*")
    assert SavedState.read(kept).loop.steps == 2


async def test_after_the_final_cut_a_restart_says_that_it_is_over(learn, state):
    async with fake_syncer() as syncer:
        async with learn(syncer, **state) as run:
            link = await syncer.connection()
            inits = await link.expect_inits()
            link.broadcast_all(0, inits)
            await run.step()
            link.final(4, [3, 4], inits)
            run.gate.open()
            assert await link.expect("ack") == 4
            # Should it die now, it must come back and give its ACK once more.
            assert not (state["state_dir"] / "done.json").exists()
            link.shutdown()
            assert (await run.expect_end()).exit_code == 0
        async with learn(syncer, **state) as run:
            outcome = await run.expect_end()
        assert outcome.exit_code == 0
        assert "this learner's run is over (global result of step 4 saved in" in outcome.reason
        assert "give another --state-dir, or remove" in outcome.reason
        assert outcome.reason.endswith(f"remove {state['state_dir'] / 'done.json'} alone")


@pytest.mark.parametrize("change", ["named-another", "removed", "emptied", "noted-by-an-older-version"])
async def test_a_run_that_is_over_does_not_pass_for_one_whose_result_is_elsewhere(
    learn, state, tmp_path, change
):
    output = tmp_path / "out"
    async with fake_syncer() as syncer, learn(syncer, free=True, **state) as run:
        link = await syncer.connection()
        inits = await link.expect_inits()
        link.broadcast_all(0, inits)
        link.final(4, [3, 4], inits)
        await link.expect("ack")
        link.shutdown()
        assert (await run.expect_end()).exit_code == 0
    if change == "named-another":
        output.rename(tmp_path / "old")
        output.symlink_to(tmp_path / "new")
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "notes.txt").write_text("not a result")
    elif change == "noted-by-an-older-version":
        (state["state_dir"] / "done.json").write_text('{"reason": "global result of step 4 saved in out"}')
    else:
        shutil.rmtree(output)
        if change == "emptied":
            output.mkdir()
    # Nobody is dialled: there is no syncer any more.
    async with learn(syncer, **state) as run:
        with pytest.raises(ConfigError, match=r"is not in --output-dir .*; for another run give another"):
            await run.expect_end()


async def test_a_learner_that_dies_after_the_cut_takes_it_again(learn, state, tmp_path):
    async with fake_syncer() as syncer:
        inits = await stopped(syncer, learn, steps=1, **state)
        assert (tmp_path / "out" / "unmerged-0").is_dir()
        async with learn(syncer, **state) as run:
            link = await syncer.connection()
            await link.expect_inits()
            link.broadcast_all(0, inits)
            link.final(4, [3, 4], inits)
            run.gate.open()
            assert await link.expect("ack") == 4
            link.shutdown()
            assert (await run.expect_end()).exit_code == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["weights.json"], (
        "and the stop's weights are gone"
    )


async def test_a_budget_is_saved_before_it_is_told_and_its_answer_is_repeated(learn, state):
    budget = {"budget_steps": 3, **state, "state_every": 1000}
    deltas = []
    async with fake_syncer() as syncer:
        for _ in range(2):
            async with learn(syncer, free=True, **budget) as run:
                link = await syncer.connection()
                inits = await link.expect_inits()
                link.broadcast_all(0, inits)
                assert await link.expect("budget") == 3
                (saved,) = [SavedState.read(path) for path in sorted(state["state_dir"].glob("set-*"))[-1:]]
                assert saved.book.frozen_work == (3, 90)
                link.pull(0, 1)
                head, delta = await link.expect("push")
                assert (head.c_steps, head.c_tokens) == (3, 90)
                deltas.append(delta)
                link.error("stop here")
                await eventually(lambda: run.ended.is_set())
    assert np.array_equal(deltas[0], deltas[1])
    assert np.abs(deltas[0]).max() > 0


def test_a_process_that_is_killed_three_times_ends_where_one_that_was_not_does(template, tmp_path):
    lives = iter(range(5))

    def started(folder):
        output = tmp_path / f"{folder}-{next(lives)}.txt"
        return template.process("state_learner:run", tmp_path / folder, 40, output=output)

    def rows(process):
        return [int(line) for line in process.said if line.isdecimal()]

    def weights(folder):
        return json.loads((tmp_path / folder / "out" / "weights.json").read_text())

    with started("whole") as process:
        assert process.wait() == 0, process.said
    begun = []
    for steps in (5, 16, 31):
        with started("killed") as process:
            process.until(lambda line, most=3 * steps: line.isdecimal() and int(line) >= most)
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            begun.append(rows(process)[0])
    with started("killed") as process:
        assert process.wait() == 0, process.said
        begun.append(rows(process)[0])
    # Each life begins behind a saved step: a multiple of three steps of three rows, and not at the beginning.
    assert begun[0] == 3
    assert all((first - 3) % 9 == 0 for first in begun)
    assert begun == sorted(begun)
    assert begun[-1] > 3
    assert weights("killed") == weights("whole")

"""A whole learner, its training thread included, against a scripted syncer over loopback sockets."""

import numpy as np
import pytest
import torch
import trio
from fake_syncer import fake_syncer
from learner_fakes import TinyTask, config, eventually

from yeto.errors import ConfigError, DataError, YetoError
from yeto.learner.app import run_learner
from yeto.learner.client import FINAL_PATIENCE_SECONDS
from yeto.learner.loop import InnerLoop
from yeto.learner.stopwatch import Stopwatch
from yeto.wire import bf16, q4
from yeto.wire.layout import MergeMode
from yeto.wire.messages import BroadcastHeader


def tensor_names(link):
    """Return the one tensor of each fragment."""
    return [fragment.tensors[0].name for fragment in link.manifest.layout.fragments]


def local(run, name):
    return run.task.trainable_parameters()[name].detach().reshape(-1).numpy()


STILL = {"inner_lr": 1e-30, "weight_decay": 0.0}
"""Steps that count but do not move a weight: what is pushed can be computed by hand."""


async def seeded(syncer):
    """Accept a connection and echo its INIT; return it with the initial values."""
    link = await syncer.connection()
    inits = await link.expect_inits()
    link.broadcast_all(0, inits)
    return link, inits


async def test_init_broadcast_pull_push(learn):
    async with fake_syncer() as syncer, learn(syncer) as run:
        before = {name: p.detach().clone() for name, p in run.task.trainable_parameters().items()}
        link, inits = await seeded(syncer)
        assert (link.hello.learner, link.hello.dtype) == (0, "f32")
        assert [fragment.mode for fragment in link.hello.layout.fragments] == [MergeMode.RDA] * 2
        assert link.manifest.binding == {"model": "tiny", "seed": 0}
        assert link.manifest.contract() == link.hello.contract
        names = tensor_names(link)
        for name, init in zip(names, inits, strict=True):
            assert np.array_equal(init, before[name].reshape(-1).numpy())
        await eventually(lambda: run.gate.is_closed)
        link.pull(0, 1)
        await run.step(pulls=1)
        head, delta = await link.expect("push")
        assert (head.learner, head.fragment, head.step, head.attempt) == (0, 0, 1, 1)
        assert (head.base_version, head.local_step, head.c_steps, head.c_tokens) == (0, 1, 1, 30)
        assert np.array_equal(delta, local(run, names[0]) - inits[0])
        assert np.abs(delta).max() > 0
        await link.expect_heartbeat(1)
        await run.step()
        await link.expect_heartbeat(2)
        assert link.heartbeats == sorted(link.heartbeats)


async def test_a_broadcast_is_blended_and_the_next_push_is_relative_to_it(learn):
    async with fake_syncer() as syncer, learn(syncer, free=True, merge_alpha=0.25, **STILL) as run:
        link, inits = await seeded(syncer)
        # Broadcasts that wait for the same boundary replace each other; this one is to be a second one.
        await link.expect_heartbeat(1)
        start = inits[0].copy()
        received = np.full_like(start, 2.0)
        link.broadcast(0, 3, received)
        await eventually(lambda: run.log("broadcast")[-1]["version"] == 3)
        link.pull(0, 5)
        head, delta = await link.expect("push")
        assert (head.base_version, head.step) == (3, 5)
        blended = np.float32(0.25) * start + np.float32(0.75) * received
        assert np.allclose(delta, blended - received, rtol=0, atol=1e-6)
        assert head.c_steps < head.local_step, "the broadcast reset the counters"
        assert head.c_tokens == 30 * head.c_steps
        assert [r["taken"] for r in run.log("broadcast")] == ["unchanged", "unchanged", "blended"]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q4"])
async def test_carried_work_is_pushed_once_and_whole(learn, dtype):
    """Two pushes add up to all that was trained, whatever the wire takes from the first."""
    async with fake_syncer() as syncer, learn(syncer, merge_alpha="carry", wire_dtype=dtype) as run:
        link, inits = await seeded(syncer)
        name = tensor_names(link)[0]
        await run.step()
        await eventually(lambda: run.gate.is_closed)
        link.pull(0, 1)
        await run.step(pulls=1)
        head, first = await link.expect("push")
        link.broadcast(0, 1, np.full_like(inits[0], 2.0))
        link.pull(0, 3)
        await run.arrived(pulls=1, broadcasts=1)
        run.gate.allow()
        head, second = await link.expect("push")
        assert (head.base_version, head.c_steps, head.local_step) == (1, 1, 3)
        assert run.log("broadcast")[-1]["taken"] == "carried"
        alone = TinyTask(rows_per_batch=3)
        loop = InnerLoop(alone, alone.trainable_parameters(), run.settings, Stopwatch())
        for _ in range(3):
            loop.step(lambda: False)
        done = alone.trainable_parameters()[name].detach().reshape(-1).numpy() - inits[0]
        assert np.allclose(local(run, name), 2.0 + (done - first), rtol=0, atol=1e-6)
        # What the wire took from the first push is in the second, whose own loss is the only one left.
        left = np.abs(done - first).max()
        loss = {"f32": 0.0, "bf16": 0.01, "q4": 0.5}[dtype] * left
        assert np.allclose(first + second, done, rtol=0, atol=loss + 1e-6)


@pytest.mark.parametrize("streams", [0, 1, 4])
async def test_a_learner_other_than_0_takes_the_first_broadcast_whole(learn, streams):
    async with (
        fake_syncer() as syncer,
        learn(syncer, free=True, learner_id=1, num_learners=2, wan_streams=streams, **STILL) as run,
    ):
        link = await syncer.connection()
        assert link.hello.num_streams == streams
        assert link.group.is_complete
        values = [np.full(numel, 3.0, dtype=np.float32) for numel in link.numels]
        link.broadcast_all(40, values)
        link.pull(1, 42)
        head, delta = await link.expect("push")
        assert (head.learner, head.base_version, head.fragment) == (1, 40, 1)
        assert np.array_equal(delta, np.zeros(link.numels[1]))
        assert link.inits == {}
        assert np.array_equal(local(run, tensor_names(link)[0]), values[0])


async def test_q4_sends_initial_values_as_bf16_and_deltas_in_four_bits(learn):
    async with fake_syncer() as syncer, learn(syncer, wire_dtype="q4") as run:
        link, inits = await seeded(syncer)
        name = tensor_names(link)[0]
        start = local(run, name).copy()
        assert np.array_equal(inits[0], bf16.decode(bf16.encode(start), start.size))
        await eventually(lambda: run.gate.is_closed)
        link.pull(0, 1)
        await run.step(pulls=1)
        _, delta = await link.expect("push")
        assert np.array_equal(delta, q4.decode(q4.encode(local(run, name) - inits[0]), start.size))


async def test_a_lost_link_is_dialled_again_and_the_work_is_kept(learn):
    async with fake_syncer() as syncer, learn(syncer, **STILL) as run:
        link, inits = await seeded(syncer)
        await eventually(lambda: run.gate.is_closed)
        link.pull(0, 1)
        await run.step(pulls=1)
        await link.expect("push")
        await eventually(lambda: run.gate.is_closed)
        # This one waits for a boundary, and dies with its connection.
        link.pull(1, 2)
        await run.arrived(pulls=1)
        await link.drop()
        again = await syncer.connection()
        assert again.hello.generation != link.hello.generation
        again.broadcast_all(0, inits)
        again.pull(0, 1, attempt=2)
        await run.arrived(pulls=1, broadcasts=2)
        run.gate.allow(1)
        head, _ = await again.expect("push")
        assert (head.fragment, head.attempt, head.base_version) == (0, 2, 0)
        assert (head.c_steps, head.local_step) == (2, 2), "the same bytes again reset nothing"
        assert again.inits == {}, "INIT is sent until the syncer has everything"
        assert again.nothing_more()


async def test_init_is_sent_again_until_every_fragment_has_an_anchor(learn):
    async with fake_syncer() as syncer, learn(syncer) as run:
        for _ in range(2):
            link = await syncer.connection()
            inits = await link.expect_inits()
            link.broadcast(0, 0, inits[0])
            await eventually(lambda: run.log("broadcast"))
            await link.drop()
        again = await syncer.connection()
        for init, first in zip(await again.expect_inits(), inits, strict=True):
            assert np.array_equal(init, first)
        assert run.log("step") == [], "one fragment has no anchor yet"


async def test_an_older_state_of_the_syncer_is_taken_and_said(learn):
    async with fake_syncer() as syncer, learn(syncer, free=True, merge_alpha=0.0, **STILL) as run:
        link, inits = await seeded(syncer)
        await eventually(lambda: len(run.log("broadcast")) == 2)
        link.broadcast(0, 9, inits[0] + 1)
        await eventually(lambda: run.log("broadcast")[-1]["version"] == 9)
        link.pull(0, 11)
        head, _ = await link.expect("push")
        assert head.base_version == 9
        await link.drop()
        again = await syncer.connection()
        again.broadcast(0, 5, inits[0] + 2)
        again.broadcast(1, 0, inits[1])
        again.pull(0, 7)
        head, delta = await again.expect("push")
        assert head.base_version == 5
        assert np.array_equal(delta, np.zeros_like(inits[0]))
        assert "fragment 0 from version 9 to 5" in run.output.getvalue()


async def test_an_error_is_permanent(learn):
    async with fake_syncer() as syncer, learn(syncer) as run:
        link, _ = await seeded(syncer)
        run.gate.allow(1)
        await link.expect_heartbeat(1)
        link.error("learner 0 connected again from 10.0.0.9:5; two processes with one --learner-id?")
        run.gate.open()
        outcome = await run.expect_end()
        assert outcome.exit_code == 1
        assert "two processes with one --learner-id?" in outcome.reason
        assert "NOT the global result" in outcome.reason
        assert run.task.saved == [run.settings.output_dir / "unmerged-0"]
        assert run.log("exit")[0]["code"] == 1


@pytest.mark.parametrize("key", [None, b"wrong"])
async def test_failed_authentication_is_not_retried(learn, key):
    async with fake_syncer(key=b"right") as syncer, learn(syncer, auth_key=key) as run:
        outcome = await run.expect_end()
        assert outcome.exit_code == 1
        assert "HELLO authentication failed; --auth-key-file must hold" in outcome.reason
        assert syncer.refused == ["HELLO authentication failed"]
        assert run.task.saved == []


async def test_the_right_key_is_accepted(learn):
    async with fake_syncer(key=b"right") as syncer, learn(syncer, auth_key=b"right"):
        await seeded(syncer)


@pytest.mark.parametrize("manifest_first", [True, False])
async def test_the_final_cut_is_taken_exactly_and_acknowledged(learn, manifest_first):
    async with fake_syncer() as syncer, learn(syncer, free=True, wire_dtype="bf16", eval_every=1000) as run:
        link, inits = await seeded(syncer)
        await link.expect_heartbeat(1)
        final = [init + np.float32(1 / 3) for init in inits]
        link.final(12, [11, 12], final, manifest_first=manifest_first)
        assert await link.expect("ack") == 12
        for name, values in zip(tensor_names(link), final, strict=True):
            assert np.array_equal(local(run, name), values)
        assert run.task.saved == [run.settings.output_dir]
        link.broadcast(0, 13, inits[0])
        link.pull(1, 14)
        link.shutdown()
        outcome = await run.expect_end()
        assert outcome.exit_code == 0
        assert "global result of step 12" in outcome.reason
        assert np.array_equal(local(run, tensor_names(link)[0]), final[0])
        assert link.nothing_more()
        assert [r["global_step"] for r in run.log("eval")] == [0, 12]
        assert run.log("exit")[0]["global_step"] == 12


async def test_a_late_learner_gets_the_final_cut_without_ever_training(learn):
    async with fake_syncer() as syncer, learn(syncer, learner_id=1, num_learners=2) as run:
        link = await syncer.connection()
        link.final(12, [11, 12], [np.ones(numel) for numel in link.numels])
        assert await link.expect("ack") == 12
        link.shutdown()
        assert (await run.expect_end()).exit_code == 0
        assert run.log("step") == []


async def test_a_link_lost_after_the_ack_is_dialled_and_acknowledged_again(learn):
    async with fake_syncer() as syncer, learn(syncer, free=True) as run:
        link, inits = await seeded(syncer)
        link.final(2, [1, 2], inits)
        assert await link.expect("ack") == 2
        await link.drop()
        again = await syncer.connection()
        again.broadcast_all(1, inits)
        assert again.nothing_more(), "the cut is acknowledged when it came over this connection"
        again.final(2, [1, 2], inits)
        assert await again.expect("ack") == 2
        assert len(run.task.saved) == 1, "it is the same cut"
        await again.drop()
        other = await syncer.connection()
        other.final(2, [1, 2], [init + 1 for init in inits])
        assert await other.expect("ack") == 2
        assert len(run.task.saved) == 2, "this one is not"
        other.shutdown()
        assert (await run.expect_end()).exit_code == 0


async def test_a_syncer_that_never_confirms_is_not_waited_for_for_ever(learn, monkeypatch):
    monkeypatch.setattr("yeto.learner.client.FINAL_PATIENCE_SECONDS", 0.2)
    async with fake_syncer() as syncer, learn(syncer, free=True) as run:
        link, inits = await seeded(syncer)
        link.final(2, [1, 2], inits)
        assert await link.expect("ack") == 2
        assert (await run.expect_end()).exit_code == 0
        assert "did not confirm" in run.output.getvalue()


async def test_a_tunnel_to_a_syncer_that_is_gone_is_not_waited_for_either(learn, skipping_clock):
    """Being connected says little: after the ACK only what a syncer sends gives it more time."""
    async with fake_syncer() as syncer, learn(syncer, free=True) as run:
        link, inits = await seeded(syncer)
        link.final(2, [1, 2], inits)
        assert await link.expect("ack") == 2
        syncer.is_tunnel = True
        await link.drop()
        dialled = 1 + run.settings.wan_streams
        await eventually(lambda: syncer.accepted > dialled)
        skipping_clock.jump(FINAL_PATIENCE_SECONDS)
        assert (await run.expect_end()).exit_code == 0
        assert "did not confirm" in run.output.getvalue()


async def test_many_streams_are_opened_some_at_a_time(learn):
    """A syncer has 64 places for connections that have not said who they are."""
    async with fake_syncer() as syncer, learn(syncer, wan_streams=200):
        link, _ = await seeded(syncer)
        assert link.group.is_complete
        assert syncer.accepted == 201
        assert syncer.most_silent <= 33


async def test_shutdown_before_a_final_cut_leaves_unmerged_weights(learn):
    async with fake_syncer() as syncer, learn(syncer, free=True) as run:
        link, _ = await seeded(syncer)
        await link.expect_heartbeat(1)
        link.shutdown()
        outcome = await run.expect_end()
        assert outcome.exit_code == 4
        assert "unmerged-0: this is NOT the global result" in outcome.reason
        assert "yeto-export --checkpoint" in outcome.reason


async def test_the_local_step_limit_ends_a_run_before_its_final_cut(learn):
    async with fake_syncer() as syncer, learn(syncer, free=True, max_local_steps=3) as run:
        await seeded(syncer)
        outcome = await run.expect_end()
        assert outcome.exit_code == 4
        assert outcome.reason.startswith("--max-local-steps 3 reached")
        assert run.log("exit")[0]["local_step"] == 3


async def test_a_used_up_budget_freezes_the_learner_until_the_finish(learn):
    async with fake_syncer() as syncer, learn(syncer, free=True, budget_steps=3) as run:
        link, inits = await seeded(syncer)
        assert await link.expect("budget") == 3
        names = tensor_names(link)
        frozen = [local(run, name).copy() for name in names]
        link.shutdown()
        again = await syncer.connection()
        assert await again.expect("budget") == 3
        resumed = [init + 1 for init in inits]
        again.broadcast_all(7, resumed)
        for attempt in (1, 2):
            again.pull(0, 8, attempt)
            head, delta = await again.expect("push")
            assert (head.attempt, head.c_steps, head.c_tokens, head.local_step) == (attempt, 3, 90, 3)
            assert np.array_equal(delta, frozen[0] - resumed[0])
        assert np.array_equal(local(run, names[0]), frozen[0])
        again.final(9, [8, 9], resumed)
        assert await again.expect("ack") == 9
        again.shutdown()
        assert (await run.expect_end()).exit_code == 0


async def test_the_address_is_looked_up_anew_at_each_dial(learn, tmp_path):
    file = tmp_path / "address"
    async with fake_syncer() as first, fake_syncer() as second, learn(first, address=f"@{file}"):
        # The file is not there yet: that is no reason to give up.
        await trio.Path(file).write_text(first.address + "\n")
        link, _ = await seeded(first)
        await trio.Path(file).write_text(second.address)
        await link.drop()
        await second.connection()


async def test_no_syncer_at_all_is_an_error_that_says_where_it_was_looked_for(learn):
    async with (
        fake_syncer() as syncer,
        learn(syncer, address="127.0.0.1:1", first_connect_seconds=0.2) as run,
    ):
        outcome = await run.expect_end()
        assert outcome.exit_code == 1
        assert "no syncer at 127.0.0.1:1 within 0 s" in outcome.reason
        assert "check --syncer" in outcome.reason


async def test_a_syncer_that_stays_away_is_given_up(learn):
    async with fake_syncer() as syncer, learn(syncer, free=True, give_up_seconds=0.0) as run:
        link, _ = await seeded(syncer)
        await link.expect_heartbeat(1)
        await link.drop()
        outcome = await run.expect_end()
        assert outcome.exit_code == 4
        assert "--give-up-after" in outcome.reason
        assert run.task.saved == [run.settings.output_dir / "unmerged-0"]


async def test_two_contents_of_one_version_are_fatal(learn):
    async with fake_syncer() as syncer, learn(syncer, free=True) as run:
        link, inits = await seeded(syncer)
        await link.expect_heartbeat(1)
        data = memoryview(np.full_like(inits[0], 9.0).tobytes())
        link.group.outbox.put(BroadcastHeader(fragment=0, version=0), data, order=(0, 1))
        outcome = await run.expect_end()
        assert outcome.exit_code == 1
        assert outcome.reason.startswith("fragment 0: version 0 came twice with different bytes")
        assert run.task.saved == [run.settings.output_dir / "unmerged-0"]


async def test_values_that_are_no_numbers_never_reach_the_weights(learn):
    async with fake_syncer() as syncer, learn(syncer, free=True) as run:
        link, inits = await seeded(syncer)
        link.broadcast(0, 1, np.full_like(inits[0], np.nan))
        await link.expect_end()
        again = await syncer.connection()
        assert np.isfinite(local(run, tensor_names(link)[0])).all()
        again.broadcast_all(0, inits)
        assert "fragment 0, version 1 holds values that are not finite" in run.output.getvalue()


async def test_a_syncer_that_only_breaks_the_protocol_is_given_up(learn):
    async with fake_syncer() as syncer, learn(syncer, free=True, give_up_seconds=0.2) as run:
        link, inits = await seeded(syncer)
        await link.expect_heartbeat(1)
        async with trio.open_nursery() as nursery:

            async def until_given_up():
                await run.expect_end()
                nursery.cancel_scope.cancel()

            nursery.start_soon(until_given_up)
            while True:
                link.broadcast(0, 1, np.full_like(inits[0], np.nan))
                await link.expect_end()
                link = await syncer.connection()
        assert run.outcome.exit_code == 4
        assert "not finite" in run.outcome.reason


async def test_an_error_of_the_training_thread_comes_out(learn):
    async with fake_syncer() as syncer, learn(syncer, free=True) as run:
        run.task.rows = [(x, y, 0) for x, y, _ in run.task.rows]
        await seeded(syncer)
        with pytest.raises(DataError, match="no target"):
            await run.expect_end()
        assert run.log("exit")[0]["code"] == 1


async def test_a_result_that_cannot_be_saved_says_where_it_still_is(learn):
    def full(folder):
        raise RuntimeError("No space left on device")

    async with fake_syncer() as syncer, learn(syncer, free=True) as run:
        run.task.save = full
        link, inits = await seeded(syncer)
        link.final(2, [1, 2], inits)
        with pytest.raises(YetoError, match=r"cannot save in --output-dir .*No space left .*yeto-export"):
            await run.expect_end()


def test_an_output_folder_that_cannot_be_is_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "file").write_text("")
    settings = config(syncer="none", max_local_steps=1, output_dir=tmp_path / "file" / "out")
    with pytest.raises(ConfigError, match=r"--output-dir .*: cannot be written to: Not a directory"):
        run_learner(settings, lambda: pytest.fail("loaded the task first"))


async def test_without_a_syncer_the_same_loop_is_the_baseline(learn, tmp_path):
    class Nobody:
        address = "none"

    async with learn(Nobody, free=True, max_local_steps=5, eval_every=2, grad_accum=2) as run:
        outcome = await run.expect_end()
    assert outcome.exit_code == 0
    assert run.task.saved == [tmp_path / "out"]
    assert [r["local_step"] for r in run.log("step")] == [1, 2, 3, 4, 5]
    assert [r["local_step"] for r in run.log("eval")] == [0, 2, 4, 5]
    assert run.log("eval")[-1]["loss"] < run.log("eval")[0]["loss"]
    twin = TinyTask(rows_per_batch=3)
    loop = InnerLoop(twin, twin.trainable_parameters(), run.settings, Stopwatch())
    for _ in range(5):
        loop.step(lambda: False)
    assert torch.equal(run.task.flat(), twin.flat()), "the network is not part of training"
    seconds = run.log("exit")[0]["seconds"]
    total = seconds.pop("total")
    assert sum(seconds.values()) == pytest.approx(total, abs=0.05)
    assert {"loading", "data", "compute", "evaluation", "saving", "unaccounted"} <= seconds.keys()

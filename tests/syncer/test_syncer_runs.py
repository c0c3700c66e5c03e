"""Whole runs to the final cut, with every dtype and with and without data streams."""

import numpy as np
import pytest
from fake_learner import BINDING, FakeLearner, initial_values, small_layout
from syncer_runs import bodies, fakes, make_config, running, verify

from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.state import read_checkpoint, read_final_marker
from yeto.wire.digest import digest
from yeto.wire.layout import MergeMode


@pytest.mark.parametrize(
    ("dtype", "num_streams", "mode"),
    [
        ("f32", 2, MergeMode.RDA),
        ("bf16", 0, MergeMode.ISO),
        ("q4", 4, MergeMode.RDA),
    ],
)
async def test_run_to_the_final_cut(tmp_path, dtype, num_streams, mode):
    layout = small_layout(mode=mode)
    config = make_config(tmp_path, mark_final_checkpoint=True)
    learners = fakes(layout=layout, dtype=dtype, num_streams=num_streams)
    async with running(config, *learners) as run:
        assert await run.end() == 0
        assert all(learner.released for learner in learners)

    checkpoint = read_checkpoint(config.checkpoint_path)
    assert checkpoint.step == 6
    assert [version.version for version in checkpoint.fragments] == [4, 5, 6]
    expected = [version.params_digest for version in checkpoint.fragments]
    for learner in learners:
        assert learner.final_digests() == expected
        assert learner.final_manifest.versions == (4, 5, 6)
    assert read_final_marker(config.checkpoint_path) == 6
    assert [entry.merges for entry in checkpoint.ledger] == [6, 6]
    assert [entry.c_tokens for entry in checkpoint.ledger] == [600, 600]
    assert checkpoint.training_manifest == learners[0].manifest.to_dict()
    commits = bodies(config.event_tape, de.RoundCommitted)
    assert [commit.step for commit in commits] == [1, 2, 3, 4, 5, 6]
    assert bodies(config.event_tape, de.CheckpointOrdered)[-1].step == 6
    merged = {fact.step: fact for fact in bodies(config.event_tape, ev.MergeFinished)}
    applied = {fact.step: fact for fact in bodies(config.event_tape, ev.OuterStepApplied)}
    for commit in commits:
        assert commit.delta_cosine == merged[commit.step].delta_cosine
        assert commit.norm_ratio == merged[commit.step].norm_ratio
        assert commit.offset_ratio == applied[commit.step].offset_ratio
        assert -1 <= commit.delta_cosine <= 1
        assert commit.norm_ratio > 0
    # The sweep publishes the learners' average as it is; before it, momentum goes ahead of them.
    offsets = [commit.offset_ratio for commit in commits]
    assert offsets[-3:] == pytest.approx([0.0] * 3, abs=1e-5)
    assert min(offsets[:3]) > 0.1


@pytest.mark.parametrize(
    ("outer", "mode"), [("direct", MergeMode.ISO), ("direct", MergeMode.RDA), ("stock", MergeMode.ISO)]
)
async def test_isotropic_merges_that_nobody_will_make_are_spoken_of(tmp_path, caplog, outer, mode):
    config = make_config(tmp_path, total_steps=3, outer=outer)
    async with running(config, *fakes(layout=small_layout(mode=mode))) as run:
        assert await run.end() == 0
    said = "learners ask for isotropic merges (--matrix-merge iso)" in caplog.text
    assert said == ((outer, mode) == ("direct", MergeMode.ISO))


async def test_merge_is_what_the_deltas_say(tmp_path):
    """Plain SGD with an average: the result can be computed by hand."""
    layout = small_layout(num_fragments=1)
    deltas = {0: np.full(40, 0.5, np.float32), 1: np.full(40, 0.25, np.float32)}
    config = make_config(tmp_path, total_steps=1, outer_lr=1.0, outer_momentum=0.0, closing_sweep="off")
    learners = [
        FakeLearner(learner=k, layout=layout, make_delta=lambda pull, numel, k=k: deltas[k], c_tokens=100)
        for k in range(2)
    ]
    async with running(config, *learners) as run:
        assert await run.end() == 0
    (commit,) = bodies(config.event_tape, de.RoundCommitted)
    assert (commit.delta_cosine, commit.norm_ratio, commit.offset_ratio) == pytest.approx((1, 1, 0), abs=1e-6)
    expected = initial_values(layout)[0] + np.float32(0.375)
    np.testing.assert_allclose(learners[1].final[0], expected, rtol=1e-6)


async def test_nothing_is_broadcast_before_step_zero_is_durable(tmp_path):
    config = make_config(tmp_path)
    learners = fakes()
    async with running(config, *learners) as run:
        assert await run.end() == 0
    kinds = [type(body) for body in bodies(config.event_tape)]
    assert kinds.index(ev.CheckpointWritten) < kinds.index(de.BroadcastOrdered)
    assert [version for _, version in learners[1].versions[:3]] == [0, 0, 0]
    first = digest(initial_values(learners[0].layout)[2])
    initialised = {
        event.fragment: event.digest for event in bodies(config.event_tape, ev.FragmentInitialised)
    }
    assert initialised[2] == first


async def test_quorum_of_one_goes_on_alone(tmp_path):
    config = make_config(tmp_path, quorum=1, wait_for=1)
    (learner,) = fakes(1)
    async with running(config, learner) as run:
        assert await run.end() == 0
    assert verify(config.event_tape).state.step == 6


async def test_a_learner_alone_moves_as_plain_sgd_says(tmp_path):
    """Nobody else is there to be averaged with, and its work is applied whole all the same."""
    layout, sent = small_layout(), {}

    def make(pull, numel):
        delta = np.random.default_rng(pull.step).standard_normal(numel).astype(np.float32)
        sent.setdefault(pull.fragment, []).append(delta)
        return delta

    learner = FakeLearner(learner=0, layout=layout, make_delta=make, binding=BINDING | {"num_learners": 1})
    config = make_config(
        tmp_path, num_learners=1, quorum=1, wait_for=1, outer_lr=0.5, outer_momentum=0.0, closing_sweep="off"
    )
    async with running(config, learner) as run:
        assert await run.end() == 0
    for fragment, start in enumerate(initial_values(layout)):
        first, second = sent[fragment]
        expected = start + np.float32(0.5) * (first + second)
        np.testing.assert_allclose(learner.final[fragment], expected, rtol=1e-5, atol=1e-6)

"""A run that goes on from an older single file: the first learner that fits it says what it holds."""

import attrs
import numpy as np
import pytest
from fake_learner import FakeLearner, initial_values, small_layout
from older_files import older_bytes
from syncer_runs import bodies, fakes, make_config, running, until

from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.errors import CheckpointError, ConfigError
from yeto.state import kept_single_file, read_checkpoint
from yeto.syncer.config import StartMode
from yeto.syncer.start import prepare
from yeto.wire.digest import digest
from yeto.wire.fingerprint import layout_fingerprint
from yeto.wire.layout import FragmentLayout, Layout, MergeMode, TensorSpec

STEP = 2
ONE_TENSOR_EACH = Layout(
    fragments=tuple(
        FragmentLayout(mode=MergeMode.AVG, tensors=(TensorSpec(name=f"t{p}", shape=(12 + p,)),))
        for p in range(3)
    )
)


def older_file(config, number, layout, *, backend=0, contract=None, ledger=((0, 2, 8, 200), (1, 1, 4, 100))):
    """Write the file of a run that was at step 2 of 6; return its parameters."""
    values = initial_values(layout, seed=5)
    momentum = [np.full(len(part), 0.5, dtype=np.float32) for part in values]
    data = older_bytes(
        number,
        step=STEP,
        fragments=list(zip((1, 2, 0), values, momentum, strict=True)),
        ledger=ledger,
        backend=backend,
        fingerprint=layout_fingerprint(layout),
        contract=contract,
    )
    config.checkpoint_path.write_bytes(data)
    return data, values


@pytest.mark.parametrize(("number", "layout"), [(3, small_layout()), (2, ONE_TENSOR_EACH)])
async def test_a_run_goes_on_from_an_older_file(tmp_path, number, layout):
    config = make_config(tmp_path, resume=True)
    data, values = older_file(config, number, layout)
    learners = fakes(layout=layout)
    async with running(config, *learners) as run:
        assert await run.end() == 0
    (event,) = bodies(config.event_tape, ev.SessionResumed)
    assert (event.step, len(event.fragments), event.terms.dtype) == (STEP, 3, "f32")
    assert event.ledger[1].c_tokens == 100
    assert [mark.params_digest for mark in event.fragments] == [digest(part) for part in values]
    # Fragment 2 had not been committed: it is the next.
    assert bodies(config.event_tape, de.RoundCommitted)[0].step == STEP + 1
    assert sorted(learners[1].versions)[:3] == [(0, 1), (0, 4), (1, 2)]
    final = read_checkpoint(config.checkpoint_path)
    assert (final.format, final.step, final.contract) == ("folder-v3", 6, event.terms.contract)
    assert final.ledger[0].merges == 2 + 4
    assert final.training_manifest == learners[0].manifest.to_dict()
    assert kept_single_file(config.checkpoint_path).read_bytes() == data
    assert not config.checkpoint_path.with_name("state.ckpt.new").exists()
    # The older file is no way back from a folder that was lost: six steps would be lost without a word.
    config.checkpoint_path.rename(tmp_path / "lost")
    tape = config.event_tape.read_bytes()
    with (
        pytest.raises(ConfigError, match=r"single-file is of step 2, .* the checkpoint of step 6"),
        prepare(config),
    ):
        pass
    assert config.event_tape.read_bytes() == tape


async def test_who_does_not_fit_is_turned_away_and_changes_nothing(tmp_path):
    config = make_config(tmp_path, resume=True)
    layout = small_layout()
    good = FakeLearner(learner=0, layout=layout)
    data, _ = older_file(config, 3, layout, contract=good.manifest.contract())
    strangers = [
        FakeLearner(learner=0, layout=small_layout(numel=44)),
        FakeLearner(learner=1, layout=layout, binding={"model": "another", "seed": 0, "num_learners": 2}),
    ]
    async with running(config, *strangers) as run:
        await until(lambda: all(stranger.error for stranger in strangers))
        assert "layout fingerprint: the checkpoint has" in strangers[0].error
        assert "session contract: the checkpoint has" in strangers[1].error
        assert config.checkpoint_path.read_bytes() == data
        assert bodies(config.event_tape, ev.HelloReceived) == []
        for learner in (good, FakeLearner(learner=1, layout=layout)):
            run.join(learner)
        assert await run.end() == 0
    assert read_checkpoint(config.checkpoint_path).step == 6


async def test_tensors_that_are_grouped_need_a_fingerprint(tmp_path):
    config = make_config(tmp_path, resume=True)
    older_file(config, 2, small_layout())
    learner = FakeLearner(learner=0)
    async with running(config, learner):
        await until(lambda: learner.error)
    assert "resumed only if every fragment has one tensor; it can be inspected" in learner.error


async def test_what_is_known_at_the_start_is_refused_at_the_start(tmp_path):
    config = make_config(tmp_path, resume=True)

    def refused(error, text, config=config):
        before = sorted(path.name for path in tmp_path.iterdir())
        with pytest.raises(error, match=text), prepare(config):
            pass
        after = sorted(path.name for path in tmp_path.iterdir())
        assert [name for name in after if name != "state.ckpt.lock"] == [
            name for name in before if name != "state.ckpt.lock"
        ]

    older_file(config, 1, small_layout())
    refused(CheckpointError, "version 1 checkpoint .* is never resumed; it can be inspected")
    older_file(config, 2, small_layout(), backend=1)
    refused(ConfigError, "--iso-backend: the checkpoint has torch-svd, this start has scalar")
    older_file(config, 3, small_layout(), ledger=((0, 1, 1, 1), (7, 1, 1, 1)))
    refused(ConfigError, "--learners 2: the checkpoint has contributions of learner 7")
    older_file(config, 3, small_layout())
    refused(
        ConfigError,
        "--total-steps 1: the checkpoint is at step 2",
        make_config(tmp_path, resume=True, total_steps=1),
    )
    refused(
        ConfigError,
        "--record-payloads: .* is an older single file",
        attrs.evolve(config, record_payloads=tmp_path / "payloads"),
    )
    refused(ConfigError, "holds the checkpoint of an earlier run", make_config(tmp_path))
    config.checkpoint_path.rename(kept_single_file(config.checkpoint_path))
    refused(ConfigError, "holds the checkpoint of an earlier run", make_config(tmp_path))


@pytest.mark.parametrize("cut_off", [False, True])
async def test_a_start_that_never_wrote_a_checkpoint_is_made_again(tmp_path, cut_off):
    """Before a learner came, and after a takeover that ended between its two renames."""
    config = attrs.evolve(make_config(tmp_path), start=StartMode.RESUME_OR_START)
    older_file(config, 3, small_layout())
    async with running(config, *(fakes(1) if cut_off else ())) as run:
        if cut_off:
            await until(lambda: bodies(config.event_tape, ev.SessionResumed))
        run.stop()
    if cut_off:
        config.checkpoint_path.rename(kept_single_file(config.checkpoint_path))
    async with running(config, *fakes()) as run:
        assert await run.end() == 0
    assert config.event_tape.with_name("events.jsonl.1").exists()
    assert read_checkpoint(config.checkpoint_path).step == 6

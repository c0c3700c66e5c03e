"""What an export does about Nesterov's look-ahead, and where it says so."""

import json

import pytest
import torch
from safetensors.torch import load_file
from text_checkpoints import NUM_FRAGMENTS, make_checkpoint

from yeto.errors import CheckpointError, ConfigError
from yeto.state import read_checkpoint
from yeto.text.export import export
from yeto.wire import TrainingManifest

STOCK = {"outer_lr": 0.7, "outer_momentum": 0.9, "total_steps": 96, "closing_sweep": "plain"}


def exported(config, checkpoint, out, **flags):
    """Export; return the report, the tensors by name, the line about the look-ahead and the facts."""
    lines = []
    report = export(checkpoint, config.model, out, verify=False, say=lines.append, **flags)
    (line,) = [line for line in lines if line.startswith("look-ahead: ")]
    facts = json.loads((out / "yeto-export.json").read_text())["lookahead"]
    assert facts["outcome"] == report.lookahead
    return report, load_file(out / "adapter_model.safetensors"), line, facts


def moved_back(checkpoint, times):
    """Return what is in a checkpoint, by name, with so many times each fragment's momentum added in f32."""
    stored = read_checkpoint(checkpoint)
    layout = TrainingManifest.from_dict(stored.training_manifest).layout
    tensors = {}
    for part, fragment, factor in zip(layout.fragments, stored.fragments, times, strict=True):
        values = fragment.params + torch.tensor(factor, dtype=torch.float32) * fragment.momentum
        for piece in part.slices():
            tensors[piece.tensor.name] = values[piece.start : piece.stop].reshape(piece.tensor.shape)
    return tensors


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_it_is_removed_fragment_by_fragment_with_the_factor_of_each(config, checkpoint, out):
    raw = make_checkpoint(checkpoint, config, momentum_noise=0.02, lookaheads=(0.63, 0.0, 0.25))
    report, tensors, line, facts = exported(config, checkpoint, out)
    assert report.lookahead == "removed"
    assert line == "look-ahead: removed from 2 of 3 fragments (--lookahead keep keeps it)"
    assert facts["momentum_times"] == [0.63, 0.0, 0.25]
    assert equal(tensors, moved_back(checkpoint, (0.63, 0.0, 0.25)))
    assert not equal(tensors, raw)


def test_it_is_kept_bit_for_bit_when_that_is_asked_for(config, checkpoint, out):
    raw = make_checkpoint(checkpoint, config, momentum_noise=0.02, lookaheads=(0.63,) * NUM_FRAGMENTS)
    report, tensors, line, _ = exported(config, checkpoint, out, lookahead="keep")
    assert report.lookahead == "kept"
    assert line == "look-ahead: kept in 3 of 3 fragments, which are ahead of the run"
    assert equal(tensors, raw)


def test_what_a_closing_sweep_left_is_untouched(config, checkpoint, out):
    # The buffers are still there: the sweep does not use them.
    raw = make_checkpoint(checkpoint, config, momentum_noise=0.02, lookaheads=(0.0,) * NUM_FRAGMENTS)
    report, tensors, line, _ = exported(config, checkpoint, out)
    assert (report.lookahead, line) == ("none", "look-ahead: there is none, the parameters are as stored")
    assert equal(tensors, raw)


def test_a_checkpoint_that_does_not_say_is_left_alone_and_that_is_said(config, checkpoint, out):
    raw = make_checkpoint(checkpoint, config, momentum_noise=0.02, settings={"quorum": 2})
    report, tensors, line, facts = exported(config, checkpoint, out)
    assert report.lookahead == "unknown"
    assert line == "look-ahead: the checkpoint does not say of 3 of 3 fragments, so they are as stored"
    assert facts["momentum_times"] == [None] * NUM_FRAGMENTS
    assert equal(tensors, raw)


def test_a_manifest_without_the_key_is_asked_for_its_settings(config, checkpoint, out, tmp_path):
    raw = make_checkpoint(checkpoint, config, momentum_noise=0.02, settings=STOCK)
    _, tensors, _, facts = exported(config, checkpoint, out)
    assert facts["momentum_times"] == pytest.approx([0.63] * NUM_FRAGMENTS)
    assert equal(tensors, moved_back(checkpoint, (0.63,) * NUM_FRAGMENTS))
    # The same checkpoint as the last of its run: fragments 1 and 2 are of the sweep, 2 to 4, and so is 0.
    last = tmp_path / "last.ckpt"
    make_checkpoint(last, config, step=6, momentum_noise=0.02, settings=STOCK | {"total_steps": 6})
    report, tensors, _, _ = exported(config, last, tmp_path / "end")
    assert report.lookahead == "none"
    assert equal(tensors, raw)


def test_merging_takes_the_same_parameters(config, checkpoint, out, tmp_path):
    make_checkpoint(checkpoint, config, momentum_noise=0.02, lookaheads=(0.63,) * NUM_FRAGMENTS)
    flags = {"merged": True, "dtype": "f32", "verify": False}
    for choice in ("remove", "keep"):
        export(checkpoint, config.model, tmp_path / choice, lookahead=choice, **flags)
    # A checkpoint that was stored without it.
    plain = tmp_path / "plain.ckpt"
    make_checkpoint(plain, config, lookaheads=(0.0,) * NUM_FRAGMENTS)
    export(plain, config.model, tmp_path / "plain", **flags)
    weights = {name: load_file(tmp_path / name / "model.safetensors") for name in ("remove", "keep", "plain")}
    assert equal(weights["keep"], weights["plain"])
    assert not equal(weights["remove"], weights["keep"])


def test_what_overflows_without_it_is_refused(config, checkpoint, out):
    make_checkpoint(checkpoint, config, momentum_noise=1e20, lookaheads=(1e30, 0.0, 0.0))
    with pytest.raises(CheckpointError, match=r"f0000-.*without the look-ahead.* not finite"):
        export(checkpoint, config.model, out, verify=False)
    assert not out.exists()


def test_there_is_no_third_choice(config, checkpoint, out):
    with pytest.raises(ConfigError, match="--lookahead off: must be one of remove, keep"):
        export(checkpoint, config.model, out, lookahead="off")

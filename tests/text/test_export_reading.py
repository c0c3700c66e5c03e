"""How an export reads a checkpoint: a fragment at a time, from a folder in use, from the older files."""

import gc
import weakref

import pytest
import torch
from older_files import older_bytes
from safetensors.torch import load_file
from text_checkpoints import NUM_FRAGMENTS, make_checkpoint

from yeto.errors import CheckpointError, ConfigError
from yeto.state import read_checkpoint
from yeto.state import reading as reading_module
from yeto.text import export as export_module
from yeto.text.export import export

LORA = {"tuning": "lora", "lora_r": 4, "lora_alpha": 8, "lora_targets": "auto"}


def saved(folder):
    return load_file(folder / "adapter_model.safetensors")


def test_one_fragment_is_in_memory_at_a_time(config, checkpoint, out, monkeypatch):
    make_checkpoint(checkpoint, config)
    real, seen = reading_module.read_params, []

    def watched(folder, entry, ahead):
        gc.collect()
        assert [values for values in seen if values() is not None] == []
        values = real(folder, entry, ahead)
        seen.append(weakref.ref(values))
        return values

    monkeypatch.setattr(reading_module, "read_params", watched)
    export(checkpoint, config.model, out, verify=False)
    assert len(seen) == NUM_FRAGMENTS


def test_a_folder_in_use_is_followed(config, checkpoint, out, monkeypatch):
    make_checkpoint(checkpoint, config)
    real, newest, lines = reading_module.read_params, [], []

    def overtaken(folder, entry, ahead):
        if entry.fragment == 1 and not newest:
            # Afterwards no file of step 4 is left.
            newest.append(make_checkpoint(checkpoint, config, step=8, noise=0.1))
            newest.append(make_checkpoint(checkpoint, config, step=12, noise=0.2))
        return real(folder, entry, ahead)

    monkeypatch.setattr(reading_module, "read_params", overtaken)
    report = export(checkpoint, config.model, out, verify=False, say=lines.append)
    assert report.step == 12
    assert "note: step 4 was replaced while it was read; taking 12" in lines
    written = saved(out)
    assert all(torch.equal(written[name], tensor) for name, tensor in newest[-1].items())


def test_the_newest_complete_checkpoint_is_taken_and_a_damaged_one_is_not(config, checkpoint, out):
    make_checkpoint(checkpoint, config)
    make_checkpoint(checkpoint, config, step=7, noise=0.1)
    path = checkpoint / "fragments" / "f0001-v00000005.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    lines = []
    assert export(checkpoint, config.model, out, verify=False, say=lines.append).step == 4
    assert [line for line in lines if "step 7 is incomplete and was passed over" in line]
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(CheckpointError, match=r"f0001-v00000005.safetensors: digest of momentum is"):
        export(checkpoint, config.model, out, overwrite=True)
    assert saved(out), "what was there is there still"
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "yeto-state.ckpt"]


def test_a_fragment_that_stays_away_ends_the_export(config, checkpoint, out, monkeypatch):
    make_checkpoint(checkpoint, config)
    real = reading_module.read_params

    def lost(folder, entry, ahead):
        (folder / entry.file).unlink()
        return real(folder, entry, ahead)

    monkeypatch.setattr(reading_module, "read_params", lost)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint: .*the file is missing"):
        export(checkpoint, config.model, out)
    assert not out.exists()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_older_file_becomes_an_adapter(config, checkpoint, out, tmp_path, number):
    tensors = make_checkpoint(checkpoint, config)
    stored = read_checkpoint(checkpoint)
    path = tmp_path / "yeto-state.bin"
    data = older_bytes(
        number,
        step=stored.step,
        fragments=[(part.version, part.params.tolist(), part.momentum.tolist()) for part in stored.fragments],
        ledger=((0, 4, 40, 4000),),
        fingerprint=bytes.fromhex(stored.fingerprint),
    )
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="say --tuning lora or --tuning full"):
        export(path, config.model, out)
    # Rank 8 gives tensors of other sizes.
    with pytest.raises(CheckpointError, match="check --model, --tuning and the --lora flags"):
        export(path, config.model, out, **(LORA | {"lora_r": 8}))
    report = export(path, config.model, out, **LORA)
    assert (report.step, report.verified.tensors) == (4, len(tensors))
    written = saved(out)
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"offset \d+: .* are left"):
        export(path, config.model, out, overwrite=True, **LORA)


def test_an_adapter_of_zeros_is_a_warning_without_verifying_too(config, checkpoint, out):
    make_checkpoint(checkpoint, config, noise=0.0)
    report = export(checkpoint, config.model, out, verify=False)
    assert report.warnings == ("after 4 committed rounds every B matrix is zero: nothing was learned",)


def test_a_merge_that_overflows_is_refused(config, checkpoint, out):
    make_checkpoint(checkpoint, config, noise=1e30)
    with pytest.raises(CheckpointError, match=r"--merged: .*weight is not finite with the adapter folded in"):
        export(checkpoint, config.model, out, merged=True, verify=False, dtype="f32")
    assert not out.exists()


def test_ctrl_c_leaves_nothing(config, checkpoint, out, monkeypatch):
    make_checkpoint(checkpoint, config)

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(export_module, "verify_adapter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(checkpoint, config.model, out)
    assert [path.name for path in out.parent.iterdir()] == ["yeto-state.ckpt"]

"""Caching latents and prompts: the tensors that computing gives, in a cache that outlives kills."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from attrs import evolve
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusion_rows import cached_row, picture, write_pictures, write_rows
from safetensors.torch import load_file
from tiny_pipelines import tiny_sd, tiny_sd3

from yeto.cli.common import run_app
from yeto.cli.main import build
from yeto.diffusion import cache as cache_module
from yeto.diffusion.cache import cache_rows, lossless
from yeto.diffusion.config import DiffusionConfig
from yeto.diffusion.loader import ExampleLoader
from yeto.diffusion.model import load_encoders as real_load_encoders
from yeto.diffusion.rows import RowReader, folder_of
from yeto.errors import ConfigError, DataError
from yeto.tuning.rows import Cursor, FileSource

SIZES = [(16, 16), (16, 32), (16, 16), (32, 16), (16, 16)]


@pytest.fixture(scope="module")
def sd(tmp_path_factory):
    return str(tiny_sd(tmp_path_factory.mktemp("pipelines") / "sd"))


@pytest.fixture(scope="module")
def sd3(tmp_path_factory):
    return str(tiny_sd3(tmp_path_factory.mktemp("pipelines") / "sd3"))


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(cache_module, "SHARD_ROWS", 2)


@pytest.fixture
def config(tmp_path, sd):
    rows = write_pictures(tmp_path, SIZES)
    # Two rows of one shard with one prompt.
    rows[1]["prompt"] = rows[0]["prompt"]
    return DiffusionConfig(model=sd, data=write_rows(tmp_path, rows))


def examples(data, needs):
    """Return all rows of a source, loaded."""
    source = FileSource(data)
    reader = RowReader(needs, folder=folder_of(data))
    return [reader.load(reader.plan(row)) for row in source.rows(Cursor())]


def lines_of(path):
    """Return the rows of a file as they stand there."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


@cache
def loaded(model, base_dtype):
    """Return a pipeline's encoders, loaded once for all tests."""
    return real_load_encoders(DiffusionConfig(model=model, base_dtype=base_dtype))


def load_encoders(config):
    return loaded(config.model, config.base_dtype)


def counting(load):
    """Return a loader of encoders that notes each image and prompt that they are given."""
    seen = {"images": 0, "prompts": []}

    def counted(config):
        encoders, needs = load(config)

        class Counted:
            def latents(self, pixels):
                seen["images"] += len(pixels)
                return encoders.latents(pixels)

            def conditioning(self, prompts):
                seen["prompts"] += prompts
                return encoders.conditioning(prompts)

        return Counted(), needs

    return counted, seen


@pytest.mark.parametrize("kind", ["sd", "sd3"])
def test_cached_is_computed_bit_for_bit(config, tmp_path, kind, request):
    config = evolve(config, model=request.getfixturevalue(kind))
    report = cache_rows(config, tmp_path / "cache", load_encoders)
    assert (report.rows, report.shards, report.kept) == (5, 3, 0)
    encoders, needs = load_encoders(config)
    computed = examples(config.data, needs)
    cached = examples(str(report.rows_file), needs)
    assert len(cached) == len(computed) == 5
    for one, other in zip(cached, computed, strict=True):
        assert (one.pixels, one.prompt) == (None, None)
        assert torch.equal(one.latents, encoders.latents(other.pixels.unsqueeze(0))[0])
        (words,) = encoders.conditioning([other.prompt])
        assert torch.equal(one.conditioning.prompt_embeds, words.prompt_embeds)
        for mine, theirs in ((one.conditioning.mask, words.mask), (one.conditioning.pooled, words.pooled)):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)
    shapes = {tuple(example.latents.shape) for example in cached}
    assert shapes == {(4, 8, 8), (4, 8, 16), (4, 16, 8)}


def test_a_cache_is_rows_to_train_on(config, tmp_path):
    report = cache_rows(config, tmp_path / "cache", load_encoders)
    _, needs = load_encoders(config)
    for data in (report.rows_file, report.rows_file.parent):
        batches = iter(ExampleLoader(evolve(config, data=str(data)), needs))
        seen = [next(batches).examples[0].origin for _ in range(5)]
        batches.close()
        assert sorted(seen) == [f"rows.jsonl line {number}" for number in range(1, 6)]


def test_sizes_and_prompts(config, tmp_path):
    load, seen = counting(load_encoders)
    report = cache_rows(evolve(config, height=16, width=16), tmp_path / "cache", load)
    lines = lines_of(report.rows_file)
    assert seen["images"] == 5
    assert seen["prompts"] == ["picture 0", "picture 2", "picture 3", "picture 4"]
    assert [line["prompt"] for line in lines] == ["picture 0", "picture 0", *seen["prompts"][1:]]
    assert lines[0]["prompt_embeds"] == lines[1]["prompt_embeds"]
    assert lines[0]["latents"] != lines[1]["latents"]
    _, needs = load_encoders(config)
    assert {tuple(e.latents.shape) for e in examples(str(report.rows_file), needs)} == {(4, 8, 8)}


def test_what_is_cached_already_is_taken_over(config, tmp_path):
    _, tensors = cached_row(tmp_path, 77, latents=(4, 8, 8), tokens=12, width=32)
    rows = [
        {"image": "0.png", "prompt_embeds": "77.safetensors"},
        {"latents": "77.safetensors", "prompt": "a"},
    ]
    load, seen = counting(load_encoders)
    report = cache_rows(evolve(config, data=write_rows(tmp_path, rows)), tmp_path / "cache", load)
    assert seen == {"images": 1, "prompts": ["a"]}
    _, needs = load_encoders(config)
    first, second = examples(str(report.rows_file), needs)
    assert torch.equal(first.conditioning.prompt_embeds, tensors["prompt_embeds"])
    assert torch.equal(second.latents, tensors["latents"])


def test_the_same_command_does_only_what_has_changed(config, tmp_path):
    output = tmp_path / "cache"
    cache_rows(config, output, load_encoders)
    first = {path.name: path.stat().st_mtime_ns for path in output.iterdir()}
    load, seen = counting(load_encoders)
    assert cache_rows(config, output, load).kept == 3
    assert seen == {"images": 0, "prompts": []}
    # Another picture in the middle, and two rows more.
    time.sleep(0.01)
    picture(16, 16, seed=99).save(tmp_path / "2.png")
    rows = lines_of(config.data)
    write_rows(tmp_path, [*rows, rows[0], rows[1]])
    report = cache_rows(config, output, load)
    assert (report.rows, report.shards, report.kept) == (7, 4, 1)
    assert seen["images"] == 2 + 2 + 1, "the changed shard, the shard that was not full, the new one"
    now = {path.name: path.stat().st_mtime_ns for path in output.iterdir()}
    assert now["shard-000000.safetensors"] == first["shard-000000.safetensors"]
    # Fewer rows leave no shards behind.
    write_rows(tmp_path, rows[:2])
    assert cache_rows(config, output, load).shards == 1
    assert sorted(path.name for path in output.iterdir() if not path.name.startswith(".")) == [
        "cache.settings",
        "rows.jsonl",
        "shard-000000.safetensors",
    ]


def test_rows_point_at_whole_shards_only(config, tmp_path):
    """While shards change, and after a failure among them, there is no rows.jsonl."""
    output = tmp_path / "cache"
    cache_rows(config, output, load_encoders)
    rows = lines_of(config.data)
    write_rows(tmp_path, [*rows[:3], rows[3] | {"image": "gone.png"}, rows[4]])
    with pytest.raises(DataError, match=r"rows.jsonl line 4: image .*gone.png"):
        cache_rows(config, output, load_encoders)
    assert (output / "rows.jsonl").exists(), "nothing was changed yet"
    write_rows(tmp_path, [rows[1], rows[0], *rows[2:3], rows[3] | {"image": "gone.png"}])
    with pytest.raises(DataError, match=r"gone\.png"):
        cache_rows(config, output, load_encoders)
    assert not (output / "rows.jsonl").exists()
    write_rows(tmp_path, rows)
    assert cache_rows(config, output, load_encoders).kept == 2
    assert len(lines_of(output / "rows.jsonl")) == 5


def test_a_shard_that_is_cut_short_is_made_anew(config, tmp_path):
    output = tmp_path / "cache"
    cache_rows(config, output, load_encoders)
    path = output / "shard-000001.safetensors"
    before = {name: tensor.clone() for name, tensor in load_file(path).items()}
    path.write_bytes(path.read_bytes()[:-8])
    assert cache_rows(config, output, load_encoders).kept == 2
    after = load_file(path)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_lossless_narrowing():
    for values, wanted in (
        (torch.tensor([1.0, -2.5, 0.0]), torch.bfloat16),
        (torch.tensor([1.0, 1025.0 / 1024]), torch.float16),
        (torch.tensor([1.0 + 2**-20]), torch.float32),
        (torch.tensor([True]), torch.bool),
    ):
        stored = lossless(values)
        assert stored.dtype == wanted
        assert torch.equal(stored.to(values.dtype), values)


# What is refused.


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"height": 16, "width": 16}, "--height 16: the cache in --output .* was begun without it; give the"),
        ({"resize_mode": "stretch"}, "--resize-mode stretch: .* was begun with center-crop"),
        ({"base_dtype": "bf16"}, "--base-dtype bf16: .* was begun with auto"),
    ],
)
def test_a_cache_of_other_settings_is_kept(config, tmp_path, change, problem):
    cache_rows(config, tmp_path / "cache", load_encoders)
    with pytest.raises(ConfigError, match=problem):
        cache_rows(evolve(config, **change), tmp_path / "cache", load_encoders)
    assert cache_rows(config, tmp_path / "cache", load_encoders).kept == 3


def test_a_cache_of_another_model_is_refused_when_made_and_when_read(config, tmp_path, sd3):
    report = cache_rows(config, tmp_path / "cache", load_encoders)
    with pytest.raises(ConfigError, match=r"--model .*: the cache in --output .* was begun with {'digest"):
        cache_rows(evolve(config, model=sd3), tmp_path / "cache", load_encoders)
    _, needs = load_encoders(evolve(config, model=sd3))
    with pytest.raises(DataError, match=r"rows.jsonl line 1: latents: .* was made with another model than"):
        examples(str(report.rows_file), needs)


def test_places_that_are_refused(config, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"--output .*file: is a file; name a folder"):
        cache_rows(config, tmp_path / "file", load_encoders)
    with pytest.raises(ConfigError, match=r"--output .*: has other files in it; name a folder that is new"):
        cache_rows(config, tmp_path, load_encoders)
    cache_rows(config, tmp_path / "cache", load_encoders)
    (tmp_path / "cache" / "cache.settings").write_text("{")
    with pytest.raises(ConfigError, match=r"its cache.settings cannot be read; name another folder"):
        cache_rows(config, tmp_path / "cache", load_encoders)


def test_a_folder_in_use_is_refused(config, tmp_path):
    from filelock import FileLock

    (tmp_path / "cache").mkdir()
    with FileLock(tmp_path / "cache" / ".lock"), pytest.raises(ConfigError, match="another process writes"):
        cache_rows(config, tmp_path / "cache", load_encoders)


def test_what_is_cheap_is_checked_before_the_model_is_loaded(config, tmp_path):
    def never(config):
        raise AssertionError("loaded")

    for rows, problem in (
        ([], r"--data .*rows.jsonl: it has no rows"),
        (
            [{"image": "gone.png", "prompt": ""}],
            r"rows.jsonl line 1: image .*gone.png: No such file or directory; bring it there",
        ),
        ([{"image": "0.png"}], "rows.jsonl line 1: neither prompt nor prompt_embeds, only image"),
    ):
        broken = evolve(config, data=write_rows(tmp_path, rows))
        with pytest.raises(DataError, match=problem):
            cache_rows(broken, tmp_path / "cache", never)
    assert not (tmp_path / "cache").exists()


def test_a_pipeline_of_pixels_is_refused(config, tmp_path):
    """It has no VAE, and no place for one."""
    unet = UNet2DModel(
        sample_size=8,
        block_out_channels=(8,),
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        norm_num_groups=4,
        layers_per_block=1,
    )
    DDPMPipeline(unet=unet, scheduler=DDPMScheduler()).save_pretrained(tmp_path / "ddpm")
    with pytest.raises(ConfigError, match=r"--model .*ddpm: DDPMPipeline does not say how much smaller"):
        cache_rows(evolve(config, model=str(tmp_path / "ddpm")), tmp_path / "cache", real_load_encoders)


def test_values_that_are_not_finite_are_refused(config, tmp_path):
    def poisoned(config):
        encoders, needs = load_encoders(config)

        class Poisoned:
            conditioning = encoders.conditioning

            def latents(self, pixels):
                return encoders.latents(pixels) * torch.nan

        return Poisoned(), needs

    with pytest.raises(DataError, match=r"rows.jsonl line 1: the encoders give NaN .*try --base-dtype f32"):
        cache_rows(config, tmp_path / "cache", poisoned)


def test_a_full_disk_is_told_and_gone_on_with(config, tmp_path, monkeypatch):
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 5:
            raise OSError(28, "No space left on device")
        return real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"--output .*: cannot write: .*No space left.*same command goes on"):
        cache_rows(config, tmp_path / "cache", load_encoders)
    assert not list((tmp_path / "cache").glob(".*partial"))
    assert cache_rows(config, tmp_path / "cache", load_encoders).kept == 1


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["--model", "nowhere/", "--output", "{out}"], 2, "--model nowhere/: no such folder"),
        (["--data", "gone.jsonl"], 2, "--data gone.jsonl: no such file or folder"),
        (["--height", "16"], 2, "--height and --width: give both or neither"),
        (["--height", "15", "--width", "16"], 2, "--height 15: this model takes multiples of"),
        (["--height", "0", "--width", "16"], 2, "--height 0 must be from 1 to 16384"),
        (["--resize-mode", "fit"], 2, "--resize-mode"),
        (["--data", "{broken}"], 1, "broken.jsonl line 1: neither image nor latents, only prompt"),
    ],
)
def test_what_the_command_refuses(config, tmp_path, capsys, words, code, problem):
    broken = write_rows(tmp_path, [{"prompt": "a"}], "broken.jsonl")
    given = {"--model": config.model, "--data": config.data, "--output": str(tmp_path / "cache")}
    pairs = zip(words[::2], words[1::2], strict=True)
    given |= {flag: value.format(out=tmp_path / "cache", broken=broken) for flag, value in pairs}
    line = ["data", "cache-latents", *(word for pair in given.items() for word in pair)]
    assert run_app(build, line) == code
    *_, said = capsys.readouterr().err.splitlines()
    assert said.startswith("yeto: ")
    assert problem in said


def test_the_command_is_killed_and_goes_on(config, tmp_path, monkeypatch, capsys):
    """The command itself, killed in the middle: it goes on, and the cache is as if it never was."""
    rows = write_pictures(tmp_path, [(16, 16)] * 90)
    data = write_rows(tmp_path, rows, "many.jsonl")
    output = tmp_path / "cache"
    words = ["data", "cache-latents", "--model", config.model, "--data", data, "--output", str(output)]
    command = [sys.executable, "-m", "yeto.cli.main", *words]
    # A process of its own, which imports everything: the one thing here that takes seconds.
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=one_thread, stderr=subprocess.PIPE) as process:
        while process.poll() is None and not (output / "shard-000000.safetensors").exists():
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        said = process.communicate()[1].decode()
    assert process.returncode == -signal.SIGKILL, said
    assert not (output / "rows.jsonl").exists()
    monkeypatch.setattr(cache_module, "SHARD_ROWS", 64)
    assert run_app(build, words) == 0
    said = capsys.readouterr()
    assert "90 rows in 2 shards, 1 " in said.out
    assert "of them were there already" in said.out
    assert "caching rows 90 " in said.err
    assert not list(output.glob(".*partial"))

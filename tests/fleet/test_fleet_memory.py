"""Sizes of models, and what an island needs to hold one."""

import json
import os
import shutil
import struct
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction

import pytest
from fake_hub import FakeHub

from yeto.errors import ConfigError
from yeto.fleet.gpus import GPUS, gpu_of
from yeto.fleet.memory import Training, limit_gb
from yeto.fleet.models import ALIASES, ModelSize, _counted, find_alias, model_size, resolve_model
from yeto.fleet.value import RDMA, goodput, island_cost, island_tflops, mfu


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test asks the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def write_model(folder, tensors, config):
    """Write a folder with the header of a safetensors file and zeros behind it."""
    folder.mkdir(exist_ok=True)
    sizes = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1, "I32": 4}
    header, offset = {}, 0
    for name, (dtype, numel) in tensors.items():
        size = sizes[dtype] * numel
        header[name] = {"dtype": dtype, "shape": [numel], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))
    (folder / "config.json").write_text(json.dumps(config))


def test_aliases_need_no_network():
    assert {"gemma4", "deepseek4flash"} <= {alias.alias for alias in ALIASES}
    flash = model_size("DeepSeek4Flash")
    assert (flash.hf_id, flash.weights_gb, flash.hidden_size) == ("deepseek-ai/DeepSeek-V4-Flash", 568, 4096)
    # The id behind an alias is known, too.
    assert model_size("deepseek-ai/DeepSeek-V4-Flash").weights_gb == 568
    assert model_size("gemma4").weights_gb == 24
    assert resolve_model("gemma4") == "google/gemma-4-12B-it"
    assert resolve_model("some/model") == "some/model"
    assert find_alias("some/model") is None


def test_a_folder_is_measured_by_its_files(fixtures):
    size = model_size(str(fixtures / "tiny-llama"))
    # 778,624 parameters of two bytes.
    assert size.weights_gb == pytest.approx(778_624 * 2e-9, rel=0)
    assert size.active_gb == size.weights_gb
    assert size.hidden_size == 128


def test_a_folder_without_weights_is_measured_by_its_config(fixtures, tmp_path):
    shutil.copy(fixtures / "tiny-llama" / "config.json", tmp_path)
    assert model_size(str(tmp_path)).weights_gb == pytest.approx(778_624 * 2e-9, rel=0)


def test_elements_count_and_not_bytes(tmp_path):
    config = {"text_config": {"hidden_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2}}
    write_model(
        tmp_path / "m",
        {"a": ("F32", 100), "b": ("F8_E4M3", 300), "l.experts.0.w": ("BF16", 800), "n": ("I32", 1)},
        config,
    )
    size = model_size(str(tmp_path / "m"))
    assert size.weights_gb == pytest.approx(1200 * 2e-9)
    # A quarter of the experts.
    assert size.active_gb == pytest.approx(600 * 2e-9)
    assert size.hidden_size == 64


def test_a_folder_in_parts_is_measured_by_its_index(tmp_path):
    folder = tmp_path / "m"
    write_model(folder, {"a": ("BF16", 10)}, {"hidden_size": 8})
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    assert model_size(str(folder)).weights_gb == pytest.approx(20e-9)
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(ConfigError, match="has no weight_map of files beside it"):
        model_size(str(folder))
    index.write_text(json.dumps({"weight_map": {"a": "absent.safetensors"}}))
    with pytest.raises(ConfigError, match=r"absent\.safetensors.*--weights-gb"):
        model_size(str(folder))


def test_what_cannot_be_measured_says_so(tmp_path):
    def refused(words, folder=tmp_path / "m"):
        with pytest.raises(ConfigError, match=words) as caught:
            model_size(str(folder))
        assert "--weights-gb" in str(caught.value)

    write_model(tmp_path / "m", {"a": ("U8", 100), "b": ("BF16", 100)}, {"hidden_size": 8})
    refused(r"its weights are packed \(U8\)")
    write_model(tmp_path / "m", {}, {"hidden_size": 8})
    refused("there are no weights")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"\xff" * 100)
    refused(r"model\.safetensors: ")
    (tmp_path / "m" / "config.json").write_text("[]")
    refused("is no JSON object")
    (tmp_path / "m" / "config.json").write_text("{")
    refused("is not JSON")
    (tmp_path / "m" / "config.json").unlink()
    refused(r"config\.json: the file is missing")
    (tmp_path / "m" / "config.json").symlink_to("/dev/zero")
    refused(r"config\.json: cannot be read: not a file")
    refused("the hub does not answer", folder="owner/nobody-has-this")
    with pytest.raises(ConfigError, match="nor an id OWNER/NAME"):
        model_size("not an id")
    for name in (str(tmp_path / "absent"), "~nobody-of-this-name/model"):
        with pytest.raises(ConfigError, match="is no folder"):
            model_size(name)
    with pytest.raises(ConfigError, match="nor an id OWNER/NAME"):
        model_size("x" * 5000)
    for weights_gb in (1e-9, 5e-324, 1e7, float("nan")):
        with pytest.raises(ConfigError, match=r"must be from 2e-09 \(one parameter\) to 1,000,000"):
            model_size("owner/model", weights_gb=weights_gb)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "num_attention_heads": 0},
        {"model_type": "llama", "hidden_size": 1 << 62},
        {"model_type": "unheard-of", "auto_map": {"AutoConfig": "own.Config"}},
        {"model_type": ["llama"]},
    ],
)
def test_a_config_that_makes_no_model_is_one_line(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"config\.json does not do: ") as caught:
        model_size(str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("count", [-5, 10**400], ids=["negative", "huge"])
def test_headers_that_speak_of_what_no_model_has_are_refused(count):
    with pytest.raises(ConfigError, match="--weights-gb"):
        _counted("owner/model", {}, [("a", "BF16", count)], "the hub")


ASKER = """
import sys
from yeto.errors import ConfigError
from yeto.fleet.models import model_size
for name in sys.argv[1:]:
    try:
        print(model_size(name).source)
    except ConfigError as error:
        print(error)
"""


def test_the_hub_is_asked_for_headers_alone_and_its_cache_before(fixtures, tmp_path):
    """A server on this machine is the hub; the client is the real one, in a process with an empty cache."""
    tiny = {path.name: path.read_bytes() for path in (fixtures / "tiny-llama").iterdir()}
    hub = FakeHub({"owner/tiny": tiny, "owner/bare": {"config.json": tiny["config.json"]}})
    names = ("owner/tiny", "owner/tiny", "owner/bare", "owner/none")
    with hub.served() as address:
        environ = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", ASKER, *names]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=200)
    first, again, bare, none = done.stdout.splitlines()
    assert first == again == "the safetensors headers on the hub"
    assert "has no safetensors files on the hub; say --weights-gb" in bare
    assert "the hub knows no such model" in none
    assert hub.ranges
    assert {header for path, header in hub.ranges if path == "model.safetensors"} == {"bytes=0-100000"}
    cache = tmp_path / "hub" / "models--owner--tiny" / "snapshots"
    (commit,) = cache.iterdir()
    assert [path.name for path in commit.iterdir()] == ["config.json"]
    # With the weights there, nobody is asked.
    (commit / "model.safetensors").write_bytes(tiny["model.safetensors"])
    environ |= {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", ASKER, "owner/tiny"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout == f"the safetensors files in {commit}\n"


def test_what_the_user_says_goes_first():
    size = model_size("owner/model", weights_gb=100, hidden_size=5120)
    assert (size.weights_gb, size.active_gb, size.hidden_size) == (100, 100, 5120)
    flash = model_size("deepseek4flash", weights_gb=300)
    assert (flash.weights_gb, flash.active_gb, flash.hidden_size) == (300, 26, 4096)
    assert model_size("owner/model", weights_gb=1).hidden_size is None


def training(weights_gb=16.0, hidden_size=4096, **more):
    size = ModelSize(
        name="m",
        hf_id="m",
        weights_gb=weights_gb,
        active_gb=weights_gb,
        source="the test",
        hidden_size=hidden_size,
    )
    return Training(model=size, **more)


def test_memory_is_the_formula():
    full = training(tuning="full", seq_len=4096, hidden_size=8192, micro_batch_size=2)
    assert full.need_gb(8) == 16 / 8 * 8 + 2 + 6 * 2 * 2 * 2
    lora = training()
    # Rank 16 on 4096 has 32 / 4096 of the parameters, and eight times that of the memory.
    assert lora.factor == 1 + 8 * 32 / 4096
    assert lora.need_gb(1) == 16 * lora.factor + 2 + 6
    assert training(hidden_size=None).need_gb(1) == lora.need_gb(1)
    assert limit_gb(gpu_of("a100")) == 0.92 * 40


def test_experts_get_no_adapters():
    flash = Training(model=model_size("deepseek4flash"))
    assert flash.trained_parameters == 13e9 * 32 / 4096
    assert flash.factor == pytest.approx(1 + 8 * (26 / 568) * 32 / 4096)


@pytest.mark.parametrize(
    ("weights_gb", "count", "gpu", "nodes"),
    [
        (16, 1, "H100", 1),
        (16, 1, "L4", 2),
        (568, 8, "A100-80GB", 2),
        (568, 8, "A100", 3),
        (568, 8, "H200", 1),
        (568, 1, "H200", 5),
        (568, 1, "L4", None),
    ],
)
def test_the_fewest_machines_that_hold_a_model(weights_gb, count, gpu, nodes):
    assert training(weights_gb).smallest_nodes(count, gpu_of(gpu)) == nodes


def test_main_memory_grows_with_what_is_trained():
    full = training(tuning="full")
    assert full.trained_parameters == 8e9
    # Anchors, waiting broadcasts, snapshots and a final cut in f32.
    assert full.host_memory_gb == 8 * 16
    assert full.head_memory_gb(3) == 8 * 4 * (5 + 3)
    assert training().host_memory_gb == pytest.approx(full.host_memory_gb / 128)


def test_worth_and_price_of_an_island():
    a100, l4 = gpu_of("a100"), gpu_of("l4")
    assert mfu("aws", 1, 8, a100) == Fraction(35, 100)
    assert mfu("aws", 2, 8, a100) == Fraction(30, 100)
    assert mfu("aws", 2, 4, a100) == mfu("lambda", 2, 8, a100) == mfu("aws", 2, 8, l4) == Fraction(20, 100)
    assert goodput(None) == Fraction(85, 100)
    assert goodput(Decimal(4)) == Fraction(70, 100)
    assert goodput(Decimal(10)) == Fraction(98, 100)
    assert island_tflops("aws", 2, 8, a100, Decimal(5)) == Fraction("1123.2")
    assert island_cost(2, Decimal("9.8")) == Fraction("22.54")


def test_networks_are_those_of_known_accelerators():
    assert {name for names in RDMA.values() for name in names} <= {gpu.name for gpu in GPUS}

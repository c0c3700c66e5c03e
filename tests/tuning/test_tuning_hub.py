"""A hub that fails: what it gives is complete, or refused in one line, after a bounded number of tries.

The hub is a server on this machine; the client, the libraries and everything of ours are the real ones, in
one process for all tests of this file.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_hub import COMMIT, FakeHub
from safetensors.torch import load, save
from tiny_pipelines import tiny_sd

from yeto.tuning.hub import TRIES

FOREVER = 100
"""More faults of a kind than anybody tries."""

pytestmark = pytest.mark.timeout(600)


class Asker:
    """Asks the hub by way of another process; each test has repositories of its own."""

    def __init__(self, hub, process, files):
        self.hub = hub
        self._process = process
        self._files = files

    def has_model(self, name, **changes):
        self.hub.models[name] = {path: data for path, data in (self._files | changes).items() if data}

    def __call__(self, what, name):
        self.hub.asked.clear()
        self._process.stdin.write(json.dumps([what, name]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@pytest.fixture(scope="module")
def tiny(fixtures):
    return fixtures / "tiny-llama"


@pytest.fixture(scope="module")
def shared(tiny, tmp_path_factory):
    hub = FakeHub()
    files = {path.name: path.read_bytes() for path in tiny.iterdir() if path.is_file()}
    child = Path(__file__).with_name("hub_child.py")
    with hub.served() as address:
        environment = os.environ | {
            "HF_ENDPOINT": address,
            "HF_HOME": str(tmp_path_factory.mktemp("hub")),
            # Seconds without a byte after which the client gives a download up.
            "HF_HUB_DOWNLOAD_TIMEOUT": "3",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        }
        environment.pop("HF_HUB_OFFLINE", None)
        process = subprocess.Popen(
            [sys.executable, str(child)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        with process:
            assert process.stdout.readline() == "ready\n"
            yield Asker(hub, process, files)
            process.stdin.close()


@pytest.fixture
def ask(shared):
    shared.hub.faults.clear()
    shared.hub.ranges.clear()
    return shared


def test_a_model_comes_whole_and_is_then_loaded_without_the_hub(ask, tiny):
    ask.has_model("owner/whole")
    template = (tiny / "chat_template.jinja").read_text(encoding="utf-8")
    assert ask("tokenizer", "owner/whole")["template"] == template
    assert ask("identity", "owner/whole") == {"hub_id": "owner/whole", "commit": COMMIT, "waits": []}
    assert ask("model", "owner/whole")["parameters"] > 0
    # Whether a model is an adapter the library asks in any case; everything else is here by now.
    asked = {call.rpartition("/")[2] for call in ask.hub.asked if "resolve" in call}
    assert asked == {"model.safetensors", "adapter_config.json"}
    assert ask("model", "owner/whole")["parameters"] > 0
    assert not [call for call in ask.hub.asked if "adapter_config.json" not in call]


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("method", ["HEAD ", ""])
def test_a_file_that_is_refused_for_a_while_is_asked_for_again(ask, method, status):
    """The template is the third file of a tokenizer; without it, it would be another tokenizer."""
    name = f"owner/busy{status}{len(method)}"
    ask.has_model(name)
    # The client itself asks a few times for some of these.
    ask.hub.faults[f"{method}chat_template.jinja"] = [status] * (3 if (method, status) == ("", 503) else 8)
    answer = ask("tokenizer", name)
    assert "generation" in answer["template"]
    assert answer["waits"]


@pytest.mark.parametrize("method", ["HEAD ", ""])
@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_file_that_never_comes_is_an_error_and_not_another_tokenizer(ask, method, file):
    name = f"owner/never{len(method)}{len(file)}"
    ask.has_model(name)
    ask.hub.faults[f"{method}{file}"] = [429] * FOREVER
    error = ask("tokenizer", name)["error"]
    assert error.startswith(f"--model {name}: no such folder, and as a Hugging Face id: ")
    assert "429" in error
    assert f"({TRIES} tries)" in error
    assert "\n" not in error
    # What has arrived is kept; once the hub is well again, the rest is all that is asked for.
    ask.hub.faults.clear()
    assert "generation" in ask("tokenizer", name)["template"]
    assert ask.hub.asked[f"GET {name}/resolve/{COMMIT}/tokenizer.json"] == 0


def test_the_waits_between_tries_grow(ask):
    ask.has_model("owner/down")
    ask.hub.faults["info"] = [503] * FOREVER
    answer = ask("tokenizer", "owner/down")
    assert "503" in answer["error"]
    assert answer["waits"] == [2.0, 4.0, 8.0]
    assert ask.hub.asked["GET api/models/owner/down"] == TRIES


@pytest.mark.parametrize("fault", ["cut", "stall"])
def test_a_download_that_stops_in_the_middle_goes_on_from_there(ask, fault):
    name = f"owner/{fault}"
    ask.has_model(name)
    ask.hub.faults["model.safetensors"] = [(fault, 5_000)]
    assert ask("model", name)["parameters"] > 0
    assert ask.hub.ranges == [("model.safetensors", "bytes=5000-")]


def test_a_download_that_stops_for_ever_ends_in_an_error(ask):
    ask.has_model("owner/dead")
    ask.hub.faults["model.safetensors"] = [("cut", 0)] * FOREVER
    error = ask("model", "owner/dead")["error"]
    assert f"({TRIES} tries)" in error
    assert "\n" not in error


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "tokenizer",
            "--model owner/none: no such folder, and as a Hugging Face id: the hub has none of this",
        ),
        ("model", "--model owner/none: no such folder, and as a Hugging Face id: the hub has none of this"),
        ("rows", "--data owner/none: no such local file, and as a Hugging Face data set it failed: the hub"),
    ],
)
def test_a_wrong_name_is_said_after_one_question(ask, what, said):
    answer = ask(what, "owner/none")
    assert answer["error"].startswith(said)
    assert "hf auth login" in answer["error"]
    assert answer["waits"] == []
    assert sum(count for call, count in ask.hub.asked.items() if "agent-harnesses" not in call) == 1


def test_a_hub_that_is_down_later_gives_way_to_the_copy_on_this_machine(ask):
    ask.has_model("owner/kept")
    assert "generation" in ask("tokenizer", "owner/kept")["template"]
    ask.hub.faults["info"] = [503] * FOREVER
    # The weights are not there yet.
    error = ask("model", "owner/kept")["error"]
    assert "503" in error
    assert "the copy of it on this machine is not complete" in error
    ask.hub.faults.clear()
    assert ask("model", "owner/kept")["parameters"] > 0
    ask.hub.faults["info"] = [503] * FOREVER
    ask("forget", "owner/kept")
    assert ask("model", "owner/kept")["parameters"] > 0
    assert ask.hub.asked == {"GET api/models/owner/kept": TRIES}


def test_weights_in_parts_are_all_fetched(ask, tiny):
    tensors = load((tiny / "model.safetensors").read_bytes())
    parts = {f"model-{number}-of-3.safetensors": sorted(tensors)[number::3] for number in range(3)}
    index = {"metadata": {}, "weight_map": {name: part for part, names in parts.items() for name in names}}
    ask.has_model(
        "owner/parts",
        **{part: save({name: tensors[name] for name in names}) for part, names in parts.items()},
        **{"model.safetensors": None, "model.safetensors.index.json": json.dumps(index).encode()},
        **{"other.safetensors": b"unwanted"},
    )
    ask.hub.faults["HEAD model-2-of-3.safetensors"] = [429] * 8
    assert ask("model", "owner/parts")["parameters"] == sum(map(torch.numel, tensors.values()))
    assert not [call for call in ask.hub.asked if "other" in call]


def rows_of(number):
    return b"".join(json.dumps({"text": f"{number}-{row}"}).encode() + b"\n" for row in range(4))


ROWS = [f"{number}-{row}" for number in range(3) for row in range(4)]


@pytest.mark.parametrize("method", ["HEAD ", ""])
def test_a_data_set_of_which_the_third_file_is_refused_for_a_while_comes_whole(ask, method):
    name = f"owner/rows{len(method)}"
    ask.hub.datasets[name] = {f"data/train-{number}.jsonl": rows_of(number) for number in range(3)}
    ask.hub.faults[f"{method}data/train-2.jsonl"] = [429] * 8
    assert ask("rows", name)["rows"] == ROWS


def test_a_byte_order_mark_is_no_data_on_the_hub(ask):
    ask.hub.datasets["owner/mark"] = {"train.jsonl": b"\xef\xbb\xbf" + rows_of(0)}
    assert ask("rows", "owner/mark")["rows"] == ROWS[:4]


def test_a_data_set_of_which_the_third_file_never_comes_is_refused(ask):
    ask.hub.datasets["owner/short"] = {f"data/train-{number}.jsonl": rows_of(number) for number in range(3)}
    ask.hub.faults["HEAD data/train-2.jsonl"] = [429] * FOREVER
    error = ask("rows", "owner/short")["error"]
    assert error.startswith(
        "--data owner/short: no such local file, and as a Hugging Face data set it failed"
    )
    assert "429" in error
    assert "\n" not in error


def test_rows_are_those_that_the_description_names_even_if_it_comes_late(ask):
    card = (
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: right.jsonl\n---\n"
    )
    ask.hub.datasets["owner/card"] = {
        "README.md": card.encode(),
        "right.jsonl": rows_of(1),
        "train.jsonl": rows_of(0),
    }
    ask.hub.faults["HEAD README.md"] = [503] * 8
    assert ask("rows", "owner/card")["rows"] == ROWS[4:8]


@pytest.fixture(scope="module")
def pipeline_files(tmp_path_factory):
    folder = tiny_sd(tmp_path_factory.mktemp("pipeline"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


UNET = "unet/diffusion_pytorch_model.safetensors"


def test_a_pipeline_comes_whole_and_is_then_loaded_without_the_hub(ask, pipeline_files):
    # What else a repository has: a variant, another kind of weights, a part that is not needed.
    beside = {
        "unet/diffusion_pytorch_model.fp16.safetensors": b"half",
        "unet/diffusion_pytorch_model.bin": b"pickled",
        "safety_checker/model.safetensors": b"unused",
        "README.md": b"card",
    }
    ask.hub.models["owner/pipeline"] = pipeline_files | beside
    answer = ask("pipeline", "owner/pipeline")
    assert answer["identity"] == {"hub_id": "owner/pipeline", "commit": COMMIT}
    assert answer["parameters"] > 80_000
    fetched = {call.partition(f"/{COMMIT}/")[2] for call in ask.hub.asked if call.startswith("GET owner")}
    assert UNET in fetched
    assert not fetched & set(beside)
    again = ask("pipeline", "owner/pipeline")
    assert again["parameters"] == answer["parameters"]
    assert not ask.hub.asked


def test_a_pipeline_in_parts_is_fetched_by_its_index(ask, pipeline_files):
    tensors = load(pipeline_files[UNET])
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    index = {"metadata": {}, "weight_map": {name: file for file, own in halves.items() for name in own}}
    files = {path: data for path, data in pipeline_files.items() if path != UNET}
    files[f"{UNET}.index.json"] = json.dumps(index).encode()
    for file, own in halves.items():
        files[f"unet/{file}"] = save({name: tensors[name] for name in own}, metadata={"format": "pt"})
    ask.hub.models["owner/pipeline-in-parts"] = files
    whole = ask("pipeline", "owner/pipeline-in-parts")
    assert whole["parameters"] > 80_000


def test_a_part_of_a_pipeline_that_never_comes_is_an_error(ask, pipeline_files):
    ask.hub.models["owner/hollow"] = dict(pipeline_files)
    ask.hub.faults[UNET] = [503] * FOREVER
    error = ask("pipeline", "owner/hollow")["error"]
    assert error.startswith("--model owner/hollow: no such folder, and as a Hugging Face id: ")
    assert f"({TRIES} tries)" in error
    # A hub that fails altogether does not make the copy whole.
    ask("forget", "")
    ask.hub.faults["info"] = [503] * FOREVER
    error = ask("pipeline", "owner/hollow")["error"]
    assert "the copy of it on this machine is not complete" in error
    # The same command goes on with what has arrived.
    ask.hub.faults.clear()
    assert ask("pipeline", "owner/hollow")["parameters"] > 80_000
    # And a whole copy is enough where the hub fails.
    ask("forget", "")
    ask.hub.faults["info"] = [503] * FOREVER
    assert ask("pipeline", "owner/hollow")["parameters"] > 80_000


def test_what_is_no_pipeline_on_the_hub_is_said(ask):
    ask.has_model("owner/chat")
    error = ask("pipeline", "owner/chat")["error"]
    assert "it has no model_index.json, so it is no pipeline of diffusers" in error
    assert "correct it, or log in" in ask("pipeline", "owner/nobody")["error"]

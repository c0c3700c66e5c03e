"""``--compile on``: the same training through torch.compile, and an error that helps where it cannot be."""

from pathlib import Path

import pytest
import torch
from attrs import evolve
from learner_fakes import config
from restarts import Lives, settings_in

from yeto.errors import ConfigError
from yeto.layout.names import strip_wrappers
from yeto.text import compiled
from yeto.text.config import TextConfig
from yeto.text.task import build_task

# Of the compiler's own making.
pytestmark = [
    pytest.mark.begins_early,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]

SCRIPT = {
    0: [("pull", 0, 1, 1), ("pull", 1, 2, 1)],
    1: [("broadcast", 0, 1)],
    2: [("broadcast", 1, 2), ("pull", 0, 3, 1)],
}


@pytest.fixture
def text(fixtures, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return TextConfig(
        model=str(fixtures / "tiny-llama"),
        data=str(fixtures / "chat" / "train.jsonl"),
        eval_data=str(fixtures / "chat" / "train.jsonl"),
        eval_rows=4,
        seq_len=64,
        micro_batch_size=2,
        stream_workers=0,
        lora_r=4,
        lora_alpha=8,
        learner_id=1,
        num_learners=2,
        compile="on",
    )


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_a_compiled_learner_trains_and_pushes_what_a_plain_one_does(
    text, tmp_path, monkeypatch, fresh_compiler
):
    """Bit for bit, with a compiler that leaves every operation as it is."""
    passes = []

    def backend(graph, inputs):
        passes.append(len(inputs))
        return graph.forward

    monkeypatch.setattr(compiled, "BACKEND", backend)
    base = config(
        output_dir=Path("unused"),
        learner_id=1,
        num_learners=2,
        max_local_steps=4,
        eval_every=2,
        torch_threads=1,
    )
    lives = {}
    for word in ("on", "off"):
        changed = evolve(text, compile=word)
        lives[word] = Lives(settings_in(tmp_path / word, base), lambda c=changed: build_task(c), SCRIPT)
        lives[word].live()
        if word == "on":
            assert passes, "nothing went through the compiler"
            passes.clear()
    assert passes == []
    assert len(lives["on"].pushes) == 3
    lives["on"].assert_as(lives["off"])
    held_out = [
        [line for line in life.output.getvalue().splitlines() if "held-out loss" in line]
        for life in lives.values()
    ]
    assert held_out[0] == held_out[1]
    assert len(held_out[0]) == 3


def test_the_wrapper_of_torch_compile_leaves_the_names_alone(text):
    module = build_task(evolve(text, compile="off"))._model.module
    plain = [name for name, _ in module.named_parameters()]
    wrapped = [name for name, _ in torch.compile(module).named_parameters()]
    assert all("_orig_mod." in name for name in wrapped)
    assert [strip_wrappers(name) for name in wrapped] == [strip_wrappers(name) for name in plain]


class Waves(torch.nn.Module):
    """Not one of torch's own, which are left as they are."""

    def forward(self, x):
        return x.sin() * x


def test_a_machine_without_a_compiler_says_so(tmp_path, monkeypatch, fresh_compiler):
    import torch._inductor.config as inductor

    # Another cache than the user's, or what an earlier run has compiled would do.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(inductor.cpp, "cxx", (None, str(tmp_path / "no-compiler")))
    module = Waves()
    compiled.compile_model(module)
    with pytest.raises(ConfigError) as caught, compiled.compiler_told():
        module(torch.ones(1, 2))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("--compile on: the model cannot be compiled here: ")
    assert "say --compile off" in str(caught.value)


def test_what_cannot_be_compiled_is_told_before_a_row_is_used(text, monkeypatch, fresh_compiler):
    def backend(graph, inputs):
        raise NotImplementedError("this one never works")

    monkeypatch.setattr(compiled, "BACKEND", backend)
    task = build_task(text)
    with pytest.raises(ConfigError, match=r"--compile on: .*this one never works.*; say --compile off"):
        task.batches()
    assert all(parameter.grad is None for parameter in task.trainable_parameters().values())


def test_an_error_that_is_not_the_compilers_stays_what_it_is():
    with pytest.raises(RuntimeError, match="out of luck"), compiled.compiler_told():
        raise RuntimeError("out of luck")

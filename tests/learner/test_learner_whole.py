"""A learner of a real model with a real syncer on real sockets, in one process, and what it leaves behind."""

import io
import json

import pytest
import torch
import trio
from attrs import evolve
from learner_fakes import config
from safetensors.torch import load_file
from syncer_runs import make_config, running
from transformers import AutoModelForCausalLM

from yeto.learner.app import Learner
from yeto.learner.progress import Progress
from yeto.state import read_checkpoint
from yeto.text.config import TextConfig
from yeto.text.export import export
from yeto.text.task import build_task
from yeto.wire import TrainingManifest

SECTIONS = {"compute", "data", "boundary", "send", "receive", "waiting", "saving", "unaccounted"}
ROUNDS = 6
FRAGMENTS = 3
"""So the closing sweep begins with round 4."""


class Whole:
    """A run that is over: full tuning of a model whose head is its embedding."""

    def __init__(self, folder, model, data):
        self.model = model
        self.output = folder / "out"
        self.log = folder / "log.jsonl"
        self.syncer = evolve(
            make_config(
                folder, num_learners=1, quorum=1, wait_for=1, total_steps=ROUNDS, sync_interval_steps=2.0
            ),
            keep_every=FRAGMENTS,
        )
        text = TextConfig(
            model=model, data=data, seq_len=64, micro_batch_size=2, stream_workers=0, tuning="full"
        )
        settings = config(
            output_dir=self.output, log_jsonl=self.log, fragments=FRAGMENTS, inner_lr=3e-3, torch_threads=1
        )
        trio.run(self._run, settings, lambda: build_task(text))

    async def _run(self, settings, make_task):
        with trio.fail_after(200):
            async with running(self.syncer) as run:
                settings = evolve(settings, syncer=f"127.0.0.1:{run.address.port}")
                with Progress(learner_id=0, log_path=self.log, stream=io.StringIO()) as progress:
                    outcome = await Learner(settings, make_task, progress).run()
                assert outcome.exit_code == 0, outcome.reason
                assert await run.end() == 0

    def logged(self, kind):
        records = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [record for record in records if record["kind"] == kind]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, fixtures):
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield Whole(folder, str(fixtures / "tiny-llama"), str(fixtures / "chat" / "train.jsonl"))


def test_the_time_of_the_training_thread_adds_up(whole):
    (end,) = whole.logged("exit")
    seconds = dict(end["seconds"])
    total = seconds.pop("total")
    assert seconds.keys() >= SECTIONS
    # Each is written to the microsecond.
    assert sum(seconds.values()) == pytest.approx(total, rel=0, abs=1e-6 * len(seconds))
    assert all(seconds[name] > 0 for name in SECTIONS)
    # What no section claims is a small share of the time in which the model was there: about a hundredth,
    # and more where a busy machine happens to stop the thread there.
    assert seconds["unaccounted"] <= 0.25 * (total - seconds["loading"])


def logits_of(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(10, 26).unsqueeze(0)).logits


def merged_by_name(checkpoint, lookahead):
    """Return parameters plus so many times the momentum, by name of the tensor."""
    named = TrainingManifest.from_dict(checkpoint.training_manifest).layout
    tensors = {}
    for layout, fragment in zip(named.fragments, checkpoint.fragments, strict=True):
        values = fragment.params + torch.tensor(lookahead) * fragment.momentum
        for piece in layout.slices():
            tensors[piece.tensor.name] = values[piece.start : piece.stop].reshape(piece.tensor.shape)
    return tensors


def test_a_checkpoint_of_the_middle_is_exported_without_the_lookahead(whole, tmp_path):
    path = whole.syncer.checkpoint_path / f"manifest-{FRAGMENTS}.json"
    stored = read_checkpoint(path)
    for choice, word, lookahead in (("remove", "removed", 0.7 * 0.9), ("keep", "kept", 0.0)):
        out = tmp_path / choice
        report = export(path, whole.model, out, dtype="f32", lookahead=choice, verify=False)
        assert (report.step, report.lookahead) == (FRAGMENTS, word)
        written = load_file(out / "model.safetensors")
        wanted = merged_by_name(stored, lookahead)
        assert written.keys() == wanted.keys()
        assert all(torch.equal(written[name], wanted[name]) for name in wanted)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_a_tied_model_is_trained_merged_and_exported_as_one(whole, tmp_path):
    assert len(whole.logged("push")) >= ROUNDS
    exported = tmp_path / "model"
    report = export(whole.syncer.checkpoint_path, whole.model, exported, dtype="f32")
    assert (report.kind, report.step, report.lookahead) == ("model", ROUNDS, "none")

    merged = merged_by_name(read_checkpoint(whole.syncer.checkpoint_path), 0.0)
    twin = AutoModelForCausalLM.from_pretrained(whole.model, dtype=torch.float32)
    before = logits_of(twin)
    assert dict(twin.named_parameters()).keys() == merged.keys()
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(torch.as_tensor(merged[name]))
    wanted = logits_of(twin)
    assert not torch.equal(wanted, before)
    for folder in (exported, whole.output):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(logits_of(model), wanted), folder

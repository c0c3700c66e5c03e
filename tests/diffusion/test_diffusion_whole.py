"""Two learners of a real pipeline with a real syncer on real sockets, and the adapter that comes of it."""

import io
import json
import threading

import pytest
import torch
import trio
from attrs import evolve
from diffusers import DiffusionPipeline
from diffusion_checkpoints import sampled
from diffusion_rows import write_rows
from PIL import Image
from safetensors.torch import load_file
from syncer_runs import make_config, running
from tiny_pipelines import tiny_sd, tiny_sd3

from yeto.cli.main import main
from yeto.diffusion import build_task, heldout_loss
from yeto.diffusion.adapter_files import WEIGHTS
from yeto.diffusion.cache import cache_rows
from yeto.diffusion.config import DiffusionConfig
from yeto.diffusion.export import export
from yeto.diffusion.model import load_encoders
from yeto.learner.app import Learner
from yeto.learner.config import LearnerConfig
from yeto.learner.progress import Progress

BUILDERS = {"sd": tiny_sd, "sd3": tiny_sd3}
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
ROUNDS, FRAGMENTS = 16, 2
LEARNERS = 2


def coloured(folder, count):
    """Pictures of one colour each, with its name; what a prompt says can be learned from few of them."""
    rows = []
    for number in range(count):
        name = list(COLOURS)[number % len(COLOURS)]
        Image.new("RGB", (16, 16), COLOURS[name]).save(folder / f"{number}.png")
        rows.append({"image": f"{number}.png", "prompt": name})
    return rows


class Whole:
    """A run that is over. One learner trains on pictures and words, the other on what was cached of them."""

    def __init__(self, kind, folder):
        self.kind = kind
        self.model = str(BUILDERS[kind](folder / "model"))
        rows = coloured(folder, 16)
        self.data, self.heldout = (
            write_rows(folder, rows[:12], "train.jsonl"),
            write_rows(folder, rows[12:], "heldout.jsonl"),
        )
        self.task = DiffusionConfig(
            model=self.model,
            data=self.data,
            eval_data=self.heldout,
            lora_r=4,
            lora_alpha=8,
            lora_targets="all-linear",
            micro_batch_size=3,
            num_learners=LEARNERS,
        )
        cache = cache_rows(self.task, folder / "cache", load_encoders)
        self.logs = [folder / f"log-{number}.jsonl" for number in range(LEARNERS)]
        self.outputs = [folder / f"out-{number}" for number in range(LEARNERS)]
        self.syncer = make_config(folder, total_steps=ROUNDS, sync_interval_steps=3.0)
        configs = [self.task, evolve(self.task, data=str(cache.rows_file), learner_id=1)]
        self.exits = []
        trio.run(self._run, configs)

    async def _run(self, configs):
        # The learners are threads here and draw their adapters from the same chance: one after the other.
        building = threading.Lock()
        with trio.fail_after(300):
            async with running(self.syncer) as run, trio.open_nursery() as nursery:
                for number, config in enumerate(configs):
                    settings = LearnerConfig(
                        syncer=f"127.0.0.1:{run.address.port}",
                        learner_id=number,
                        num_learners=LEARNERS,
                        output_dir=self.outputs[number],
                        log_jsonl=self.logs[number],
                        fragments=FRAGMENTS,
                        wan_streams=2,
                        inner_lr=1e-2,
                        warmup_steps=0,
                        eval_every=10**6,
                        torch_threads=1,
                    )
                    nursery.start_soon(self._learn, settings, config, building)
                assert await run.end() == 0

    async def _learn(self, settings, config, building):
        def make_task():
            with building:
                return build_task(config)

        with Progress(
            learner_id=settings.learner_id, log_path=settings.log_jsonl, stream=io.StringIO()
        ) as progress:
            outcome = await Learner(settings, make_task, progress).run()
        assert outcome.exit_code == 0, outcome.reason

    def logged(self, learner, kind):
        records = [json.loads(line) for line in self.logs[learner].read_text().splitlines()]
        return [record for record in records if record["kind"] == kind]


@pytest.fixture(scope="module", params=["sd", "sd3"])
def whole(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"whole-{request.param}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "user"))
        yield Whole(request.param, folder)


def test_the_exported_adapter_lowers_the_held_out_loss_and_changes_an_image(whole, tmp_path):
    out = tmp_path / "adapter"
    report = export(whole.syncer.checkpoint_path, whole.model, out)
    assert report.step == ROUNDS
    assert report.verified is not None
    base = heldout_loss(whole.model, None, whole.task)
    tuned = heldout_loss(whole.model, out, whole.task)
    assert tuned.targets == base.targets
    assert tuned.loss < 0.97 * base.loss, (tuned.loss, base.loss)
    # What the learners saw of it: at the start that of the base, at the end that of the global result.
    for learner in range(LEARNERS):
        first, *_, last = whole.logged(learner, "eval")
        assert first["loss"] == pytest.approx(base.loss, rel=1e-5)
        assert last["loss"] == pytest.approx(tuned.loss, rel=1e-4)
    pipeline = DiffusionPipeline.from_pretrained(whole.model)
    pipeline.set_progress_bar_config(disable=True)
    before = sampled(pipeline)
    part = "unet" if whole.kind == "sd" else "transformer"
    pipeline.load_lora_weights(str(out / part))
    after = sampled(pipeline)
    assert torch.isfinite(after).all()
    assert float((after - before).abs().max()) > 1e-3


def test_every_learner_has_saved_the_same_global_result(whole):
    part = "unet" if whole.kind == "sd" else "transformer"
    first, second = (load_file(out / part / WEIGHTS) for out in whole.outputs)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for learner in range(LEARNERS):
        assert len(whole.logged(learner, "push")) >= ROUNDS - 1
        # Tokens are samples, three in a batch; targets are elements of their latents.
        steps = whole.logged(learner, "step")
        assert len(steps) >= ROUNDS
        assert [step["tokens"] for step in steps] == [3 * step["local_step"] for step in steps]
        assert {step["targets"] for step in steps} == {3 * 4 * 8 * 8}


def test_the_command_trains_alone(whole, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    out, log = tmp_path / "alone", tmp_path / "log.jsonl"
    words = [
        *("run", "--role", "learner", "--task", "diffusion", "--syncer", "none", "--max-local-steps", "3"),
        *("--model", whole.model, "--data", whole.data, "--eval-data", whole.heldout, "--eval-every", "3"),
        *("--lora-r", "2", "--lora-targets", "attention", "--micro-batch-size", "2", "--device", "cpu"),
        *("--diffusion-loss-weighting", "min-snr", "--output-dir", str(out), "--log-jsonl", str(log)),
        *("--torch-threads", "1"),
    ]
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0, capfd.readouterr().err
    part = "unet" if whole.kind == "sd" else "transformer"
    assert (out / part / WEIGHTS).is_file()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "eval"]
    assert len(losses) >= 2
    assert losses[0] != losses[-1]


def test_the_command_says_what_is_wrong_in_one_line(whole, capfd):
    for words, message in (
        (["--model", whole.model, "--seq-len", "64"], "--seq-len 64 is for --task text"),
        (["--model", str(whole.outputs[0])], "not a folder of a diffusers pipeline"),
    ):
        with pytest.raises(SystemExit) as end:
            main(
                [
                    *("run", "--role", "learner", "--task", "diffusion", "--syncer", "none"),
                    *("--max-local-steps", "1", "--data", whole.data, *words),
                ]
            )
        assert end.value.code == 2
        error = capfd.readouterr().err.strip().splitlines()[-1]
        assert message in error

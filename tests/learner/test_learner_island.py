"""Islands of several ranks: real processes over gloo on the CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import psutil
import pytest
from rank_processes import SECONDS_MAX
from safetensors.numpy import load_file

from yeto.errors import ConfigError
from yeto.learner.ranks import Ranks

pytestmark = [pytest.mark.begins_early, pytest.mark.timeout(900)]

SHARDS = ("ddp", "fsdp")
ISLANDS = ((1, "ddp"), (2, "ddp"), (2, "fsdp"))


LOADED = (
    "torch.distributed.fsdp",
    "peft",
    "yeto.cli.run_learner",
    "yeto.cli.run_syncer",
    "yeto.syncer.app",
    "yeto.text.task",
    "rank_cases",
)


@pytest.fixture(scope="module")
def template(template):
    """Return the template of all tests of learners, with what ranks need besides."""
    template.load(*LOADED)
    return template


@pytest.fixture
def ran(template, tmp_path):
    """Return a function that runs a case on so many ranks, to a good end, and returns the folder."""

    folders = []

    def run(size, case, *args):
        folder = tmp_path / f"{case}-{len(folders)}"
        folders.append(folder)
        folder.mkdir()
        output = folder / "output.txt"
        pids = template.island(size, f"rank_cases:{case}", folder, *args, output=output)
        assert [template.code(pid) for pid in pids] == [0] * size, output.read_text()
        return folder

    return run


def test_ranks_are_found_in_torchruns_environment():
    assert Ranks.of({}) == Ranks()
    assert Ranks.of({"WORLD_SIZE": "1", "RANK": "0"}) == Ranks()
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert Ranks.of(environ) == Ranks(rank=3, size=4, local_rank=1, is_one_machine=False)
    assert Ranks.of(environ | {"LOCAL_WORLD_SIZE": "4"}).is_one_machine
    with pytest.raises(ConfigError, match="WORLD_SIZE is 4, but LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not"):
        Ranks.of({"WORLD_SIZE": "4", "RANK": "3"})


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_gather_and_sum(ran, size):
    ran(size, "speak")


def test_a_step_is_the_token_mean_over_the_whole_island(ran):
    """The ranks of an island take the steps of one rank that has all their rows, however they are split."""
    alone = ran(1, "steps", "ddp", 6)
    weights, results = np.load(alone / "weights.npy"), np.load(alone / "results.npy")
    for shard in SHARDS:
        island = ran(2, "steps", shard, 6)
        np.testing.assert_allclose(np.load(island / "results.npy"), results, rtol=1e-5)
        np.testing.assert_allclose(np.load(island / "weights.npy"), weights, rtol=0, atol=1e-6)
        if shard == "ddp":
            np.testing.assert_array_equal(np.load(island / "rank0.npy"), np.load(island / "rank1.npy"))
    assert np.abs(weights[-1] - weights[0]).max() > 1e-2


@pytest.mark.parametrize("shard", SHARDS)
def test_the_head_decides_and_the_others_follow(ran, shard):
    ran(2, "exchange", shard)


@pytest.mark.parametrize("shard", SHARDS)
def test_an_island_goes_on_from_what_its_head_saved(ran, shard):
    ran(2, "restored", shard)


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_a_syncer_cannot_tell_an_island_from_one_rank(ran, fixtures, tuning):
    """Layout, fingerprint, contract and initial values are alike, and so is what is saved."""
    name = "adapter_model.safetensors" if tuning == "lora" else "model.safetensors"
    folders = [ran(size, "identity", fixtures, shard, tuning) for size, shard in ISLANDS]
    stated = [(folder / "identity.json").read_text() for folder in folders]
    assert stated[0] == stated[1] == stated[2]
    # Sums over parts that the ranks have scored are the sums of one rank.
    scored = [json.loads((folder / "evaluation.json").read_text()) for folder in folders]
    assert scored[0] == scored[1] == scored[2]
    plain, whole, parts = (load_file(folder / "saved" / name) for folder in folders)
    assert plain.keys() == whole.keys() == parts.keys()
    assert any(not np.array_equal(plain[key], whole[key]) for key in plain)
    for key in whole:
        np.testing.assert_allclose(parts[key], whole[key], rtol=0, atol=1e-6)


def test_ranks_that_built_different_models_do_not_train(ran):
    folder = ran(2, "unlike")
    for rank in range(2):
        name, text = json.loads((folder / f"said{rank}.json").read_text())
        assert name == "YetoError"
        assert "ranks" in text
        assert "have built different models" in text


def test_an_island_goes_on_from_its_state_dir(template, fixtures, tmp_path):
    """By the command line; that either sharding goes on from what it saved is shown above."""

    def train(steps, out, *more):
        output = tmp_path / f"{out}.txt"
        pids = template.island(
            2,
            "rank_cases:cli",
            *("run", "--role", "learner", "--syncer=none", f"--max-local-steps={steps}", "--device=cpu"),
            *(f"--model={fixtures / 'tiny-llama'}", f"--data={fixtures / 'chat' / 'train.jsonl'}"),
            *("--seq-len=64", "--micro-batch-size=1", "--stream-workers=0", "--lora-dropout=0.1"),
            *(f"--output-dir={tmp_path / out}", "--shard=fsdp", *more),
            output=output,
        )
        assert [template.code(pid) for pid in pids] == [0, 0], output.read_text()
        return load_file(tmp_path / out / "adapter_model.safetensors")

    state = f"--state-dir={tmp_path / 'state'}"
    straight = train(4, "straight")
    before = train(2, "before", state)
    after = train(4, "after", state)
    assert all(np.array_equal(after[key], straight[key]) for key in straight)
    assert any(not np.array_equal(before[key], straight[key]) for key in straight)


def test_a_rank_that_only_stops_is_lost_too(template, tmp_path):
    output = tmp_path / "output.txt"
    pids = template.island(3, "rank_cases:silent", tmp_path, output=output)
    assert [template.code(pids[0]), template.code(pids[2])] == [0, 0], output.read_text()
    template.kill(pids[1])
    reason = "rank 1 of this island was silent for 5 s: it is stopped, or its machine is gone"
    assert json.loads((tmp_path / "said0.json").read_text()) == [reason, False]
    assert json.loads((tmp_path / "said2.json").read_text()) == [reason, True]


def test_a_rank_that_lives_and_does_not_come_is_named(template, tmp_path):
    output = tmp_path / "output.txt"
    pids = template.island(3, "rank_cases:hanging", tmp_path, output=output)
    for pid in pids:
        template.code(pid)
    said = [json.loads((tmp_path / f"said{rank}.json").read_text()) for rank in range(3)]
    reason, is_told = said[0]
    assert not is_told, output.read_text()
    assert reason.startswith(f"rank 1 (process {pids[1]} on ")
    assert ") of this island has kept the others waiting for 1 s (--rank-timeout): it hangs, or" in reason
    assert said[1] == said[2] == [reason, True], "the one that hangs ends, too"


def test_where_no_rank_can_be_named_its_processes_are(template, tmp_path):
    output = tmp_path / "output.txt"
    pids = template.island(2, "rank_cases:stalling", tmp_path, output=output)
    assert [template.code(pid) for pid in pids] == [0, 0], output.read_text()
    reason = json.loads((tmp_path / "said.json").read_text())
    assert reason.startswith("a rank of this island has kept rank 0 waiting inside a step for more than 1 s")
    assert f"shows where a process is (rank 1 is process {pids[1]} on " in reason


class Fleet:
    """A syncer and two islands of two ranks each, by the command line."""

    def __init__(self, template, fixtures, folder, shard, tuning, **changes):
        self._template = template
        self.folder = folder
        ready = folder / "ready.json"
        self.syncer = template.start(
            "rank_cases:cli",
            *("run", "--role", "syncer", "--port=0", "--learners=2", f"--ready-file={ready}"),
            *(f"--checkpoint-path={folder / 'state.ckpt'}", f"--event-tape={folder / 'events.jsonl'}"),
            *words({"sync_interval_steps": 2, "quorum": 1, "grace_ms": 200} | changes),
            output=folder / "syncer.txt",
        )
        eventually(ready.exists)
        self._learner = (
            *("run", "--role", "learner", "--num-learners=2", f"--shard={shard}", f"--tuning={tuning}"),
            *(f"--syncer=127.0.0.1:{json.loads(ready.read_text())['port']}", "--device=cpu"),
            *(f"--model={fixtures / 'tiny-llama'}", f"--data={fixtures / 'chat' / 'train.jsonl'}"),
            *("--seq-len=64", "--micro-batch-size=1", "--stream-workers=0", "--fragments=2"),
            "--inner-lr=3e-3",
        )
        self.islands = [[], []]
        self.processes = [self.syncer]
        for number in range(2):
            self.start(number)

    def start(self, number):
        """Start an island, perhaps once more."""
        self.islands[number] = self._template.island(
            2,
            "rank_cases:cli",
            *self._learner,
            *(f"--learner-id={number}", f"--output-dir={self.out(number)}"),
            f"--log-jsonl={self.folder / f'log-{number}.jsonl'}",
            output=self.folder / f"island-{number}.txt",
        )
        self.processes += self.islands[number]

    def out(self, number):
        return self.folder / f"out-{number}"

    def codes(self, number):
        return [self._template.code(pid) for pid in self.islands[number]]

    def said(self, number):
        return (self.folder / f"island-{number}.txt").read_text()

    def steps(self, number):
        """Return how many steps the log of an island's head has."""
        log = self.folder / f"log-{number}.jsonl"
        return log.read_text().count('"kind": "step"') if log.exists() else 0


def words(flags):
    return [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]


def eventually(predicate):
    """Wait for something that another process does."""
    deadline = time.monotonic() + SECONDS_MAX
    while not predicate():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


@pytest.fixture
def fleet(template, fixtures, tmp_path):
    fleets = []

    def start(*args, **changes):
        fleets.append(Fleet(template, fixtures, tmp_path, *args, **changes))
        return fleets[-1]

    yield start
    for one in fleets:
        for pid in one.processes:
            template.kill(pid)


@pytest.mark.parametrize(("shard", "tuning"), [("ddp", "lora"), ("fsdp", "full")])
def test_two_islands_of_two_ranks_end_with_the_same_weights(fleet, template, shard, tuning):
    run = fleet(shard, tuning, quorum=2, total_steps=6)
    assert [run.codes(0), run.codes(1)] == [[0, 0], [0, 0]], run.said(0) + run.said(1)
    assert template.code(run.syncer) == 0
    name = "adapter_model.safetensors" if tuning == "lora" else "model.safetensors"
    first, second = (load_file(run.out(number) / name) for number in range(2))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[key], second[key]) for key in first)
    for number in range(2):
        # One rank speaks for both.
        assert run.said(number).count("global result of step 6 saved in") == 1


def test_a_killed_rank_ends_its_island_and_the_fleet_goes_on(fleet, template):
    run = fleet("ddp", "lora", total_steps=12)
    eventually(lambda: run.steps(0) >= 2 and run.steps(1) >= 2)
    os.kill(run.islands[1][1], signal.SIGKILL)
    assert run.codes(1) == [1, -signal.SIGKILL]
    message = "learner 1: rank 1 of this island ended without a word: it was killed, or it crashed"
    assert run.said(1).splitlines()[-1] == message
    assert not run.out(1).exists()
    run.start(1)
    assert [run.codes(0), run.codes(1)] == [[0, 0], [0, 0]], run.said(0) + run.said(1)
    assert template.code(run.syncer) == 0
    first, second = (load_file(run.out(number) / "adapter_model.safetensors") for number in range(2))
    assert all(np.array_equal(first[key], second[key]) for key in first)


def test_a_rank_that_fails_says_why_through_rank_0(template, fixtures, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text((fixtures / "chat" / "train.jsonl").read_text().split("\n")[0] + "\n")
    output = tmp_path / "output.txt"
    pids = template.island(
        2,
        "rank_cases:cli",
        *("run", "--role", "learner", "--syncer=none", "--max-local-steps=3", "--device=cpu"),
        *(f"--model={fixtures / 'tiny-llama'}", f"--data={rows}", f"--output-dir={tmp_path / 'out'}"),
        output=output,
    )
    assert 0 not in [template.code(pid) for pid in pids]
    reason = f"--data {rows}: no rows for learner 0 of 1, rank 1 of 2;"
    assert f"learner 0: rank 1 of this island failed: {reason}" in output.read_text()


def test_a_killed_head_ends_its_island(fleet, template):
    run = fleet("fsdp", "lora", total_steps=10**6)
    eventually(lambda: run.steps(0) >= 1)
    os.kill(run.islands[0][0], signal.SIGKILL)
    assert run.codes(0) == [-signal.SIGKILL, 1]
    message = "yeto: rank 0 of this island ended without a word: it was killed, or it crashed"
    assert run.said(0).splitlines()[-1] == message


# Ctrl-C at a terminal reaches the tokenizing workers of the ranks, too.
@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 1), (signal.SIGKILL, 0)])
def test_torchrun_starts_an_island_that_stops_with_it(fixtures, tmp_path, number, workers):
    log, out = tmp_path / "log.jsonl", tmp_path / "out"
    launcher = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"),
            *("-m", "yeto", "run", "--role", "learner", "--syncer=none", "--max-local-steps=1000000"),
            *(f"--model={fixtures / 'tiny-llama'}", f"--data={fixtures / 'chat' / 'train.jsonl'}"),
            *("--seq-len=64", "--micro-batch-size=1", f"--stream-workers={workers}", "--device=cpu"),
            *(f"--output-dir={out}", f"--log-jsonl={log}"),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        eventually(lambda: log.exists() and '"kind": "step"' in log.read_text())
        family = psutil.Process(launcher.pid).children(recursive=True)
        if number is signal.SIGINT:
            # As a terminal sends it; torchrun sends it to the ranks once more.
            os.killpg(launcher.pid, number)
        else:
            os.kill(launcher.pid, number)
        _, errors = launcher.communicate(timeout=SECONDS_MAX)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
    assert launcher.returncode != 0
    name = "SIGINT" if number is signal.SIGINT else "SIGTERM"
    assert f"learner 0: stopped by {name}; local weights of step" in errors
    assert errors.count("local weights of step") == 1
    assert (out / "unmerged-0" / "adapter_model.safetensors").exists()
    assert json.loads(log.read_text().splitlines()[-1])["code"] == 4
    _, alive = psutil.wait_procs(family, timeout=SECONDS_MAX)
    assert alive == []

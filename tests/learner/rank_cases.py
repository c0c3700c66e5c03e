"""What the ranks of an island do in its tests; each function is the whole life of one process."""

import json
import os
import queue
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from learner_fakes import config
from torch import nn

import yeto.learner.crew
import yeto.learner.island
import yeto.learner.watch
import yeto.text.evaluate
from yeto.cli.main import main
from yeto.errors import YetoError
from yeto.learner.equipment import equip
from yeto.learner.identity import initial_fragment, make_identity
from yeto.learner.island import find_island
from yeto.learner.mailbox import Arrivals
from yeto.learner.ranks import Ranks
from yeto.learner.stopwatch import Stopwatch
from yeto.learner.task import Batch, Evaluation
from yeto.text import TextConfig, build_task
from yeto.tuning.shard import shard_model

CPU = torch.device("cpu")


def cli(*words):
    """Run the command line."""
    torch.set_num_threads(1)
    main(words)


class Net(nn.Module):
    """Blocks whose sides no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x)


class NetTask:
    """Seven ragged rows a step, unevenly split over ranks and micro batches.

    Of the rows of step s the first ``cuts[s % len(cuts)]`` are rank 0's, the others rank 1's; in a rank, the
    first is one micro batch and the rest another. Row i counts ``i % 3`` of its three outputs.
    """

    rows_per_step = 7
    cuts = (7, 5, 0, 1)

    def __init__(self, ranks, shard):
        torch.manual_seed(0)
        self.net = Net()
        self.ranks = ranks
        if shard == "fsdp":
            shard_model(self.net, CPU)
        rows = torch.Generator().manual_seed(1)
        self.x = torch.randn(64, 4, generator=rows)
        self.y = torch.randn(64, 3, generator=rows)
        torch.manual_seed(100 + ranks.rank)

    def trainable_parameters(self):
        return dict(self.net.named_parameters())

    def binding(self):
        return {}

    def describe(self):
        return {}

    def batches(self, start=None):
        step = 0 if start is None else start
        while True:
            rows = [(step * self.rows_per_step + i) % 64 for i in range(self.rows_per_step)]
            if self.ranks.size == 2:
                cut = self.cuts[step % len(self.cuts)]
                rows = rows[:cut] if self.ranks.rank == 0 else rows[cut:]
            step += 1
            for part in (rows[:1], rows[1:]):
                targets = sum(row % 3 for row in part)
                yield Batch(inputs=part, targets=targets, tokens=10 * len(part), position=step)

    def loss(self, batch):
        rows = torch.tensor(batch.inputs, dtype=torch.int64)
        counts = (torch.arange(3) < (rows % 3)[:, None]).float()
        return ((self.net(self.x[rows]) - self.y[rows]).square() * counts).sum()

    def evaluate(self):
        part = self.x if self.ranks.size == 1 else (self.x[:40], self.x[40:])[self.ranks.rank]
        with torch.no_grad():
            return Evaluation(loss_sum=float(self.net(part).square().sum()), targets=len(part), rows=64)

    def save(self, folder):
        raise NotImplementedError


class Case:
    """An island of a NetTask, opened and equipped."""

    def __init__(self, shard, saved=None, **changes):
        self.ranks = Ranks.of(os.environ)
        self.island = find_island(self.ranks, "cpu")
        self.island.open(lambda loss: None)
        settings = {"output_dir": Path("unused"), "grad_accum": 2, "clip_norm": 0.5, "weight_decay": 0.1}
        self.task = NetTask(self.ranks, shard)
        self.equipment = equip(
            config(**(settings | changes)),
            self.task,
            self.island,
            Stopwatch(),
            lambda layout: saved if self.ranks.is_head else None,
        )
        self.crew = self.equipment.crew
        self.num_fragments = len(self.equipment.layout.fragments)

    def flat(self):
        """Return all weights, by the head's snapshots."""
        parts = [self.crew.snapshot(fragment).values() for fragment in range(self.num_fragments)]
        return np.concatenate(parts)

    def check_evaluation(self):
        """Check that a pass through the model sees the weights that the snapshots show."""
        state = {}
        for fragment, part in enumerate(self.equipment.layout.fragments):
            values = torch.from_numpy(self.crew.snapshot(fragment).values())
            flat = values.split([tensor.numel for tensor in part.tensors])
            for tensor, one in zip(part.tensors, flat, strict=True):
                state[tensor.name] = one.view(tensor.shape)
        net = Net()
        net.load_state_dict(state)
        with torch.no_grad():
            expected = float(net(self.task.x).square().sum())
        evaluation = self.crew.evaluate()
        np.testing.assert_allclose(evaluation.loss_sum, expected, rtol=1e-5)
        assert (evaluation.targets, evaluation.rows) == (64, 64)

    def own_flat(self):
        """Return what this rank itself holds."""
        return np.concatenate(
            [parameter.detach().numpy().reshape(-1) for parameter in self.task.net.parameters()]
        )

    def close(self):
        self.equipment.loop.close()
        self.island.close()


def never():
    return False


def steps(folder, shard, count):
    """Take steps; the head notes what they saw and the weights behind each."""
    torch.set_num_threads(1)
    case = Case(shard)
    if case.ranks.is_head:
        results, weights = [], [case.flat()]
        for _ in range(count):
            result = case.crew.step(never)
            results.append([result.loss, result.targets, result.tokens, result.gradient_norm])
            weights.append(case.flat())
        np.save(folder + "/weights.npy", np.stack(weights))
        np.save(folder + "/results.npy", np.array(results))
        case.crew.end()
    else:
        case.crew.follow()
    if shard == "ddp":
        np.save(f"{folder}/rank{case.ranks.rank}.npy", case.own_flat())
    case.close()


def exchange(folder, shard):
    """Blend and read back, stop steps in the middle, evaluate; the head checks all of it."""
    torch.set_num_threads(1)
    case = Case(shard)
    if not case.ranks.is_head:
        case.crew.follow()
        case.close()
        return
    crew = case.crew
    before = [crew.snapshot(fragment).values() for fragment in range(case.num_fragments)]
    received = [np.arange(values.size, dtype=np.float32) for values in before]
    crew.blend(0, received[0], 0.25)
    crew.blend(1, received[1], 0.0)
    expected = np.float32(0.25) * before[0] + np.float32(0.75) * received[0]
    np.testing.assert_allclose(crew.snapshot(0).values(), expected, rtol=1e-6)
    np.testing.assert_array_equal(crew.snapshot(1).values(), received[1])
    crew.add(1, before[1], 1.0)
    np.testing.assert_array_equal(crew.snapshot(1).values(), received[1] + before[1])
    case.check_evaluation()
    # The pass that only looked must not leave old weights behind for the next one.
    crew.blend(0, before[0], 0.0)
    crew.blend(1, before[1], 0.0)
    case.check_evaluation()
    start = case.flat()
    for asked in range(1, 5):
        answers = iter([False] * (asked - 1) + [True])
        assert crew.step(lambda answers=answers: next(answers)) is None
        np.testing.assert_array_equal(case.flat(), start)
    assert crew.step(never) is not None
    assert not np.array_equal(case.flat(), start)
    arrivals = Arrivals()
    yeto.learner.crew.IDLE_SECONDS = 0.01
    threading.Timer(0.1, arrivals.release).start()
    idle = []
    crew.wait(arrivals, lambda: idle.append(1))
    assert idle
    crew.end()
    case.close()


def restored(folder, shard):
    """Take four steps with a saving behind the second; then go on from there, twice."""
    torch.set_num_threads(1)
    case = Case(shard)
    saved = None
    if case.ranks.is_head:
        for _ in range(2):
            case.crew.step(never)
        saved = case.crew.saved()
        for _ in range(2):
            case.crew.step(never)
        straight = case.flat()
        case.crew.end()
    else:
        case.crew.follow()
    chance = random.random(), float(torch.rand(()))
    case.equipment.loop.close()
    again = equip(
        config(output_dir=Path("unused"), grad_accum=2, clip_norm=0.5, weight_decay=0.1),
        NetTask(case.ranks, shard),
        case.island,
        Stopwatch(),
        lambda layout: saved,
    )
    if case.ranks.is_head:
        assert len(saved.ranks) == case.ranks.size
        for _ in range(2):
            again.crew.step(never)
        parts = [again.crew.snapshot(fragment).values() for fragment in range(case.num_fragments)]
        np.testing.assert_array_equal(np.concatenate(parts), straight)
        again.crew.end()
    else:
        again.crew.follow()
    assert (random.random(), float(torch.rand(()))) == chance
    case.close()


def speak(folder):
    """Share, gather and sum."""
    torch.set_num_threads(1)
    ranks = Ranks.of(os.environ)
    island = find_island(ranks, "cpu")
    island.open(lambda loss: None)
    small = ["blend", 3, 0.1, None, "é"]
    large = {"words": ["x" * 100] * 100, "array": np.arange(6, dtype=np.int16).reshape(2, 3)}
    assert list(island.share(small if ranks.is_head else None)) == small
    shared = island.share(large if ranks.is_head else None)
    assert shared["words"] == large["words"]
    np.testing.assert_array_equal(shared["array"], large["array"])
    assert shared["array"].dtype == np.int16
    assert island.gather("y" * (1 + 1000 * ranks.rank)) == ["y" * (1 + 1000 * r) for r in range(ranks.size)]
    assert island.sum(2**60 + ranks.rank, 1) == (2**60 * ranks.size + sum(range(ranks.size)), ranks.size)
    tensors = [torch.full((3, 2), float(ranks.rank + 1)), torch.ones(())]
    island.add(tensors)
    assert float(tensors[0].min()) == float(tensors[0].max()) == sum(range(1, ranks.size + 1))
    assert float(tensors[1]) == ranks.size
    island.close()
    assert not dist.is_initialized()


def identity(folder, fixtures, shard, tuning):
    """Load a language model; the head notes what it would state to a syncer, and saves what it has."""
    torch.set_num_threads(1)
    # A batch of held-out rows for each window, so that there is something to deal out.
    yeto.text.evaluate.BATCH_TOKENS = 32
    ranks = Ranks.of(os.environ)
    island = find_island(ranks, "cpu")
    island.open(lambda loss: None)
    task = build_task(
        TextConfig(
            model=fixtures + "/tiny-llama",
            data=fixtures + "/chat/train.jsonl",
            eval_data=fixtures + "/chat/train.jsonl",
            eval_rows=3,
            device="cpu",
            seq_len=32,
            stream_workers=0,
            tuning=tuning,
            shard=shard,
            # With it the passes through a block's hooks are not one forward and one backward.
            gradient_checkpointing="on",
            rank=ranks.rank,
            num_ranks=ranks.size,
        )
    )
    settings = config(output_dir=Path(folder), fragments=3)
    equipment = equip(settings, task, island, Stopwatch(), lambda layout: None)
    if ranks.is_head:
        initial = tuple(
            initial_fragment(equipment.crew.snapshot(fragment).values(), "f32")
            for fragment in range(len(equipment.layout.fragments))
        )
        stated = make_identity(settings, equipment.layout, task.binding(), initial)
        said = [stated.fingerprint.hex(), stated.contract.hex(), [one.digest for one in initial]]
        Path(folder, "identity.json").write_text(json.dumps(said))
        evaluation = equipment.crew.evaluate()
        scored = [evaluation.loss_sum, evaluation.targets, evaluation.rows]
        Path(folder, "evaluation.json").write_text(json.dumps(scored))
        assert equipment.crew.step(never) is not None
        equipment.crew.save(Path(folder) / "saved")
        equipment.crew.end()
    else:
        equipment.crew.follow()
    equipment.loop.close()
    island.close()


def silent(folder):
    """Stop rank 1 without ending it."""
    yeto.learner.watch.BEAT_SECONDS, yeto.learner.watch.SILENCE_SECONDS = 0.2, 5.0
    ranks = Ranks.of(os.environ)
    island = find_island(ranks, "cpu")
    losses = queue.Queue()
    island.open(losses.put)
    island.sum(0)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    loss = losses.get()
    Path(folder, f"said{ranks.rank}.json").write_text(json.dumps([loss.reason, loss.is_told]))
    island.close(loss.reason)


def hanging(folder):
    """Have rank 1 live on and not come to what the others wait in."""
    yeto.learner.watch.BEAT_SECONDS = 0.1
    ranks = Ranks.of(os.environ)
    island = find_island(ranks, "cpu", 1.0)
    losses = queue.Queue()
    island.open(losses.put)
    if ranks.rank == 0:
        # Not before it is known that rank 2 has come.
        while island._watch.peers[2][0] == 0:
            assert losses.empty()
    if ranks.rank != 1:
        threading.Thread(target=island.sum, args=(0,), daemon=True).start()
    loss = losses.get()
    Path(folder, f"said{ranks.rank}.json").write_text(json.dumps([loss.reason, loss.is_told]))
    island.close(loss.reason)


def stalling(folder):
    """Have rank 1 not come to an exchange that nobody counts, as there are inside a step."""
    yeto.learner.watch.BEAT_SECONDS = 0.1
    yeto.learner.island.LATE_SECONDS = yeto.learner.island.FAREWELL_SECONDS = 0.2
    ranks = Ranks.of(os.environ)
    island = find_island(ranks, "cpu", 1.0)
    island.open(print)
    said = Path(folder, "said.json")
    if ranks.rank == 1:
        while not said.exists():
            time.sleep(0.01)
        return
    while not island._watch.peers[1][1]:
        time.sleep(0.01)
    try:
        dist.all_reduce(torch.ones(()))
    except RuntimeError as stalled:
        try:
            island.blame(stalled)
        except YetoError as error:
            said.write_text(json.dumps(str(error)))


def unlike(folder):
    """Build another model on rank 1."""
    try:
        ranks = Ranks.of(os.environ)
        island = find_island(ranks, "cpu")
        island.open(lambda loss: None)
        task = NetTask(ranks, "ddp")
        with torch.no_grad():
            task.net.last.bias[0] += ranks.rank
        equip(config(output_dir=Path("unused")), task, island, Stopwatch(), lambda layout: None)
    except Exception as error:
        Path(f"{folder}/said{ranks.rank}.json").write_text(json.dumps([type(error).__name__, str(error)]))
    island.close()

"""A task small enough to compute by hand, and what else the tests of the learner share."""

import json
import threading

import torch
import trio
from torch import nn

from yeto.learner.config import LearnerConfig
from yeto.learner.task import Batch, Evaluation


class TinyTask:
    """Learns ``y = x @ w + b`` by least squares; every row has its own number of targets.

    The rows are ragged: row i counts ``i % 3`` of its outputs, so some rows have no target at all.
    """

    def __init__(self, *, rows_per_batch=1, num_rows=64, width=4, seed=0, untouched=False, gate=None):
        generator = torch.Generator().manual_seed(seed)
        self.model = nn.ParameterDict(
            {
                "layers_0_weight": nn.Parameter(torch.randn(width, 3, generator=generator)),
                "layers_1_bias": nn.Parameter(torch.zeros(3)),
            }
        )
        if untouched:
            self.model["layers_2_dead"] = nn.Parameter(torch.zeros(2))
        rows = torch.Generator().manual_seed(100)
        self.rows = [
            (torch.randn(width, generator=rows), torch.randn(3, generator=rows), index % 3)
            for index in range(num_rows)
        ]
        self.rows_per_batch = rows_per_batch
        self.batches_given = 0
        self.saved = []
        self.gate = gate

    def trainable_parameters(self):
        return {name.replace("_", "."): parameter for name, parameter in self.model.items()}

    def binding(self):
        return {"model": "tiny", "seed": 0}

    def describe(self):
        return {"model": "tiny"}

    def batches(self, start=None):
        start = start or 0
        while True:
            if self.gate is not None:
                self.gate(self.batches_given)
            chosen = [self.rows[(start + i) % len(self.rows)] for i in range(self.rows_per_batch)]
            start += self.rows_per_batch
            self.batches_given += 1
            yield Batch(
                inputs=chosen,
                targets=sum(count for _, _, count in chosen),
                tokens=10 * self.rows_per_batch,
                position=start,
            )

    def loss(self, batch):
        total = torch.zeros(())
        for x, y, count in batch.inputs:
            predicted = x @ self.model["layers_0_weight"] + self.model["layers_1_bias"]
            total = total + (predicted - y)[:count].square().sum()
        return total

    def evaluate(self):
        with torch.no_grad():
            loss = sum(
                float((x @ self.model["layers_0_weight"] + self.model["layers_1_bias"] - y).square().sum())
                for x, y, _ in self.rows[:4]
            )
        return Evaluation(loss_sum=loss, targets=12, rows=4)

    def save(self, folder):
        self.saved.append(folder)
        weights = {name: p.detach().tolist() for name, p in self.trainable_parameters().items()}
        (folder / "weights.json").write_text(json.dumps(weights))

    def flat(self):
        """Return all parameters as one list of numbers, in the order of their names."""
        return torch.cat([p.detach().reshape(-1) for _, p in sorted(self.trainable_parameters().items())])


def config(**changes):
    """Return a configuration of one learner with two fragments of the tiny task."""
    settings = {
        "syncer": "127.0.0.1:1",
        "output_dir": None,
        "fragments": 2,
        "wire_dtype": "f32",
        "wan_streams": 2,
        "warmup_steps": 0,
        "inner_lr": 0.01,
    }
    return LearnerConfig(**(settings | changes))


async def eventually(predicate):
    """Wait for something that another thread does."""
    with trio.fail_after(200):
        while not predicate():
            await trio.sleep(0.002)


class Steps:
    """A gate for ``TinyTask``: lets the training thread take so many batches and no more."""

    def __init__(self):
        self._allowed = 0
        self._changed = threading.Condition()
        self._at = -1

    def __call__(self, batch):
        with self._changed:
            self._at = batch
            assert self._changed.wait_for(lambda: self._allowed > batch, timeout=200)

    @property
    def is_closed(self):
        """Whether the training thread stands here, having done all the steps it may do."""
        with self._changed:
            return self._at == self._allowed

    def allow(self, count=1):
        with self._changed:
            self._allowed += count
            self._changed.notify_all()

    def open(self):
        self.allow(10**9)

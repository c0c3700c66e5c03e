"""A learner's training thread on a scripted network: killed where a test says, and started again.

The script says what arrives while which batch is fetched, counted over all lives; so the same things arrive
at the same boundaries, whether the learner was killed or not. A new life has a new connection, over which the
syncer first sends the newest version of every fragment, and pulls again what it has not got.
"""

import hashlib
import io
import json

import numpy as np
import torch
from attrs import evolve

from yeto.learner.exchanged import Broadcast, Pull
from yeto.learner.island import SOLO
from yeto.learner.mailbox import Arrivals, Departures, Stop
from yeto.learner.progress import Progress
from yeto.learner.push import encode_push
from yeto.learner.trainer import Trainer
from yeto.wire import codecs
from yeto.wire.digest import digest


class Killed(BaseException):
    """The process is gone, in the middle of fetching a batch."""


class Fetching:
    """A task whose fetching of a batch can be watched."""

    def __init__(self, task, before):
        self._task = task
        self._before = before

    def __getattr__(self, name):
        return getattr(self._task, name)

    def batches(self, start=None):
        batches = self._task.batches(start)
        try:
            while True:
                self._before()
                yield next(batches)
        finally:
            batches.close()


class Lives:
    """One learner over all its lives, with everything that can be compared."""

    def __init__(self, settings, make_task, script=None):
        """Prepare.

        Args:
            settings: of the learner, with a log.
            make_task: loads a fresh task.
            script: by number of the batch that is fetched, a list of ("broadcast", fragment, version) and
                ("pull", fragment, step, attempt).
        """
        self.settings = settings
        self._make_task = make_task
        self._script = script or {}
        self._generation = 0
        self.rows = {}
        """Digest of the tokens of each batch, by number; a later life replaces an earlier one's."""
        self.pushes = {}
        """Heads and payloads by fragment, step and attempt."""
        self.fetched = []
        self.output = io.StringIO()
        self.task = None

    def live(self, *, until=None, stop_at=None):
        """Run one life; ``until`` is the number of the batch at which it is killed. Return its outcome."""
        self._generation += 1
        arrivals = Arrivals()
        arrivals.begin_generation(self._generation)
        departures = Departures(ring_pushes=lambda: self._encode(departures), ring_news=lambda: None)
        real = self._make_task()

        def before():
            number = trainer._loop.steps
            if number == until:
                raise Killed
            self.fetched.append(number)
            for entry in self._script.get(number, ()):
                self._deliver(arrivals, entry)
            if number == stop_at:
                arrivals.stop(Stop(exit_code=4, reason="stopped by SIGTERM"))

        self.task = Fetching(real, before)
        self._watch_rows(real)
        progress = Progress(learner_id=1, log_path=self.settings.log_jsonl, stream=self.output)
        trainer = Trainer(
            self.settings,
            lambda: self.task,
            arrivals=arrivals,
            departures=departures,
            progress=progress,
            on_ready=lambda identity: self._connected(arrivals, trainer, identity),
            island=SOLO,
            on_lost=lambda loss: None,
        )
        self.trainer = trainer
        with progress:
            try:
                return trainer.run()
            except Killed:
                return None

    def _watch_rows(self, task):
        loss = task.loss

        def watched(batch):
            ids = batch.inputs.ids.numpy().tobytes()
            self.rows[self.trainer._loop.steps] = hashlib.sha256(ids).hexdigest()
            return loss(batch)

        task.loss = watched

    def _connected(self, arrivals, trainer, identity):
        """Send the newest version of every fragment, as far as the script has come."""
        self._numels = [fragment.numel for fragment in identity.layout.fragments]
        if not hasattr(self, "_initial"):
            self._initial = [
                trainer._crew.snapshot(fragment).values().copy() for fragment in range(len(self._numels))
            ]
        versions = dict.fromkeys(range(len(self._numels)), 0)
        for number, entries in self._script.items():
            if number < trainer._loop.steps:
                versions |= {entry[1]: entry[2] for entry in entries if entry[0] == "broadcast"}
        for fragment, version in versions.items():
            self._deliver(arrivals, ("broadcast", fragment, version))
        for entry in self._script.get(trainer._loop.steps - 1, ()):
            # Was answered at the boundary behind the saving, which is crossed once more.
            if entry[0] == "pull":
                self._deliver(arrivals, entry)

    def _deliver(self, arrivals, entry):
        kind, fragment, step = entry[:3]
        if kind == "pull":
            arrivals.put_pull(
                Pull(generation=self._generation, fragment=fragment, step=step, attempt=entry[3])
            )
            return
        noise = np.random.default_rng([fragment, step]).normal(0, 0.01, self._numels[fragment])
        values = (self._initial[fragment] + noise).astype(np.float32)
        codec = codecs.by_name(codecs.bulk_dtype(self.settings.wire_dtype))
        payload = codec.encode(values)
        arrivals.put_broadcast(
            Broadcast(
                generation=self._generation,
                fragment=fragment,
                version=step,
                digest=digest(payload),
                values=codec.decode(payload, values.size),
            )
        )

    def _encode(self, departures):
        while (push := departures.take_push()) is not None:
            head, payload = encode_push(push, 1, self.settings.wire_dtype)
            self.pushes[head.fragment, head.step, head.attempt] = (head, bytes(payload))

    def weights(self):
        return {name: p.detach().clone() for name, p in self.task.trainable_parameters().items()}

    def moments(self):
        return self.trainer._loop.saved().optimizer

    def steps(self):
        """Return what was logged of each local step; a later life replaces an earlier one's."""
        records = [json.loads(line) for line in self.settings.log_jsonl.read_text().splitlines()]
        return {
            record["local_step"]: (record["loss"], record["learning_rate"], record["gradient_norm"])
            for record in records
            if record["kind"] == "step"
        }

    def assert_as(self, other):
        """Nothing that was trained differs from what another learner trained, not by a bit."""
        assert self.rows == other.rows
        assert self.steps() == other.steps()
        assert self.pushes == other.pushes
        mine, theirs = self.weights(), other.weights()
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        for name, parts in self.moments().items():
            for word, part in parts.items():
                assert np.array_equal(part, other.moments()[name][word]), (name, word)


def settings_in(folder, base, **changes):
    """Return settings whose every path lies in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    return evolve(
        base,
        output_dir=folder / "out",
        log_jsonl=folder / "log.jsonl",
        state_dir=folder / "state",
        **changes,
    )

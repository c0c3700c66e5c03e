"""Runs that are recorded and then executed again: everything that can happen to a round, on real sockets."""

import attrs
import trio
from attrs import define
from fake_learner import FakeLearner, small_layout
from syncer_runs import bodies, make_config, on_tape, running, until

from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.state.manifest import manifest_file, manifest_steps
from yeto.wire.layout import MergeMode


@define(eq=False)
class Lively(FakeLearner):
    """A learner whose pushes are one round old from each fragment's third round on, and worth nothing in one.

    Its deltas are noise, which the correction turns.
    """

    no_tokens_at: int = 2

    def push_message(self, pull, anchor):
        base = max(anchor - 3, 0) if anchor > 3 else anchor
        c_tokens, self.c_tokens = self.c_tokens, 0 if pull.step == self.no_tokens_at else self.c_tokens
        try:
            return FakeLearner.push_message(self, pull, base)
        finally:
            self.c_tokens = c_tokens


def lively(count=2, *, dtype="f32", mode=MergeMode.RDA, numel=40, **settings):
    """Learners of different weight; each draws its own deltas."""
    layout = small_layout(numel=numel, mode=mode)
    return [
        Lively(learner=learner, layout=layout, dtype=dtype, c_tokens=100 + 37 * learner, **settings)
        for learner in range(count)
    ]


def recorded_config(folder, *, resume=False, record=True, **core):
    # Noise is sideways to the momentum: nearly every push is corrected, also where few happen to be stale.
    settings = {"total_steps": 12, "checkpoint_every": 1, "delta_correction": "heloco-all"} | core
    config = make_config(folder, resume=resume, **settings)
    return attrs.evolve(config, keep_every=1, record_payloads=folder / "payloads" if record else None)


def fall_back(config, step):
    """Take away the checkpoints above a step."""
    for other in manifest_steps(config.checkpoint_path):
        if other > step:
            (config.checkpoint_path / manifest_file(other)).unlink()
    (config.checkpoint_path / "manifest.json").unlink(missing_ok=True)


async def eventful_run(folder, *, dtype="f32", mode=MergeMode.RDA, numel=40, **core):
    """Record a run with stale and corrected pushes, a no-op, a retry, two resumes and a closing sweep.

    The first process is killed while round 8 is merged and waits for round 7; the second resumes from a
    checkpoint of step 4 at most, two rounds before where the first was, and is killed as well.
    """
    config = recorded_config(folder, **core)
    learners = lively(dtype=dtype, mode=mode, numel=numel, reconnects=True)
    hung_up = []

    async def before_push(learner, pull):
        if learner.learner == 1 and pull.step == 3 and not hung_up:
            hung_up.append(pull)
            await until(lambda: learners[0].pushes[-1].step >= 3)
            await learner.hang_up()
            return False
        if learner.learner == 1 and pull.step == 7:
            await trio.sleep_forever()
        return True

    learners[1].before_push = before_push
    async with running(config, *learners) as run:
        await until(lambda: any(fact.step == 8 for fact in bodies(config.event_tape, ev.MergeFinished)))
        await until(lambda: any(fact.step == 6 for fact in bodies(config.event_tape, ev.CheckpointWritten)))
        run.stop()
        await run.ended.wait()
    assert hung_up
    fall_back(config, 4)
    resumed = recorded_config(folder, resume=True, **core)
    async with running(resumed, *lively(dtype=dtype, mode=mode, numel=numel, reconnects=True)) as run:
        await until(on_tape(config, de.RoundCommitted, 6 + 3))
        run.stop()
        await run.ended.wait()
    async with running(resumed, *lively(dtype=dtype, mode=mode, numel=numel)) as run:
        assert await run.end() == 0
    return config


def flip(path, place=-1):
    """Change one bit of a file; in the middle unless a place is named."""
    data = bytearray(path.read_bytes())
    place = len(data) // 2 if place == -1 else place
    data[place] ^= 1
    path.write_bytes(data)

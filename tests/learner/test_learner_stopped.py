"""A learner's process that is stopped for a while, as by a full host: SIGSTOP, then SIGCONT."""

import contextlib
import json
import math
import signal

import numpy as np
import trio
from fake_learner import FakeLearner
from learner_fakes import TinyTask
from syncer_runs import HANGS_SECONDS, bodies, hurrying, make_config, running, until

from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.layout import build_layout
from yeto.learner.fragments import named_shapes

TOGETHER, ALONE, AGAIN = range(1, 4), range(4, 9), range(12, 15)
"""Rounds that the child has a part in, that go on without it, and that it has a part in again."""


@contextlib.asynccontextmanager
async def child(template, address, folder):
    """Run a learner process, which is gone at the end, also when it is stopped."""
    arguments = (f"{address.host}:{address.port}", folder)
    with template.process("network_learner:run", *arguments, output=folder / "said.txt") as process:
        yield process


async def test_a_stopped_learner_delays_nobody_and_comes_back_by_itself(template, tmp_path, skipping_clock):
    # The two that are never stopped are enough, and the child alone is not.
    core = {"num_learners": 3, "quorum": 2, "wait_for": 3, "total_steps": AGAIN[-1], "pipeline": 1}
    config = make_config(tmp_path, quorum_timeout_seconds=1e9, **core)
    task = TinyTask()
    layout = build_layout(named_shapes(task.trainable_parameters()), fragments=2)
    settings = {"layout": layout, "binding": task.binding()}
    steady = [FakeLearner(learner=learner, **settings) for learner in (0, 2)]
    gone, back = trio.Event(), trio.Event()
    signals = [signal.SIGSTOP, signal.SIGCONT]

    def of_child(kind):
        return [body for body in bodies(config.event_tape, kind) if body.learner == 1]

    def answered(step):
        return any(push.step == step for push in of_child(de.PushAccepted))

    async with running(config, *steady) as run, child(template, run.address, tmp_path) as process:

        async def send(number, awaited, happened):
            if number in signals:
                signals.remove(number)
                before = len(of_child(awaited))
                process.send_signal(number)
                # By then the others have been heard often.
                async with hurrying(skipping_clock, 5.0 if number == signal.SIGSTOP else 0.0):
                    await until(lambda: len(of_child(awaited)) > before, math.inf)
                happened.set()
            await happened.wait()

        async def pace(learner, pull):
            if pull.step in TOGETHER or pull.step in AGAIN:
                await until(lambda: answered(pull.step))
            elif pull.step in ALONE:
                await send(signal.SIGSTOP, ev.LearnerLeft, gone)
            else:
                await send(signal.SIGCONT, ev.LearnerJoined, back)
            return True

        async def beat(learner):
            while True:
                learner.beat()
                await trio.sleep(0.25)

        for learner in steady:
            learner.before_push, learner.on_connected = pace, beat
        assert await run.end(math.inf) == 0
        with trio.fail_after(HANGS_SECONDS):
            assert await trio.to_thread.run_sync(process.wait) == 0, process.said
    assert "no byte on the control stream for 60 s" in [left.reason for left in of_child(ev.LearnerLeft)]
    assert not signals
    parts = {
        commit.step: [responder.learner for responder in commit.responders]
        for commit in bodies(config.event_tape, de.RoundCommitted)
    }
    assert [*parts] == [*range(1, AGAIN[-1] + 1)]
    assert all(1 in parts[step] for step in (*TOGETHER, *AGAIN))
    assert all(parts[step] == [0, 2] for step in ALONE[1:])
    weights = json.loads((tmp_path / "out" / "weights.json").read_text())
    for position, fragment in enumerate(layout.fragments):
        (name,) = (tensor.name for tensor in fragment.tensors)
        mine = np.array(weights[name], np.float32).reshape(-1)
        assert mine.tobytes() == steady[0].final[position].tobytes()

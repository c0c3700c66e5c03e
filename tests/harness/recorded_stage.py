"""Where runs are recorded: a real syncer process that can be killed, and learners that follow a script.

The syncer is a process of its own, so kill -9 is what it says. Learners are fakes on real sockets; what one
of them is to do otherwise than a healthy one stands in its script, by round and attempt, and is done once.
"""

import json
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import numpy as np
import psutil
import trio
from fake_learner import FakeLearner

from yeto.link import LinkClosed
from yeto.tape import read
from yeto.wire.frames import MessageType, encode_header
from yeto.wire.messages import ChunkHeader

CHILD = Path(__file__).with_name("syncer_child.py")


class Stage:
    """A folder, the syncer's process in it, and learners that dial whatever syncer is there."""

    def __init__(self, folder, nursery, **flags):
        self.folder = folder
        self.nursery = nursery
        self.tape = folder / "events.jsonl"
        self.checkpoint = folder / "state.ckpt"
        self._ready = folder / "ready.json"
        self._flags = {
            "port": 0,
            # Inside the folder, so that no message on the tape has where it was recorded.
            "ready_file": self._ready.name,
            "checkpoint_path": self.checkpoint.name,
            "event_tape": self.tape.name,
            **flags,
        }
        self._process = None
        self.log = folder / "syncer.log"
        self._log = self.log.open("ab")

    async def start(self, **flags):
        """Start the syncer, with some flags otherwise than the stage's."""
        words = [sys.executable, str(CHILD), json.dumps(self._flags | flags)]
        self._process = await trio.lowlevel.open_process(
            words, stdout=self._log, stderr=self._log, cwd=self.folder
        )
        await self.until(lambda: self._ready.exists() or self._process.poll() is not None)
        if not self._ready.exists():
            raise RuntimeError(f"the syncer did not start:\n{self.log.read_text()}")

    async def kill(self):
        """kill -9."""
        self._process.kill()
        await self.end()

    def stop(self):
        """Ask the syncer to stop."""
        self._process.send_signal(signal.SIGTERM)

    async def end(self, seconds=200):
        """Wait for the syncer's end; return its exit code."""
        with trio.fail_after(seconds):
            code = await self._process.wait()
        self._ready.unlink(missing_ok=True)
        return code

    def kill_children(self):
        """kill -9 the processes that the syncer has started."""
        for child in psutil.Process(self._process.pid).children():
            child.kill()

    def close(self):
        """Leave no process behind."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self._log.close()

    def join(self, *learners):
        """Have learners dial, again and again, until they are released or refused for good."""
        for learner in learners:
            self.nursery.start_soon(self._keep_dialling, learner)

    async def _keep_dialling(self, learner):
        while not (learner.released or learner.error or learner.retired):
            if self._ready.exists():
                address = json.loads(self._ready.read_text())
                await learner.run(address["host"], address["port"])
            await trio.sleep(0.05)

    async def until(self, condition, seconds=200):
        """Wait until something is so."""
        with trio.fail_after(seconds):
            while not condition():
                await trio.sleep(0.02)

    async def seen(self, kind, count=1, seconds=200, **fields):
        """Wait until the tape has so many records of a kind with these fields."""

        def there():
            if not self.tape.exists():
                return False
            found = (record.body for record in read(self.tape) if record.kind == kind)
            fits = (all(getattr(body, name) == value for name, value in fields.items()) for body in found)
            return sum(fits) >= count

        await self.until(there, seconds)


@asynccontextmanager
async def staged(folder, **flags):
    """A stage whose learners and process are gone at the end."""
    async with trio.open_nursery() as nursery:
        stage = Stage(folder, nursery, **flags)
        try:
            yield stage
        finally:
            stage.close()
            nursery.cancel_scope.cancel()


@attrs.define(eq=False)
class Actor(FakeLearner):
    """A learner with a script: ``(step, attempt)`` to what it does there instead of answering."""

    script: dict = attrs.field(factory=dict)
    pause: float = 0.03
    """How long an answer takes it."""
    retired: bool = False
    """Whether it does not dial again."""

    def __attrs_post_init__(self):
        super().__attrs_post_init__()
        self.before_push = self._act

    async def _act(self, learner, pull):
        await trio.sleep(self.pause)
        act = self.script.pop((pull.step, pull.attempt), None)
        return True if act is None else await act(self, pull)

    def send(self, pull, *, anchor=None, delta=None, number=0, **changes):
        """Send an answer of one's own making: another base, other values, another header."""
        self.local_step += changes.get("c_steps", self.c_steps)
        base = self.anchor(pull.fragment)
        make, self.make_delta = self.make_delta, delta or self.make_delta
        head, tensor = self.push_message(pull, base if anchor is None else anchor)
        self.make_delta = make
        self.pushes.append(attrs.evolve(head, **changes))
        self.group.outbox.put(self.pushes[-1], tensor, order=(pull.step, pull.attempt, base, number))


# What a learner may do instead of answering. True: answer after all.


def late(seconds):
    """Answer, but only after so long."""

    async def act(learner, pull):
        await trio.sleep(seconds)
        return True

    return act


async def silent(learner, pull):
    """Never answer this pull."""
    return False


async def hang_up(learner, pull):
    """Die, as a killed process does; whoever dials again is another member."""
    await learner.hang_up()
    return False


async def half_a_push(learner, pull):
    """Die in the middle of an upload."""

    def dying(stream):
        async def send(kind, *parts):
            data = encode_header(kind, sum(map(len, parts))) + b"".join(parts)
            await stream.stream.send_all(data[:-20])
            await trio.sleep(0.1)  # let the header be seen and admitted before the end is
            await learner.hang_up()
            raise LinkClosed("died in the middle of a push")

        return send

    for stream in learner.streams[1:]:
        stream.send = dying(stream)
    return True


async def not_finite(learner, pull):
    """Send NaN."""
    learner.send(pull, delta=lambda pull, numel: np.full(numel, np.nan, np.float32))
    return False


async def second_thoughts(learner, pull):
    """Send NaN, then something sane, which nobody waits for any more."""
    await not_finite(learner, pull)
    await trio.sleep(0.5)
    learner.send(pull, number=1)
    return False


async def outlier(learner, pull):
    """Send a delta a thousand times as large as the others'."""
    learner.send(pull, delta=lambda pull, numel: np.full(numel, 10.0, np.float32))
    return False


async def no_work(learner, pull):
    """Answer without having taken a step."""
    learner.send(pull, c_steps=0, c_tokens=0)
    return False


async def no_tokens(learner, pull):
    """Answer with steps in which there was nothing to learn from."""
    learner.send(pull, c_tokens=0)
    return False


async def stale(learner, pull):
    """Answer from the very first version, as if every broadcast since had been lost."""
    learner.send(pull, anchor=0, number=-1)
    return False


async def future(learner, pull):
    """Answer from a version that this syncer has never broadcast."""
    learner.send(pull, anchor=learner.anchor(pull.fragment) + 300, number=-1)
    return False


async def twice(learner, pull):
    """Answer two times."""
    learner.send(pull)
    await trio.sleep(0.05)
    learner.send(pull, number=1)
    return False


async def dawdle(learner, pull):
    """Answer with an upload whose second slice takes a second."""

    def slow(send):
        async def send_slowly(kind, *parts):
            if kind is MessageType.CHUNK and ChunkHeader.decode(bytes(parts[0])).offset > 0:
                await trio.sleep(1.0)
            await send(kind, *parts)

        return send_slowly

    for stream in learner.streams[1:]:
        stream.send = slow(stream.send)
    return True

"""The runs that are recorded for ever, with a real syncer and everything that goes wrong with one.

Each function plays one story into a folder and returns the tape. They differ in their times from recording
to recording, as real runs do; what happens in them is the same.
"""

import numpy as np
from recorded_stage import (
    Actor,
    dawdle,
    future,
    half_a_push,
    hang_up,
    late,
    no_tokens,
    no_work,
    not_finite,
    outlier,
    second_thoughts,
    silent,
    staged,
    stale,
    twice,
)

from yeto.wire.frames import SLICE_BYTES
from yeto.wire.layout import FragmentLayout, Layout, MergeMode, TensorSpec


def layout(numel=40):
    """Return three fragments of one tensor each, the first of ``numel`` elements."""
    shapes = ((numel // 4, 4), (10, 4), (6, 3))
    return Layout(
        fragments=tuple(
            FragmentLayout(
                mode=MergeMode.AVG if p == 0 else MergeMode.RDA,
                tensors=(TensorSpec(name=f"layers.{p}.weight", shape=shape),),
            )
            for p, shape in enumerate(shapes)
        )
    )


def actor(learner, shape, **settings):
    """Return a learner that starts from zeros, so that a large model costs no time to draw."""
    initial = [np.zeros(part.numel, np.float32) for part in shape.fragments] if learner == 0 else None
    return Actor(learner=learner, layout=shape, initial=initial, **settings)


async def record_faulty(folder):
    """Record a run of 24 rounds over four starts of the syncer; see the comments."""
    shape = layout(numel=SLICE_BYTES // 2)  # pushes of its first fragment have two slices
    flags = {
        "learners": 4,
        "quorum": 2,
        "total_steps": 24,
        "start_timeout_s": 12.0,
        "grace_ms": 300.0,
        "grace_tau": 60.0,
        "sync_interval_steps": 1.0,
        "max_base_lag": 4,
        "max_norm_ratio": 20.0,
        "checkpoint_every": 3,
        "mark_final_checkpoint": True,
    }
    learners = [actor(learner, shape) for learner in range(4)]
    async with staged(folder, **flags) as stage:
        await stage.start(quorum_timeout_s=30.0)

        # Learner 0's first values are no numbers. Another learner 0 dies in the middle of its own; the next
        # connection decides anew.
        absurd = actor(0, shape)
        absurd.initial[2][0] = np.inf
        stage.join(absurd)
        await stage.until(lambda: absurd.error)
        broken = actor(0, shape)
        broken.initial = broken.initial[:1]

        async def leave(learner):
            await stage.seen("fragment_initialised", generation=f"{learner.generation:016x}")
            await learner.hang_up()

        broken.on_connected = leave
        stage.join(_once(broken))
        await stage.seen("session_released", count=2)

        # Three of four are there: the start timeout lets the quorum begin. Strangers are turned away.
        stage.join(*learners[:3])
        await stage.seen("checkpoint_written")
        used = learners[1].generation
        echo = actor(1, shape, draw_generation=lambda: used)
        stage.join(_once(actor(3, shape, dtype="bf16")), _once(actor(7, shape)), _once(echo))
        for learner in learners[:3]:
            # Nobody says how fast it steps, so the next round opens without knowing.
            learner.script |= {(1, 1): late(10.5), (2, 1): late(10.5)}
        learners[2].script |= {(4, 1): late(0.6), (6, 1): half_a_push}
        learners[1].script |= {(5, 1): second_thoughts}
        for learner in (0, 2, 3):
            learners[learner].script |= {(5, 1): late(1.0)}
        learners[0].script |= {(7, 1): outlier}
        for learner in learners:
            learner.script |= {(8, 1): no_tokens}
        await stage.seen("first_estimate_deadline_passed")
        await stage.seen("merge", step=2)
        stage.join(learners[3])
        await stage.seen("merge", step=8)
        await stage.kill()

        # The checkpoint is of step 6: rounds 7 and 8 come once more. Then a bad day.
        everyone = range(4)
        for learner in everyone:
            learners[learner].script |= {(9, 1): silent}
        for learner in (0, 1, 2):
            learners[learner].script |= {(10, 1): no_work, (11, 1): hang_up, (13, 1): late(0.8)}
        learners[0].script |= {(15, 1): stale}
        for learner in (2, 3):
            learners[learner].script |= {(15, 1): late(0.4)}
        learners[3].script |= {(13, 1): dawdle}
        learners[1].script |= {(14, 1): future, (15, 1): silent}
        learners[0].script |= {(16, 1): twice}
        for learner in (1, 2, 3):
            learners[learner].script |= {(16, 1): late(0.2)}
        await stage.start(resume=True, quorum_timeout_s=3.0)
        await stage.seen("attempt_opened", step=15)
        # Its old connection still looks alive when learner 1 dials again.
        learners[1] = actor(1, shape)
        stage.join(learners[1])
        await stage.seen("merge", step=16)
        fragments = stage.checkpoint / "fragments"
        fragments.rename(folder / "aside")
        fragments.write_text("in the way\n")
        assert await stage.end() == 1
        fragments.unlink()
        (folder / "aside").rename(fragments)

        # Learner 3 diverges and is sent away; the closing sweep misses learner 2 and waits for it no more.
        for step in range(16, 22):
            learners[3].script |= {(step, 1): not_finite}
        learners[2].script |= {(22, 1): silent, (23, 1): late(0.5)}
        learners[2].acknowledges = False
        await stage.start(resume=True, quorum_timeout_s=3.0, final_ack_timeout_s=2.0)
        await stage.until(lambda: learners[3].error)
        learners[3] = actor(3, shape)
        stage.join(learners[3])
        assert await stage.end() == 3

        # Everything is committed; learner 2 comes back late and takes the final cut.
        learners[2].retired = True
        await stage.start(resume=True)
        await stage.seen("final_cut_ordered", count=2)
        learners[2] = actor(2, shape)
        stage.join(learners[2])
        assert await stage.end() == 0
        assert all(learner.released for learner in learners)
    return stage.tape


def _once(learner):
    """Have a learner dial one time only."""
    learner.retired = False
    connected = learner.on_connected

    async def retire(learner):
        learner.retired = True
        if connected is not None:
            await connected(learner)

    learner.on_connected = retire
    return learner


async def record_budget(folder):
    """Record a budget cut-off, at first without one of the learners, and its finish."""
    shape = layout()
    budget = 20
    flags = {"learners": 2, "total_steps": 500, "learner_budget_steps": budget, "sync_interval_steps": 0.0}
    async with staged(folder, **flags) as stage:

        def frugal(learner, local_step=0, report=budget):
            made = actor(learner, shape, local_step=local_step, script=_Budget(budget, report))
            stage.join(made)
            return made

        await stage.start(start_timeout_s=10.0)
        first, wrong = frugal(0), frugal(1, report=budget - 1)
        await stage.until(lambda: wrong.error)
        assert await stage.end() == 3
        first.retired = True
        await stage.start(resume=True, start_timeout_s=60.0)
        both = frugal(0), frugal(1)
        assert await stage.end() == 0
        for learner in both:
            learner.retired = True
        await stage.start(resume=True, budget_finish=True, mark_final_checkpoint=True)
        finishing = [actor(learner, shape, c_steps=budget, local_step=budget) for learner in range(2)]
        stage.join(*finishing)
        assert await stage.end() == 0
    return stage.tape


class _Budget(dict):
    """A script for a learner that trains until its budget is used up, and then reports."""

    def __init__(self, budget, report):
        super().__init__()
        self._budget = budget
        self._report = report
        self._reported = False

    def pop(self, key, default):
        async def act(learner, pull):
            if learner.local_step + learner.c_steps <= self._budget:
                return True
            if not self._reported:
                self._reported = True
                learner.local_step = self._budget
                learner.report_budget(self._report)
            return False

        return act


async def record_stop(folder):
    """Record a stop while a round gathers, one while another merges, and the run's end."""
    shape = layout()
    flags = {"learners": 3, "quorum": 2, "total_steps": 9, "grace_ms": 400.0, "sync_interval_steps": 0.0}
    async with staged(folder, **flags) as stage:
        learners = [actor(learner, shape) for learner in range(3)]
        for learner in learners[1:]:
            learner.script |= {(4, 1): silent}
        stage.join(*learners)
        await stage.start()
        await stage.seen("push_accepted", step=4)
        stage.stop()
        # Who dials now is asked to come later.
        await stage.seen("session_finalising")
        stage.join(_once(actor(2, shape)))
        assert await stage.end() == 4
        learners[1].script |= {(6, 1): late(0.3)}
        learners[2].script |= {(6, 1): silent}
        await stage.start(resume=True)
        await stage.seen("push_accepted", step=6)
        stage.stop()
        assert await stage.end() == 4
        await stage.start(resume=True)
        assert await stage.end() == 0
    return stage.tape


async def record_unusable(folder):
    """Record outer steps that leave f32 until the syncer gives up, and the run's end with a sane one."""
    shape = layout()
    async with staged(folder, learners=2, total_steps=4, sync_interval_steps=0.0) as stage:
        learners = [actor(learner, shape) for learner in range(2)]
        stage.join(*learners)
        await stage.start(outer_lr=1e45)
        assert await stage.end() == 1
        await stage.start(resume=True)
        assert await stage.end() == 0
    return stage.tape


async def record_pool(folder):
    """Record iso merges through the SVD pool: a limit that is too low, a worker that dies, and the end."""
    shape = Layout(
        fragments=(
            *layout().fragments[:1],
            FragmentLayout(mode=MergeMode.ISO, tensors=(TensorSpec(name="wide.weight", shape=(512, 600)),)),
            *layout().fragments[2:],
        )
    )
    flags = {"learners": 2, "total_steps": 9, "iso_worker_devices": "cpu:0", "sync_interval_steps": 0.0}
    async with staged(folder, **flags) as stage:
        stage.join(*(actor(learner, shape) for learner in range(2)))
        # The matrix has 1.2 MiB.
        await stage.start(iso_worker_frame_mib=1)
        assert await stage.end() == 1
        await stage.start(resume=True)
        await stage.seen("merge", step=2)
        stage.kill_children()
        assert await stage.end() == 1
        await stage.start(resume=True)
        assert await stage.end() == 0
    return stage.tape


STORIES = {
    "faulty": record_faulty,
    "budget": record_budget,
    "stop": record_stop,
    "unusable": record_unusable,
    "pool": record_pool,
}
"""Name of a recorded tape to the function that plays it."""

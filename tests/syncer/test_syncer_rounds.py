"""What is computed for a round, and what is given up."""

import threading

import trio
from syncer_runs import HANGS_SECONDS, fakes, make_config, running, until
from trio.testing import wait_all_tasks_blocked

from yeto.core.config import CoreConfig
from yeto.core.decisions import AttemptOpened, MergeOrdered
from yeto.merge import examine_push
from yeto.syncer.rounds import Rounds
from yeto.tape import read


async def test_a_merge_that_has_not_begun_is_given_up_with_its_attempt(fixtures):
    """Its pushes are gone by the time it would look for them; nothing of the session is asked for."""
    bodies = [record.body for record in read(fixtures / "tapes" / "two-learners-v1.jsonl")]
    merge = next(body for body in bodies if isinstance(body, MergeOrdered))
    opened = next(b for b in bodies if isinstance(b, AttemptOpened) and b.step == merge.step)
    config = CoreConfig(num_learners=2, total_steps=9, quorum=2, wait_for=2)
    rounds = Rounds(session=None, facts=None, config=config, heavy=trio.CapacityLimiter(1))
    async with trio.open_nursery() as nursery:
        await nursery.start(rounds.run)
        rounds.open(opened)
        rounds.merge(merge)
        rounds.discard(merge.step, merge.attempt)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


async def test_a_syncer_does_not_end_under_a_thread_that_computes(tmp_path, monkeypatch):
    """An interpreter that is taken down under native code may abort, and then the exit code is wrong."""
    began, may_end = threading.Event(), threading.Event()

    def slow(*parts, **settings):
        began.set()
        may_end.wait(HANGS_SECONDS)
        return examine_push(*parts, **settings)

    monkeypatch.setattr("yeto.syncer.jobs.examine_push", slow)
    monkeypatch.setattr("yeto.syncer.rounds.TINY_BYTES", 0)
    learners = fakes()
    async with running(make_config(tmp_path), *learners) as run:
        await until(began.is_set)
        run.stop()
        await until(lambda: all(learner.closed for learner in learners))
        assert not run.ended.is_set()
        may_end.set()
        with trio.fail_after(HANGS_SECONDS):
            await run.ended.wait()

"""The Miles six-island preset as it is run, only smaller: six learners that train, and both phases."""

import sys
from pathlib import Path

import pytest
import trio
from supervised import SECONDS_MAX, records, supervised

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

from comparing.processes import Command, family, obey, prepare  # noqa: E402

from yeto.core.decisions import RoundCommitted, SessionEnded  # noqa: E402
from yeto.core.events import BudgetReported, LearnerJoined, SessionResumed  # noqa: E402
from yeto.state import read_checkpoint, read_final_marker  # noqa: E402
from yeto.tape import Header, replay  # noqa: E402
from yeto.view.budget import read_budget  # noqa: E402

LEARNERS, BUDGET, FRAGMENTS = 6, 24, 3
SLOW = 8.0
"""Steps of a model this small would be over before anything of them is merged."""

pytestmark = [pytest.mark.begins_early, pytest.mark.timeout(2 * SECONDS_MAX)]


def learner_words(fixtures, place, port, learner):
    return (
        *("run", "--role=learner", f"--syncer=127.0.0.1:{port}", f"--learner-id={learner}"),
        *(f"--num-learners={LEARNERS}", f"--learner-budget-steps={BUDGET}", f"--fragments={FRAGMENTS}"),
        *(f"--model={fixtures / 'tiny-llama'}", f"--data={fixtures / 'chat' / 'train.jsonl'}"),
        *("--matrix-merge=iso", "--seq-len=32", "--micro-batch-size=1", "--stream-workers=0"),
        *("--torch-threads=1", f"--output-dir={place / f'learner-{learner}'}"),
    )


async def test_both_phases_with_six_learners_that_train(tmp_path, fixtures, request):
    prepare(str(fixtures / "tiny-llama"), 1)
    devices = ",".join(f"cpu:{number}" for number in range(request.config.getoption("--svd-workers")))
    flags = {"learner_budget_steps": BUDGET, "sync_interval_steps": 2, "iso_worker_devices": devices}
    async with supervised(tmp_path, **flags) as run, family() as children:
        # The server that learners are forked from has to load as much as the syncer.
        await children.start("first", tmp_path / "first.log", print)
        port = await run.port()
        learners = []
        # Nobody trains before learner 0 has brought the initial values, so all begin at about the same time.
        for number in reversed(range(LEARNERS)):
            if number == 0:
                await run.until(lambda: len(records(run.tape, LearnerJoined)) == LEARNERS - 1)
            learners.append(
                await children.start(
                    f"learner {number}",
                    tmp_path / f"learner-{number}.log",
                    obey,
                    Command(words=learner_words(fixtures, tmp_path, port, number), slow=SLOW),
                )
            )
        with trio.fail_after(SECONDS_MAX):
            assert await run.end() == 0, run.said()
            for learner in learners:
                await learner.succeed()
    (header,) = [body.config for body in records(run.tape, Header)]
    assert (header.num_learners, header.quorum, header.pipeline, header.svd_pool) == (6, 6, 16, True)
    reports = records(run.tape, BudgetReported)
    assert {body.learner for body in reports} == set(range(LEARNERS))
    assert {body.local_steps for body in reports} == {BUDGET}
    (resumed,) = records(run.tape, SessionResumed)
    assert resumed.config.budget_finish
    rounds = [body for body in records(run.tape, RoundCommitted) if body.step > resumed.step]
    assert [body.step for body in rounds] == [resumed.step + n + 1 for n in range(FRAGMENTS)]
    for body in rounds:
        assert {(r.learner, r.c_steps) for r in body.responders} == {(n, BUDGET) for n in range(LEARNERS)}
    assert [body.exit_code for body in records(run.tape, SessionEnded)] == [0, 0]
    story = read_budget(run.tape)
    assert story.finished
    assert story.cut_off.step == resumed.step >= FRAGMENTS
    assert list(story.missing(LEARNERS, BUDGET)) == []
    assert replay(run.tape).divergence is None
    assert read_checkpoint(run.checkpoint).step == read_final_marker(run.checkpoint) == story.target
    assert read_checkpoint(run.checkpoint).iso_backend == "torch-svd"
    said = run.said()
    assert f"cut off at step {resumed.step}; the checkpoint of step {resumed.step} is whole" in said
    assert said.splitlines()[-1].startswith(f"done: step {story.target}, verified and marked as final")

"""A recorded run is executed again: it comes to the tape's digests, and whatever was changed is named."""

import json
import math
import re
import shutil
import threading
from functools import partial

import attrs
import pytest
import torch
import trio
from fake_learner import FakeLearner
from recorded_audit import eventful_run, flip, lively, recorded_config
from syncer_runs import bodies, on_tape, running, until
from tape_lines import summed_all

from yeto.cli import replay_tensors
from yeto.cli.main import main
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.state.digested import decode_digested, encode_digested
from yeto.syncer.recorded import Difference
from yeto.syncer.reexecute import reexecuting
from yeto.syncer.reexecute_round import Kind
from yeto.syncer.svd_settings import SvdSettings
from yeto.tape import Replayer
from yeto.wire.layout import FragmentLayout, Layout, MergeMode, TensorSpec

RUNS = {"f32": MergeMode.RDA, "bf16": MergeMode.ISO, "q4": MergeMode.RDA}
OUTER = {"f32": "stock", "bf16": "stock", "q4": "normalised"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the folder of an eventful run in a dtype; each is made once."""
    made = {}

    def folder(dtype):
        if dtype not in made:
            made[dtype] = tmp_path_factory.mktemp(dtype)
            run = partial(eventful_run, made[dtype], dtype=dtype, mode=RUNS[dtype], outer=OUTER[dtype])
            trio.run(run)
        return made[dtype]

    return folder


@pytest.fixture
def copied(recorded, tmp_path):
    """Return a copy of a run to spoil."""

    def copy(dtype):
        folder = tmp_path / dtype
        shutil.copytree(recorded(dtype), folder)
        return folder

    return copy


@pytest.fixture
def audit(capsys, monkeypatch):
    """Run ``yeto replay --tensors`` on a folder; return exit code, what it printed, what it complained."""

    # How far it is: said once in some seconds, which a busy machine may need.
    monkeypatch.setattr(replay_tensors, "PROGRESS_SECONDS", math.inf)

    def run(folder, *flags, payloads=None, tape=None):
        words = [str(tape or folder / "events.jsonl"), "--tensors", str(payloads or folder / "payloads")]
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(["replay", *words, *flags])
        said = capsys.readouterr()
        return end.value.code, said.out, said.err

    return run


@pytest.mark.parametrize("dtype", RUNS)
def test_every_merge_of_an_eventful_run_is_bit_equal_for_any_number_of_threads(recorded, audit, dtype):
    folder = recorded(dtype)
    tape = folder / "events.jsonl"
    commits = bodies(tape, de.RoundCommitted)
    parts = [part for commit in commits for part in commit.responders]
    assert any(part.staleness for part in parts)
    assert any(part.corrected for part in parts)
    assert any(commit.attempt > 1 for commit in commits)
    assert any(commit.no_op for commit in commits)
    assert sum(order.sweep for order in bodies(tape, de.CommitOrdered)) >= 3
    assert bodies(tape, ev.SessionResumed)[0].step <= 4
    assert len(bodies(tape, de.AttemptSealed)) > len(commits)
    scales = [order.momentum_scale for order in bodies(tape, de.MergeOrdered) if not order.plain_average]
    assert any(scale not in (None, 1.0) for scale in scales) == (OUTER[dtype] == "normalised")
    # A start that resumes goes on counting from what its checkpoint holds.
    resumed = bodies(tape, ev.SessionResumed)[0]
    moved = [
        commit.fragment
        for commit in commits[: resumed.step]
        if not commit.no_op  # the sweep comes later
    ]
    assert [mark.merges for mark in resumed.outer_marks] == [
        moved.count(p) for p in range(len(resumed.outer_marks))
    ]

    results = []
    for threads in ("1", "2"):
        code, printed, complaints = audit(folder, "--json", "--threads", threads)
        assert (code, complaints) == (0, "")
        results.append(json.loads(printed)["tensors"])
    assert [result.pop("threads") for result in results] == [1, 2]
    assert results[0] == results[1]
    result = results[0]
    no_op = sum(commit.no_op for commit in commits)
    assert (result["no_op"], result["iso_close"], result["not_recorded"]) == (no_op, 0, 0)
    assert result["average_and_rda_bit_equal"] + result["iso_bit_equal"] == len(commits) - no_op
    assert (result["iso_bit_equal"] > 0) == (RUNS[dtype] is MergeMode.ISO)
    assert result["superseded"] >= 2
    assert result["difference"] is None

    code, printed, _ = audit(folder)
    equal = result["average_and_rda_bit_equal"]
    assert code == 0
    assert f"{equal} of {equal} average and RDA merges are bit-equal (1 thread)" in printed


@pytest.mark.parametrize("mode", [MergeMode.RDA, MergeMode.ISO])
async def test_fragments_of_many_blocks_are_bit_equal_for_any_number_of_threads(tmp_path, audit, mode):
    """Large enough that torch takes several threads where nobody stops it, and a matrix that is one."""
    matrix = TensorSpec(name="weight", shape=(320, 480))
    vector = TensorSpec(name="bias", shape=(97,))
    tensors = (matrix,) if mode is MergeMode.ISO else (matrix, vector)
    layout = Layout(fragments=(FragmentLayout(mode=mode, tensors=tensors),))
    config = recorded_config(tmp_path, total_steps=4, delta_correction="heloco-all")
    learners = [FakeLearner(learner=k, layout=layout, dtype="bf16", c_tokens=100 + 37 * k) for k in range(2)]
    async with running(config, *learners) as run:
        assert await run.end() == 0
    assert any(
        part.corrected for body in bodies(config.event_tape, de.RoundCommitted) for part in body.responders
    )
    found = []
    for threads in ("1", "2", "3"):
        code, printed, _ = audit(tmp_path, "--json", "--threads", threads)
        result = json.loads(printed)["tensors"]
        assert (code, result.pop("threads")) == (0, int(threads))
        found.append(result)
    assert found[0] == found[1] == found[2]
    iso = 3 if mode is MergeMode.ISO else 0
    assert (found[0]["average_and_rda_bit_equal"], found[0]["iso_bit_equal"]) == (4 - iso, iso)


def file_of(folder, kind):
    """Return a file of one kind of a recorded run, and what a complaint about it has to name."""
    payloads, tape = folder / "payloads", folder / "events.jsonl"
    resumed = re.search(rb'"seq":(\d+),"at":[^,]+,"kind":"session_resumed"', tape.read_bytes())[1].decode()
    if kind == "push":
        return next(payloads.glob("start-0/round-00000003/*-learner-1-*")), "round 3, fragment 2, learner 1"
    if kind == "superseded push":
        return next(payloads.glob("start-0/round-00000006/*-learner-0-*")), "round 6, fragment 2, learner 0"
    if kind == "push of a commit that moved nothing":
        return next(payloads.glob("start-0/round-00000002/*-learner-0-*")), "round 2, fragment 1, learner 0"
    if kind == "push that was never committed":
        return next(payloads.glob("start-0/round-00000008/*-learner-1-*")), "round 8, fragment 1, learner 1"
    if kind == "gradient that was never committed":
        return payloads / "start-0/round-00000008/attempt-1.gradient", "round 8, fragment 1"
    if kind == "gradient":
        return payloads / "start-0/round-00000006/attempt-1.gradient", "round 6, fragment 2"
    if kind == "initial fragment":
        return payloads / "start-0/checkpoint/fragments/f0001-v00000000.safetensors", "fragment 1"
    if kind == "resumed fragment":
        return next(payloads.glob(f"start-{resumed}/checkpoint/fragments/f0000-*")), "fragment 0"
    if kind == "manifest":
        return payloads / "start-0/checkpoint/manifest-0.json", "manifest"
    if kind == "resumed manifest":
        return next(payloads.glob(f"start-{resumed}/checkpoint/manifest-*")), "manifest"
    assert kind == "recording"
    return payloads / "recording.json", "recording"


PUSHES = [
    "push",
    "superseded push",
    "push of a commit that moved nothing",
    "push that was never committed",
]
GRADIENTS = ["gradient", "gradient that was never committed"]
STARTS = ["initial fragment", "resumed fragment", "manifest", "resumed manifest", "recording"]


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(dtype, "push") for dtype in RUNS] + [("bf16", kind) for kind in [*PUSHES[1:], *STARTS, *GRADIENTS]],
)
def test_one_flipped_bit_in_any_file_is_found_and_named(copied, audit, dtype, kind):
    folder = copied(dtype)
    path, named = file_of(folder, kind)
    flip(path)
    code, printed, complaints = audit(folder, "--threads", "2")
    assert code == 1
    said = printed + complaints
    assert str(path) in said
    assert named in said
    if kind not in ("manifest", "resumed manifest", "recording"):
        digests = re.search(r"recorded ([0-9a-f]{32}), found ([0-9a-f]{32})", said)
        assert digests is not None
        assert digests[1] != digests[2]
    if complaints == "":
        code, printed, _ = audit(folder, "--json")
        difference = json.loads(printed)["tensors"]["difference"]
        assert (code, difference["file"]) == (1, str(path))


@pytest.mark.parametrize("kind", ["push", "superseded push", "gradient", *STARTS])
def test_a_missing_file_is_named_with_the_remedy(copied, audit, kind):
    folder = copied("bf16")
    path, _ = file_of(folder, kind)
    path.unlink()
    code, printed, complaints = audit(folder)
    assert code == 1
    said = printed + complaints
    assert path.name in said
    assert "missing" in said
    assert "bring it back from a copy" in said or "--record-payloads" in said


def test_what_was_sealed_and_never_committed_may_be_missing(copied, audit):
    folder = copied("bf16")
    path, _ = file_of(folder, "push that was never committed")
    path.unlink()
    assert audit(folder)[0] == 0


@pytest.mark.parametrize("kind", ["push", "gradient", "initial fragment", "manifest"])
def test_a_file_that_was_cut_short_or_grew_is_named(copied, audit, kind):
    folder = copied("bf16")
    path, _ = file_of(folder, kind)
    whole = path.read_bytes()
    for data in (whole[:-1], b"", whole + b"\0"):
        path.write_bytes(data)
        code, printed, _ = audit(folder)
        assert code == 1
        assert str(path) in printed


def test_the_first_difference_is_the_first_on_the_tape_for_any_number_of_threads(copied, audit):
    folder = copied("q4")
    flipped = sorted(folder.glob("payloads/start-0/round-*/*-learner-0-*"))
    for path in flipped:
        flip(path)
    for threads in ("1", "2", "3"):
        code, printed, _ = audit(folder, "--threads", threads)
        assert code == 1
        assert printed.startswith(f"{flipped[0]}: round 1, fragment 0, learner 0: the push was changed")
        assert printed.count("\n") == 1


def rewrite(folder, change):
    """Change the text of a tape, events, decisions and checksums alike: every decision still follows."""
    tape = folder / "events.jsonl"
    tape.write_bytes(summed_all(change(tape.read_text()).encode()))
    return tape


@pytest.mark.parametrize("field", ["params_digest", "momentum_digest"])
def test_a_tape_that_is_consistent_in_itself_and_wrong_is_found(copied, audit, field):
    folder = copied("f32")
    true = getattr(bodies(folder / "events.jsonl", de.RoundCommitted)[4], field)
    forged = true[::-1]
    tape = rewrite(folder, lambda text: text.replace(true, forged))
    with pytest.raises(SystemExit) as end:
        main(["replay", str(tape)])
    assert end.value.code == 0
    code, printed, _ = audit(folder)
    assert code == 1
    what = "parameters" if field == "params_digest" else "momentum"
    assert f"round 5, fragment 1: digest of the {what}: recorded {forged}, found {true}" in printed


def test_a_forged_norm_is_found(copied, audit):
    folder = copied("f32")
    pushes = bodies(folder / "events.jsonl", ev.PushReceived)
    push = next(event for event in pushes if event.step == 1)
    true, forged = repr(push.norm), repr(math.nextafter(push.norm, 1.0))
    rewrite(folder, lambda text: text.replace(true, forged))
    code, printed, _ = audit(folder)
    assert code == 1
    where = f"round 1, fragment 0, learner {push.learner}"
    assert f"{where}: norm of the push: recorded {forged}, found {true}" in printed


def test_a_resume_from_values_that_were_never_committed_is_found(copied, audit):
    """The tape and the recording of the second start agree with each other, not with the first start."""
    folder = copied("f32")
    (first, *_) = bodies(folder / "events.jsonl", ev.SessionResumed)
    mark = first.fragments[2]

    def forge(text):
        kind = '"kind":"session_resumed"'
        head, tail = text.split(kind, 1)
        return head + kind + tail.replace(mark.params_digest, mark.params_digest[::-1])

    rewrite(folder, forge)
    code, printed, _ = audit(folder)
    assert code == 1
    assert f"resumes from step {first.step} with other parameters than were committed" in printed
    assert mark.params_digest in printed


def test_another_recording_and_another_tape_are_refused(recorded, audit, tmp_path):
    mine, other = recorded("f32"), recorded("q4")
    for flags in ({"payloads": other / "payloads"}, {"tape": other / "events.jsonl"}):
        code, _, complaints = audit(mine, **flags)
        assert code == 1
        assert "is the recording of session" in complaints
        assert complaints.count("\n") == 1
    code, _, complaints = audit(mine, payloads=tmp_path)
    assert code == 1
    assert "holds no recording" in complaints
    code, _, complaints = audit(mine, "--threads", "0")
    assert code == 2
    assert "--threads 0" in complaints


def test_a_tape_that_does_not_follow_the_rules_is_not_executed_beyond(copied, audit):
    folder = copied("f32")
    rewrite(folder, lambda text: text.replace('"kind":"attempt_sealed"', '"kind":"attempt_sealed"', 1))
    rewrite(folder, lambda text: re.sub(r'("kind":"merge",.*?"step":)5', r"\g<1>55", text, count=1))
    code, printed, _ = audit(folder)
    assert code == 1
    assert "diverges" in printed


def test_a_part_of_the_tape_can_be_executed(recorded, audit):
    folder = recorded("f32")
    text = (folder / "events.jsonl").read_text().splitlines()
    seq = next(number for number, line in enumerate(text) if '"kind":"merge","because"' in line)
    code, printed, _ = audit(folder, "--until", str(seq))
    assert code == 0
    assert "1 of 1 average and RDA merges are bit-equal" in printed


def test_long_runs_say_how_far_they_are(recorded, audit, monkeypatch):
    monkeypatch.setattr(replay_tensors, "PROGRESS_SECONDS", 0.0)
    code, _, progress = audit(recorded("f32"))
    assert code == 0
    assert re.search(r"yeto: \d+ rounds executed again, the tape is at \d+ of 12", progress)


async def test_starts_that_were_not_recorded_are_counted_and_said(tmp_path, audit):
    """The first start is not recorded, the second is, the third is not."""
    config = recorded_config(tmp_path, record=False)
    for record, step in ((False, 2), (True, 5), (False, 12)):
        config = recorded_config(tmp_path, record=record, resume=step > 2)

        async def up_to(learner, pull, step=step):
            if pull.step > step:
                await trio.sleep_forever()
            return True

        async with running(config, *lively(reconnects=True, before_push=up_to)) as run:
            await until(lambda run=run, step=step: _reached(run, step))
            run.stop()
            await run.ended.wait()
    code, printed, _ = audit(tmp_path, "--json")
    commits = bodies(config.event_tape, de.RoundCommitted)
    tensors = json.loads(printed)["tensors"]
    executed = tensors["average_and_rda_bit_equal"] + tensors["no_op"]
    assert code == 0
    assert executed >= 2
    assert tensors["not_recorded"] >= 2 + 6
    assert executed + tensors["not_recorded"] == len(commits)
    assert "commits NOT executed" in audit(tmp_path)[1]


def _reached(run, step):
    return run.exit_code == 0 or any(
        commit.step >= step for commit in bodies(run.config.event_tape, de.RoundCommitted)
    )


async def test_iso_merges_of_another_machine_are_compared_and_called_close(tmp_path, audit, monkeypatch):
    svd = torch.linalg.svd

    def rounded_otherwise(matrix, full_matrices):
        left, values, right = svd(matrix, full_matrices=full_matrices)
        return left * (1 + error), values, right

    config = recorded_config(tmp_path, total_steps=6)
    with monkeypatch.context() as patch:
        error = 4e-6
        patch.setattr(torch.linalg, "svd", rounded_otherwise)
        async with running(config, *lively(mode=MergeMode.ISO)) as run:
            assert await run.end() == 0

    # On the machine that computed them nothing but equal bits will do.
    code, printed, _ = audit(tmp_path)
    assert code == 1
    assert "round 3, fragment 2: the iso merge is off by 4.1e-06, digest of its gradient" in printed

    path = tmp_path / "payloads" / "recording.json"
    value = decode_digested(path.read_bytes(), str(path), "recording")
    value["starts"][0]["arithmetic"]["machine"] = "another machine"
    path.write_bytes(encode_digested(value))
    code, printed, _ = audit(tmp_path)
    assert code == 0
    assert "0 of 1 iso merges are bit-equal, 1 are close (within 2e-05): computed on another mach" in printed
    # What was computed from the close gradient is bit-equal all the same.
    assert "4 of 4 average and RDA merges are bit-equal" in printed

    flip(tmp_path / "payloads/start-0/round-00000003/attempt-1.gradient")
    code, printed, _ = audit(tmp_path)
    assert code == 1
    assert "round 3, fragment 2" in printed


async def test_iso_merges_that_a_pool_computed_are_equal_or_close_here(tmp_path, audit):
    config = recorded_config(tmp_path, total_steps=6)
    config = attrs.evolve(
        config,
        core=attrs.evolve(config.core, svd_pool=True),
        iso_backend="torch-svd",
        svd=SvdSettings(devices=("cpu:0",)),
    ).validated()
    async with running(config, *lively(mode=MergeMode.ISO)) as run:
        assert await run.end() == 0
    code, printed, _ = audit(tmp_path, "--json")
    tensors = json.loads(printed)["tensors"]
    assert code == 0
    assert tensors["iso_bit_equal"] + tensors["iso_close"] == 1
    assert tensors["average_and_rda_bit_equal"] == 4


async def test_close_has_a_limit(tmp_path, audit, monkeypatch):
    svd = torch.linalg.svd

    def far_off(matrix, full_matrices):
        left, values, right = svd(matrix, full_matrices=full_matrices)
        return left * 1.00003, values, right

    config = recorded_config(tmp_path, total_steps=6)
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "svd", far_off)
        async with running(config, *lively(mode=MergeMode.ISO)) as run:
            assert await run.end() == 0
    path = tmp_path / "payloads" / "recording.json"
    value = decode_digested(path.read_bytes(), str(path), "recording")
    value["starts"][0]["arithmetic"]["machine"] = "another machine"
    path.write_bytes(encode_digested(value))
    code, printed, _ = audit(tmp_path)
    assert code == 1
    assert "the iso merge is off by 3e-05" in printed


@pytest.mark.parametrize("threads", [1, 2])
def test_no_more_rounds_are_in_memory_than_threads(recorded, threads):
    folder = recorded("f32")
    tape = folder / "events.jsonl"
    replayer = Replayer(str(tape))
    before = torch.get_num_threads()
    with reexecuting(folder / "payloads", str(tape), threads=threads) as execution, tape.open("rb") as file:
        for line in file:
            record = replayer.feed(line)
            execution.feed(record, replayer.state)
            assert len(execution._jobs) <= threads
            assert len({work.committed.fragment for work, _ in execution._jobs}) == len(execution._jobs)
            assert len(execution._attempts) <= 8
        execution.finish()
    assert execution.difference is None
    assert execution.outcomes[Kind.EQUAL] > 10
    assert torch.get_num_threads() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reexecute")]


def test_differences_are_plain_values(copied, audit):
    folder = copied("q4")
    path, _ = file_of(folder, "push")
    flip(path)
    _, printed, _ = audit(folder, "--json")
    difference = json.loads(printed)["tensors"]["difference"]
    assert {name: difference[name] for name in ("step", "fragment", "learner")} == {
        "step": 3,
        "fragment": 2,
        "learner": 1,
    }
    assert set(difference) == {"sentence", *attrs.fields_dict(Difference)}


async def test_a_run_that_is_still_going_on_can_be_executed_as_far_as_it_is(tmp_path, audit):
    config = recorded_config(tmp_path, total_steps=60)
    async with running(config, *lively()) as run:
        await until(on_tape(config, de.RoundCommitted, 4))
        code, printed, _ = await trio.to_thread.run_sync(audit, tmp_path)
        run.stop()
    assert code == 0
    assert re.search(r"([3-9]|\d\d) of \1 average and RDA merges are bit-equal", printed)

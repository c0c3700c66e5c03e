"""``tools/compare_diloco.py``: what is compared with what, and a small comparison that is killed half way."""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import trio
from attrs import evolve

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tools"))

from comparing import campaign as campaign_module  # noqa: E402
from comparing.campaign import Campaign, plan  # noqa: E402
from comparing.command import main  # noqa: E402
from comparing.logs import read_logs  # noqa: E402
from comparing.measured import measure  # noqa: E402
from comparing.processes import Child, RunFailed, island  # noqa: E402
from comparing.recipe import Recipe, words  # noqa: E402
from comparing.report import report  # noqa: E402
from comparing.results import Folder, Result  # noqa: E402
from comparing.settings import ARMS, chosen  # noqa: E402
from comparing.summary import differs, summarise  # noqa: E402

from yeto.cli.run_learner import LearnerFlags  # noqa: E402
from yeto.errors import ConfigError  # noqa: E402
from yeto.learner.ranks import Ranks  # noqa: E402
from yeto.tuning.share import share_of  # noqa: E402

pytestmark = pytest.mark.begins_early

SECONDS_MAX = 600
"""Far more than a comparison of a few steps takes; a hang fails here."""


@pytest.fixture
def recipe(fixtures):
    """32 blocks of 64 tokens and a few more, for all devices together."""
    chat = fixtures / "chat"
    flags = LearnerFlags(
        syncer="none",
        model=str(fixtures / "tiny-llama"),
        data=str(chat / "train.jsonl"),
        eval_data=str(chat / "heldout.jsonl"),
        seq_len=64,
        micro_batch_size=2,
        grad_accum=2,
        stream_workers=0,
    )
    return Recipe(flags=flags, token_budget=32 * 64 + 1)


# -- what is compared ---------------------------------------------------------------------------------------


def test_the_named_arms():
    names = (
        "m2 m4 alpha0 q4 q4-nofeedback serial noheloco heloco-all strided iso direct-rda direct normalised"
    )
    assert list(ARMS) == [*names.split(), "auto", "stock-off", "unthrottled"]
    assert [arm.name for arm in chosen("all")] == list(ARMS)


def test_an_arm_with_more_changed_has_a_name_of_its_own():
    first, second = chosen("m2@H=2,M=4,direct@tau=3", ["slow=2"])
    assert (first.name, first.learners, first.slow, first.baseline) == (
        "m2@H=2,M=4,slow=2",
        4,
        2.0,
        "baseline-m4",
    )
    assert first.syncer_flags()["sync-interval-steps"] == "2"
    assert first.syncer_flags()["quorum"] == "4"
    assert second.syncer == {"outer": "direct", "grace-tau": "3"}
    assert second.learner_flags() == ARMS["m2"].learner_flags() | {"merge-alpha": "carry"}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("m3", "unknown"),
        ("m2,m2", "given twice"),
        ("", "is empty"),
        ("m2@H", "KEY=VALUE"),
        ("m2@M=0", "above 0"),
        ("m2@slow=0.5", "from 1 to 100"),
        # What is trained is both sides'.
        ("m2@inner-lr=1", "no setting of an arm"),
        ("m2@total-steps=1", "no setting of an arm"),
    ],
)
def test_a_wrong_arm_is_refused(names, said):
    with pytest.raises(ConfigError, match=said):
        chosen(names)


def test_a_run_for_each_arm_and_seed_beside_a_baseline_of_its_size():
    runs = plan(chosen("m2,m4,alpha0,m2@G=2"), [17, 29])
    assert [run.title for run in runs[:7]] == [
        *("base", "baseline-m2 seed 17", "baseline-m4 seed 17", "m2 seed 17", "m4 seed 17", "alpha0 seed 17"),
        "m2@G=2 seed 17",
    ]
    assert len(runs) == 1 + 2 * (2 + 4)
    assert [run.devices for run in runs[1:7]] == [2, 4, 2, 4, 2, 4]


# -- the commands -------------------------------------------------------------------------------------------


def test_steps_share_the_budget_and_are_rounded_up(recipe):
    assert [recipe.steps(devices) for devices in (1, 2, 4, 8)] == [9, 5, 3, 2]


def test_every_arm_is_made_of_flags_that_its_commands_take(recipe):
    recipe.check(chosen("all"))


@pytest.mark.parametrize(
    ("change", "said"), [("H=often", "often"), ("alpha=1.5", "alpha"), ("quorum=3", "quorum")]
)
def test_a_value_that_a_command_would_refuse_is_refused_before_any_is_started(recipe, change, said):
    with pytest.raises(ConfigError, match=said):
        recipe.check(chosen("m2", [change]))


def test_both_sides_are_told_the_same_but_for_the_exchange(recipe):
    arm = chosen("m2@G=2")[0]
    baseline, learner = recipe.baseline(29, 4), recipe.learner(arm, 29, 1, syncer="127.0.0.1:1")
    assert (baseline.max_local_steps, learner.learner_budget_steps) == (3, 3)
    assert (learner.learner_id, learner.num_learners) == (1, 2)
    own = {"max_local_steps", "learner_budget_steps", "learner_id", "num_learners", "syncer"}
    same = {name: getattr(baseline, name) for name in own}
    assert evolve(learner, **same) == baseline


def test_rank_r_of_learner_l_has_the_rows_of_one_rank_of_the_baseline(recipe):
    arm = chosen("m2@G=2")[0]
    baseline = recipe.baseline(29, 4)
    alone = {share_of(baseline.text_config(Ranks(rank=rank, size=4))) for rank in range(4)}
    learners = [recipe.learner(arm, 29, learner, syncer="127.0.0.1:1") for learner in range(2)]
    together = {
        share_of(flags.text_config(Ranks(rank=rank, size=2))) for flags in learners for rank in range(2)
    }
    assert len(alone) == 4
    assert alone == together


def test_a_command_is_what_a_user_would_type(recipe):
    arm = chosen("q4-nofeedback")[0]
    assert words(recipe.learner(arm, 3, 1, syncer="127.0.0.1:1"))[:3] == (
        *("run", "--role=learner", f"--model={recipe.flags.model}"),
    )
    assert "--no-q4-error-feedback" in words(recipe.learner(arm, 3, 1, syncer="127.0.0.1:1"))
    assert words(recipe.syncer(arm))[:3] == ("run", "--role=syncer", "--learners=2")


def test_the_ranks_of_an_island_are_told_their_places():
    environs = [command.environ for command in island(("run",), 2)]
    assert [(environ["RANK"], environ["LOCAL_RANK"], environ["WORLD_SIZE"]) for environ in environs] == [
        *(("0", "0", "2"), ("1", "1", "2"))
    ]
    assert environs[0]["MASTER_PORT"] == environs[1]["MASTER_PORT"]
    assert not island(("run",), 1)[0].environ


def test_an_arm_ends_with_a_budget_finish_or_where_there_is_no_sweep_with_a_merge_of_each_fragment(recipe):
    swept, plain = (recipe.finish(arm, 40) for arm in chosen("m2,stock-off"))
    assert (swept.resume, swept.budget_finish, swept.learner_budget_steps) == (True, True, 5)
    assert (plain.resume, plain.budget_finish, plain.learner_budget_steps) == (True, False, None)
    assert (plain.total_steps, plain.sync_interval_steps, plain.quorum) == (48, 0.0, 2)
    assert plain.closing_sweep == "off"


# -- figures ------------------------------------------------------------------------------------------------


def result(name, seed=17, **fields):
    """Return a run of two steps."""
    fields = {"loss": 2.0, "tokens": 512, "targets": (100, 110), "curve": ((256, 3.0), (512, 2.5))} | fields
    return Result(name=name, seed=seed, devices=2, steps=2, scored_targets=90, scored_rows=4, **fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, None),
        ({"tokens": 511}, "511 raw tokens, the baseline 512"),
        # As many in the end, but not on the same rows.
        ({"targets": (110, 100)}, "110 target tokens in step 1, the baseline 100"),
        ({"targets": (100, 110, 0)}, "3 steps, the baseline 2"),
    ],
)
def test_a_pair_has_trained_on_the_same_tokens_step_by_step(fields, said):
    assert differs(result("m2", **fields), result("baseline-m2")) == said


def test_what_was_scored_on_other_rows_is_no_pair():
    other = evolve(result("m2"), scored_targets=91)
    assert "scored on 91" in differs(other, result("baseline-m2"))


def test_each_arm_is_compared_with_the_baseline_of_its_seed_and_an_invalid_run_counts_for_nothing():
    results = [
        *(result("baseline-m2", seed, loss=loss) for seed, loss in ((17, 2.0), (29, 1.0), (43, 1.0))),
        *(result("m2", 17, loss=2.2), result("m2", 29, loss=1.0), result("m2", 43, loss=9.0, tokens=1)),
        result("alpha0", 31),
    ]
    arms = chosen("m2,alpha0,m4")
    summary = summarise(results, arms)
    m2, alpha0, m4 = summary["arms"]
    assert [round(pair["percent"], 6) for pair in m2["pairs"]] == [10.0, 0.0]
    assert (m2["percent"], m2["percent_deviation"]) == pytest.approx((5.0, 50**0.5))
    assert m2["invalid"] == ("seed 43: 1 raw tokens, the baseline 512",)
    assert alpha0["invalid"] == ("seed 31: its baseline is missing",)
    assert (alpha0["percent"], m4["percent"], m4["pairs"]) == (None, None, ())
    text = report(CONFIG, summary, ["iso seed 17: out of memory"])
    assert "| **m2** | stock outer step, H 24, two learners | 1.6000 | 4.95 | +5.00 % ± 7.07 | 2 |" in text
    assert "**Invalid**, m2, seed 43: 1 raw tokens, the baseline 512." in text
    assert "**Failed**, iso seed 17: out of memory" in text


CONFIG = {
    "recipe": {"token_budget": 512, "seq_len": 64, "model": "m", "data": "d", "eval_data": "e"},
    "seeds": [17],
    "arms": {},
    "machine": {"yeto": "1", "torch": "2", "cores": 2, "platform": "p"},
}


def test_the_logs_of_all_learners_are_one_training(tmp_path):
    for learner, losses in enumerate([(4.0, 2.0), (1.0, 3.0)]):
        records = [
            {"kind": "phase", "at": 100.0 + learner, "phase": "training"},
            *(
                {
                    "kind": "step",
                    "at": 101.0 + step + learner,
                    "local_step": step + 1,
                    "loss": loss,
                    "targets": 10 * (learner + 1),
                    "tokens": 64 * (step + 1),
                }
                for step, loss in enumerate(losses)
            ),
            {"kind": "push", "at": 102.0, "fragment": 0, "step": 3, "local_step": 1},
            {"kind": "broadcast", "at": 103.0, "fragment": 1, "version": 3, "local_step": 2},
            {"kind": "broadcast", "at": 103.0, "fragment": 0, "version": 3, "local_step": 2 + learner},
        ]
        path = tmp_path / f"{learner}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    trained = read_logs([tmp_path / "0.jsonl", tmp_path / "1.jsonl"])
    assert (trained.tokens, trained.targets, trained.seconds) == (256, (30, 30), 3.0)
    assert trained.curve == ((128, pytest.approx(2.0)), (256, pytest.approx(8 / 3)))
    assert trained.in_flight_steps == 1.5


def test_what_a_tape_says_is_counted_up_to_the_cut_off(fixtures):
    tape = fixtures / "tapes" / "budget-v2.jsonl"
    lines = [json.loads(line) for line in tape.read_text().splitlines()]
    finish = next(number for number, line in enumerate(lines) if line["kind"] == "session_resumed")
    merges = [line for line in lines[:finish] if line["kind"] == "merge"]
    found = measure(tape)
    assert found.pushes == sum(len(line["responders"]) for line in merges)
    assert found.finish_merges == sum(line["kind"] == "merge" for line in lines[finish:])
    assert found.merges_per_fragment == len(merges) / found.finish_merges
    assert found.pushed_bytes == sum(
        line["payload_bytes"] for line in lines if line["kind"] == "push_offered"
    )
    assert 0.0 < found.participation <= 1.0


# -- the folder ---------------------------------------------------------------------------------------------


def config_of(recipe, names):
    return {
        "recipe": recipe.to_json(),
        "arms": {arm.name: {"syncer": arm.syncer_flags()} for arm in chosen(names)},
    }


def test_a_line_that_was_cut_off_is_a_run_that_is_not_over(recipe, tmp_path):
    folder = Folder(tmp_path)
    assert folder.begin(config_of(recipe, "m2"), resume=False) == []
    folder.keep(result("baseline-m2"))
    kept = folder.results.read_bytes()
    folder.keep(result("m2"))
    folder.results.write_bytes(folder.results.read_bytes()[:-1])
    assert folder.begin(config_of(recipe, "m2,q4"), resume=True) == [result("baseline-m2")]
    assert folder.results.read_bytes() == kept


def test_what_would_not_be_comparable_is_refused(recipe, tmp_path):
    folder = Folder(tmp_path)
    with pytest.raises(ConfigError, match="there is no comparison"):
        folder.begin(config_of(recipe, "m2"), resume=True)
    folder.begin(config_of(recipe, "m2"), resume=False)
    with pytest.raises(ConfigError, match="holds a comparison"):
        folder.begin(config_of(recipe, "m2"), resume=False)
    with pytest.raises(ConfigError, match="token_budget was 2049 and is 4096 now"):
        folder.begin(config_of(evolve(recipe, token_budget=4096), "m2"), resume=True)
    changed = config_of(recipe, "m2")
    changed["arms"]["m2"] = {"syncer": {}}
    with pytest.raises(ConfigError, match="the arm m2 means something else"):
        folder.begin(changed, resume=True)


def test_an_arm_that_is_left_out_still_means_what_it_meant(recipe, tmp_path):
    folder = Folder(tmp_path)
    folder.begin(config_of(recipe, "m2,q4"), resume=False)
    folder.begin(config_of(recipe, "q4"), resume=True)
    changed = config_of(recipe, "m2")
    changed["arms"]["m2"] = {"syncer": {}}
    with pytest.raises(ConfigError, match="the arm m2 means something else"):
        folder.begin(changed, resume=True)


def test_one_comparison_at_a_time_works_in_a_folder(recipe, tmp_path):
    first = Folder(tmp_path)
    first.begin(config_of(recipe, "m2"), resume=False)
    with pytest.raises(ConfigError, match="another comparison is at work in it"):
        Folder(tmp_path).begin(config_of(recipe, "m2"), resume=True)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 1}', '{"format": 1, "recipe": {}, "arms": 3}', "\xff"]
)
def test_a_damaged_config_is_an_error_in_a_line(recipe, tmp_path, content):
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json is damaged, .*; name another --output-dir"):
        Folder(tmp_path).begin(config_of(recipe, "m2"), resume=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda line: b"\xff" + line,
        lambda line: line[:40],
        lambda line: b"",
        lambda line: b"[]",
        lambda line: line.replace(b'"loss"', b'"lost"'),
        lambda line: line.replace(b'"loss": ', b'"loss": -'),
        lambda line: line.replace(b'"loss": ', b'"loss": NaN, "x": '),
        lambda line: line.replace(b'"tokens": ', b'"tokens": -'),
        lambda line: line.replace(b'"targets": [', b'"targets": ["1", '),
    ],
)
def test_a_damaged_result_is_an_error_that_names_its_line_and_nothing_is_lost(recipe, tmp_path, change):
    folder = Folder(tmp_path)
    folder.begin(config_of(recipe, "m2"), resume=False)
    folder.keep(result("baseline-m2"))
    folder.keep(result("m2"))
    first, second = folder.results.read_bytes().splitlines()
    assert change(second) != second
    damaged = first + b"\n" + change(second) + b"\n"
    folder.results.write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"results\.jsonl: line 2 is damaged; delete it"):
        folder.begin(config_of(recipe, "m2"), resume=True)
    assert folder.results.read_bytes() == damaged


def test_a_result_that_does_not_fit_on_the_disk_leaves_nothing_of_itself(recipe, tmp_path):
    folder = Folder(tmp_path)
    folder.begin(config_of(recipe, "m2"), resume=False)
    folder.keep(result("baseline-m2"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (folder.results.stat().st_size + 10, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            folder.keep(result("m2"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    folder.keep(result("q4"))
    assert folder.begin(config_of(recipe, "m2"), resume=True) == [result("baseline-m2"), result("q4")]


def test_a_run_that_diverged_has_no_result(recipe, tmp_path):
    folder = Folder(tmp_path)
    folder.begin(config_of(recipe, "m2"), resume=False)
    with pytest.raises(RunFailed, match="not finite: it diverged"):
        folder.keep(result("m2", loss=float("nan")))
    assert list(folder.begin(config_of(recipe, "m2"), resume=True)) == []


def test_a_run_that_fails_is_told_of_and_the_others_are_done(recipe, tmp_path):
    """The folder of the first run cannot be emptied; what is finished stands on the disk."""
    folder, runs = Folder(tmp_path), plan(chosen("m2"), [1])[:2]
    folder.begin(config_of(recipe, "m2"), resume=False)
    (tmp_path / "runs").mkdir()
    for run in runs:
        folder.run(run.name, run.seed).write_text("no folder")
    campaign = Campaign(recipe=recipe, folder=folder, runs=runs, done={})
    trio.run(campaign.go)
    assert [failure.partition(":")[0] for failure in campaign.failures] == [run.title for run in runs]
    assert all("Not a directory" in failure for failure in campaign.failures)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--model", "no such folder"),
        ("--train-data", "no such file or folder"),
        ("--eval-data", "no such file or folder"),
    ],
)
def test_what_is_not_there_is_told_once_before_anything_is_begun(tmp_path, capfd, flag, said):
    missing = str(tmp_path / "missing")
    assert main(["--output-dir", str(tmp_path / "compare"), "--settings", "all", flag, missing]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{flag} {missing}: {said}" in err
    assert not (tmp_path / "compare").exists()


def test_a_model_that_cannot_be_scored_ends_it_all(recipe, tmp_path, monkeypatch, capsys):
    """What the first child says of the model, all others would say too."""

    async def refused(*_, **how):
        raise RunFailed("--model m: does not load")

    monkeypatch.setattr(campaign_module, "score", refused)
    folder, runs = Folder(tmp_path), plan(chosen("m2,m4"), [1, 2])
    folder.begin(config_of(recipe, "m2"), resume=False)
    campaign = Campaign(recipe=recipe, folder=folder, runs=runs, done={}, jobs=3)
    trio.run(campaign.go)
    assert campaign.failures == ["base: --model m: does not load"]
    assert "the others are not tried" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["base"]


def test_an_output_folder_that_is_a_file_is_refused_in_a_line(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    assert main(["--output-dir", str(tmp_path / "file"), "--settings", "m2"]) == 2
    assert main(["--output-dir", str(tmp_path / "file" / "below"), "--settings", "m2"]) == 1
    first, second = capfd.readouterr().err.splitlines()
    assert first.endswith("is no folder; name another")
    assert "Not a directory" in second
    assert second.endswith("what is finished is kept")


def child(folder, name, text, family, exitcode=1):
    process = SimpleNamespace(exitcode=exitcode)
    log = folder / f"{name}.log"
    if text is not None:
        log.write_text(text)
    one = Child(name, log, process, family)
    family.append(one)
    return one


@pytest.mark.parametrize(
    ("own", "other", "code", "said"),
    [
        ("a\nyeto: no rows\nb\n\n", "yeto: else\n", 2, "rank-1: no rows"),
        ("a\nTraceback: x\n", "", 1, "rank-1: Traceback: x"),
        ("", "step 3\nyeto: no model\n", 1, "rank-0: no model"),
        ("", "step 3\n", 1, "rank-1: exit code 1"),
        (None, None, 1, "rank-1: exit code 1"),
        ("step 3\n", "step 3\n", -9, "rank-1: killed by signal 9"),
    ],
)
def test_why_a_run_failed_is_said_by_whoever_knows(tmp_path, own, other, code, said):
    family = []
    child(tmp_path, "rank-0", other, family)
    one = child(tmp_path, "rank-1", own, family)
    assert str(one.failure(code)).startswith(said + "; its log is ")


# -- the whole ----------------------------------------------------------------------------------------------


def command(output_dir, *words):
    return [
        *(sys.executable, str(ROOT / "tools" / "compare_diloco.py"), "--output-dir", str(output_dir)),
        *("--settings", "m2@H=4,P=2", "--seeds", "17", "--token-budget", "1536", "--seq-len", "64"),
        *("--eval-rows", "8", "--lora-targets", "attention", *words),
    ]


@pytest.mark.timeout(3 * SECONDS_MAX)
def test_a_comparison_that_is_killed_goes_on_and_repeats_nothing(tmp_path):
    output_dir = tmp_path / "compare"
    results = output_dir / "results.jsonl"
    said = tmp_path / "said.txt"
    with said.open("wb") as file:
        process = subprocess.Popen(command(output_dir), stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + SECONDS_MAX
        # Killed in the middle of the baseline: the untrained model is over.
        while not (output_dir / "runs" / "baseline-m2-seed17" / "rank-1.log").exists():
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    gone, alive = psutil.wait_procs(children, timeout=SECONDS_MAX)
    assert gone
    assert not alive
    before = results.read_bytes()
    assert [json.loads(line)["name"] for line in before.splitlines()] == ["base"]

    again = subprocess.run(
        command(output_dir, "--resume"), capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "3 runs, 1 of them finished before" in again.stdout
    assert results.read_bytes().startswith(before)
    base, baseline, arm = (json.loads(line) for line in results.read_bytes().splitlines())
    assert arm["name"] == "m2@H=4,P=2"
    assert (arm["steps"], arm["tokens"]) == (12, 1536)
    assert arm["targets"] == baseline["targets"]
    assert arm["measured"]["finish_merges"] == 2
    assert base["loss"] > max(arm["loss"], baseline["loss"])
    (line,) = json.loads((output_dir / "summary.json").read_text())["arms"]
    assert line["invalid"] == []
    assert line["percent"] == pytest.approx(100 * (arm["loss"] / baseline["loss"] - 1))
    assert {path.name for path in output_dir.iterdir()} == {
        *("config.json", "results.jsonl", "summary.json", "report.md", "losses.png", "curves.png", "runs")
    }

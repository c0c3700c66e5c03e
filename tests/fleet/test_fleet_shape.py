"""``yeto shape`` as people and programs meet it: the real command on a small file of offers."""

import json
import shlex

import pytest
import yaml

from yeto.cli.main import main
from yeto.cli.shape_simulate import LEARNER_STEPS
from yeto.fleet.grammar import parse_islands

OFFERS = """\
cloud,region,gpu,count,price,spot,quota,score
aws,us-east-2,a100,8,9,true,8,6
aws,us-east-2,a100-80gb,8,12.30,true,32,5
aws,us-west-2,t4,4,0.62,true,,9
runpod,CA,h100,8,14.32,true,16,
lambda,us-east-1,h100,8,23.92,false,8,
"""


@pytest.fixture
def yeto(capsys, tmp_path):
    """Run ``yeto shape`` on the offers above; return exit code, stdout and stderr."""
    path = tmp_path / "offers.csv"
    path.write_text(OFFERS)

    def run(*words, offers=path):
        with pytest.raises(SystemExit) as end:
            main(["shape", *map(str, words), f"--offers={offers}"])
        printed = capsys.readouterr()
        return end.value.code, printed.out, printed.err

    return run


@pytest.fixture
def planned(yeto):
    """Run ``yeto shape --json`` without a simulation; return what it printed."""

    def run(*words, code=0):
        got, out, err = yeto(*words, "--json", "--no-simulate")
        assert got == code, err
        return json.loads(out)

    return run


def test_a_plan_is_printed_with_cost_reasons_and_the_line_that_launches_it(yeto):
    code, out, err = yeto("--model", "gemma4", "--budget", "50", "--no-simulate")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    (launch,) = [line for line in lines if line.startswith("yeto launch ")]
    words = shlex.split(launch)
    islands = parse_islands(words[words.index("--gpu") + 1])
    assert list(map(str, islands)) == ["aws:8xa100@us-east-2", "runpod:8xh100@CA", "runpod:8xh100@CA"]
    assert words[words.index("--model") + 1] == "google/gemma-4-12B-it"
    assert words[words.index("--shard") + 1] == "fsdp"
    # 2 x 14.32 and 9, times 1.15, and .40.
    assert any(
        line.startswith("$43.69 an hour: offers with 15% margin, and $0.40 for the head") for line in lines
    )
    assert "binding: --budget: $43.69 of $50.00 an hour" in lines
    assert "binding: quota of H100 at runpod CA: 16 of 16 accelerators" in lines
    assert any("24.0 / 8 * 1.067 + 2 + 5.62 = 10.8 GB a GPU <= 36.8 (92% of 40)" in line for line in lines)
    assert any("T4 has no bf16" in line and "aws us-west-2" in line for line in lines)


def test_a_large_model_is_refused_with_the_arithmetic(yeto):
    code, out, err = yeto("--model", "deepseek4flash", "--budget", "60", "--no-simulate")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert any("16 x 80 GB" in line for line in lines)
    refused = "8xa100 aws us-east-2 spot memory: 568.0 / 8 * 1.003 + 2 + 6 = 79.2 GB a GPU > 36.8 (92% of 40)"
    assert refused in lines
    assert "3x8xa100 aws us-east-2 spot quota: 8 accelerators, and an island takes 24" in lines
    (launch,) = [line for line in lines if line.startswith("yeto launch ")]
    islands = parse_islands(shlex.split(launch)[3])
    assert all(island.ranks >= 16 and island.gpu.memory_gb >= 80 for island in islands)


def test_json_has_everything(planned):
    told = planned("--model", "gemma4", "--flops", "4000", "--max-islands", "3")
    plan = told["plan"]
    assert plan["tflops"] >= 4000
    assert plan["cost"] == pytest.approx(0.4 + sum(part["islands"] * part["cost"] for part in plan["parts"]))
    assert plan["tflops"] == pytest.approx(sum(part["islands"] * part["tflops"] for part in plan["parts"]))
    assert plan["binding"][0] == "--flops: 4,000.0 TFLOPS are wanted"
    assert plan["gpu"] in plan["launch"]
    assert told["limits"] == {"budget": None, "flops": 4000.0, "max_islands": 3, "max_per_offer": None}
    assert {one["island"] for one in told["shapes"]} == {
        *("aws:8xa100@us-east-2", "aws:8xa100-80gb@us-east-2", "runpod:8xh100@CA", "lambda:8xh100@us-east-1")
    }
    assert [(one["island"], one["reason"]) for one in told["rejected"]] == [
        ("aws:4xt4@us-west-2", "T4 has no bf16")
    ]
    assert told["simulated"] is None


def test_islands_that_are_not_spot_are_named_in_the_line(planned):
    plan = planned("--model", "gemma4", "--budget", "200", "--max-per-offer", "1")["plan"]
    islands = plan["gpu"].split(",")
    assert islands.index("lambda:8xh100@us-east-1") == 2
    assert plan["launch"].endswith("--on-demand 2")


def test_the_line_is_one_that_launches(planned, tmp_path, monkeypatch, capsys):
    words = ("--model", "gemma4", "--budget", "200", "--max-per-offer", "1", "--tuning", "full")
    line = (
        planned(*words)["plan"]["launch"].replace("DATA", "owner/rows").replace("OUTPUT", "s3://bucket/run")
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("YETO_RUNS_DIR", str(tmp_path / "runs"))
    with pytest.raises(SystemExit) as end:
        main([*shlex.split(line)[1:], "--name", "trial", "--dry-run"])
    assert not end.value.code, capsys.readouterr().err
    tasks = [yaml.safe_load(path.read_text()) for path in sorted((tmp_path / "trial-tasks").glob("island-*"))]
    found = [(task["resources"]["infra"], task["num_nodes"], task["resources"]["use_spot"]) for task in tasks]
    assert found == [
        ("aws/us-east-2", 1, True),
        ("aws/us-east-2", 1, True),
        ("lambda/us-east-1", 1, False),
        ("runpod/CA", 1, True),
    ]


@pytest.mark.parametrize("text", ["3", "0,", "x", "-1"])
def test_islands_on_demand_that_are_not_there_are_refused(text, capsys):
    islands = "aws:8xa100,aws:8xa100,aws:8xa100"
    words = ["--gpu", islands, "--model", "gemma4", "--data", "owner/rows", "--output", "s3://bucket/run"]
    with pytest.raises(SystemExit) as end:
        main(["launch", *words, f"--on-demand={text}", "--dry-run"])
    assert end.value.code == 2
    assert f"--on-demand {text}: say all, or numbers of islands from 0 to 2" in capsys.readouterr().err


def test_flags_of_the_training_reach_the_memory_and_the_line(planned):
    words = ("--model", "owner/model", "--weights-gb", "16", "--budget", "100")
    plain = planned(*words)
    assert plain["model"]["hidden_size"] is None
    assert "568" not in plain["training"]["memory_formula"]
    more = ("--tuning", "full", "--seq-len", "4096", "--micro-batch-size", "2", "--hidden-size", "8192")
    told = planned(*words, *more)
    # 16 / 8 * 8 + 2 + 6 * 2 * 2 * 2: too much for 40 GB on one machine, and the quota has no second one.
    reasons = {one["island"]: one["reason"] for one in told["rejected"]}
    assert (
        reasons["aws:8xa100@us-east-2"]
        == "memory: 16.0 / 8 * 8.000 + 2 + 48.0 = 66.0 GB a GPU > 36.8 (92% of 40)"
    )
    assert (
        told["plan"]["launch"]
        .partition("--output OUTPUT ")[2]
        .startswith("--tuning full --seq-len 4096 --micro-batch-size 2 --shard fsdp")
    )


def test_without_a_plan_the_code_is_1_and_the_reasons_are_there(yeto, planned):
    code, out, err = yeto("--model", "gemma4", "--budget", "5", "--no-simulate")
    assert code == 1
    assert err == (
        "yeto: no plan: no offer makes an island within the limits; each one's reason is in the list\n"
    )
    assert "price: $10.35 an hour with margin and $0.40 for the head: over --budget" in out
    told = planned("--model", "gemma4", "--flops", "1e6", code=1)
    assert told["plan"] is None
    assert told["why_none"].startswith("at most ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--budget", "3"), "--model is missing"),
        (("--model", "gemma4"), "say one of --budget"),
        (("--model", "gemma4", "--budget", "1", "--flops", "1"), "say one of --budget"),
        (("--model", "gemma4", "--budget", "nan"), "--budget nan: must be above 0 and below 1,000,000,000"),
        (("--model", "gemma4", "--budget", "0"), "--budget 0.0: must be above 0 and below 1,000,000,000"),
        (
            ("--model", "gemma4", "--budget", "9", "--max-islands", "300"),
            "--max-islands 300: must be from 1 to 256",
        ),
        (
            ("--model", "gemma4", "--budget", "9", "--seq-len", "0"),
            "--seq-len 0: must be from 1 to 1,048,576",
        ),
        (("--model", "gemma4", "--budget", "9", "--tuning", "some"), "--tuning"),
        (("--model", "gemma4", "--flops", "inf"), "--flops inf: must be above 0"),
        (
            ("--model", "gemma4", "--budget", "9", "--weights-gb", "-1"),
            "--weights-gb -1.0: must be from 2e-09",
        ),
        (("--model", "gemma4", "--budget", "9", "--hidden-size", "0"), "--hidden-size 0: must be from 1"),
    ],
)
def test_wrong_usage_is_one_line(yeto, words, said):
    code, out, err = yeto(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_wrong_offers_are_named_with_their_line(yeto, tmp_path):
    path = tmp_path / "wrong.csv"
    path.write_text(OFFERS + "aws,us-east-2,h100,8,free,true,,\n")
    code, _, err = yeto("--model", "gemma4", "--budget", "9", offers=path)
    assert code == 2
    assert err.startswith(f"yeto: --offers {path}: line 7, price 'free': must be a number")


def test_the_simulator_has_the_islands_of_the_plan_and_its_line_gives_the_same(yeto, capsys, monkeypatch):
    monkeypatch.setattr("yeto.cli.shape_simulate.LEARNER_STEPS", LEARNER_STEPS // 20)
    code, out, _ = yeto("--model", "gemma4", "--budget", "45", "--json")
    assert code == 0
    told = json.loads(out)["simulated"]
    words = shlex.split(told["command"])
    assert words[:2] == ["yeto", "simulate"]
    with pytest.raises(SystemExit) as end:
        main([*words[1:], "--json"])
    assert not end.value.code
    (run,) = json.loads(capsys.readouterr().out)["cases"][0]["runs"]
    # One island of the first offer, two of the second.
    assert [one["learner"] for one in run["learners"]] == [0, 1, 2]
    assert run["goodput"] == told["goodput"]
    assert run["uptime"] == told["uptime"]
    gigabytes = sum(one["sent_bytes"] + one["received_bytes"] for one in run["learners"]) * 1e-9
    assert told["egress_gb_per_hour"] == pytest.approx(gigabytes * 3600 / run["seconds"])
    # 8 GPUs of 989 at .35 take 4 operations for each of 12e9 parameters and token.
    speed = 8 * 989e12 * 0.35 / (4 * 12e9)
    tokens = run["learners"][1]["tokens"] / (run["seconds"] * run["learners"][1]["stepping_share"])
    assert tokens == pytest.approx(speed, rel=0.02)

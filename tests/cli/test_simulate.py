"""``yeto simulate`` as people and programs meet it: the real command on tiny fleets."""

import csv
import io
import json
import math
import resource
import signal
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from rich.text import Text

from yeto.cli import simulate_published
from yeto.cli.main import main
from yeto.cli.simulate_flags import FaultFlags, LearnerFlags, LengthFlags, SyncerMachineFlags, WireFlags
from yeto.cli.simulate_progress import Progress
from yeto.cli.simulate_setup import PARTS, Setup
from yeto.sim import published, table
from yeto.sim.account import Fate
from yeto.sim.cases import MEASURES, Case
from yeto.sim.config import Faults, LearnerSpec, SyncerSpec
from yeto.sim.sweep import run_all
from yeto.sim.table import PAPER_WIDTH, print_cases
from yeto.tape import replay

TINY = ("--learners", "2", "--fragments", "2", "--duration", "10m", "--jobs", "1")


@pytest.fixture
def yeto(capsys, monkeypatch):
    """Run ``yeto simulate``; return exit code, stdout and stderr."""
    # How far it is: said once in some seconds, which a busy machine may need.
    monkeypatch.setattr("yeto.cli.simulate_progress.LINE_SECONDS", math.inf)

    def run(*words):
        with pytest.raises(SystemExit) as end:
            main(["simulate", *map(str, words)])
        printed = capsys.readouterr()
        return end.value.code, printed.out, printed.err

    return run


@pytest.fixture
def measured(yeto):
    """Run ``yeto simulate --json``; return its cases without the times that this machine took."""

    def run(*words):
        code, out, err = yeto(*words, "--json")
        assert code == 0, err
        cases = json.loads(out)["cases"]
        for case in cases:
            del case["mean"]["wall_seconds"], case["standard_deviation"]["wall_seconds"]
            for one in case["runs"]:
                del one["wall_seconds"]
        return cases

    return run


# -- one simulation --------------------------------------------------------------------------------------


def test_one_simulation_is_explained_line_by_line(yeto):
    code, out, err = yeto(*TINY)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines() if line.strip()]
    for measure in MEASURES:
        (line,) = [words for words in lines if words[:2] == measure.label.split()]
        float(line[2].replace(",", ""))
        assert line[3:] == measure.text.split()
    lost = [words for words in lines if words[:2] == ["not", "merged:"]]
    assert "between" in [words[2] for words in lost]
    for words in lost:
        share, *why = words[words.index("(%)") + 1 :]
        assert 0 <= float(share) < 100
        assert why
    learners = [words for words in lines if words[0] in ("0", "1")]
    assert [words[0] for words in learners] == ["0", "1"]
    assert all(int(words[2].replace(",", "")) > 500 for words in learners)


def test_every_fate_of_work_that_is_not_merged_is_explained():
    assert set(table._WHY) == set(Fate) - {Fate.MERGED}


def test_a_healthy_fleet_trains_nearly_all_the_time(measured):
    (case,) = measured(*TINY)
    (run,) = case["runs"]
    assert case["sweep"] == {}
    assert case["standard_deviation"]["goodput"] is None
    mean = case["mean"]
    assert mean["goodput"] > 0.95
    assert mean["participation"] == 1.0
    assert 0.9 < mean["merged_share"] <= 1.0
    assert mean["simulated_seconds"] == 600.0
    assert mean["merges_per_hour"] == pytest.approx(run["step"] * 6)
    assert mean["model_merges_per_hour"] == pytest.approx(run["step"] * 3)
    assert mean["sent_bytes_per_learner"] == sum(one["sent_bytes"] for one in run["learners"]) / 2


def test_what_it_costs_is_both_ways_times_the_price(measured):
    (case,) = measured(*TINY, "--egress-cost-per-gb", "0.5")
    mean = case["mean"]
    gigabytes = (mean["sent_bytes_per_learner"] + mean["received_bytes_per_learner"]) / 1e9
    assert gigabytes > 0
    assert mean["egress_cost_per_learner"] == pytest.approx(0.5 * gigabytes)


def test_the_same_seed_gives_the_same_tape_and_replay_verifies_it(yeto, tmp_path):
    paths = [tmp_path / name for name in ("one.jsonl", "two.jsonl", "other.jsonl")]
    for path, seed in zip(paths, (3, 3, 4), strict=True):
        code, _, err = yeto(*TINY, "--mean-up-hours", "0.1", "--seed", seed, "--event-tape", path)
        assert code == 0, err
    one, two, other = (path.read_bytes() for path in paths)
    assert one == two
    assert one != other
    assert replay(paths[0]).divergence is None


def test_a_run_of_given_length_ends(measured):
    (case,) = measured("--learners", "2", "--fragments", "2", "--total-steps", "20")
    (run,) = case["runs"]
    assert (run["step"], run["exit_code"]) == (20, 0)


def test_a_session_that_ends_says_how(yeto):
    words = ("--learners", "2", "--fragments", "2", "--total-steps", "20")
    code, out, err = yeto(*words)
    assert (code, err) == (0, "")
    assert "The session ended with exit code 0.\n" in out
    code, out, err = yeto(*words, "--duration", "10s")
    assert (code, err) == (0, "yeto: 1 of 1 sessions had not ended by then\n")
    assert "The session ended" not in out


def test_a_session_that_cannot_end_is_given_up():
    flags = {name: part() for name, part in PARTS.items()}
    flags["length"] = LengthFlags(total_steps=7)
    assert Setup(**flags).config(seed=0).until_seconds == 30 * 86_400


def test_mixed_fleets(measured):
    fleet = ("--learner", "count=2,step-seconds=2,up-mbps=10", "--learner", "tokens-per-step=7")
    (case,) = measured(*fleet, "--learners", "4", "--step-seconds", "0.5", "--duration", "10m")
    steps = [one["steps"] for one in case["runs"][0]["learners"]]
    tokens = [one["tokens"] for one in case["runs"][0]["learners"]]
    assert all(250 < count <= 310 for count in steps[:2])
    assert all(1000 < count <= 1240 for count in steps[2:])
    assert tokens[2] == 7 * steps[2]
    assert tokens[3] == LearnerFlags().tokens_per_step * steps[3]
    (case,) = measured(*fleet, "--duration", "10m")
    assert len(case["runs"][0]["learners"]) == 3


def test_flags_come_from_the_file_and_the_environment_too(measured, tmp_path, monkeypatch):
    file = tmp_path / "run.toml"
    file.write_text('[simulate]\nlearners = 3\nsweep = ["grace-ms=0,10", "quorum=2,3"]\n')
    monkeypatch.setenv("YETO_DURATION", "5m")
    cases = measured("--config", file, "--jobs", "1")
    assert [case["sweep"] for case in cases] == [
        {"grace-ms": grace, "quorum": quorum} for grace in ("0", "10") for quorum in ("2", "3")
    ]
    assert all(case["mean"]["simulated_seconds"] == 300.0 for case in cases)


# -- sweeps ----------------------------------------------------------------------------------------------

SWEEP = ("--learners", "3", "--duration", "4m", "--mean-up-hours", "0.05", "--repair-minutes", "1")
QUORUMS = ("--sweep", "quorum=1,3")


def test_a_sweep_has_a_line_for_each_combination(yeto):
    code, out, err = yeto(*SWEEP, *QUORUMS, "--sweep", "wire-dtype=bf16,q4", "--jobs", "1")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines() if line.strip()]
    rows = lines[-4:]
    assert [words[:2] for words in rows] == [["1", "bf16"], ["1", "q4"], ["3", "bf16"], ["3", "q4"]]
    assert all(len(words) == 2 + len(MEASURES) for words in rows)
    sent = [float(words[2 + [one.key for one in MEASURES].index("sent_bytes_per_learner")]) for words in rows]
    assert sent[1] < sent[0] / 2


def test_a_sweep_changes_what_it_says(measured):
    low, high = measured(*SWEEP, *QUORUMS, "--jobs", "1")
    assert low["sweep"] == {"quorum": "1"}
    assert high["sweep"] == {"quorum": "3"}
    assert high["mean"]["participation"] == 1.0
    assert high["mean"]["uptime"] < low["mean"]["uptime"]


def test_work_that_is_carried_is_merged(measured):
    blended, carried = measured(*SWEEP, "--sweep", "merge-alpha=0.5,carry", "--jobs", "1")
    assert carried["mean"]["merged_share"] > blended["mean"]["merged_share"]


def test_every_flag_of_a_whole_model_can_be_swept(measured):
    """The parts become smaller as there are more of them."""
    sizes = ("--parameters", "8e6", "--sweep", "fragments=1,4", "--sync-interval-steps", "50")
    few, many = measured("--learners", "2", "--duration", "20m", *sizes)
    one_round = [case["mean"]["received_bytes_per_learner"] / case["runs"][0]["step"] for case in (few, many)]
    assert one_round[0] == pytest.approx(16e6, rel=0.2)
    assert one_round[1] == pytest.approx(4e6, rel=0.2)


def test_results_do_not_depend_on_the_number_of_processes(measured):
    words = (*SWEEP, *QUORUMS, "--seeds", "2")
    assert measured(*words, "--jobs", "2") == measured(*words, "--jobs", "1")


def test_several_seeds_show_mean_and_deviation(yeto, measured):
    words = (*SWEEP, "--seeds", "3", "--seed", "5", "--jobs", "1")
    (case,) = measured(*words)
    goodputs = [one["goodput"] for one in case["runs"]]
    assert [one["seed"] for one in case["runs"]] == [5, 6, 7]
    assert len(set(goodputs)) > 1
    assert case["mean"]["goodput"] == pytest.approx(sum(goodputs) / 3)
    spread = (sum((value - case["mean"]["goodput"]) ** 2 for value in goodputs) / 2) ** 0.5
    assert case["standard_deviation"]["goodput"] == pytest.approx(spread)
    code, out, _ = yeto(*words)
    assert code == 0
    assert f"{case['mean']['goodput'] * 100:.1f} ±{spread * 100:.1f}" in out


def test_csv_has_the_numbers_and_is_the_same_each_time(yeto, measured, tmp_path):
    words = (*SWEEP, *QUORUMS, "--seeds", "2", "--jobs", "1")
    paths = [tmp_path / "one.csv", tmp_path / "two.csv"]
    for path in paths:
        assert yeto(*words, "--csv", path)[0] == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    rows = list(csv.DictReader(io.StringIO(paths[0].read_text())))
    for row, case in zip(rows, measured(*words), strict=True):
        assert (row["quorum"], row["seeds"]) == (case["sweep"]["quorum"], "2")
        for key, mean in case["mean"].items():
            assert float(row[key]) == mean
            assert float(row[f"{key}_sd"]) == case["standard_deviation"][key]


def test_the_plot_is_a_picture_that_names_its_axes(yeto, tmp_path):
    words = (*SWEEP, *QUORUMS, "--sweep", "grace-ms=0,1000", "--jobs", "1")
    svg, again, png = tmp_path / "sweep.svg", tmp_path / "again.svg", tmp_path / "sweep.png"
    for path in (svg, again, png):
        assert yeto(*words, "--plot", path)[0] == 0
    texts = {"".join(node.itertext()).strip() for node in ElementTree.parse(svg).iter() if _is_text(node)}
    assert {"--quorum", "goodput (%)", "merges (1/h)", "egress ($)", "staleness (steps)"} <= texts
    assert {"--grace-ms 0", "--grace-ms 1000"} <= texts
    assert {"1", "3"} <= texts
    assert svg.read_bytes() == again.read_bytes()
    assert png.read_bytes().startswith(b"\x89PNG")


def _is_text(node):
    return node.tag.endswith("}text")


def test_a_plot_of_words_has_a_place_for_each(yeto, tmp_path):
    path = tmp_path / "sweep.svg"
    words = (*SWEEP, "--sweep", "wire-dtype=q4,bf16", "--seeds", "2", "--jobs", "1", "--plot", path)
    assert yeto(*words)[0] == 0
    texts = {"".join(node.itertext()).strip() for node in ElementTree.parse(path).iter() if _is_text(node)}
    assert {"--wire-dtype", "q4", "bf16"} <= texts


def test_without_matplotlib_the_plot_says_what_to_install(yeto, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = yeto(*SWEEP, *QUORUMS, "--plot", tmp_path / "sweep.svg")
    assert (code, out) == (2, "")
    assert "pip install 'yeto[plot]'" in err


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("term", "escapes"), [("xterm", True), ("dumb", False)])
def test_a_bar_is_drawn_where_one_can_be(monkeypatch, term, escapes):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("sys.stderr", Terminal())
    for name in ("BAR_SECONDS", "LINE_SECONDS"):
        monkeypatch.setattr(f"yeto.cli.simulate_progress.{name}", 0.0)
    with Progress(2) as progress:
        progress.tick(0.5)
    said = sys.stderr.getvalue()
    assert " 50%, 0 of 2 simulations" in said
    assert ("\x1b" in said) == escapes


def test_a_narrow_terminal_gets_several_tables(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    narrow, paper = Terminal(), io.StringIO()
    cases = [Case(values={"quorum": "1"}, runs=_runs())]
    print_cases(cases, 0.09, file=narrow)
    print_cases(cases, 0.09, file=paper)
    lines = [Text.from_ansi(line).plain for line in narrow.getvalue().splitlines()]
    assert max(map(len, lines)) <= 60
    assert "\n".join(lines).count("quorum") > 1 == paper.getvalue().count("quorum")
    assert "\n".join(lines).count("goodput") == 1
    assert 60 < max(map(len, paper.getvalue().splitlines())) < PAPER_WIDTH
    assert "…" not in narrow.getvalue() + paper.getvalue()


def _runs():
    setup = Setup(**{name: flags() for name, flags in PARTS.items()})
    configs = [setup.replaced({"duration": "2m"}).config(seed) for seed in (0, 1)]
    return dict(run_all(configs))


# -- mistakes --------------------------------------------------------------------------------------------


MANY = ",".join(map(str, range(1, 51)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--sweep quorumm=1,2", "no flag 'quorumm' to sweep; there are duration, total-steps, learners"),
        ("--sweep learner=count=2", "no flag 'learner' to sweep"),
        ("--sweep quorum", "say quorum=VALUE,VALUE"),
        ("--sweep quorum=1,", "say quorum=VALUE,VALUE"),
        ("--sweep quorum=2,2", "a value is there twice"),
        ("--sweep quorum=2,02", "a value is there twice"),
        ("--sweep grace-ms=0,0.0", "a value is there twice"),
        ("--sweep lockstep=true,yes", "a value is there twice"),
        ("--sweep quorum=1.5", "--sweep quorum=1.5: "),
        ("--quorum 1.5", "--quorum 1.5: must be a whole number (see yeto simulate --help)"),
        (
            f"--sweep tokens-per-step={MANY} --sweep step-seconds={MANY} --sweep up-mbps={MANY}",
            "makes more than 100,000 simulations",
        ),
        ("--sweep quorum=1 --sweep quorum=2", "quorum is swept already"),
        ("--sweep quorum=one", "--sweep quorum=one: --quorum one: must be a whole number"),
        ("--sweep wire-dtype=bf16,bf17", "--wire-dtype bf17: must be one of bf16, f32, q4"),
        ("--sweep quorum=1,9 --sweep grace-ms=0,5", "--sweep quorum=9 --sweep grace-ms=0: --quorum 9"),
        ("--quorum 9", "--quorum 9: must lie between 1 and --learners 4"),
        ("--quorum 4 --wait-for 2", "--wait-for 2"),
        ("--learner speed=2", "no 'speed'; it can say count, step-seconds"),
        ("--learner count", "count=VALUE"),
        ("--learner count=0", "count=0 must be a whole number from 1 to 10,000"),
        ("--learner count=999999999999", "count=999999999999 must be a whole number from 1 to 10,000"),
        ("--learner count=10000 --learner count=1", "--learner describes more than 10,000 learners"),
        ("--learner count=1,count=2", "count is given twice"),
        ("--learners 1000000000", "must lie between 1 and 10,000"),
        ("--learner step-seconds=x", '--learner "step-seconds=x": --step-seconds x: must be a number'),
        ("--learner count=3 --learners 2", "--learners 2: --learner describes 3 already"),
        ("--learners 0", "yeto: --learners 0: must lie between 1 and 10,000 (see yeto simulate --help)"),
        ("--grace-ms=-1", "--grace-ms -1.0: must be"),
        ("--min-round-interval-ms=-250", "--min-round-interval-ms -250.0: must be"),
        ("--step-seconds 0", "above 0"),
        ("--step-seconds nan", "finite"),
        ("--latency-ms=-1", "not negative"),
        ("--fault-late 1.5", "[0, 1]"),
        ("--duration 3y", "--duration 3y: must be a time such as 90s, 30m, 12h or 1d"),
        ("--duration 0", "above 0"),
        ("--parameters 1e6 --fragment-mb 3", "--parameters and --fragment-mb: give one of them"),
        ("--fragments 70000", "--fragments 70000: can be at most 65536"),
        ("--jobs 0", "--jobs 0: need at least 1"),
        ("--seeds 0", "--seeds 0: need at least 1"),
        ("--seeds 1000000000000", "--seeds 1000000000000: that makes more than 100,000 simulations"),
        ("--egress-cost-per-gb=-1", "--egress-cost-per-gb -1.0"),
        ("--event-tape x.jsonl --seeds 2", "--event-tape is for one simulation; these are 2"),
        ("--event-tape {here}", "exists already"),
        ("--csv /nowhere/x.csv", "there is no folder /nowhere"),
        ("--csv {folder}", "is a folder; name a file"),
        ("--event-tape {folder}/x --csv {folder}/../one/x", "--event-tape writes that file already"),
        ("--csv {folder}/x.svg --plot {folder}/x.svg --sweep quorum=1", "--csv writes that file already"),
        ("--published --csv x.csv", "--published has models of its own: only --seed and --json go with it"),
        ("--published --quorum 2", "--published has models of its own"),
        ("--plot x.svg", "--plot draws a sweep"),
        ("--plot x.jpg --sweep quorum=1", ".svg, .png, .pdf"),
        ("--outer-lr 1", "--outer-lr"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_simulated(yeto, tmp_path, words, said):
    here = tmp_path / "here.jsonl"
    here.write_text("")
    folder = tmp_path / "one"
    folder.mkdir()
    code, out, err = yeto(*words.format(here=here, folder=folder).split())
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("yeto: ")
    assert err.count("\n") == 1


def test_a_tape_that_cannot_be_written_is_named(yeto, tmp_path):
    tape = tmp_path / "x.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        code, out, err = yeto(*TINY, "--event-tape", tape)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (code, out) == (1, "")
    assert err == f"yeto: --event-tape {tape}: cannot be written: File too large\n"


# -- long work -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_print_what_is_done(tmp_path, jobs, how):
    path = tmp_path / "sweep.csv"
    script = (
        "from yeto.cli import simulate_progress\n"
        "from yeto.cli.main import main\n"
        "if __name__ == '__main__':\n"
        "    simulate_progress.LINE_SECONDS = 0.0\n"
        f"    main(['simulate', '--learners', '2', '--sweep', 'duration=1m,1000d', '--jobs', {jobs!r},\n"
        f"          '--csv', {str(path)!r}])\n"
    )
    (tmp_path / "program.py").write_text(script)
    words = [sys.executable, str(tmp_path / "program.py")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "1 of 2 simulations" in line:
                break
        process.send_signal(how)
        out, err = process.communicate(timeout=200)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "yeto: interrupted: 1 of 2 simulations are done"
    rows = [line.split() for line in out.splitlines() if line.strip()]
    assert rows[-1][0] == "1m"
    assert path.read_text().count("\n") == 2
    assert "Traceback" not in err


def test_workers_of_a_killed_sweep_end(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from yeto.cli import simulate_progress\n"
        "from yeto.cli.main import main\n"
        "if __name__ == '__main__':\n"
        "    simulate_progress.LINE_SECONDS = 0.0\n"
        "    main(['simulate', '--learners', '2', '--sweep', 'duration=1m,1000d,2000d', '--jobs', '2'])\n"
    )
    with subprocess.Popen([sys.executable, program], stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "1 of 3 simulations" in line:
                break
        process.kill()
        # Workers hold this pipe, too: it ends with the last of them.
        process.communicate(timeout=200)
    assert process.returncode == -signal.SIGKILL


def test_long_work_says_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr("yeto.cli.simulate_progress.LINE_SECONDS", 0.0)
    with Progress(4) as progress:
        progress.done(1)
        progress.tick(0.25)
    assert capsys.readouterr().err.startswith("yeto simulate:  25%, 1 of 4 simulations, ")


# -- flags -----------------------------------------------------------------------------------------------


def test_flags_left_alone_are_the_simulations_own_defaults():
    assert LearnerFlags().spec(streams=4, window_mb=4.0) == LearnerSpec()
    assert SyncerMachineFlags().spec() == SyncerSpec()
    assert FaultFlags().faults() == Faults()


def test_units():
    spec = LearnerFlags(
        up_mbps=80.0, down_mbps=8.0, latency_ms=100.0, mean_up_hours=2.0, repair_minutes=3.0
    ).spec(streams=1, window_mb=1.0)
    assert (spec.up_rate, spec.down_rate) == (5e6, 1e6)  # one window of 1 MB in each round trip of 0.2 s
    assert (spec.latency_seconds, spec.mean_up_seconds, spec.mean_repair_seconds) == (0.1, 7200.0, 180.0)


@pytest.mark.parametrize(
    ("flags", "push", "broadcast"),
    [
        (WireFlags(fragment_mb=2.0), 2_000_000, 2_000_000),
        (WireFlags(fragment_mb=2.0, wire_dtype="f32"), 4_000_000, 4_000_000),
        (WireFlags(fragment_mb=2.0, wire_dtype="q4"), 515_625, 2_000_000),
        (WireFlags(parameters=8e6, fragments=4), 4_000_000, 4_000_000),
    ],
)
def test_sizes_on_the_wire(flags, push, broadcast):
    assert flags.sizes() == (push, broadcast)


def test_the_help_teaches_by_examples(yeto):
    code, out, _ = yeto("--help")
    assert code == 0
    for line in out.splitlines():
        if line.startswith("    yeto simulate "):
            assert len(line) <= 80
    assert out.count("    yeto simulate ") == 4
    assert "--quorum" in out
    assert "Learners that must be there" in " ".join(out.split())


# -- the published figures -------------------------------------------------------------------------------


@pytest.fixture
def quick_figures(monkeypatch):
    """Figures from fewer failures and stretches: as exact as these tests need them."""
    monkeypatch.setattr(published, "CELL_FAILURES", 2000)
    monkeypatch.setattr(published, "SPEED_ROUNDS", 200)


@pytest.mark.usefixtures("quick_figures")
def test_published_figures_beside_ours(yeto, monkeypatch):
    monkeypatch.setattr(simulate_published, "RMS_POINTS_MAX", 3.0)
    monkeypatch.setattr(simulate_published, "SPEED_POINTS_MAX", 4.0)
    code, out, err = yeto("--published")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines() if line.strip()]
    (row,) = [place for place, words in enumerate(lines) if words[:3] == ["M", "=", "16"]]
    paper, model, error = lines[row][-5:], lines[row + 1][-5:], lines[row + 2][-5:]
    assert paper == ["99", "98", "96", "93", "86"]
    for cells in zip(paper, model, error, strict=True):
        assert float(cells[1]) - float(cells[0]) == pytest.approx(float(cells[2]))
    assert "rms error of the 25 elastic cells: " in out
    assert "waiting for all 8  goodput  8" in out


@pytest.mark.usefixtures("quick_figures")
def test_published_figures_that_are_missed_are_an_error(yeto, monkeypatch):
    monkeypatch.setattr(simulate_published, "RMS_POINTS_MAX", 0.5)
    code, out, _ = yeto("--published", "--json")
    assert code == 1
    said = json.loads(out)
    assert said["rms_points"] > 0.5
    assert len(said["cells"]) == 30
    assert [one["paper"] for one in said["speeds"]] == [84, 100]

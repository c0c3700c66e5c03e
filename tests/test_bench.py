"""``tools/bench``: every benchmark runs at its small size and prints what it promises; none is timed."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FIGURES = {
    "core": {
        "events_per_second",
        "microseconds_per_member_25",
        "microseconds_per_member_50",
        "microseconds_per_member_100",
        "microseconds_per_member_200",
    },
    "replay": {
        "verified_records_per_second",
        "folded_records_per_second",
        "peak_mib_of_ten_times_the_records",
    },
    "merge": {
        "arrival_gb_per_second",
        "sealing_gb_per_second",
        "together_gb_per_second",
        "merge_seconds",
        "outer_seconds",
        "encode_seconds",
        "seal_to_broadcast_seconds",
        "milliseconds_per_push_2",
        "milliseconds_per_push_4",
        "milliseconds_per_push_8",
        "milliseconds_per_push_16",
        "peak_fragments_above_inputs",
        "peak_fragments_above_outputs",
    },
    "wire": {"push_gb_per_second", "broadcast_gb_per_second"},
    "checkpoint": {"checkpoint_mb_per_second"},
}

TARGETS = {
    "events_per_second",
    "microseconds_per_member_200",
    "verified_records_per_second",
    "folded_records_per_second",
    "peak_mib_of_ten_times_the_records",
    "together_gb_per_second",
    "milliseconds_per_push_16",
    "peak_fragments_above_outputs",
    "push_gb_per_second",
    "broadcast_gb_per_second",
    "checkpoint_mb_per_second",
}
"""Figures that something is aimed at."""

MAY_BE_ZERO = {"peak_fragments_above_inputs", "peak_fragments_above_outputs"}
"""A quick run's buffers are small, and may fit into memory that the process has already."""


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """Run ``tools/bench WORDS`` in this process; return what it printed."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.chdir(tmp_path)
    from benchmarks.__main__ import app

    def run(*words):
        app(words, exit_on_error=False, result_action="return_value")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", FIGURES)
def test_a_quick_run_prints_every_figure(bench, name):
    document = json.loads(bench(name, "--quick", "--json"))
    assert set(document) == {"machine", "benchmarks"}
    assert set(document["benchmarks"]) == {name}
    report = document["benchmarks"][name]
    assert report["settings"]["repeats"] >= 2
    assert set(report["figures"]) == FIGURES[name]
    for key, figure in report["figures"].items():
        assert figure["low"] <= figure["value"] <= figure["high"]
        assert figure["value"] > 0 or key in MAY_BE_ZERO
        assert (figure["peer"] is None) == (figure["ratio"] is None)
        if figure["peer"] is not None:
            assert figure["peer"]["value"] > 0
            assert figure["ratio"] > 0
        assert (figure["target"] is not None) == (figure["reached"] is not None) == (key in TARGETS)


def test_the_launcher_prints_a_table():
    done = subprocess.run(
        ["tools/bench", "core", "--quick", "--repeats", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "step(), 8 learners" in done.stdout
    assert "make and keep the objects" in done.stdout


def test_help_names_every_benchmark(bench):
    text = bench("--help")
    for name in (*FIGURES, "all"):
        assert name in text

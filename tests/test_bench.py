"""``tools/bench``: every benchmark runs at its small size and prints what it promises; none is timed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.begins_early

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
        "shown_records_per_second",
        "seconds_to_show_100000_rounds",
        "written_records_per_second",
        "peak_mib_of_ten_times_the_records",
    },
    "sim": {"day_seconds", "thirty_days_seconds"},
    "http": {"rounds_per_second_observed"},
    "merge": {
        "arrival_gb_per_second",
        "sealing_gb_per_second",
        "together_gb_per_second",
        "merge_seconds",
        "commit_seconds",
        "arrival_undigested_gb_per_second",
        "sealing_undigested_gb_per_second",
        "together_undigested_gb_per_second",
        "read_undigested_gb_per_second",
        "together_digests_alone_gb_per_second",
        "digest_gb_per_second",
        "commit_undigested_seconds",
        "arrival_one_thread_gb_per_second",
        "sealing_one_thread_gb_per_second",
        "together_one_thread_gb_per_second",
        "merge_one_thread_seconds",
        "commit_one_thread_seconds",
        "arrival_undigested_one_thread_gb_per_second",
        "sealing_undigested_one_thread_gb_per_second",
        "together_undigested_one_thread_gb_per_second",
        "read_undigested_one_thread_gb_per_second",
        "together_digests_alone_one_thread_gb_per_second",
        "digest_one_thread_gb_per_second",
        "commit_undigested_one_thread_seconds",
        "job_beside_all_reduce_seconds",
        "job_beside_stack_and_mean_seconds",
        "milliseconds_per_push_2",
        "milliseconds_per_push_4",
        "milliseconds_per_push_8",
        "milliseconds_per_push_16",
        "seal_to_broadcast_2_milliseconds",
        "seal_to_broadcast_4_milliseconds",
        "seal_to_broadcast_8_milliseconds",
        "seal_to_broadcast_16_milliseconds",
        "peak_fragments_above_inputs",
        "peak_fragments_above_outputs",
    },
    "svd": {"jobs_per_second_one", "jobs_per_second_all", "pipe_gb_per_second"},
    "wire": {
        "push_gb_per_second",
        "broadcast_gb_per_second",
        "push_over_tls_gb_per_second",
        "broadcast_over_tls_gb_per_second",
        "q4_encode_gb_per_second",
        "q4_decode_gb_per_second",
        "bf16_encode_gb_per_second",
        "bf16_decode_gb_per_second",
        "broadcast_beside_slow_reader_milliseconds",
        "crowd_pushes_per_second",
        "crowd_syncer_microseconds_per_push",
    },
    "checkpoint": {
        "checkpoint_mb_per_second",
        "rounds_per_second_of_250_ms",
        "rounds_per_second_unthrottled",
    },
    "data": {
        "core_beside_texts_tokens_per_second",
        "core_beside_template_tokens_per_second",
        "workers_beside_texts_tokens_per_second",
        "workers_beside_template_tokens_per_second",
        "workers_cpu_beside_texts_tokens_per_second",
        "first_block_milliseconds",
        "peak_mib",
    },
    "learner": {
        "step_milliseconds",
        "step_cpu_milliseconds",
        "boundary_milliseconds",
        "growth_bytes_per_boundary",
    },
    "peers": {
        "outer_round_2_beside_free_milliseconds",
        "outer_round_2_beside_bf16_milliseconds",
        "outer_round_2_beside_f32_milliseconds",
        "outer_round_2_beside_bf16_mib_per_learner",
        "outer_round_2_beside_f32_mib_per_learner",
    },
}

TARGETS = {
    "events_per_second",
    "microseconds_per_member_200",
    "verified_records_per_second",
    "folded_records_per_second",
    "seconds_to_show_100000_rounds",
    "written_records_per_second",
    "peak_mib_of_ten_times_the_records",
    "day_seconds",
    "thirty_days_seconds",
    "together_gb_per_second",
    "together_undigested_gb_per_second",
    "read_undigested_gb_per_second",
    "job_beside_all_reduce_seconds",
    "job_beside_stack_and_mean_seconds",
    "milliseconds_per_push_16",
    "peak_fragments_above_outputs",
    "push_gb_per_second",
    "broadcast_gb_per_second",
    "broadcast_beside_slow_reader_milliseconds",
    "crowd_pushes_per_second",
    "rounds_per_second_observed",
    "checkpoint_mb_per_second",
    "rounds_per_second_of_250_ms",
    "core_beside_template_tokens_per_second",
    "workers_beside_texts_tokens_per_second",
    "workers_beside_template_tokens_per_second",
    "first_block_milliseconds",
    "peak_mib",
    "step_milliseconds",
    "growth_bytes_per_boundary",
}
"""Figures that something is aimed at."""

GRPC_FIGURE = "push_beside_grpc_gb_per_second"

MAY_BE_ZERO = {
    *("peak_fragments_above_inputs", "peak_fragments_above_outputs"),
    "growth_bytes_per_boundary",
}
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


def test_wrong_usage_is_one_line(bench, monkeypatch, capsys):
    from benchmarks.__main__ import main

    monkeypatch.setattr(sys, "argv", ["bench", "core", "--repeets", "3"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 2
    said = "tools/bench: --repeets: there is no such flag; did you mean --repeats? (see tools/bench --help)\n"
    assert capsys.readouterr().err == said


REPEATS = dict.fromkeys(("checkpoint", "data", "http", "learner", "merge", "peers", "svd", "wire"), 1)
"""Of a quick run here, where it is not the usual 2: their samples start processes, or move many bytes."""


@pytest.mark.parametrize("name", FIGURES)
def test_a_quick_run_prints_every_figure(bench, name):
    words = ["--repeats", str(REPEATS[name])] if name in REPEATS else []
    document = json.loads(bench(name, "--quick", "--json", *words))
    assert set(document) == {"machine", "benchmarks"}
    assert set(document["benchmarks"]) == {name}
    report = document["benchmarks"][name]
    assert report["settings"]["repeats"] == REPEATS.get(name, 2)
    figures = set(report["figures"])
    if GRPC_FIGURE in figures:  # what needs an extra is a figure or a sentence
        assert name == "wire"
        figures.remove(GRPC_FIGURE)
    else:
        assert [note for note in report["notes"] if "gRPC is not installed" in note] or name != "wire"
    assert figures == FIGURES[name]
    for key, figure in report["figures"].items():
        assert figure["low"] <= figure["value"] <= figure["high"]
        assert figure["value"] > 0 or key in MAY_BE_ZERO
        assert (figure["peer"] is None) == (figure["ratio"] is None)
        if figure["peer"] is not None:
            assert figure["peer"]["value"] > 0
            assert figure["ratio"] > 0
        assert (figure["target"] is not None) == (figure["reached"] is not None) == (key in TARGETS)


def test_without_grpc_its_figure_is_a_sentence(bench, monkeypatch):
    bench("--help")
    from benchmarks import wire

    monkeypatch.setattr(wire, "is_installed", lambda: False)
    monkeypatch.setattr(wire, "codec_figures", lambda **_: [])
    monkeypatch.setattr(wire, "slow_reader_figures", lambda **_: [])
    monkeypatch.setattr(wire, "crowd_figures", lambda **_: [])
    text = bench("wire", "--quick")
    assert "gRPC is not installed, so push has no such peer" in text
    assert "gRPC stream" not in text


def test_without_flower_its_figures_are_a_sentence(bench, monkeypatch):
    bench("--help")
    from benchmarks import outer_peers

    monkeypatch.setattr(outer_peers, "_figures", lambda *_: [])
    assert "Flower has no figure: name the Python of an environment" in " ".join(
        bench("peers", "--quick").split()
    )


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux tells what a socket has moved")
def test_bytes_are_those_of_the_sockets_of_this_process(bench):
    bench("--help")
    from benchmarks.tcp_bytes import tcp_bytes

    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as near, server.accept()[0] as far:
            before = tcp_bytes()
            near.sendall(bytes(300_000))
            assert len(far.recv(300_000, socket.MSG_WAITALL)) == 300_000
            # Each byte left one socket of this process and came to another.
            assert tcp_bytes() - before == 600_000
        assert tcp_bytes() < before + 600_000


def test_the_launcher_prints_a_table():
    done = subprocess.run(
        ["tools/bench", "core", "--quick", "--repeats", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert "step(), 8 learners" in done.stdout
    assert "make and keep the objects" in done.stdout


def test_one_that_is_ended_takes_its_syncer_with_it():
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "http", "--quick"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "tools:tests/harness"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        ends, children = time.monotonic() + 200, []
        while not any("--role" in child.cmdline() for child in children):
            assert process.poll() is None
            assert time.monotonic() < ends
            time.sleep(0.02)
            children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        assert process.wait(200) == 143
        gone, alive = psutil.wait_procs(children, timeout=60)
    finally:
        process.kill()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
    assert gone
    assert not alive


def test_help_names_every_benchmark(bench):
    text = bench("--help")
    for name in (*FIGURES, "all"):
        assert name in text

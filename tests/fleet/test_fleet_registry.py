"""The registry: a name is taken once, files are strict, secrets closed, and no other process is ever hit."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time

import psutil
import pytest

from yeto.errors import ConfigError, YetoError
from yeto.fleet.launch import Launch, check_name
from yeto.fleet.processes import (
    RUN_VARIABLE,
    Process,
    processes_of,
    send,
    start_mark,
    wait_gone,
    written_down,
)
from yeto.fleet.registry import RECORD_BYTES_MAX, Rented, all_runs, create_run, find_run, forget

KEY = "ab" * 32 + "\n"


def launch_of(name):
    return Launch(
        name=name, islands="local:1xcpu", model="/m", data="/d", output="/o", quorum=1, syncer_words=("--x",)
    )


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "deep" / "runs"


@pytest.fixture
def run(folder):
    return create_run(folder, launch_of("trial"), KEY)


def test_what_is_written_is_read_again(folder, run):
    assert find_run(folder, "trial").launch() == launch_of("trial")
    process = Process(name="head", pid=7, mark="99")
    rented = (Rented(name="head", cluster="trial-head", address="h:1"), Rented(name="island-0", job="j"))
    run.change(phase="running", why="it runs", controller=process, children=(process,), rented=rented)
    state = find_run(folder, "trial").state()
    assert (state.phase, state.why, state.controller, state.children) == (
        "running",
        "it runs",
        process,
        (process,),
    )
    assert state.rented == rented
    assert not state.over
    forget(run)
    assert all_runs(folder) == []


def test_only_the_owner_sees_a_run_and_only_one_file_holds_the_key(folder, run):
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(run.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.key.stat().st_mode) == 0o600
    holders = [path for path in run.folder.rglob("*") if path.is_file() and KEY.strip() in path.read_text()]
    assert holders == [run.key]


def test_a_name_is_taken_once_also_by_two_at_the_same_moment(folder):
    outcomes = []
    barrier = threading.Barrier(8)

    def take():
        barrier.wait()
        try:
            outcomes.append(create_run(folder, launch_of("one"), KEY))
        except ConfigError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert len(refused) == 7
    assert all("there is a run of that name; yeto status one shows it" in text for text in refused)


@pytest.mark.parametrize(
    "name", ["", "Upper", "-a", "a-", "a--b", "9a", "a/b", "..", "a.b", "a" * 31, "a\nb", "ä"]
)
def test_names_that_a_cloud_or_a_path_would_misread_are_refused(folder, name):
    with pytest.raises(ConfigError, match="lower-case letters"):
        check_name(name)
    with pytest.raises(ConfigError):
        find_run(folder, name)


def test_a_run_that_is_not_there(folder):
    with pytest.raises(
        ConfigError, match=r"other: no run of that name in .*; yeto status lists the runs there"
    ):
        find_run(folder, "other")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda value: value["state"].update(phase="flying"), "no such phase: 'flying'"),
        (lambda value: value["state"].update(more=1), "unknown key more"),
        (lambda value: value["state"].update(exit_code="0"), "expected int, found str"),
        (
            lambda value: value["state"].update(children=[{"name": "head", "pid": True, "mark": "1"}]),
            "found bool",
        ),
        (lambda value: value.update(format=2), "format 2; this Yeto reads 1"),
        (lambda value: value.pop("state"), "a key is missing"),
    ],
)
def test_a_state_that_was_changed_is_refused_by_its_path(run, change, said):
    path = run.folder / "state.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(YetoError, match=said) as caught:
        run.state()
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("text", ["", "{", '{"format": 1, "format": 1}', "[]", " " * (RECORD_BYTES_MAX + 1)])
def test_a_state_that_is_no_record_is_one_line(run, text):
    (run.folder / "state.json").write_text(text)
    with pytest.raises(YetoError, match=r"state\.json: "):
        run.state()


def test_a_copied_folder_is_no_other_run(folder, run):
    run.folder.rename(folder / "copy")
    with pytest.raises(YetoError, match="holds the run 'trial'"):
        find_run(folder, "copy").launch()


@pytest.fixture
def sleeper():
    """Start a process that only sleeps; it is gone at the end."""
    started = []

    def make(**environ):
        words = [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(600)"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, **environ})
        assert process.stdout.readline() == b"up\n"
        started.append(process)
        return process

    yield make
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_number_that_was_given_to_another_process_is_left_alone(sleeper):
    process = sleeper()
    reused = Process(name="head", pid=process.pid, mark="1")
    assert not reused.alive
    assert not send(reused, signal.SIGKILL)
    time.sleep(0.05)
    assert process.poll() is None
    same = written_down("head", process.pid)
    assert same.alive
    assert send(same, signal.SIGKILL)
    # Nobody has waited for it yet: a zombie is gone, all the same.
    assert wait_gone([same], 60.0) == []
    assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    assert start_mark(process.pid) is None


def test_two_processes_have_different_marks_and_one_keeps_its_own(sleeper):
    first = sleeper()
    mark = start_mark(first.pid)
    time.sleep(0.05)
    assert start_mark(sleeper().pid) != mark
    assert start_mark(first.pid) == mark
    assert start_mark(0) is None
    assert start_mark(-1) is None


@pytest.mark.skipif(
    not os.path.exists("/proc/self/environ"), reason="only Linux shows processes' environments"
)
def test_what_nobody_wrote_down_is_found_by_the_run_it_belongs_to(sleeper, tmp_path):
    ours = sleeper(**{RUN_VARIABLE: str(tmp_path / "a")})
    sleeper(**{RUN_VARIABLE: str(tmp_path / "ab")})
    assert [process.pid for process in processes_of(tmp_path / "a")] == [ours.pid]

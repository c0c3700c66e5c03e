import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import trio

from yeto.errors import YetoError
from yeto.fleet import children
from yeto.fleet.children import Child
from yeto.learner import saved_folder


@pytest.fixture
def child(tmp_path, monkeypatch):
    """A child whose command is a line of Python instead of a yeto command."""
    monkeypatch.setattr(children, "RELAUNCH_SECONDS", 0.0)

    def make(program):
        made = Child("worker", ("-c", program), tmp_path / "worker.log")
        monkeypatch.setattr(made, "_words", lambda: [sys.executable, "-c", program])
        return made

    return make


async def test_a_childs_own_last_line_explains_its_failure(child):
    failing = child(
        "import sys; print('noise'); print('yeto: port 7 is taken', file=sys.stderr); sys.exit(2)"
    )
    failing.start()
    code = await failing.wait()
    error = failing.failure(code)
    assert code == 2
    assert (str(error), error.exit_code) == (f"worker: port 7 is taken; its log is {failing.log}", 2)


async def test_a_childs_line_in_its_own_name_explains_its_failure_too(child):
    refused = child("print('worker: refused: seed differs'); raise SystemExit(1)")
    refused.start()
    error = refused.failure(await refused.wait())
    assert str(error) == f"worker: refused: seed differs; its log is {refused.log}"


async def test_a_child_that_ignores_sigterm_is_killed(child):
    stubborn = child(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('up', flush=True); time.sleep(600)"
    )
    stubborn.start()
    with trio.fail_after(200):
        while "up" not in stubborn.log.read_text():
            await trio.sleep(0.01)
        await stubborn.stop(0.05)
    assert not stubborn.running


async def test_a_killed_child_is_started_again_but_not_for_ever(child):
    dying = child("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    dying.start()
    for _ in range(children.RELAUNCHES_MAX):
        assert await dying.wait() == -signal.SIGKILL
        await dying.relaunch()
    assert await dying.wait() == -signal.SIGKILL
    with pytest.raises(YetoError, match=r"worker died 6 times.*it needs more, or, if it trains, a smaller"):
        await dying.relaunch()


async def test_a_child_that_lived_for_a_while_has_earned_its_next_accidents(child, monkeypatch):
    monkeypatch.setattr(children, "LIVED_SECONDS", 0.0)
    dying = child("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    dying.start()
    for _ in range(children.RELAUNCHES_MAX + 2):
        assert await dying.wait() == -signal.SIGKILL
        await dying.relaunch()
    assert await dying.wait() == -signal.SIGKILL


async def test_the_pause_before_a_relaunch_doubles(child, monkeypatch):
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(children, "RELAUNCH_SECONDS", 1.0)
    monkeypatch.setattr(trio, "sleep", sleep)
    brief = child("pass")
    brief.start()
    for _ in range(children.RELAUNCHES_MAX):
        await brief.wait()
        await brief.relaunch()
    await brief.wait()
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0]


async def test_a_child_without_a_log_speaks_where_its_parent_does(tmp_path, capfd, monkeypatch):
    (tmp_path / "spoken.py").write_text(
        "import os; print(os.getcwd()); print('yeto: no', flush=True); exit(3)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("YETO_LEARNERS", "7")
    speaking = Child("worker", ["spoken"], None, folder=tmp_path)
    speaking.start()
    code = await speaking.wait()
    assert capfd.readouterr().out == f"{tmp_path}\nyeto: no\n"
    assert str(speaking.failure(code)) == "worker: exit code 3"


@pytest.mark.parametrize("over", [True, False])
def test_only_what_a_learner_marked_as_over_is_cleared(tmp_path, over):
    state = tmp_path / "state"
    state.mkdir()
    (state / (saved_folder.DONE if over else "set")).write_text("{}")
    children.clear_finished(state)
    assert state.exists() is not over


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux tells a child of its parent's death"
)
def test_children_end_when_their_parent_is_killed(tmp_path):
    program = (
        "import subprocess, sys, os, time\n"
        "inner = 'import sys, time; from yeto.fleet.child import die_with_parent;'\n"
        "inner += 'die_with_parent(int(sys.argv[1])); print(\"ready\", flush=True); time.sleep(600)'\n"
        "child = subprocess.Popen([sys.executable, '-c', inner, str(os.getpid())], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    lines = [parent.stdout.readline().strip() for _ in range(2)]
    pid = int(next(line for line in lines if line != "ready"))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 200
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.01)

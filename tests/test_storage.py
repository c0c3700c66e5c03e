"""What rooms that write files do alike."""

import subprocess
import sys
import threading

import pytest

from yeto.storage import hold, is_held

HOLDS = """
import sys
from yeto.storage import hold
held = hold(sys.argv[1], OSError())
print("held", flush=True)
sys.stdin.read()
"""


class Taken(Exception):
    """Somebody else has it."""


def test_a_lock_that_another_process_holds_is_taken_until_its_end(tmp_path):
    file = tmp_path / "lock"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(Taken):
            hold(file, Taken())
        assert is_held(file)
        other.kill()
    assert not is_held(file)
    hold(file, Taken()).release()


def test_a_lock_may_be_given_back_by_another_thread_than_took_it(tmp_path):
    held = hold(tmp_path / "lock", Taken())
    with pytest.raises(Taken):
        hold(tmp_path / "lock", Taken())
    thread = threading.Thread(target=held.release)
    thread.start()
    thread.join()
    with hold(tmp_path / "lock", Taken()), pytest.raises(Taken):
        hold(tmp_path / "lock", Taken())
    hold(tmp_path / "lock", Taken()).release()


def test_a_place_where_no_lock_can_be_is_the_systems_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        hold(tmp_path / "file" / "lock", Taken())


def test_to_ask_whether_a_lock_is_held_makes_and_takes_nothing(tmp_path):
    file = tmp_path / "lock"
    assert not is_held(file)
    assert not file.exists()
    with hold(file, Taken()):
        assert is_held(file)
    assert not is_held(file)
    hold(file, Taken()).release()

"""Sets of saved state: written whole or not at all, read whole or not at all."""

import json
import os
import random
import resource
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.numpy import load_file

from yeto.errors import ConfigError
from yeto.learner.chance import Chance
from yeto.learner.pages import SavedBook, SavedFragment
from yeto.learner.saved import DIGEST, STATE, TENSORS, DamagedState, SavedLoop, SavedRank, SavedState
from yeto.learner.saved_folder import Finished, StateFolder


def array(*numbers):
    return np.array(numbers, dtype=np.float32)


def state(steps=7, numel=3):
    """Return a set with something in every place."""
    fragment = SavedFragment(
        anchor=array(1, 2),
        version=5,
        digest="ab" * 16,
        is_own_init=False,
        c_steps=3,
        c_tokens=300,
        pushed_step=9,
        due=array(0.5, 0.25),
        pending=(9, array(0.125, 0.0)),
    )
    bare = evolve(fragment, anchor=None, pushed_step=None, due=None, pending=None, is_own_init=True)
    return SavedState(
        settings={"--learner-id": 1, "--inner-lr": 3e-4, "lora": {"r": 4}, "--max-local-steps": None},
        loop=SavedLoop(
            steps=steps,
            tokens=2**40 + steps,
            empty_groups=2,
            ranks=(SavedRank(position={"row": [1, 2], "carry": "AAE="}, chance=Chance.now()),),
            parameters={"a.weight": np.full((2, numel), steps, np.float32), "b": array(-0.0)},
            optimizer={
                "a.weight": {
                    "step": np.float32(steps).reshape(()),
                    "exp_avg": np.ones((2, numel), np.float32),
                },
                "b": {"step": np.float32(1).reshape(()), "exp_avg": array(1e-40)},
            },
        ),
        book=SavedBook(fragments=(fragment, evolve(fragment, pending=(9, None)), bare), frozen_work=(7, 700)),
    )


def same(left, right):
    """Whether two sets are equal in every array and every number."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if hasattr(left, "__attrs_attrs__"):
        return all(same(getattr(left, a.name), getattr(right, a.name)) for a in left.__attrs_attrs__)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@pytest.fixture
def said():
    return []


@pytest.fixture
def folder(tmp_path, said):
    """Return a function that opens the folder as a new process does; what was open is closed first."""
    open_now = []

    def start():
        while open_now:
            open_now.pop().close()
        open_now.append(StateFolder(tmp_path / "state", said.append))
        return open_now[0]

    yield start
    for one in open_now:
        one.close()


def sets(tmp_path):
    return sorted(path.name for path in (tmp_path / "state").glob("set-*"))


class TestOneSet:
    def test_it_is_read_as_it_was_written(self, tmp_path):
        before = state()
        before.write(tmp_path / "set")
        assert same(SavedState.read(tmp_path / "set"), before)

    def test_its_files_are_what_they_are_called(self, tmp_path):
        state().write(tmp_path / "set")
        assert sorted(path.name for path in (tmp_path / "set").iterdir()) == [DIGEST, STATE, TENSORS]
        assert json.loads((tmp_path / "set" / STATE).read_text())["steps"] == 7
        tensors = load_file(tmp_path / "set" / TENSORS)
        assert tensors["parameter/a.weight"].shape == (2, 3)
        assert tensors["optimizer/exp_avg/b"].tolist() == [np.float32(1e-40)]

    def test_every_generator_goes_on(self, tmp_path):
        def draw():
            return random.random(), random.gauss(), np.random.normal(), float(torch.rand(()))

        draw()
        saved = state()
        saved.write(tmp_path / "set")
        expected = [draw() for _ in range(3)]
        SavedState.read(tmp_path / "set").loop.ranks[0].chance.put_back()
        assert [draw() for _ in range(3)] == expected

    @pytest.mark.parametrize("name", [DIGEST, STATE, TENSORS])
    def test_damage_anywhere_is_found(self, tmp_path, name):
        state().write(tmp_path / "set")
        path = tmp_path / "set" / name
        whole = path.read_bytes()
        for place in {0, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
            for damaged in (whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]):
                path.write_bytes(damaged)
                with pytest.raises(DamagedState):
                    SavedState.read(tmp_path / "set")
        path.unlink()
        with pytest.raises(DamagedState):
            SavedState.read(tmp_path / "set")

    def test_a_later_format_is_refused_and_not_skipped(self, tmp_path, folder, monkeypatch):
        monkeypatch.setattr("yeto.learner.saved.FORMAT", 2)
        folder().save(state())
        folder()
        monkeypatch.undo()
        with pytest.raises(ConfigError, match="saved in format 2, this version knows 1"):
            folder().newest()

    def test_other_settings_are_named(self, tmp_path):
        saved = state()
        saved.require_settings(dict(saved.settings), tmp_path)
        with pytest.raises(ConfigError, match=r"saved with lora\.r 4, now it is 8; give the same as before"):
            saved.require_settings({**saved.settings, "lora": {"r": 8}}, tmp_path)


class TestFolder:
    def test_an_empty_one_begins_anew(self, folder, said):
        assert folder().newest() is None
        assert said == []

    def test_the_newest_is_found_and_one_more_is_kept(self, folder, tmp_path, said):
        now = folder()
        for steps in (1, 2, 3):
            now.save(state(steps))
            now.flush()
        assert sets(tmp_path) == ["set-00000002", "set-00000003"]
        assert folder().newest().loop.steps == 3
        assert said == []

    def test_a_damaged_one_gives_way_to_the_one_before_aloud(self, folder, tmp_path, said):
        now = folder()
        for steps in (1, 2):
            now.save(state(steps))
            now.flush()
        with (tmp_path / "state" / "set-00000002" / TENSORS).open("ab") as file:
            file.truncate(100)
        now = folder()
        assert now.newest().loop.steps == 1
        (line,) = said
        assert "skipping a damaged set" in line
        assert "set-00000002/tensors.safetensors was changed or cut off" in line
        now.save(state(3))
        now.flush()
        assert sets(tmp_path) == ["set-00000001", "set-00000003"], (
            "the whole one is kept, not the damaged one"
        )

    def test_if_none_is_whole_nothing_is_guessed(self, folder, tmp_path):
        folder().save(state())
        folder()
        (tmp_path / "state" / "set-00000001" / DIGEST).unlink()
        with pytest.raises(ConfigError, match="none of its 1 sets is whole; remove the folder to begin anew"):
            folder().newest()

    def test_two_processes_cannot_share_it(self, folder, tmp_path):
        folder()
        with pytest.raises(
            ConfigError, match="another process uses it; give every learner a folder of its own"
        ):
            StateFolder(tmp_path / "state", print)

    def test_a_place_that_cannot_be_written_to_is_refused(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match=r"--state-dir .*file.*: cannot be written to"):
            StateFolder(tmp_path / "file" / "state", print)

    def test_a_disk_without_room_is_refused_with_the_figures(self, folder, tmp_path):
        now = folder()
        now.require_space(1000)
        now.save(state(1))
        now.flush()
        held = sum(path.stat().st_size for path in (tmp_path / "state" / "set-00000001").iterdir())
        with pytest.raises(ConfigError) as caught:
            now.require_space(10**18)
        message = str(caught.value)
        assert message.startswith(f"--state-dir {tmp_path / 'state'}: 2 sets of state and one being written")
        assert "written take 2728484.1 TiB, for which 2728484.1 TiB must be free and only " in message
        assert message.endswith("make room, or name a folder on another disk")
        free = shutil.disk_usage(tmp_path).free
        # The set that is there gives way, so what it takes is not needed twice.
        now.require_space((free // 2 + held) // 3)

    def test_the_end_of_the_run_is_remembered(self, folder):
        now = folder()
        assert now.done is None
        now.finish("global result of step 9 saved in out", Path("out"))
        assert folder().done == Finished("global result of step 9 saved in out", Path("out").absolute())

    def test_closing_ends_the_thread_and_waits_for_the_disk(self, folder, tmp_path):
        before = threading.active_count()
        now = folder()
        now.save(state(1))
        now.close()
        assert threading.active_count() == before
        assert sets(tmp_path) == ["set-00000001"]


class TestWriting:
    def test_a_newer_set_replaces_one_that_waits(self, folder, tmp_path, monkeypatch):
        """One is being written, one waits; memory holds no third."""
        begun, go_on = threading.Event(), threading.Event()
        honest, written = SavedState.write, []

        def slow(self, path):
            written.append(self.loop.steps)
            begun.set()
            assert go_on.wait(30)
            honest(self, path)

        monkeypatch.setattr(SavedState, "write", slow)
        now = folder()
        now.save(state(1))
        assert begun.wait(30)
        now.save(state(2))
        now.save(state(3))
        go_on.set()
        now.flush()
        assert written == [1, 3]
        assert folder().newest().loop.steps == 3

    def test_a_full_disk_is_said_each_time_and_the_set_before_stays(self, folder, tmp_path, said):
        """No file may grow beyond what the limit says, which the system refuses as it does on a full disk."""
        now = folder()
        now.save(state(1))
        now.flush()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            for steps in (2, 3):
                now.save(state(steps, numel=100_000))
                now.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [line.split(": ", 1)[1] for line in said] == [
            f"cannot save local step {steps}: File too large; step 1 is saved, training goes on"
            for steps in (2, 3)
        ]
        assert sets(tmp_path) == ["set-00000001"]
        assert list((tmp_path / "state").glob("*.tmp")) == []
        now.save(state(4))
        now.flush()
        assert folder().newest().loop.steps == 4

    def test_whatever_goes_wrong_training_does_not_wait_for_ever(self, folder, said):
        now = folder()
        odd = state(1)
        now.save(evolve(odd, loop=evolve(odd.loop, parameters={"a": np.zeros(1, np.complex64)})))
        now.flush()
        assert "cannot save local step 1: KeyError('complex64'); nothing is saved yet" in said[0]

    def test_a_kill_at_any_system_call_leaves_the_old_set_or_the_new_one(self, folder, tmp_path, said):
        """A child process is ended in front of its n-th call, for every n until it gets through."""
        folder().save(state(1))
        folder()
        path, kept = tmp_path / "state", tmp_path / "kept"
        found = []
        for number in range(1, 100):
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(path, kept)
            gone = _killed_at(number, lambda: state(2).write(kept / "set-00000002"))
            now = StateFolder(kept, said.append)
            found.append(now.newest().loop.steps)
            now.close()
            assert list(kept.glob("*.tmp")) == []
            if not gone:
                break
        assert not gone, "it got through at last"
        assert number > 12, "every call was an end once"
        assert set(found) == {1, 2}
        assert found == sorted(found)
        assert said == [], "never is anything there that is not whole"


CALLS = ("mkdir", "open", "write", "fsync", "close", "rename", "rmdir", "unlink")


def _killed_at(number, act):
    """Run ``act`` in a child that ends in front of its ``number``-th system call; say whether it did."""
    child = os.fork()
    if child == 0:
        left = number

        def ending(name):
            honest = getattr(os, name)

            def call(*arguments, **options):
                nonlocal left
                left -= 1
                if left == 0:
                    os._exit(9)
                return honest(*arguments, **options)

            return call

        for name in CALLS:
            setattr(os, name, ending(name))
        try:
            act()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9), code
    return code == 9

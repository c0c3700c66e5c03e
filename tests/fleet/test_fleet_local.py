"""A run on one machine: what it leaves behind when it fails."""

import shutil

import pytest
import trio

from yeto.errors import ConfigError, YetoError
from yeto.fleet.local import LocalRun, hold_folder


async def unseen(tape):
    """Show nothing."""
    await trio.sleep_forever()


def test_a_run_that_never_began_leaves_nothing_in_the_way(tmp_path):
    folder = tmp_path / "run"
    (folder / "learners" / "0" / "state").mkdir(parents=True)
    run = LocalRun(
        folder=folder,
        num_learners=1,
        resume=False,
        syncer_words=["--learners=1", "--total-steps=1"],
        learner_words=lambda _: [],
        show=unseen,
    )
    with pytest.raises(YetoError, match="learner 0: --model is missing"):
        run.train()
    assert {path.name for path in folder.iterdir()} == {"logs"}


@pytest.mark.parametrize("what", ["session", "resumed"])
def test_a_run_that_has_begun_is_kept_when_it_fails(fixtures, tmp_path, what):
    run = LocalRun(
        folder=tmp_path,
        num_learners=1,
        resume=what == "resumed",
        # A fresh syncer refuses a tape, and any refuses this flag.
        syncer_words=["--learners=1", "--total-steps=1", "--bogus"],
        learner_words=lambda _: [],
        show=unseen,
    )
    (tmp_path / "learners").mkdir()
    if what == "session":
        shutil.copy(next(fixtures.glob("tapes/*.jsonl")), run.tape)
    else:
        run.tape.touch()
    with pytest.raises(YetoError, match=r"syncer: .*--bogus"):
        run.train()
    assert run.tape.exists()
    assert (tmp_path / "learners").exists()


def test_a_folder_is_that_of_one_command_at_a_time(tmp_path):
    folder = tmp_path / "run"
    with (
        hold_folder(folder, resume=False),
        pytest.raises(ConfigError, match="run: another command is running in it"),
    ):
        hold_folder(folder, resume=False)
    # What the last one left is in no later one's way.
    with hold_folder(folder, resume=False):
        pass

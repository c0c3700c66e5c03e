"""What does not belong into a checkpoint folder: pipes, links, manifests under another's name."""

import os

import pytest
from state_examples import Run

from yeto.errors import CheckpointError
from yeto.state import checkpoint_lock, inspect, open_checkpoint, read_checkpoint, write_checkpoint
from yeto.state.manifest import manifest_file


@pytest.fixture
def folder(tmp_path):
    run = Run().commit(4)
    write_checkpoint(tmp_path / "c", run.checkpoint())
    write_checkpoint(tmp_path / "c", run.commit().checkpoint())
    return tmp_path / "c"


def test_a_pipe_is_refused_and_not_waited_for(folder, tmp_path):
    fragment = folder / "fragments" / "f0001-v00000005.safetensors"
    fragment.unlink()
    os.mkfifo(fragment)
    for read in (read_checkpoint, lambda path: open_checkpoint(path).read_params(1)):
        with pytest.raises(CheckpointError, match=f"{fragment.name}: "):
            read(folder)
    assert any(
        f"{fragment.name}: cannot be read: not a file" in problem for problem in inspect(folder).problems
    )
    os.mkfifo(folder / manifest_file(6))
    os.mkfifo(tmp_path / "older")
    for read in (read_checkpoint, open_checkpoint, inspect):
        for path in (folder, tmp_path / "older"):
            with pytest.raises(CheckpointError):
                read(path)


def test_a_manifest_of_another_step_than_its_name_says_is_refused(folder):
    """A resume from it would remove what its name says is of an abandoned continuation: itself."""
    (folder / manifest_file(5)).rename(folder / manifest_file(7))
    says = f"{manifest_file(7)}: is the manifest of step 5; give it back its name, {manifest_file(5)}"
    for read in (read_checkpoint, open_checkpoint, inspect):
        with pytest.raises(CheckpointError, match=says):
            read(folder)
    (folder / manifest_file(7)).rename(folder / "copy.json")
    assert read_checkpoint(folder / "copy.json").step == 5
    assert read_checkpoint(folder).step == 4


def test_a_folder_is_held_by_whichever_link(folder, tmp_path):
    link, other = tmp_path / "link", tmp_path / "other"
    link.symlink_to(folder)
    other.symlink_to(link)
    for first in (folder, link, other):
        for second in (folder, link, other):
            with (
                checkpoint_lock(first),
                pytest.raises(CheckpointError, match="another syncer is using this checkpoint"),
                checkpoint_lock(second),
            ):
                pass

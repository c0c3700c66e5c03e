"""A save that is stopped between any two system calls, by a kill, a power cut, or a full disk."""

import errno
import shutil

import pytest
from state_examples import NO_SPACE, CountingDisk, Crash, Run, VolatileDisk, same

from yeto.errors import CheckpointError
from yeto.state import (
    final_marker_path,
    has_checkpoint,
    read_checkpoint,
    read_final_marker,
    read_fragment,
    read_manifest,
    remove_final_marker,
    remove_superseded,
    write_checkpoint,
    write_final_marker,
)
from yeto.state.manifest import decode_manifest


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "yeto-state.ckpt"


def saved(folder, last):
    """Return a run whose checkpoints up to ``last`` are on the disk."""
    run = Run()
    write_checkpoint(folder, run.checkpoint(), disk=CountingDisk())
    while run.step < last:
        write_checkpoint(folder, run.commit().checkpoint(), disk=CountingDisk())
    return run


def goes_on(folder, checkpoint):
    """Check that a run resumes, commits, and leaves nothing of the crash behind."""
    run = Run.resumed(checkpoint, timeline=1)
    remove_superseded(folder, run.step, disk=CountingDisk())
    write_checkpoint(folder, run.commit().checkpoint(), disk=CountingDisk())
    assert same(read_checkpoint(folder), run.checkpoint())
    assert not list(folder.rglob("*.tmp"))


def stops(tmp_path, make_disk, before, commits):
    """Yield (folder, checkpoint, disk, finished) of a save stopped at each of its calls in turn."""
    first = tmp_path / "first" / "yeto-state.ckpt"
    first.parent.mkdir()
    run = Run() if before is None else saved(first, before)
    checkpoint = run.commit(commits).checkpoint()
    stop_at, finished = 0, False
    while not finished:
        stop_at += 1
        shutil.copytree(first.parent, tmp_path / f"stop-{stop_at}")
        folder = tmp_path / f"stop-{stop_at}" / "yeto-state.ckpt"
        disk = make_disk(stop_at)
        try:
            write_checkpoint(folder, checkpoint, disk=disk)
            finished = disk.calls < stop_at
        except Crash:
            pass
        yield folder, checkpoint, disk, finished
    assert stop_at > 10


@pytest.mark.parametrize(("before", "commits"), [(0, 1), (5, 1), (5, 3), (5, 0)])
def test_a_kill_at_every_call_leaves_the_old_or_the_new(tmp_path, before, commits):
    seen = set()
    for folder, checkpoint, _, finished in stops(tmp_path, CountingDisk, before, commits):
        loaded = read_checkpoint(folder)
        assert loaded.notices == ()
        assert loaded.step in (before, before + commits)
        if finished:
            assert same(loaded, checkpoint)
        seen.add(loaded.step)
        goes_on(folder, loaded)
    assert seen == {before, before + commits}


def test_a_kill_in_the_very_first_save_leaves_none_or_all(tmp_path):
    seen = set()
    for folder, checkpoint, _, finished in stops(tmp_path, CountingDisk, None, 0):
        seen.add(has_checkpoint(folder))
        if has_checkpoint(folder):
            assert same(read_checkpoint(folder), checkpoint)
        else:
            assert not finished
            write_checkpoint(folder, checkpoint)
            assert same(read_checkpoint(folder), checkpoint)
            assert not list(folder.rglob("*.tmp"))
    assert seen == {False, True}


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_kill_while_an_abandoned_continuation_is_replaced(tmp_path, forgotten):
    first = tmp_path / "first"
    run = Run()
    while run.step < 8:
        write_checkpoint(first, run.commit().checkpoint(), keep_every=1, disk=CountingDisk())
    other = Run.resumed(read_checkpoint(first / "manifest-4.json"), timeline=1)
    if forgotten:
        remove_superseded(first, 4)
    checkpoint = other.commit(3).checkpoint()
    stop_at, finished = 0, False
    while not finished:
        stop_at += 1
        folder = tmp_path / f"stop-{stop_at}"
        shutil.copytree(first, folder)
        disk = CountingDisk(stop_at)
        try:
            write_checkpoint(folder, checkpoint, disk=disk)
            finished = disk.calls < stop_at
        except Crash:
            pass
        loaded = read_checkpoint(folder)
        assert loaded.notices == ()
        if finished:
            assert same(loaded, checkpoint)
        elif forgotten:
            assert loaded.step == 4 or same(loaded, checkpoint)


@pytest.mark.parametrize("names_survive", [False, True])
@pytest.mark.parametrize(("before", "commits"), [(5, 1), (5, 3)])
def test_a_power_cut_at_every_call_never_loses_what_was_durable(tmp_path, before, commits, names_survive):
    for folder, checkpoint, disk, finished in stops(tmp_path, VolatileDisk, before, commits):
        disk.cut_power(names_survive=names_survive)
        loaded = read_checkpoint(folder)
        assert loaded.step in (before, before + commits)
        if finished:
            assert same(loaded, checkpoint)
        goes_on(folder, loaded)


@pytest.mark.parametrize("stop_before", ["rename", "sync_folder"])
def test_the_power_cut_test_has_teeth(tmp_path, stop_before):
    """Without an fsync the simulated disk does lose the checkpoint: the test above proves something."""

    class Forgetful(VolatileDisk):
        def sync(self, descriptor):
            if stop_before == "rename":
                self.calls += 1
            else:
                super().sync(descriptor)

        def sync_folder(self, path):
            if stop_before == "rename":
                super().sync_folder(path)

    folder = tmp_path / "yeto-state.ckpt"
    run = saved(folder, 5)
    disk = Forgetful()
    write_checkpoint(folder, run.commit().checkpoint(), disk=disk)
    disk.cut_power(names_survive=stop_before == "rename")
    assert read_checkpoint(folder).step == 5


@pytest.mark.parametrize("error", [NO_SPACE, errno.EIO])
def test_a_refused_call_names_path_and_space_and_harms_nothing(tmp_path, error):
    first = tmp_path / "first"
    checkpoint = saved(first, 5).commit().checkpoint()
    refusals, call = [], 0
    while True:
        call += 1
        folder = tmp_path / f"refuse-{call}"
        shutil.copytree(first, folder)
        disk = CountingDisk(call, error)
        try:
            write_checkpoint(folder, checkpoint, disk=disk)
        except CheckpointError as refusal:
            refusals.append((folder, str(refusal)))
            assert read_checkpoint(folder).step in (5, 6)
        else:
            assert read_checkpoint(folder).step == 6
            if disk.calls < call:
                break
        # A full disk gets back what was half written.
        assert not list(folder.rglob("*.tmp"))
    assert len(refusals) > 10
    for folder, text in refusals:
        assert str(folder) in text
        assert "free" in text
        assert "the checkpoint of step 5 is intact" in text


def test_failing_to_tidy_up_is_said_and_does_not_stop_the_run(folder, caplog):
    run = saved(folder, 5)

    class Sticky(CountingDisk):
        def remove(self, path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    write_checkpoint(folder, run.commit().checkpoint(), disk=Sticky())
    assert read_checkpoint(folder).step == 6
    assert "could not tidy up after step 6" in caplog.text


def test_leftovers_of_a_crash_go_with_the_next_save(folder):
    run = saved(folder, 2)
    for name in ("manifest-3.json.tmp", "fragments/f0002-v00000003.safetensors.tmp"):
        (folder / name).write_bytes(b"half")
    (folder / "fragments/f0002-v00000003.safetensors").write_bytes(b"renamed, but no manifest names it")
    (folder / "notes.txt").write_text("mine")
    assert read_checkpoint(folder).step == 2
    write_checkpoint(folder, run.commit(5).checkpoint())
    assert not list(folder.rglob("*.tmp"))
    assert not (folder / "fragments/f0002-v00000003.safetensors").exists()
    assert (folder / "notes.txt").exists()


def test_leftovers_of_a_crash_go_with_the_next_resume(folder):
    """Also of a run that is at its end, and writes no checkpoint any more."""
    saved(folder, 5)
    for name in ("manifest.json.tmp", "fragments/f0002-v00000003.safetensors.tmp"):
        (folder / name).write_bytes(b"half")
    remove_superseded(folder, 5)
    assert not list(folder.rglob("*.tmp"))
    assert read_checkpoint(folder).step == 5


class TestFinalMarker:
    def test_exactly_two_lines(self, folder):
        assert read_final_marker(folder) is None
        write_final_marker(folder, 17)
        assert folder.with_name("yeto-state.ckpt.final").read_bytes() == (b"YETO_FINAL_V1\nglobal_step=17\n")
        assert read_final_marker(f"{folder}/") == 17

    def test_removal(self, folder):
        write_final_marker(folder, 1)
        remove_final_marker(folder)
        assert read_final_marker(folder) is None
        remove_final_marker(folder)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "YETO_FINAL_V1\n",
            "YETO_FINAL_V1\nglobal_step=1",
            "YETO_FINAL_V1\nglobal_step=01\n",
            "YETO_FINAL_V1\r\nglobal_step=1\r\n",
            "YETO_FINAL_V1\nglobal_step=1\n\n",
            "x" * 100,
        ],
    )
    def test_anything_else_is_no_marker(self, folder, text):
        folder.with_name("yeto-state.ckpt.final").write_bytes(text.encode())
        with pytest.raises(CheckpointError, match="final"):
            read_final_marker(folder)

    def test_atomic_at_every_call(self, folder):
        for stop_at in range(1, 8):  # create, two writes, fsync, rename, fsync of the folder; then none
            disk = VolatileDisk(stop_at)
            try:
                write_final_marker(folder, 3, disk=disk)
            except Crash:
                disk.cut_power(names_survive=stop_at % 2 == 0)
            assert read_final_marker(folder) in (None, 3)
        assert read_final_marker(folder) == 3

    def test_refusals_say_what_is_intact(self, folder):
        with pytest.raises(CheckpointError, match="the checkpoint is intact and not marked as final"):
            write_final_marker(folder, 3, disk=CountingDisk(2, NO_SPACE))


class TestAnyChangedByte:
    """No position is left out: in-memory where the reader allows it, so that all of them cost little."""

    @pytest.mark.parametrize("mask", [0x01, 0x80])
    def test_of_a_manifest(self, folder, mask):
        saved(folder, 2)
        path = folder / "manifest-2.json"
        data = bytearray(path.read_bytes())
        for place in range(len(data)):
            data[place] ^= mask
            with pytest.raises(CheckpointError, match=r"manifest-2\.json"):
                decode_manifest(bytes(data), str(path))
            data[place] ^= mask
        assert decode_manifest(bytes(data), str(path)).step == 2

    @pytest.mark.parametrize("mask", [0x01, 0x80])
    def test_of_a_fragment(self, folder, mask):
        saved(folder, 2)
        entry = read_manifest(folder).fragments[1]
        path = folder / entry.file
        data = bytearray(path.read_bytes())
        for place in range(len(data)):
            data[place] ^= mask
            path.write_bytes(data)
            with pytest.raises(CheckpointError, match="f0001-v00000002"):
                read_fragment(folder, entry)
            data[place] ^= mask
        path.write_bytes(data)
        assert read_fragment(folder, entry).params_digest == entry.params_digest

    def test_of_the_final_marker(self, folder):
        write_final_marker(folder, 23)
        path = final_marker_path(folder)
        data = bytearray(path.read_bytes())
        digits = data.index(b"23")
        for place in range(len(data)):
            data[place] ^= 0x01
            path.write_bytes(data)
            if digits <= place < digits + 2:
                assert read_final_marker(folder) != 23  # a number still: it is not the checkpoint's
            else:
                with pytest.raises(CheckpointError, match=r"\.final"):
                    read_final_marker(folder)
            data[place] ^= 0x01

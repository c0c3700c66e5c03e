"""The mirror: what is copied, in which order, what a death leaves, and the way back."""

import os
import shutil
import signal
import subprocess
import sys
import threading

import attrs
import pytest
import trio
from filelock import FileLock
from mirrored_run import (
    CHECKPOINT,
    TAPE,
    TOTAL,
    BreakingStore,
    Killed,
    brought_back,
    make_stages,
    objects,
    pusher,
    same_run,
)
from syncer_runs import fakes, make_config, on_tape, running, until

from yeto.core import decisions as de
from yeto.errors import CheckpointError, ConfigError, TapeError
from yeto.fleet import mirror, mirror_tape
from yeto.fleet.mirror_copies import read_index
from yeto.fleet.mirror_push import OtherWriter, held_folder
from yeto.fleet.store import StorageError, Store
from yeto.state import read_checkpoint
from yeto.state.digested import encode_digested
from yeto.state.manifest import manifest_steps, read_manifest

HERE = "breaking://mirror/run"


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """Three moments of one run: some steps done, some more (in another start), the end."""
    return make_stages(tmp_path_factory.mktemp("stages"), [2, 8])


@pytest.fixture(autouse=True)
def store():
    BreakingStore.reset()
    return BreakingStore


@pytest.fixture
def live(tmp_path, stages):
    """A folder that can be changed, and what puts a stage there in place of what it holds."""
    place = tmp_path / "live"

    def become(number):
        # As a syncer does: files that have the same contents stay as they are, the tape keeps its inode.
        place.mkdir(exist_ok=True)
        shutil.rmtree(place / CHECKPOINT, ignore_errors=True)
        shutil.copytree(stages[number] / CHECKPOINT, place / CHECKPOINT)
        with (place / TAPE).open("r+b" if (place / TAPE).exists() else "wb") as tape:
            tape.write((stages[number] / TAPE).read_bytes())
            tape.truncate()
        return place

    return become


@pytest.mark.parametrize("kind", ["folder", "store"])
def test_what_is_copied_comes_back_and_nothing_is_copied_twice(tmp_path, stages, live, kind):
    uri = HERE if kind == "store" else str(tmp_path / "mirror")
    place = live(0)
    process = pusher(uri, place)
    first = process.push()
    manifest = read_manifest(place / CHECKPOINT)
    assert (first.index.number, first.index.step) == (1, manifest.step)
    assert first.objects == len(manifest.fragments) + 2  # and the manifest, and one segment of the tape
    assert first.index.tape_bytes == (place / TAPE).stat().st_size
    assert process.push() is None
    assert pusher(uri, place).push() is None, "nor by a process that was started anew"
    assert brought_back(uri, tmp_path / "back").passed_over == ()
    assert same_run(tmp_path / "back", place)

    before = objects(uri)
    if kind == "folder":
        # What a writer left that was killed.
        fragment = next((tmp_path / "mirror" / "fragments").iterdir())
        fragment.with_name(f"{fragment.name}.part").write_bytes(b"half")
        pusher(uri, place).push()
        assert not list((tmp_path / "mirror").rglob("*.part"))
    live(1)
    second = process.push()
    later = read_manifest(place / CHECKPOINT)
    moved = [new for new, old in zip(later.fragments, manifest.fragments, strict=True) if new != old]
    assert second.objects == len(moved) + 2
    assert second.index.segments[0] == first.index.segments[0]
    assert {name: data for name, data in objects(uri).items() if name in before} == before
    assert brought_back(uri, tmp_path / "again").index == second.index
    assert same_run(tmp_path / "again", place)

    live(2)
    third = pusher(uri, place).push()
    assert third.index.number == 3
    # Two copies are kept, and of the first only what they have in common with it.
    left = objects(uri)
    assert [name for name in left if name.startswith("copies/")] == [
        "copies/000000000002.json",
        "copies/000000000003.json",
    ]
    named = {entry.params_digest for m in (later, read_manifest(place / CHECKPOINT)) for entry in m.fragments}
    assert {name.split("-")[2] for name in left if name.startswith("fragments/")} == named
    assert brought_back(uri, tmp_path / "end").records > 0
    assert same_run(tmp_path / "end", stages[2])


def test_the_index_is_written_last_and_tidied_up_is_after_it(live, store):
    process = pusher(HERE, live(0))
    process.push()
    folders = [name.split("/")[-2] for name in store.writes]
    assert folders == sorted(folders, key=["fragments", "manifests", "tape", "copies"].index)
    for number in (1, 2):
        store.writes.clear()
        live(number)
        process.push()
    last = max(n for n, name in enumerate(store.writes) if "/copies/000000000003" in name)
    assert "/copies/000000000001" in store.writes[last + 1], "an index goes before what it names"
    assert len(store.writes) > last + 2


def test_a_death_at_any_write_leaves_a_copy_that_can_be_restored(tmp_path, stages, live, store):
    """Wherever the n-th write would be: the old copy, or the new one, and the next push makes the new one."""
    kept, outcomes = {}, set()
    place = live(0)
    pusher(HERE, place).push()
    live(1)
    pusher(HERE, place).push()
    kept = dict(store.store)
    live(2)
    for at in range(200):
        store.store.clear()
        store.store.update(kept)
        store.writes, store.kill_at = [], at
        died = True
        try:
            pusher(HERE, place).push()
            died = False
        except Killed:
            pass
        store.kill_at = None
        back = tmp_path / f"back-{at}"
        restored = brought_back(HERE, back)
        assert restored.passed_over == ()
        assert same_run(back, stages[restored.index.number - 1])
        outcomes.add(restored.index.number)
        shutil.rmtree(back)
        again = pusher(HERE, place).push()
        assert (again is None) == (restored.index.number == 3)
        if died and again is not None:
            # What the first one copied is not copied again.
            written = store.writes[:at]
            assert not set(written) & set(store.writes[at:])
        assert brought_back(HERE, back).index.number == 3
        assert same_run(back, stages[2])
        shutil.rmtree(back)
        if not died:
            break
    assert not died
    assert at > 8
    assert outcomes == {2, 3}
    assert not held_folder(place / CHECKPOINT).exists()


@pytest.mark.parametrize("folder", ["fragments", "manifests", "tape", "copies"])
@pytest.mark.parametrize("harm", ["changed", "short", "gone"])
def test_a_damaged_copy_is_passed_over_with_its_reason(tmp_path, stages, live, store, folder, harm):
    place = live(0)
    process = pusher(HERE, place)
    process.push()
    before = set(objects(HERE))
    live(1)
    process.push()
    victim = next(name for name in sorted(set(objects(HERE)) - before) if name.startswith(folder))
    data = bytearray(objects(HERE)[victim])
    data[len(data) // 2] ^= 1
    store = Store(HERE)
    if harm == "gone":
        store.remove(victim)
    else:
        store.put(victim, bytes(data if harm == "changed" else data[:-5]))
    said = []
    restored = brought_back(HERE, tmp_path / "back", said.append)
    if folder == "copies" and harm == "gone":
        assert (restored.index.number, said) == (1, [])
    else:
        (sentence,) = restored.passed_over
        assert said == [sentence]
        assert sentence.startswith("copy 2 is passed over: ")
        assert victim in sentence
    assert same_run(tmp_path / "back", stages[0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"number": 7}, "is of copy 7"),
        ({"step": -1}, "step -1 is negative"),
        ({"step": "2"}, "expected int, found str"),
        ({"manifest_digest": "../../etc/passwd"}, "manifest_digest is not 32 hex digits"),
        ({"segments": ()}, "there is no tape"),
        ({"segments": ({"start": 5, "bytes": 1, "digest": "0" * 32},)}, "does not follow byte 0"),
        ({"segments": ({"start": 0, "bytes": 1 << 40, "digest": "0" * 32},)}, "are too many"),
        ({"segments": ({"start": 0, "bytes": 9, "digest": "/../x"},)}, "no digest of 32 hex digits"),
        ({"segments": ({"start": 0, "bytes": 0, "digest": "0" * 32},)}, "does not follow byte 0"),
        ({"format_version": 2}, "format version 2; this software reads 1"),
        ({"more": 1}, "more"),
    ],
)
def test_an_index_that_says_what_none_can_say_is_passed_over(tmp_path, stages, live, wrong, message):
    process = pusher(HERE, live(0))
    process.push()
    live(1)
    index = attrs.asdict(process.push().index)
    Store(HERE).put("copies/000000000002.json", encode_digested(index | wrong))
    restored = brought_back(HERE, tmp_path / "back")
    (sentence,) = restored.passed_over
    assert message in sentence
    assert same_run(tmp_path / "back", stages[0])
    # A push takes the place after it, and goes on.
    assert pusher(HERE, live(2)).push().index.number == 3


@pytest.mark.timeout(60)
@pytest.mark.parametrize("folder", ["fragments", "manifests", "tape"])
@pytest.mark.parametrize("harm", ["pipe", "device", "folder", "link to itself"])
def test_what_is_no_file_is_passed_over_and_copied_anew(tmp_path, stages, live, folder, harm):
    """Whoever waited for the end of a pipe or a device would wait for ever."""
    there = tmp_path / "mirror"
    pusher(str(there), live(0)).push()
    before = set(objects(str(there)))
    pusher(str(there), live(1)).push()
    victim = next(
        there / name for name in sorted(set(objects(str(there))) - before) if name.startswith(folder)
    )
    victim.unlink()
    match harm:
        case "pipe":
            os.mkfifo(victim)
        case "device":
            victim.symlink_to("/dev/zero")
        case "folder":
            victim.mkdir()
        case _:
            victim.symlink_to(victim)
    restored = brought_back(str(there), tmp_path / "back")
    assert f"{folder}/{victim.name}" in restored.passed_over[0]
    assert same_run(tmp_path / "back", stages[0])
    if harm != "folder":  # which nothing can take the place of
        assert pusher(str(there), live(2)).push().index.number == 3
        assert brought_back(str(there), tmp_path / "again").passed_over == ()
        assert same_run(tmp_path / "again", stages[2])


def test_a_piece_of_the_tape_that_was_taken_away_is_copied_anew(tmp_path, stages, live):
    """Else no copy would ever be whole again."""
    pusher(HERE, live(0)).push()
    (piece,) = [name for name in objects(HERE) if name.startswith("tape")]
    Store(HERE).remove(piece)
    pusher(HERE, live(1)).push()
    assert brought_back(HERE, tmp_path / "back").passed_over == ()
    assert same_run(tmp_path / "back", stages[1])


def test_what_is_somebody_elses_stays(tmp_path, stages, live):
    """Also the files of a checkpoint, which has folders of the same names."""
    there = tmp_path / "mirror"
    theirs = ["tape/song.mp3", "fragments/poem.txt", "fragments/half.part", "manifests/x.json", "copies/list"]
    for name in theirs:
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_text("mine")
    for number in range(3):
        pusher(str(there), live(number)).push()
    assert {(there / name).read_text() for name in theirs} == {"mine"}
    place = live(0)
    pusher(str(place / CHECKPOINT), place).push()
    assert same_run(place, stages[0])


def test_places_that_are_in_each_others_way_are_refused(tmp_path, live, capsys, monkeypatch):
    place = live(0)
    files = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    monkeypatch.chdir(place)
    (place / "link").symlink_to(CHECKPOINT)
    (place / "loop").symlink_to("loop")
    to = "which is not for it; name another folder"
    for flags, message in (
        ({"to": CHECKPOINT}, to),
        ({"to": f"{CHECKPOINT}/mirror"}, to),
        ({"to": "link"}, to),
        ({"to": f"file://{place}/{CHECKPOINT}.restoring"}, to),
        ({"to": f".{CHECKPOINT}.held"}, to),
        ({"event-tape": f"{CHECKPOINT}/events.jsonl"}, "is in the checkpoint's folder"),
        ({"event-tape": CHECKPOINT}, "is in the checkpoint's folder"),
        ({"checkpoint": "."}, "--checkpoint .: has no name of its own"),
        ({"event-tape": "/"}, "--event-tape /: has no name of its own"),
        ({"to": ""}, "--to is empty"),
    ):
        words = {"checkpoint": CHECKPOINT, "event-tape": TAPE, "to": "mirror"} | flags
        for what in ("push", "restore"):
            assert mirror.main([what, *(f"--{name}={value}" for name, value in words.items())]) == 2
            error = capsys.readouterr().err
            assert message in error
            assert error.count("\n") == 1
    words = [f"--checkpoint={CHECKPOINT}", f"--event-tape={TAPE}", "--to=loop"]
    assert mirror.main(["restore", *words]) == 0, "there is a checkpoint already"
    assert {path: path.read_bytes() for path in files} == files


def test_only_one_restores_at_a_time(tmp_path, live, capsys):
    pusher(str(tmp_path / "mirror"), live(0)).push()
    checkpoint = tmp_path / "new" / CHECKPOINT
    words = [f"--checkpoint={checkpoint}", f"--event-tape={tmp_path / 'new' / TAPE}"]
    words = ["restore", *words, f"--to={tmp_path / 'mirror'}"]
    with FileLock(f"{checkpoint}.restore.lock"):
        assert mirror.main(words) == 2
    assert "another process restores it already" in capsys.readouterr().err
    assert not checkpoint.exists()
    assert mirror.main(words) == 0


def test_a_restore_that_is_interrupted_says_so(tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(mirror, "restore", interrupted)
    words = [f"--checkpoint={tmp_path / CHECKPOINT}", f"--event-tape={tmp_path / TAPE}", f"--to={HERE}"]
    assert mirror.main(["restore", *words]) == 130
    assert capsys.readouterr().err == "yeto: interrupted; the same command begins anew\n"


def test_that_there_is_nothing_to_copy_is_said_once(tmp_path, capsys):
    class Stopping(threading.Event):
        looks = 0

        def wait(self, timeout=None):
            self.looks += 1
            if self.looks == 3:
                self.set()
            return self.is_set()

    assert mirror.push_until(pusher(HERE, tmp_path), Stopping(), 7.0) == 0
    assert capsys.readouterr().out == "mirror: nothing new to copy yet; looking every 7 s\n"


def test_with_copies_of_which_none_is_whole_nobody_may_begin_anew(tmp_path, live):
    pusher(HERE, live(0)).push()
    name = next(name for name in objects(HERE) if name.startswith("fragments"))
    Store(HERE).remove(name)
    with pytest.raises(CheckpointError, match=r"there are copies and none can be used: copy 1 .*fragments/"):
        brought_back(HERE, tmp_path / "back")
    assert os.listdir(tmp_path / "back") == []


def test_nothing_to_restore_and_nothing_to_copy(tmp_path, live, store):
    said = []
    assert brought_back(HERE, tmp_path / "back", said.append) is None
    assert "there is nothing to restore" in said[0]
    # Also when the first copy was never completed.
    place = live(0)
    store.kill_at = 3
    with pytest.raises(Killed):
        pusher(HERE, place).push()
    assert brought_back(HERE, tmp_path / "back", said.append) is None
    store.kill_at = None
    for missing in (CHECKPOINT, TAPE):
        empty = tmp_path / f"without-{missing}"
        shutil.copytree(place, empty, ignore=shutil.ignore_patterns(missing))
        assert pusher(HERE, empty).push() is None
    assert pusher(HERE, tmp_path / "nowhere").push() is None


def test_what_is_on_the_disk_is_never_replaced(tmp_path, live):
    place = live(0)
    pusher(HERE, place).push()
    live(1)
    files = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    said = []
    assert brought_back(HERE, place, said.append) is None
    assert "there is a checkpoint already" in said[0]
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == files
    shutil.rmtree(place / CHECKPOINT)
    with pytest.raises(CheckpointError, match="move the tape away"):
        brought_back(HERE, place)
    (place / CHECKPOINT).write_text("no folder\n")
    (place / TAPE).unlink()
    assert brought_back(HERE, place) is None  # an older single file may have this name
    (place / CHECKPOINT).unlink()
    (place / CHECKPOINT).mkdir()
    with pytest.raises(CheckpointError, match="is in the way and holds no checkpoint"):
        brought_back(HERE, place)


def test_a_restore_that_was_cut_off_is_ended_by_the_next(tmp_path, stages, live, monkeypatch):
    pusher(HERE, live(0)).push()
    back, rename = tmp_path / "back", os.rename
    for survives in range(3):
        calls = []

        def breaking(source, target, calls=calls, survives=survives):
            if len(calls) == survives:
                raise Killed
            calls.append(target)
            rename(source, target)

        monkeypatch.setattr("yeto.fleet.mirror_restore.os.rename", breaking)
        shutil.rmtree(back, ignore_errors=True)
        if survives < 2:
            with pytest.raises(Killed):
                brought_back(HERE, back)
            monkeypatch.undo()
            brought_back(HERE, back)
        else:
            brought_back(HERE, back)
        assert same_run(back, stages[0])
        assert sorted(path.name for path in back.iterdir()) == [TAPE, CHECKPOINT]


def test_one_place_is_for_one_run_and_one_writer(tmp_path, live, stages):
    place = live(0)
    first = pusher(HERE, place)
    first.push()
    other = make_stages(tmp_path / "other", [1])[0]
    with pytest.raises(ConfigError, match=r"holds the mirror of another run \(session "):
        pusher(HERE, other).push()
    assert brought_back(HERE, tmp_path / "back").index.number == 1
    # A second head that goes on from the same files.
    second = pusher(HERE, place)
    live(1)
    second.push()
    live(2)
    with pytest.raises(OtherWriter, match="somebody else wrote copy 2 there, the last of this process was 1"):
        first.push()
    assert read_index(Store(HERE), 2).step == read_manifest(stages[1] / CHECKPOINT).step


def test_an_answer_that_was_lost_is_no_other_writer(live, store):
    place = live(0)
    process = pusher(HERE, place)
    process.push()

    def lose_the_answer(path):
        if path.endswith("/copies/000000000002.json"):
            store.on_write = None
            fs = Store(HERE)._fs
            fs.pipe_file(path, store.data)
            raise TimeoutError("no answer")

    live(1)
    real = BreakingStore.pipe_file

    def pipe_file(self, path, value, *rest, **options):
        store.data = value
        return real(self, path, value, *rest, **options)

    store.pipe_file, store.on_write = pipe_file, lose_the_answer
    try:
        with pytest.raises(StorageError, match="no answer"):
            process.push()
    finally:
        store.pipe_file = real
    assert read_index(Store(HERE), 2).number == 2
    live(2)
    assert process.push().index.number == 3


def test_a_store_that_does_not_answer_is_asked_again_and_that_is_told(
    tmp_path, stages, live, store, monkeypatch, capsys
):
    monkeypatch.setattr(mirror, "_wait_seconds", lambda failures: 0.001 * failures)
    store.refusals = [TimeoutError("busy"), ConnectionResetError("reset"), OSError("5xx")]
    stop = threading.Event()
    stop.set()
    assert mirror.push_until(pusher(HERE, live(0)), stop, 10.0) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[0] == (
        "mirror: breaking://mirror/run: cannot list copies: TimeoutError: busy; trying again in 0.001 s"
    )
    assert lines[3].startswith("mirror: copy 1: step ")
    # A restore, too; what never will be is not asked for again.
    store.refusals = [TimeoutError("busy")] * 2
    words = [f"--checkpoint={tmp_path / CHECKPOINT}", f"--event-tape={tmp_path / TAPE}", f"--to={HERE}"]
    assert mirror.main(["restore", *words]) == 0
    assert same_run(tmp_path, stages[0])
    assert capsys.readouterr().out.count("trying again") == 2
    store.refusals = [PermissionError("no key")]
    live(1)
    words = [f"--checkpoint={tmp_path / 'live' / CHECKPOINT}", *words[1:]]
    assert mirror.main(["push", *words]) == 1
    assert "PermissionError: no key" in capsys.readouterr().err
    store.refusals = [TimeoutError("busy")] * 100
    with pytest.raises(StorageError, match="busy"):
        mirror.push_until(pusher(HERE, live(1)), stop, 10.0)


def test_a_version_that_was_committed_anew_does_not_meet_its_predecessor(tmp_path, live, stages):
    """After a fall back the same step has other contents, and the tape another end: both come back."""
    place = live(0)
    process = pusher(HERE, place)
    process.push()
    live(1)
    process.push()
    # A twin of the run went on from its first stage: the same steps, other values.
    twin = tmp_path / "twin"
    (twin / "live").mkdir(parents=True)
    shutil.copytree(stages[0], twin / "live", dirs_exist_ok=True)
    for lock in (twin / "live").glob("*.lock"):
        lock.unlink()

    async def go_on():
        config = make_config(twin / "live", resume=True, total_steps=TOTAL)
        learners = fakes(reconnects=True, c_steps=9)
        async with running(config, *learners) as run:
            await until(on_tape(config, de.RoundCommitted, 12))
            run.stop()
            await run.ended.wait()

    trio.run(go_on)
    shutil.rmtree(place / CHECKPOINT)
    shutil.copytree(twin / "live" / CHECKPOINT, place / CHECKPOINT)
    with (place / TAPE).open("r+b") as tape:
        tape.write((twin / "live" / TAPE).read_bytes())
        tape.truncate()
    for again in (process, pusher(HERE, place)):
        again.push()
        shutil.rmtree(tmp_path / "back", ignore_errors=True)
        brought_back(HERE, tmp_path / "back")
        assert same_run(tmp_path / "back", twin / "live")


def test_a_file_that_vanishes_while_it_is_copied(tmp_path, stages, live, store, monkeypatch):
    place = live(0)
    process = pusher(HERE, place)

    def replace(path):
        if "/fragments/" in path:
            store.on_write = None
            live(1)

    store.on_write = replace
    assert process.push().index.step == read_manifest(stages[0] / CHECKPOINT).step, "they have a second name"

    def no_links(source, target):
        raise PermissionError("no hard links here")

    monkeypatch.setattr("yeto.fleet.mirror_push.os.link", no_links)
    BreakingStore.reset()
    live(0)
    store.on_write = replace
    pushed = pusher(HERE, place).push()
    assert pushed.index.step == read_manifest(stages[1] / CHECKPOINT).step, "the newer one is taken"
    brought_back(HERE, tmp_path / "back")
    assert same_run(tmp_path / "back", stages[1])


def test_what_is_damaged_here_does_not_get_there(tmp_path, live):
    place = live(0)
    process = pusher(HERE, place)
    process.push()
    live(1)
    entry = read_manifest(place / CHECKPOINT).fragments[1]
    path = place / CHECKPOINT / entry.file
    good = path.read_bytes()
    path.write_bytes(good[:-3] + bytes([good[-3] ^ 1]) + good[-2:])
    with pytest.raises(CheckpointError, match=f"{path.name}: digest of momentum"):
        process.push()
    path.write_bytes(good)
    lines = (place / TAPE).read_bytes().splitlines(keepends=True)
    middle = len(lines) // 2
    lines[middle] = lines[middle].replace(b'"at":', b'"at": ', 1)
    (place / TAPE).write_bytes(b"".join(lines))
    with pytest.raises(TapeError, match=f"line {middle + 1}"):
        process.push()
    assert brought_back(HERE, tmp_path / "back").index.number == 1


def test_the_tape_is_copied_to_its_last_whole_line_and_a_checkpoint_waits_for_its_record(
    tmp_path, stages, live
):
    whole = (stages[1] / TAPE).read_bytes()
    place = live(1)
    manifest = read_manifest(place / CHECKPOINT)
    lines = whole.splitlines(keepends=True)
    # Without the record that orders it, the newest checkpoint is not taken: the one before is.
    (place / TAPE).write_bytes(b"".join(lines[: manifest.tape_seq]) + lines[manifest.tape_seq][:30])
    process = pusher(HERE, place)
    newest, before = manifest_steps(place / CHECKPOINT)
    assert (newest, process.push().index.step) == (manifest.step, before)
    (place / TAPE).write_bytes(b"".join(lines[: manifest.tape_seq + 1]))
    pushed = process.push()
    assert (pushed.index.step, pushed.index.tape_bytes) == (
        manifest.step,
        sum(map(len, lines[: manifest.tape_seq + 1])),
    )
    brought_back(HERE, tmp_path / "back")
    assert (tmp_path / "back" / TAPE).read_bytes() == b"".join(lines[: manifest.tape_seq + 1])


def test_a_long_tape_is_cut_at_its_lines_and_many_short_pieces_become_one(tmp_path, stages, monkeypatch):
    monkeypatch.setattr(mirror_tape, "SEGMENT_BYTES", 2000)
    monkeypatch.setattr(mirror_tape, "SMALL_SEGMENTS_MAX", 4)
    data = (stages[2] / TAPE).read_bytes()
    lines = data.splitlines(keepends=True)
    assert max(map(len, lines)) > 2000 / 4
    path = tmp_path / TAPE
    tape = mirror_tape.LocalTape(path)
    segments = ()
    for count in [*range(5, 60, 5), len(lines)]:
        path.open("r+b" if path.exists() else "wb").close()
        with path.open("r+b") as file:
            file.write(b"".join(lines[:count]) + lines[min(count, len(lines) - 1)][:-1])
        tape.read_on()
        new = list(tape.cut(segments))
        for segment, text in new:
            assert text == data[segment.start : segment.end]
            assert text.endswith(b"\n")
        segments = (*mirror_tape.kept(segments), *(segment for segment, _ in new))
        assert [s.start for s in segments] == [0, *(s.end for s in segments[:-1])]
        assert segments[-1].end == tape.end == sum(map(len, lines[:count]))
        small = [s for s in segments if s.bytes < 1000]
        assert len(small) <= 4
        assert tape.unchanged(segments) == segments
        assert list(tape.cut(segments)) == []
    assert len(segments) > 5


def test_the_process_copies_until_it_is_told_to_stop_and_then_once_more(tmp_path, stages, live):
    place, there = live(0), tmp_path / "mirror"
    words = [sys.executable, "-m", "yeto.fleet.mirror", "push", f"--checkpoint={place / CHECKPOINT}"]
    words += [f"--event-tape={place / TAPE}", f"--to={there}", "--interval-s=600"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout.readline().startswith("mirror: copy 1: step ")
        done = subprocess.run(words, capture_output=True, text=True, timeout=200)
        assert done.returncode == 2
        assert "another process mirrors it already" in done.stderr
        live(2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(200) == 0
        assert process.stdout.read().startswith(f"mirror: copy 2: step {TOTAL}, ")
    finally:
        process.kill()
        process.stdout.close()
    assert brought_back(str(there), tmp_path / "back").index.number == 2
    assert same_run(tmp_path / "back", stages[2])
    assert read_checkpoint(tmp_path / "back" / CHECKPOINT).step == TOTAL


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to=nosuch://x"], "--to nosuch://x: Protocol not known: nosuch"),
        (["--to=.", "--interval-s=0"], "--interval-s 0: must be above 0 and at most 86400"),
        (["--to=.", "--interval-s=nan"], "--interval-s nan: must be above 0"),
        (["--to=.", "--interval-s=1e300"], "--interval-s 1e+300: must be above 0"),
        (["--to=.", "--interval-s=x"], "argument --interval-s: invalid float value: 'x' (see python -m"),
        ([], "the following arguments are required: --to (see python -m yeto.fleet.mirror --help)"),
    ],
)
def test_wrong_usage(tmp_path, capsys, words, message):
    place = [f"--checkpoint={tmp_path / CHECKPOINT}", f"--event-tape={tmp_path / TAPE}"]
    try:
        code = mirror.main(["push", *place, *words])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr().err
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith("yeto: ")
    assert message in said

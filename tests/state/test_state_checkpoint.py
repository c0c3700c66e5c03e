"""Checkpoints written and read back: what is on the disk, what is refused, what is fallen back from."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch
from older_files import older_bytes
from safetensors import safe_open
from state_examples import COUNT, LAYOUT, CountingDisk, Run, flip, same, version

from yeto.errors import CheckpointError
from yeto.state import (
    FragmentStore,
    FragmentVersion,
    LedgerEntry,
    Manifest,
    has_checkpoint,
    inspect,
    read_checkpoint,
    read_fragment,
    read_manifest,
    remove_superseded,
    require_space,
    write_checkpoint,
)
from yeto.state.manifest import ManifestFragment, decode_manifest, encode_manifest, version_at
from yeto.wire.digest import digest
from yeto.wire.hello import HelloLayout


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "yeto-state.ckpt"


@pytest.fixture
def run():
    return Run()


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def write_steps(folder, run, last, **options):
    write_checkpoint(folder, run.checkpoint(), **options)
    while run.step < last:
        write_checkpoint(folder, run.commit().checkpoint(), **options)


class TestStore:
    def test_holds_immutable_versions_by_reference(self):
        store = FragmentStore(2)
        assert store.missing() == (0, 1)
        with pytest.raises(KeyError, match="fragment 1 is not initialised"):
            store.current(1)
        first = version(1, 0)
        store.put(first)
        assert store.missing() == (0,)
        with pytest.raises(KeyError):
            store.snapshot()
        store.put(version(0, 0))
        snapshot = store.snapshot()
        store.put(version(1, 2))
        assert snapshot[1] is first
        assert store.current(1).version == 2

    def test_versions_ascend(self):
        store = FragmentStore(1)
        store.put(version(0, 0))
        store.put(version(0, 0, timeline=1))  # initialised once more before the first commit
        store.put(version(0, 1))
        with pytest.raises(AssertionError, match="does not follow"):
            store.put(version(0, 1))


class TestRoundTrip:
    @pytest.mark.parametrize("commits", [0, 1, 2, 3, 7])
    def test_what_is_written_is_read(self, folder, run, commits):
        checkpoint = run.commit(commits).checkpoint()
        written = write_checkpoint(folder, checkpoint)
        loaded = read_checkpoint(folder)
        assert same(loaded, checkpoint)
        assert loaded.notices == ()
        assert loaded.modes == tuple(part.mode for part in LAYOUT.fragments)
        assert HelloLayout.of(loaded.layout) == HelloLayout.of(LAYOUT)
        assert written == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    def test_all_optional_facts(self, folder, run):
        checkpoint = run.commit(4).checkpoint(
            profile="ef" * 32, finish_target=9, training_manifest=None, tape_file=None, tape_seq=None
        )
        write_checkpoint(str(folder), checkpoint)
        assert same(read_checkpoint(str(folder)), checkpoint)

    def test_any_safetensors_reader_opens_a_fragment(self, folder, run):
        checkpoint = run.commit(5).checkpoint()
        write_checkpoint(folder, checkpoint)
        for part in checkpoint.fragments:
            path = folder / f"fragments/f{part.fragment:04d}-v{part.version:08d}.safetensors"
            with safe_open(path, framework="pt") as file:
                assert sorted(file.keys()) == ["momentum", "params"]
                assert torch.equal(file.get_tensor("params"), part.params)
                assert torch.equal(file.get_tensor("momentum"), part.momentum)

    def test_the_files_are_where_the_format_says(self, folder, run):
        write_steps(folder, run, 1)
        assert names(folder) == [
            "fragments/f0000-v00000000.safetensors",
            "fragments/f0000-v00000001.safetensors",
            "fragments/f0001-v00000000.safetensors",
            "fragments/f0002-v00000000.safetensors",
            "manifest-0.json",
            "manifest-1.json",
            "manifest.json",
        ]
        assert (folder / "manifest.json").read_bytes() == (folder / "manifest-1.json").read_bytes()
        stated = json.loads((folder / "manifest.json").read_text())
        assert stated["iso_backend"] == 0
        assert stated["layout_fingerprint"] == "ab" * 32
        assert stated["fragments"][2]["mode"] == "iso"

    def test_the_newest_is_read_and_any_can_be_named(self, folder, run):
        write_steps(folder, run, 11)
        assert read_checkpoint(folder).step == 11
        assert read_checkpoint(folder / "manifest-10.json").step == 10
        assert read_manifest(folder).step == 11

    def test_fragments_can_be_read_one_at_a_time(self, folder, run):
        write_checkpoint(folder, run.commit(2).checkpoint())
        manifest = read_manifest(folder)
        arrays = read_fragment(folder, manifest.fragments[1])
        assert torch.equal(torch.from_numpy(arrays.params), run.store.current(1).params)

    def test_the_manifest_is_read_without_torch(self, folder, run):
        write_checkpoint(folder, run.checkpoint())
        script = (
            "import sys; from yeto.state import read_manifest; from pathlib import Path\n"
            f"assert read_manifest(Path({str(folder)!r})).step == 0\n"
            "assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", script], check=True, timeout=200)

    def test_the_digest_names_the_checkpoint(self, folder, run):
        write_checkpoint(folder, run.checkpoint())
        digest_line = (folder / "manifest.json").read_text().splitlines()[-2]
        assert read_checkpoint(folder).digest in digest_line


class TestIncremental:
    def test_a_commit_costs_one_fragment(self, folder, run):
        write_checkpoint(folder, run.checkpoint())
        for _ in range(8):
            disk = CountingDisk()
            step = run.commit().step
            write_checkpoint(folder, run.checkpoint(), disk=disk)
            assert disk.created == [
                f"f{(step - 1) % COUNT:04d}-v{step:08d}.safetensors.tmp",
                f"manifest-{step}.json.tmp",
                "manifest.json.tmp",
            ]

    def test_coalesced_commits_cost_what_changed(self, folder, run):
        write_checkpoint(folder, run.checkpoint())
        disk = CountingDisk()
        write_checkpoint(folder, run.commit(2).checkpoint(), disk=disk)
        assert len(disk.created) == 4
        disk = CountingDisk()
        write_checkpoint(folder, run.commit(COUNT * 2).checkpoint(), disk=disk)
        assert len(disk.created) == COUNT + 2

    def test_the_same_step_again_writes_no_tensor(self, folder, run):
        write_checkpoint(folder, run.commit(2).checkpoint())
        disk = CountingDisk()
        write_checkpoint(folder, run.checkpoint(finish_target=5), disk=disk)
        assert disk.created == ["manifest-2.json.tmp", "manifest.json.tmp"]
        assert read_checkpoint(folder).finish_target == 5

    def test_the_newest_two_are_kept_whole_and_nothing_else(self, folder, run):
        write_steps(folder, run, 20)
        assert [name for name in names(folder) if name.startswith("manifest-")] == [
            "manifest-19.json",
            "manifest-20.json",
        ]
        assert len(names(folder)) == 3 + COUNT + 1
        assert read_checkpoint(folder / "manifest-19.json").step == 19

    def test_keep_every(self, folder, run):
        write_steps(folder, run, 20, keep_every=6)
        kept = {int(name[9:-5]) for name in names(folder) if name.startswith("manifest-")}
        assert kept == {0, 6, 12, 18, 19, 20}
        for step in kept:
            assert read_checkpoint(folder / f"manifest-{step}.json").step == step

    def test_a_lost_fragment_is_written_again(self, folder, run):
        write_checkpoint(folder, run.commit(3).checkpoint())
        (folder / "fragments/f0001-v00000002.safetensors").unlink()
        write_checkpoint(folder, run.commit().checkpoint())
        assert same(read_checkpoint(folder), run.checkpoint())


class TestTimelines:
    def test_a_resumed_run_never_mixes_with_what_it_abandoned(self, folder, run):
        write_steps(folder, run, 8, keep_every=1)
        other = Run.resumed(read_checkpoint(folder / "manifest-4.json"), timeline=1)
        remove_superseded(folder, 4)
        assert read_checkpoint(folder).step == 4
        write_checkpoint(folder, other.commit(3).checkpoint(), keep_every=1)
        assert same(read_checkpoint(folder), other.checkpoint())
        assert "manifest-8.json" not in names(folder)
        assert read_checkpoint(folder / "manifest-3.json").step == 3

    @pytest.mark.parametrize("commits", [1, 4, 6])
    def test_even_when_nobody_removed_the_abandoned_checkpoints(self, folder, run, commits):
        write_steps(folder, run, 8)
        write_steps(folder, run, 9)
        other = Run.resumed(read_checkpoint(folder / "manifest-8.json"), timeline=1)
        write_checkpoint(folder, other.commit(commits).checkpoint())
        assert same(read_checkpoint(folder), other.checkpoint())

    def test_nothing_to_supersede(self, folder, run):
        write_steps(folder, run, 2)
        before = names(folder)
        remove_superseded(folder, 2)
        assert names(folder) == before
        remove_superseded(folder.with_name("nowhere"), 2)


class TestRefusals:
    def test_there_is_none(self, tmp_path, folder):
        assert not has_checkpoint(folder)
        with pytest.raises(CheckpointError, match="there is no checkpoint; a syncer writes them"):
            read_checkpoint(folder)
        (folder / "fragments").mkdir(parents=True)
        assert not has_checkpoint(folder)
        with pytest.raises(CheckpointError, match="no checkpoint in this folder"):
            read_checkpoint(folder)
        stranger = tmp_path / "notes.txt"
        stranger.write_text("hello")
        with pytest.raises(CheckpointError, match="neither a checkpoint folder"):
            read_checkpoint(stranger)

    def test_what_has_no_manifest_is_told_apart(self, tmp_path, folder):
        with pytest.raises(CheckpointError, match="there is no checkpoint, neither a folder nor a manifest"):
            read_manifest(folder)
        folder.mkdir()
        with pytest.raises(CheckpointError, match=r"there is no manifest-<step>.json in this folder"):
            read_manifest(folder)
        older = tmp_path / "yeto-state.bin"
        older.write_bytes(older_bytes(2, step=0, fragments=[(0, [1.0], [0.0])]))
        with pytest.raises(
            CheckpointError, match="an older checkpoint in a single file, which has no manifest"
        ):
            read_manifest(older)

    @pytest.mark.parametrize("name", ["params", "momentum"])
    def test_one_changed_bit_in_a_fragment(self, folder, run, name):
        write_steps(folder, run, 4)
        path = folder / "fragments/f0000-v00000004.safetensors"
        flip(path, -3 if name == "momentum" else -4 * 7 - 3)
        with pytest.raises(CheckpointError, match=rf"f0000-v00000004.*digest of {name}.*manifest-3.json"):
            read_checkpoint(folder)
        assert not inspect(folder).valid
        assert read_checkpoint(folder / "manifest-3.json").step == 3

    def test_any_changed_byte_of_a_fragment(self, folder, run):
        write_checkpoint(folder, run.commit(1).checkpoint())
        path = folder / "fragments/f0001-v00000000.safetensors"
        intact = path.read_bytes()
        for place in range(0, len(intact), 5):
            flip(path, place)
            with pytest.raises(CheckpointError, match="f0001"):
                read_checkpoint(folder)
            path.write_bytes(intact)
        assert read_checkpoint(folder).step == 1

    def test_any_changed_byte_of_the_manifest(self, folder, run):
        write_steps(folder, run, 2)
        path = folder / "manifest-2.json"
        intact = path.read_bytes()
        for place in [*range(0, len(intact) - 60, 9), *range(len(intact) - 60, len(intact))]:
            flip(path, place)
            with pytest.raises(CheckpointError, match=r"manifest-2.json: .*; to go on from .*manifest-1"):
                read_checkpoint(folder)
            path.write_bytes(intact)
        assert read_checkpoint(folder).step == 2

    def test_bytes_too_many(self, folder, run):
        write_checkpoint(folder, run.checkpoint())
        path = folder / "fragments/f0002-v00000000.safetensors"
        path.write_bytes(path.read_bytes() + b"\0")
        with pytest.raises(CheckpointError, match="1 bytes too many"):
            read_checkpoint(folder)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_values_that_are_not_finite(self, folder, run, value):
        bad = run.store.current(1)
        params = bad.params.clone()
        params[5] = value
        changed = FragmentVersion(
            fragment=1,
            version=0,
            params=params,
            momentum=bad.momentum,
            params_digest=digest(params.numpy()),
            momentum_digest=bad.momentum_digest,
        )
        fragments = (run.store.current(0), changed, run.store.current(2))
        write_checkpoint(folder, run.checkpoint(fragments=fragments))
        with pytest.raises(CheckpointError, match=r"f0001.*params holds a value that is not finite"):
            read_checkpoint(folder)

    def test_fragments_swapped(self, folder, run):
        layout = attrs.evolve(LAYOUT, fragments=(LAYOUT.fragments[0],) * 2)
        fragments = (version(0, 0), attrs.evolve(version(0, 0, timeline=1), fragment=1))
        write_checkpoint(folder, run.checkpoint(layout=layout, fragments=fragments))
        a, b = (folder / f"fragments/f000{i}-v00000000.safetensors" for i in range(2))
        a_bytes, b_bytes = a.read_bytes(), b.read_bytes()
        a.write_bytes(b_bytes)
        b.write_bytes(a_bytes)
        with pytest.raises(CheckpointError, match="digest of params"):
            read_checkpoint(folder)

    def test_what_cannot_be_written(self, folder, run):
        with pytest.raises(CheckpointError, match="fragment 0 is at version 0, but after 1 steps"):
            write_checkpoint(folder, run.checkpoint(step=1))
        with pytest.raises(CheckpointError, match="does not say its layout, contract"):
            write_checkpoint(folder, run.checkpoint(layout=None, contract=None))
        with pytest.raises(CheckpointError, match="cannot be written"):
            write_checkpoint(folder, run.checkpoint(settings={"grace": float("inf")}))
        assert not folder.exists()

    def test_a_folder_that_is_a_file(self, tmp_path, run):
        path = tmp_path / "file"
        path.write_text("")
        with pytest.raises(CheckpointError, match=r"file.*cannot be written.*free.*no earlier checkpoint"):
            write_checkpoint(path, run.checkpoint())


class TestFallBack:
    @pytest.mark.parametrize("size", [0, 1, 7, 100, -1])
    def test_a_fragment_cut_short(self, folder, run, size):
        write_steps(folder, run, 4)
        path = folder / "fragments/f0000-v00000004.safetensors"
        path.write_bytes(path.read_bytes()[:size])
        loaded = read_checkpoint(folder)
        assert loaded.step == 3
        (notice,) = loaded.notices
        assert "step 4 is incomplete" in notice
        assert str(path) in notice
        assert "ends after" in inspect(folder).problems[0]

    def test_a_fragment_gone(self, folder, run):
        write_steps(folder, run, 4)
        (folder / "fragments/f0000-v00000004.safetensors").unlink()
        assert read_checkpoint(folder).step == 3

    def test_a_manifest_cut_short_anywhere(self, folder, run):
        write_steps(folder, run, 2)
        path = folder / "manifest-2.json"
        intact = path.read_bytes()
        for size in [*range(0, len(intact) - 60, 29), *range(len(intact) - 60, len(intact))]:
            path.write_bytes(intact[:size])
            assert read_checkpoint(folder).step == 1

    def test_a_manifest_gone(self, folder, run):
        write_steps(folder, run, 2)
        (folder / "manifest-2.json").unlink()
        assert read_checkpoint(folder).step == 1

    def test_a_named_manifest_is_not_fallen_back_from(self, folder, run):
        write_steps(folder, run, 4)
        (folder / "fragments/f0000-v00000004.safetensors").unlink()
        with pytest.raises(CheckpointError, match="the file is missing"):
            read_checkpoint(folder / "manifest-4.json")

    def test_nothing_complete_names_everything(self, folder, run):
        write_steps(folder, run, 2)
        (folder / "fragments/f0002-v00000000.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"no complete checkpoint: .*step 2 .*; .*step 1 "):
            read_checkpoint(folder)

    def test_the_run_goes_on_after_a_fall_back(self, folder, run):
        write_steps(folder, run, 4)
        path = folder / "fragments/f0000-v00000004.safetensors"
        path.write_bytes(b"")
        other = Run.resumed(read_checkpoint(folder), timeline=1)
        remove_superseded(folder, other.step)
        write_checkpoint(folder, other.commit().checkpoint())
        loaded = read_checkpoint(folder)
        assert same(loaded, other.checkpoint())
        assert loaded.notices == ()

    def test_resuming_twice_equals_resuming_once(self, folder, run):
        write_steps(folder, run, 5)
        once = read_checkpoint(folder)
        remove_superseded(folder, once.step)
        write_checkpoint(folder, Run.resumed(once, timeline=1).checkpoint(tape_seq=once.tape_seq))
        assert same(read_checkpoint(folder), once)


def test_a_reader_of_a_live_folder_follows_the_writer(folder, run, monkeypatch):
    write_steps(folder, run, 4)
    import yeto.state.reading as reading

    real, passes = reading.read_fragment, []

    def slow(place, entry):
        if entry.fragment == 2 and len(passes) < 3:
            passes.append(run.step)
            for _ in range(2 * COUNT):  # by now none of the files of the manifest being read is left
                write_checkpoint(folder, run.commit().checkpoint())
        return real(place, entry)

    monkeypatch.setattr(reading, "read_fragment", slow)
    loaded = read_checkpoint(folder)
    assert passes == [4, 10, 16]
    assert same(loaded, run.checkpoint())
    assert loaded.notices == ()


def test_a_reader_that_is_always_too_late_says_so(folder, run, monkeypatch):
    write_steps(folder, run, 4)
    import yeto.state.reading as reading

    real = reading.read_fragment

    def hopeless(place, entry):
        for _ in range(2 * COUNT):
            write_checkpoint(folder, run.commit().checkpoint())
        return real(place, entry)

    monkeypatch.setattr(reading, "read_fragment", hopeless)
    with pytest.raises(CheckpointError, match=r"replaced 16 times.*--keep-every"):
        read_checkpoint(folder)


class TestManifest:
    """A manifest with a right digest that says what it must not."""

    @pytest.fixture
    def forge(self, folder, run):
        write_checkpoint(folder, run.commit(2).checkpoint())
        text = (folder / "manifest.json").read_text()

        def forged(old, new):
            assert text.count(old) >= 1, old
            lines = text.replace(old, new, 1).splitlines(keepends=True)[:-2]
            body = "".join(lines).encode()
            return body + f'  "digest": "{digest(body)}"\n}}\n'.encode()

        return forged

    def test_forging_nothing_is_accepted(self, forge):
        assert decode_manifest(forge("{", "{"), "m").step == 2

    @pytest.mark.parametrize(
        ("old", "new", "text"),
        [
            ('"step": 2', '"step": "2"', r"expected int, found str @ \$.step"),
            ('"step": 2', '"step": 2.0', "expected int, found float"),
            ('"step": 2', '"step": true', "expected int, found bool"),
            ('"step": 2', '"step": -2', "step -2 is negative"),
            ('"step": 2', '"step": 3', "version 0, but after 3 steps it is 3"),
            ('"step": 2', '"step": 2, "step": 2', "the same key twice"),
            ('"step": 2', '"stop": 2', "unknown key stop"),
            ('"profile": null', '"profile": 7', r"expected str, found int @ \$.profile"),
            ('"outer_lr": 0.7', '"outer_lr": NaN', "NaN is no JSON number"),
            ('"outer_lr": 0.7', '"outer_lr": 1e999', "too large for a number"),
            ('"settings": {', '"settings": [], "x": {', r"expected dict, found list"),
            ('"format_version": 3', '"format_version": 4', "format version 4; this software reads 3"),
            ('"iso_backend": 0', '"iso_backend": 2', "iso_backend 2 is unknown"),
            ('"dtype": "bf16"', '"dtype": "fp8"', "dtype fp8 is unknown"),
            ("abab", "ABAB", "layout_fingerprint is not 64 hex digits"),
            ("cdcd", "cd", "session_contract is not 64 hex digits"),
            ('"mode": "avg"', '"mode": "sum"', "mode 'sum' is unknown"),
            ('"numel": 7', '"numel": 8', "numel 8 is not what the shapes sum to"),
            ('"shapes": [[7]]', '"shapes": [[-7]]', "numel 7 is not"),
            ('"shapes": [[7]]', '"shapes": ["7"]', r"expected list, found str @ \$.fragments\[0\].shapes"),
            ("fragments/f0000", "../f0000", "is misnamed"),
            ('"fragment": 1', '"fragment": 2', "fragment 2 is out of place"),
            ('"learner": 2', '"learner": 0', "learners do not ascend"),
            ('"merges": 2, ', "", r"a key is missing @ \$.ledger\[0\].merges"),
        ],
    )
    def test_refusals(self, forge, old, new, text):
        with pytest.raises(CheckpointError, match=text):
            decode_manifest(forge(old, new), "m")

    def test_fields_with_a_default_may_be_missing(self, forge):
        assert decode_manifest(forge('  "finish_target": null,\n', ""), "m").finish_target is None

    def test_deep_nesting_is_refused(self, forge):
        with pytest.raises(CheckpointError, match="no strict JSON"):
            decode_manifest(forge('"quorum": 2', '"quorum": ' + "[" * 100_000 + "]" * 100_000), "m")

    def test_writing_is_the_inverse_of_reading(self, folder, run):
        write_checkpoint(folder, run.checkpoint())
        data = (folder / "manifest.json").read_bytes()
        assert encode_manifest(decode_manifest(data, "m")) == data
        assert data.isascii()


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_the_contiguous_cut_is_what_round_robin_commits_give(count):
    versions = [0] * count
    for step in range(1, 30):
        versions[(step - 1) % count] = step
        assert [version_at(step, fragment, count) for fragment in range(count)] == versions


def test_space_for_two_checkpoints_is_required(tmp_path):
    require_space(tmp_path / "not" / "there" / "yet", 10)
    with pytest.raises(CheckpointError, match=r"yeto.ckpt: two checkpoints take \d+.0 TiB, .* only .* are;"):
        require_space(tmp_path / "yeto.ckpt", 2**50)


def test_the_checkpoint_that_is_there_counts_as_one_of_the_two(tmp_path, folder):
    one = 8 * (shutil.disk_usage(tmp_path).free * 3 // 4 // 8)
    with pytest.raises(CheckpointError, match=r"only .* are; make room, or move the run to a larger disk"):
        require_space(folder, one // 8)
    (folder / "fragments").mkdir(parents=True)
    for number, start in enumerate(range(0, one, 2**40)):
        with (folder / "fragments" / f"sparse-{number}").open("wb") as file:
            file.truncate(min(2**40, one - start))  # takes no room
    require_space(folder, one // 8)


def test_inspection(folder, run):
    write_steps(folder, run, 5)
    found = inspect(folder)
    assert found.valid
    assert (found.step, [kept.step for kept in found.kept], found.final_step) == (5, [4], None)
    assert [part.version for part in found.fragments] == [4, 5, 3]
    assert [part.mode for part in found.fragments] == ["avg", "rda", "iso"]
    assert found.ledger[0].merges == 5
    assert found.manifest.settings["quorum"] == 2
    paths = [folder / f"fragments/f000{i}-v0000000{v}.safetensors" for i, v in enumerate((4, 5, 3))]
    assert [part.file_bytes for part in found.fragments] == [path.stat().st_size for path in paths]
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        inspect(folder / "nowhere")


def test_the_documentation_lists_every_key():
    text = (Path(__file__).parents[2] / "docs" / "CHECKPOINT.md").read_text(encoding="utf-8")
    keys = [field.name for cls in (Manifest, ManifestFragment, LedgerEntry) for field in attrs.fields(cls)]
    assert [key for key in [*keys, "digest"] if f"`{key}`" not in text] == []

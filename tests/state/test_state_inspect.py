"""``yeto checkpoint inspect``: what it shows of good checkpoints, and that it names what is broken."""

import json
import subprocess
import sys

import pytest
from older_files import older_bytes
from state_examples import COUNT, LAYOUT, Run, flip

from yeto.cli.common import run_app
from yeto.cli.main import build
from yeto.state import final_marker_path, inspect, write_checkpoint, write_final_marker


@pytest.fixture
def run():
    return Run()


@pytest.fixture
def folder(tmp_path, run):
    """Return a folder with the checkpoints of steps 4 and 5."""
    path = tmp_path / "yeto-state.ckpt"
    write_checkpoint(path, run.commit(3).checkpoint())
    for _ in range(2):
        write_checkpoint(path, run.commit().checkpoint())
    return path


@pytest.fixture
def command(capsys):
    def call(*words):
        code = run_app(build, ["checkpoint", "inspect", *map(str, words)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_everything_a_checkpoint_says(folder, command):
    write_final_marker(folder, 5)
    code, out, err = command(folder)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"{folder}/manifest-5.json: step 5, sound"
    facts = {line[2:16].strip(): line[16:] for line in out.splitlines()[1:14]}
    used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert facts["parameters"] == f"39 in 3 fragments; {used:,} bytes on disk"
    assert facts["iso backend"] == "scalar"
    assert facts["fingerprint"] == "ab" * 32
    assert facts["contract"] == "cd" * 32
    assert facts["written by"].startswith("yeto 0.")
    assert facts["profile"] == "not stated"
    assert facts["tape"] == "events.jsonl, record 45"
    assert facts["trained"] == '{"model": "tiny é\\u2028"}', "a terminal gets no line break from a file"
    assert facts["also kept"] == "steps 4"
    assert facts["final marker"] == "step 5"
    table = [line.split() for line in out.splitlines() if "fragments/" in line]
    assert [row[:4] for row in table] == [
        ["0", "4", "avg", "7"],
        ["1", "5", "rda", "17"],
        ["2", "3", "iso", "15"],
    ]
    assert [row[5:] for row in table] == [
        [f"fragments/f000{place}-v0000000{version}.safetensors", "sound"]
        for place, version in enumerate((4, 5, 3))
    ]
    assert ["0", "5", "7", f"{2**60:,}"] in [line.split() for line in out.splitlines()]
    assert "  outer_lr       0.7" in out.splitlines()


def test_json_has_all_of_it(folder, command):
    code, out, _ = command(folder, "--json")
    found = json.loads(out)
    assert (code, found["valid"], found["step"], found["problems"]) == (0, True, 5, [])
    assert [part["version"] for part in found["fragments"]] == [4, 5, 3]
    assert found["kept"] == [{"step": 4, "problem": None}]
    assert found["ledger"][1] == {"learner": 2, "merges": 1, "c_steps": 1, "c_tokens": 1}
    assert found["manifest"]["settings"]["quorum"] == 2
    assert found["manifest"]["tape_file"] == "events.jsonl"


def test_one_manifest_can_be_named(folder, command):
    code, out, _ = command(folder / "manifest-4.json")
    assert (code, out.splitlines()[0]) == (0, f"{folder}/manifest-4.json: step 4, sound")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda f: flip(f / "fragments/f0001-v00000005.safetensors", -3), "digest of momentum is"),
        (lambda f: flip(f / "fragments/f0001-v00000005.safetensors", -80), "digest of params is"),
        (lambda f: flip(f / "fragments/f0002-v00000003.safetensors", 9), "the header is not that of"),
        (lambda f: (f / "fragments/f0000-v00000004.safetensors").unlink(), "the file is missing"),
        (lambda f: (f / "fragments/f0000-v00000004.safetensors").write_bytes(b""), "ends after 0 of"),
        # What is broken in the checkpoint before counts, too: it is what a resume would fall back to.
        (
            lambda f: (f / "fragments/f0001-v00000002.safetensors").unlink(),
            "f0001-v00000002.safetensors: the file",
        ),
        (lambda f: (f / "manifest-4.json").write_bytes(b"{"), "manifest-4.json: the manifest ends too early"),
        (lambda f: final_marker_path(f).write_bytes(b"YETO"), "ckpt.final: not a final marker"),
    ],
)
def test_what_is_broken_is_named(folder, command, spoil, problem):
    spoil(folder)
    code, out, _ = command(folder)
    assert code == 1
    assert "step 5, broken (1, see the end)" in out.splitlines()[0]
    assert problem in out.splitlines()[-1]
    code, out, _ = command(folder, "--json")
    found = json.loads(out)
    assert (code, found["valid"], len(found["problems"])) == (1, False, 1)
    assert problem in found["problems"][0]


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda f: flip(f / "manifest-5.json", 40), "manifest-5.json: "),
        (lambda f: (f / "manifest-5.json").write_bytes(b"{"), "manifest-5.json: the manifest ends too early"),
        (lambda f: f.rename(f.with_name("moved")), "there is no checkpoint; a syncer writes"),
        (lambda f: [path.unlink() for path in f.glob("manifest*")], "there is no manifest"),
    ],
)
def test_what_cannot_be_shown_is_one_line(folder, command, spoil, problem):
    spoil(folder)
    code, out, err = command(folder)
    assert (code, out) == (1, "")
    assert problem in err
    assert err.count("\n") == 1


def test_a_file_that_is_something_else(tmp_path, command):
    (tmp_path / "notes.txt").write_text("hello")
    code, _, err = command(tmp_path / "notes.txt")
    assert code == 1
    assert "neither a checkpoint folder, nor a manifest, nor an older checkpoint" in err


def test_half_written_files_are_listed_and_no_fault(folder, command):
    (folder / "fragments" / "f0002-v00000006.safetensors.tmp").write_bytes(b"half")
    code, out, _ = command(folder)
    assert code == 0
    assert "half written  fragments/f0002-v00000006.safetensors.tmp" in out


@pytest.mark.parametrize(("number", "backend"), [(1, "not stated"), (2, "torch-svd"), (3, "torch-svd")])
def test_older_files(tmp_path, run, command, number, backend):
    parts = run.commit(4).checkpoint().fragments
    path = tmp_path / "yeto-state.bin"
    data = older_bytes(
        number,
        step=4,
        fragments=[(part.version, part.params.tolist(), part.momentum.tolist()) for part in parts],
        ledger=((3, 1, 2, 5),),
        backend=1,
        fingerprint=bytes(range(32)),
    )
    path.write_bytes(data)
    code, out, _ = command(path)
    lines = out.splitlines()
    assert (code, lines[0]) == (0, f"{path}: step 4, sound")
    assert lines[1].split() == ["format", f"file-v{number}"]
    assert lines[3].split(maxsplit=2)[2] == backend
    assert lines[4].split(maxsplit=1)[1] == (bytes(range(32)).hex() if number == 3 else "not stated")
    assert [row.split()[:4] for row in lines if " offset " in row] == [
        [str(place), str(part.version), "-", str(part.numel)] for place, part in enumerate(parts)
    ]
    path.write_bytes(data[:-5])
    code, _, err = command(path)
    assert code == 1
    assert "offset " in err
    assert "are left" in err


def test_a_folder_in_use_is_followed(folder, run, monkeypatch):
    import yeto.state.inspection as inspection

    real, passes = inspection.read_params, []

    def slow(place, entry):
        if entry.fragment == 2 and len(passes) < 2:
            passes.append(run.step)
            for _ in range(2 * COUNT):  # by now none of the files of the manifest being read is left
                write_checkpoint(folder, run.commit().checkpoint())
        return real(place, entry)

    monkeypatch.setattr(inspection, "read_params", slow)
    found = inspect(folder)
    assert (found.valid, found.step, passes) == (True, run.step, [5, 11])


def test_a_folder_needs_no_tensor_library(folder):
    script = (
        "import sys; from yeto.state import inspect\n"
        f"assert inspect({str(folder)!r}).valid\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200)


def test_the_values_are_read_whole_by_pieces(tmp_path, monkeypatch):
    """Momentum goes by in pieces, of which the last is a short one."""
    import yeto.state.fragmentfile as fragmentfile

    monkeypatch.setattr(fragmentfile, "_CHECKED_AT_A_TIME", 4)
    path = tmp_path / "c"
    write_checkpoint(path, Run().commit(3).checkpoint())
    found = inspect(path)
    assert found.valid
    sizes = [part.numel for part in LAYOUT.fragments]
    assert [part.numel for part in found.fragments] == sizes

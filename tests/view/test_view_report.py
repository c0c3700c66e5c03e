"""yeto report: what is refused before the work, and what it leaves behind."""

import json
import os
import shutil

import pytest

from yeto.cli.main import main
from yeto.view.page import MODULES, joined, text
from yeto.view.report import LOSS_POINTS, read_loss


@pytest.fixture
def folder(fixtures, tmp_path, monkeypatch):
    shutil.copy(fixtures / "tapes" / "faulty-v1.jsonl", tmp_path / "events.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def report(*words):
    with pytest.raises(SystemExit) as end:
        main(["report", *words])
    return end.value.code


def log(path, steps):
    path.write_text("".join(json.dumps(step) + "\n" for step in steps) + '{"kind": "st')


def test_a_report_is_written_whole_and_replaced_only_when_asked(folder, capsys):
    assert report() == 0
    assert "report.html: 0.2 MB, 24 rounds" in capsys.readouterr().out
    first = (folder / "report.html").read_bytes()
    assert report() == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (folder / "report.html").read_bytes() == first
    assert report("--overwrite") == 0
    assert {path.name for path in folder.iterdir()} == {"events.jsonl", "report.html"}


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("absent.jsonl",), 1, "absent.jsonl: no such tape; a syncer writes"),
        ((".",), 1, ".: is a folder; name the tape in it"),
        (("empty.jsonl",), 1, "empty.jsonl"),
        (("-o", "."), 2, "-o .: is a folder"),
        (("-o", "events.jsonl", "--overwrite"), 2, "-o events.jsonl: is what the report is made of"),
        (("-o", "pipe", "--overwrite"), 2, "-o pipe: is a device or a pipe"),
        (("-o", "absent/report.html"), 2, "there is no folder"),
        (("--log-jsonl", "absent"), 2, "--log-jsonl absent"),
        (("--png", "events.jsonl"), 2, "--png events.jsonl: is a file"),
        (("--png", "absent/png"), 2, "--png absent/png: there is no folder"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(folder, capsys, words, code, says):
    (folder / "empty.jsonl").write_bytes(b"")
    os.mkfifo(folder / "pipe")
    assert report(*words) == code
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (folder / "report.html").exists()


def test_pictures(folder, capsys):
    pytest.importorskip("matplotlib", reason="pip install 'yeto[plot]'")
    log(folder / "learner-1.jsonl", [{"kind": "step", "global_step": 1, "loss": 2.0}])
    odd = os.fsdecode(b"a$\\frac{$\xffb.jsonl")
    log(folder / odd, [{"kind": "step", "global_step": 1, "loss": 2.0}])
    assert report("--png", "png", "--log-jsonl", "learner-1.jsonl", "--log-jsonl", odd) == 0
    names = {path.stem for path in (folder / "png").iterdir()}
    assert names == {
        "time",
        "participation",
        "contribution",
        "pace",
        "staleness",
        "loss",
        "gradient",
        "cosine",
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (folder / "png").iterdir())


def test_the_loss_is_the_mean_over_rounds_and_bounded(tmp_path):
    path = tmp_path / "learner-7.jsonl"
    steps = [
        {"kind": "step", "global_step": step // 2, "loss": float(step)} for step in range(4 * LOSS_POINTS)
    ]
    log(
        path,
        [{"kind": "phase", "phase": "training"}, *steps, {"kind": "step", "global_step": 1, "loss": None}],
    )
    curve = read_loss(path)
    assert curve.name == "learner 7"
    assert len(curve.step) == LOSS_POINTS
    # Four steps to a point: 0 to 3, 4 to 7, ...
    assert curve.loss[:2] == (1.5, 5.5)
    assert curve.step[:2] == (0, 2)


def test_the_modules_are_joined_without_a_rest():
    module = joined()
    assert not any(line.startswith(("import", "export")) for line in module.splitlines())
    names = {name.removesuffix(".js") for name in MODULES}
    for name in MODULES:
        for line in text(name).splitlines():
            if line.startswith("import "):
                assert line.rpartition('"./')[2].removesuffix('.js";') in names

"""The ``yeto-export`` command as a process: exit codes, one-line errors, JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from yeto.cli.common import run_app
from yeto.cli.export import build

TEXT_TESTS = Path(__file__).parent.parent / "text"


def command(*words):
    return run_app(build, list(words), table="export")


def test_flags_of_the_command_are_these(capsys):
    assert command("--help") == 0
    text = capsys.readouterr().out
    for flag in (
        "--checkpoint --output-dir --model --model-revision --trust-remote-code --tuning --lora-r "
        "--lora-alpha --lora-targets --merged --verify --no-verify --overwrite --dtype --lookahead --json"
    ).split():
        assert flag in text


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        ((), 2, "output-dir"),
        (("--output-dir", "{tmp}/out", "--bogus"), 2, "bogus"),
        (("--output-dir", "{tmp}"), 2, "exists; name another one"),
        (
            ("--output-dir", "{tmp}/out", "--lookahead", "off"),
            2,
            "--lookahead off: must be one of remove, keep (see yeto-export --help)",
        ),
        (
            ("--output-dir", "{tmp}/out", "--dtype", "f16"),
            2,
            "--dtype f16: must be one of auto, f32, bf16; did you mean bf16? (see yeto-export --help)",
        ),
        (("--output-dir", "{tmp}/out", "--tuning", "most"), 2, "--tuning most: must be one of lora, full"),
        (("--output-dir", "{tmp}/out", "--checkpoint", "{tmp}/none"), 2, "none: there is no checkpoint"),
    ],
)
def test_errors_are_one_line_and_have_their_exit_code(tmp_path, capsys, words, code, problem):
    assert command(*(word.format(tmp=tmp_path) for word in words)) == code
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("reading ")]
    assert len(lines) == 1
    assert lines[0].startswith("yeto: ")
    assert problem in lines[0]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["--output-dir", "out", "--checkpoint", "none"],
            "yeto: --checkpoint none: there is no checkpoint; ",
        ),
        (["--output-dir", ".", "--checkpoint", "."], "yeto: --output-dir "),
        (["--output-dir", "there", "--checkpoint", "."], "exists; name another one, or replace it with "),
    ],
)
def test_a_wrong_place_is_said_before_anything_large_is_loaded(tmp_path, words, problem):
    (tmp_path / "there").mkdir()
    program = (
        "import sys\n"
        "from yeto.cli.export import main\n"
        "try:\n    main()\n"
        "finally:\n    print(sorted({'torch', 'transformers'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stdout) == (2, "[]\n"), done.stderr
    assert done.stderr.count("\n") == 1
    assert problem in done.stderr


@pytest.mark.timeout(600)
def test_a_checkpoint_becomes_an_adapter_in_a_process_of_its_own(tmp_path, fixtures, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(TEXT_TESTS))
    from text_checkpoints import make_checkpoint

    from yeto.text.config import TextConfig

    model = str(fixtures / "tiny-llama")
    make_checkpoint(tmp_path / "yeto-state.ckpt", TextConfig(model=model, lora_r=4, lora_alpha=8))
    done = subprocess.run(
        [sys.executable, "-m", "yeto.cli.export", "--model", model, "--output-dir", "out", "--json"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["kind"] == "adapter"
    assert outcome["verified"]["logits_moved"] > 0
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert "done: " in done.stderr

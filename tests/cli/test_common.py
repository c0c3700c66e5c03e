import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import attrs
import pytest
from cyclopts import App, Parameter

from yeto.cli.common import run_app, sigterm_unwinds, take_flag
from yeto.cli.main import main
from yeto.cli.passing import flags_without, to_words
from yeto.errors import ConfigError, TapeError


@attrs.frozen(kw_only=True)
class Flags:
    size: Annotated[int, Parameter(help="How big.")]
    name: Annotated[str, Parameter(help="What it is called.")] = "x"
    mode: Annotated[Literal["a", "b"], Parameter(help="Which.")] = "a"
    quick: Annotated[bool, Parameter(help="Hurry.")] = False
    careful: Annotated[bool, Parameter(help="Do not hurry.")] = True
    path: Annotated[Path | None, Parameter(help="Where.")] = None
    share: Annotated[float | Literal["auto"], Parameter(help="How much.")] = 1.0


def run(words, *, command=None, table=None):
    seen = []

    def default(flags: Annotated[Flags, Parameter(name="*")]) -> int:
        seen.append(flags)
        return 7

    def build():
        app = App(name="thing")
        app.default(command or default)
        return app

    return run_app(build, words, table=table), (seen or [None])[0]


def test_the_command_gives_the_exit_code():
    assert run(["--size", "3"]) == (7, Flags(size=3))


def test_precedence_is_flag_then_environment_then_file(tmp_path, monkeypatch):
    file = tmp_path / "run.toml"
    file.write_text('[thing]\nsize = 1\nname = "file"\nmode = "b"\n')
    monkeypatch.setenv("YETO_SIZE", "2")
    monkeypatch.setenv("YETO_NAME", "env")
    code, flags = run(["--config", str(file), "--size=3"], table="thing")
    assert (code, flags) == (7, Flags(size=3, name="env", mode="b"))


def test_a_table_of_another_role_is_left_alone(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[other]\nunknown = 1\n[thing]\nsize = 4\n")
    assert run(["--config", str(file)], table="thing") == (7, Flags(size=4))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "yeto: --size is missing (see thing --help)"),
        (["--size"], "yeto: --size needs a value (see thing --help)"),
        (["--size", "big"], "yeto: --size big: must be a whole number (see thing --help)"),
        (["--size", "1", "--share", "big"], "yeto: --share big: must be a number or auto (see thing --help)"),
        (["--size", "1", "--share", "aut"], "must be a number or auto; did you mean auto?"),
        (["--size", "1e3"], "yeto: --size 1e3: must be a whole number (see thing --help)"),
        (
            ["--size", "1", "--quick=perhaps"],
            "yeto: --quick perhaps: must be true or false (see thing --help)",
        ),
        (["--size", ""], "yeto: --size is empty; give it a value, or leave it out (see thing --help)"),
        (["--size", "1", "--path", ""], "yeto: --path is empty; "),
        (["--size", "1", "--size", "2"], "yeto: --size is given twice (see thing --help)"),
        (["--size", "1", "a", "b"], "yeto: a b: more than this command takes (see thing --help)"),
        (
            ["--size", "1", "--nam=y"],
            "yeto: --nam: there is no such flag; did you mean --name? (see thing --help)",
        ),
        (["--size", "1.5"], "--size 1.5: must be a whole number"),
        (["--size", "1.0e999"], "--size 1.0e999: must be a whole number"),
        (["--size", "1.x"], "--size"),
        (["--size", "1", "--mode", "c"], "yeto: --mode c: must be one of a, b (see thing --help)"),
        (["--size", "1", "--colour", "red"], "yeto: --colour: there is no such flag (see thing --help)"),
        (["--size", "1", "--config", "/nowhere/run.toml"], "/nowhere/run.toml: No such file"),
        (["--size", "1", "--config"], "--config needs a value"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(words, named, capsys):
    code, _ = run(words)
    error = capsys.readouterr().err
    assert code == 2
    assert named in error
    assert error.startswith("yeto: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("rnu", "yeto: rnu: there is no such command; did you mean run? (see yeto --help)\n"),
        ("sim", "yeto: sim: there is no such command; did you mean simulate? (see yeto --help)\n"),
        ("--jsno", "yeto: --jsno: there is no such flag (see yeto --help)\n"),
    ],
)
def test_a_wrong_command_is_refused_without_loading_any(word, said):
    script = (
        "import sys\n"
        "from yeto.cli.main import main\n"
        "try:\n"
        f"    main([{word!r}])\n"
        "finally:\n"
        "    assert not [name for name in sys.modules if name.startswith(('yeto.core', 'yeto.cli.run'))]\n"
    )
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (2, said)


def test_a_value_of_the_environment_is_named_by_its_variable(monkeypatch, capsys):
    monkeypatch.setenv("YETO_SIZE", "big")
    assert run([])[0] == 2
    assert capsys.readouterr().err == "yeto: YETO_SIZE big: must be a whole number (see thing --help)\n"
    monkeypatch.setenv("YETO_SIZE", "")
    assert run([])[0] == 2
    assert capsys.readouterr().err.startswith("yeto: YETO_SIZE is empty; ")


def test_what_stands_on_the_line_is_not_taken_from_the_environment(monkeypatch, capsys):
    """``yeto down`` ends a run: that of a variable which another command wanted is not meant."""
    monkeypatch.setenv("YETO_NAME", "trial")
    with pytest.raises(SystemExit) as ended:
        main(["down"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "yeto: NAME is missing (see yeto down --help)\n"


def test_an_unknown_key_of_the_file_is_named(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text("[thing]\nsize = 4\nsise = 5\n")
    assert run(["--config", str(file)], table="thing")[0] == 2
    assert "sise" in capsys.readouterr().err


def test_errors_are_one_line_and_debug_adds_the_traceback(capsys):
    def failing() -> int:
        raise TapeError("line 3:\n  torn")

    assert run([], command=failing)[0] == 1
    assert capsys.readouterr().err == "yeto: line 3: torn\n"
    assert run(["--debug"], command=failing)[0] == 1
    assert "Traceback" in capsys.readouterr().err


def test_nothing_in_an_error_steers_a_terminal(capsys):
    def failing() -> int:
        raise TapeError("\x1b[31mred\udcff")

    assert run([], command=failing)[0] == 1
    assert capsys.readouterr().err == "yeto: \\x1b[31mred\\udcff\n"


def test_a_name_that_the_terminals_encoding_lacks_is_printed_escaped(tmp_path):
    lines = (Path(__file__).parents[2] / "fixtures/tapes/two-learners-v1.jsonl").read_bytes()
    tape = os.fsencode(tmp_path) + b"/\xff.jsonl"
    with open(tape, "wb") as file:
        file.write(lines)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-m", "yeto", "replay", tape]
    done = subprocess.run(words, env=environment, capture_output=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"/\\udcff.jsonl: " in done.stdout


def test_ctrl_c_while_the_command_is_loaded_is_one_line():
    """What takes long to load is loaded where Ctrl-C is caught."""
    script = (
        "import sys\n"
        "import yeto.cli.main\n"
        "assert 'cyclopts' not in sys.modules\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'cyclopts':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "yeto.cli.main.main(['replay', 'x'])\n"
    )
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (130, "yeto: interrupted\n")


def test_a_program_of_its_own_is_named_to_who_takes_it_for_a_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["export", "--checkpoint", "yeto-state.ckpt"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("yeto: the command is yeto-export, in one word")


def test_take_flag_reads_both_spellings():
    assert take_flag(["a", "--role", "x", "b"], "--role") == (["a", "b"], "x")
    assert take_flag(["--role=y"], "--role") == ([], "y")
    assert take_flag(["--roles=y"], "--role") == (["--roles=y"], None)
    with pytest.raises(ConfigError, match="--role needs a value"):
        take_flag(["--role"], "--role")


def test_flags_are_passed_on_when_they_differ_from_their_defaults():
    assert to_words(Flags(size=1)) == ["--size=1"]
    full = Flags(size=1, name="n", mode="b", quick=True, careful=False, path=Path("p"))
    words = ["--size=1", "--name=n", "--mode=b", "--quick", "--no-careful", "--path=p"]
    assert to_words(full) == words
    assert run(words)[1] == full


def test_a_class_of_flags_can_be_offered_in_part():
    part = flags_without(Flags, {"size", "path"}, name="Part", group="Thing")
    assert [field.name for field in attrs.fields(part)] == ["name", "mode", "quick", "careful", "share"]

    nothing_said = part()

    def command(*, flags: Annotated[part, Parameter(name="*")] = nothing_said) -> int:
        return 0 if to_words(flags) == ["--name=-n"] else 1

    assert run(["--name=-n"], command=command)[0] == 0


def yeto(*words):
    done = subprocess.run([sys.executable, "-m", "yeto", *words], capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout, done.stderr


def test_the_command_line_as_a_process(tmp_path):
    code, out, _ = yeto("--help")
    assert code == 0
    assert "run" in out
    assert "replay" in out
    code, out, _ = yeto("run", "--help")
    assert code == 0
    assert "--role learner" in out
    code, out, err = yeto("run", "--role", "cook")
    assert code == 2
    assert err == "yeto: --role cook: must be one of local, syncer, supervisor, learner\n"
    code, _, err = yeto("replay", str(tmp_path / "none.jsonl"))
    assert code == 1
    assert err.count("\n") == 1
    assert "none.jsonl" in err


@pytest.mark.parametrize("role", ["local", "syncer", "learner"])
def test_every_role_explains_its_flags(role):
    code, out, err = yeto("run", "--role", role, "--help")
    assert code == 0, err
    assert "--model" in out or role == "syncer"
    assert "--quorum" in out or role == "learner"


def test_a_new_key_is_private_and_never_overwritten(tmp_path):
    path = tmp_path / "yeto.key"
    code, _, err = yeto("keys", "new", str(path))
    assert code == 0, err
    assert path.stat().st_mode & 0o777 == 0o600
    key = path.read_text()
    assert len(bytes.fromhex(key.strip())) == 32
    code, _, err = yeto("keys", "new", str(path))
    assert code == 2
    assert "exists already" in err
    assert path.read_text() == key


def test_an_error_nobody_foresaw_is_one_line_too(capsys):
    def failing() -> int:
        raise ExceptionGroup("several", [ExceptionGroup("inner", [KeyError("x\ny")])])

    assert run([], command=failing)[0] == 1
    said = capsys.readouterr().err
    assert said.startswith("yeto: unexpected KeyError: ")
    assert said.count("\n") == 1
    assert run(["--debug"], command=failing)[0] == 1
    assert "Traceback" in capsys.readouterr().err

    def refused() -> int:
        Path("/proc/none/file").read_text()
        return 0

    assert run([], command=refused)[0] == 1
    assert capsys.readouterr().err == (
        "yeto: /proc/none/file: No such file or directory; --debug shows where it happened\n"
    )

    def full() -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert run([], command=full)[0] == 1
    assert capsys.readouterr().err == "yeto: No space left on device; --debug shows where it happened\n"


def test_a_working_folder_that_is_gone_is_named(capsys, monkeypatch, tmp_path):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    assert run([], command=lambda: len(str(Path("file").absolute())))[0] == 1
    assert capsys.readouterr().err == (
        "yeto: the folder this was started in is gone; change to one that is there\n"
    )


def test_ctrl_c_is_one_line(capsys):
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert run([], command=interrupted)[0] == 130
    assert capsys.readouterr().err == "yeto: interrupted\n"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"size = ", "not TOML"),
        (b"\xff", "not TOML"),
        (b"\xef\xbb\xbf[thing]\nsize = 4\n", "begins with a byte-order mark; save it as UTF-8 without one"),
        (b"size = 4\n", "no table [thing]"),
        (b"thing = 4\n", "no table [thing]"),
    ],
)
def test_a_file_that_says_nothing_to_the_command_is_refused(tmp_path, capsys, text, named):
    file = tmp_path / "run.toml"
    file.write_bytes(text)
    assert run(["--config", str(file)], table="thing")[0] == 2
    said = capsys.readouterr().err
    assert str(file) in said
    assert named in said
    assert said.count("\n") == 1


def test_sigterm_unwinds_a_block():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_unwinds():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--quorum", "9"], 2, "--quorum 9: must lie between 1 and --learners 3"),
        (["--port", "-1", "--debug"], 2, "--port -1"),
        (["--learners", "0"], 2, "--learners 0"),
        (["--config", "{tmp}/none.toml"], 2, "none.toml: No such file"),
    ],
)
def test_a_role_reads_its_own_table_through_the_main_command(tmp_path, capsys, words, code, said):
    """The file is given to ``yeto``, and its flags are those of a role."""
    file = tmp_path / "run.toml"
    file.write_text("[syncer]\nlearners = 3\ntotal-steps = 8\n[learner]\nunknown = 1\n")
    words = [word.format(tmp=tmp_path) for word in words]
    if "--config" not in words:
        words += ["--config", str(file)]
    with pytest.raises(SystemExit) as ended:
        main(["run", "--role", "syncer", *words])
    error = capsys.readouterr().err
    assert ended.value.code == code
    assert said in error.splitlines()[-1]
    assert ("Traceback" in error) == ("--debug" in words)


def test_a_wrong_key_in_a_roles_table_is_named(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text("[syncer]\nlearners = 3\ntotalsteps = 8\n")
    with pytest.raises(SystemExit) as ended:
        main(["run", "--role", "syncer", "--config", str(file)])
    assert ended.value.code == 2
    assert "totalsteps" in capsys.readouterr().err

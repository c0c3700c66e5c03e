"""``tools/fuzz``: the whole corpus is taken as it should be, and a bug does not stay hidden from the tool."""

import contextlib
import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_targets import CONNECTIONS, TARGETS, examples
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tools"))

from fuzzing import __main__ as tool  # noqa: E402
from fuzzing import corpus, plain  # noqa: E402
from fuzzing.plain import fuzz  # noqa: E402

from yeto.errors import ProtocolError  # noqa: E402
from yeto.wire.frames import MessageType, decode_header, encode_header  # noqa: E402


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_takes_its_corpus(target):
    kept = corpus.read(target)
    assert kept
    for data in [*examples(target), *kept]:
        TARGETS[target](data)


def test_there_is_no_corpus_without_a_target():
    assert {path.stem for path in corpus.FOLDER.iterdir()} == set(TARGETS)


@pytest.mark.parametrize("target", [name for name in TARGETS if name not in CONNECTIONS])
def test_examples_with_changes_are_taken_or_refused(target):
    """Each change is one that a bad link or a bad peer makes: bytes turned over, cut, put in, repeated."""
    change = st.tuples(
        st.sampled_from(["set", "cut", "put", "repeat"]), st.integers(0, 2**16), st.binary(max_size=9)
    )

    @settings(derandomize=True, deadline=None, max_examples=60)
    @given(st.sampled_from(examples(target)), st.lists(change, max_size=5))
    def holds(data, changes):
        data = bytearray(data)
        for kind, place, some in changes:
            place %= len(data) + 1
            end = place + len(some)
            match kind:
                case "set":
                    data[place:end] = some
                case "cut":
                    del data[place:end]
                case "put":
                    data[place:place] = some
                case "repeat":
                    data[place:place] = data[place : place + 40]
        TARGETS[target](bytes(data))

    holds()


def believes(data):
    """A decoder as it must not be: a certain length is taken without a look."""
    with contextlib.suppress(ProtocolError):
        header = decode_header(data)
        if header.type is MessageType.HELLO and header.length >= 2**20:
            raise IndexError("believed")


def test_the_mutator_finds_what_is_wrong_and_says_with_what():
    seeds = [encode_header(MessageType.PULL_REQ, 16)]
    outcome = fuzz(believes, seeds, seconds=60, rng=random.Random(3))
    assert isinstance(outcome.crash.error, IndexError)
    with pytest.raises(IndexError):
        believes(outcome.crash.data)
    assert outcome.executions > 1
    assert outcome.pool[0] == seeds[0]


def test_an_input_that_hangs_is_a_crash(monkeypatch):
    monkeypatch.setattr(plain, "INPUT_SECONDS", 0.05)

    def hangs(data):
        while data == b"slow":
            pass

    # A busy machine must not make the quick one slow.
    with monkeypatch.context() as patch:
        patch.setattr(plain, "INPUT_SECONDS", 60)
        outcome = fuzz(hangs, [b"quick", b"slow"], seconds=0, rng=random.Random(0))
    assert outcome.crash is None
    outcome = fuzz(hangs, [b"slow"], seconds=0, rng=random.Random(0))
    assert isinstance(outcome.crash.error, plain.Hang)


def test_what_reaches_nothing_new_is_not_kept():
    frames = [encode_header(kind, 16) for kind in MessageType]
    kept = plain.distilled(believes, [*frames, b"", b"12"])
    assert len(kept) == 2


@pytest.fixture
def planted(monkeypatch, tmp_path):
    monkeypatch.setitem(tool.TARGETS, "planted", believes)
    monkeypatch.setattr(tool, "examples", lambda name: [encode_header(MessageType.PULL_REQ, 16)])
    return ["--target", "planted", "--engine", "plain", "--output", str(tmp_path)]


def test_a_crash_leaves_a_file_that_brings_it_back(planted, tmp_path, capsys):
    assert tool.main([*planted, "--seconds", "60", "--seed", "3"]) == 1
    [path] = tmp_path.glob("crash-planted-*")
    said = capsys.readouterr().out
    assert "IndexError: believed" in said
    assert f"--target planted --replay {path}" in said
    with pytest.raises(IndexError, match="believed"):
        tool.main(["--target", "planted", "--replay", str(path)])


def test_the_launcher_prints_what_was_done():
    done = subprocess.run(
        ["tools/fuzz", "--seconds", "1", "--target", "header", "--engine", "plain", "--seed", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert "engine plain, seed 1" in done.stdout
    assert "nothing" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_libfuzzer_prints_what_was_done(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "tools:tests/harness")
    monkeypatch.chdir(ROOT)
    words = ["--seconds", "1", "--target", "header", "--engine", "atheris", "--output", str(tmp_path)]
    assert tool.main(words) == 0
    assert "engine atheris" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seconds", "-1"], "tools/fuzz: error: --seconds -1: must be finite and above 0"),
        (["--seconds", "nan"], "tools/fuzz: error: --seconds nan: must be finite and above 0"),
    ],
)
def test_wrong_usage_is_refused(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        tool.main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == said


def test_an_input_that_is_not_there_is_named():
    with pytest.raises(SystemExit, match="tools/fuzz: --replay none: No such file or directory"):
        tool.main(["--target", "hello", "--replay", "none"])

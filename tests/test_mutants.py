"""``tools/mutate``: every mutant still finds its text in the coordinator, and the tool tells caught from not.

That the mutants are caught is shown by running it, which takes some minutes.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tools"))

from mutants import MUTANTS, Mutant  # noqa: E402
from mutation import changed  # noqa: E402


def test_there_are_enough_and_each_has_a_name():
    assert len(MUTANTS) >= 20
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_exactly_once(mutant):
    healthy = (ROOT / "yeto" / "core" / mutant.file).read_text(encoding="utf-8")
    assert changed(mutant) != healthy


def test_a_mutant_that_was_left_behind_is_named():
    gone = Mutant("gone", "weights.py", "no such text", "", "nothing")
    with pytest.raises(ValueError, match="gone: its text stands 0 times"):
        changed(gone)


def test_the_tool_tells_caught_from_survived():
    names = ["--only", "weights-not-squared", "--only", "stop-retries"]
    run = subprocess.run(
        [sys.executable, "tools/mutation.py", "--by", "formulas", *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert "test_learner_weight" in run.stdout
    assert "SURVIVED: a stopping session retries nothing" in run.stdout
    assert "1 of 2 caught" in run.stdout

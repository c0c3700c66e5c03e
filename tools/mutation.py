"""Mutation check: break a rule of the coordinator on purpose, and see whether a test notices.

Each mutant is one small change of ``yeto/core`` that breaks one rule and nothing else. The tree is copied to
a temporary folder, the change is made there, and the tests that are to prove the coordinator run until the
first one fails. A mutant that no test catches is a rule that nobody checks; a mutant whose text is not found
exactly once was left behind by the source. Either is a failure.

    tools/mutate                       all of them, one after the other
    tools/mutate --list                what there is
    tools/mutate --only ema-weight     one (may be given several times)
    tools/mutate --by machine          by one of the proofs alone: formulas, scripts or machine
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen
from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("yeto", "tests", "fixtures", "pyproject.toml")
PROOFS = {
    "formulas": "tests/core/test_core_formulas.py",
    "scripts": "tests/core/test_core_scripts.py",
    "machine": "tests/core/test_core_machine.py",
}
"""What has to notice, quickest first."""
SECONDS_MAX = 900.0
"""A mutant that keeps the tests busy for so long is caught: the healthy tree takes a fraction."""


def changed(mutant: Mutant, root: Path = ROOT) -> str:
    """The source of the mutant's file with the change made.

    Raises:
        ValueError: the text is not found exactly once, or the result is no Python.
    """
    source = (root / "yeto" / "core" / mutant.file).read_text(encoding="utf-8")
    found = source.count(mutant.old)
    if found != 1:
        raise ValueError(f"{mutant.name}: its text stands {found} times in yeto/core/{mutant.file}, not once")
    result = source.replace(mutant.old, mutant.new)
    ast.parse(result, filename=mutant.file)
    return result


@frozen
class Verdict:
    """What became of one mutant."""

    mutant: Mutant
    caught_by: str | None
    """The test that failed; None when all passed."""
    seconds: float


def prove(tree: Path, proofs: list[str]) -> tuple[str | None, float]:
    """Run the proofs in a tree up to the first failure; return the test that failed, and the seconds."""
    environment = dict(os.environ, PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1", YETO_MACHINE="first")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "--tb=no", "--no-header"]
    command += ["-rfE", "--show-capture=no", *(PROOFS[name] for name in proofs)]
    began = time.monotonic()
    try:
        run = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX
        )
    except subprocess.TimeoutExpired:
        return "no end of it", time.monotonic() - began
    seconds = time.monotonic() - began
    if run.returncode == 0:
        return None, seconds
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    return failed[1].removeprefix("tests/core/") if failed else run.stdout[-300:].strip(), seconds


def copy_tree(target: Path) -> None:
    """Copy what the proofs need."""
    for name in NEEDED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target / name)


def check(mutants: list[Mutant], proofs: list[str]) -> Iterator[Verdict]:
    """Try mutants, one after the other, in a copy of the tree.

    Raises:
        RuntimeError: the proofs fail without any mutant.
    """
    with tempfile.TemporaryDirectory(prefix="yeto-mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        broken, seconds = prove(tree, proofs)
        if broken is not None:
            raise RuntimeError(f"the proofs fail without any mutant: {broken}")
        print(f"{'healthy':28} nothing fails in {seconds:.1f} s", flush=True)
        for mutant in mutants:
            path = tree / "yeto" / "core" / mutant.file
            healthy = path.read_text(encoding="utf-8")
            path.write_text(changed(mutant, tree), encoding="utf-8")
            try:
                yield Verdict(mutant, *prove(tree, proofs))
            finally:
                path.write_text(healthy, encoding="utf-8")


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="tools/mutate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="name the mutants and the rules they break")
    parser.add_argument("--only", action="append", metavar="NAME", help="try this one")
    parser.add_argument("--by", action="append", choices=PROOFS, help="let only this proof try")
    options = parser.parse_args()
    known = {mutant.name: mutant for mutant in MUTANTS}
    if options.list:
        for mutant in MUTANTS:
            print(f"{mutant.name:28} {mutant.file:12} {mutant.breaks}")
        return 0
    unknown = sorted(set(options.only or ()) - set(known))
    if unknown:
        print(f"--only {unknown[0]}: there is no such mutant; --list names them", file=sys.stderr)
        return 2
    chosen = [known[name] for name in options.only or known]
    # Whichever way it is stopped, also as a background job: the copy and the running proof go too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    survived: list[str] = []
    try:
        for verdict in check(chosen, options.by or list(PROOFS)):
            if verdict.caught_by is None:
                survived.append(verdict.mutant.name)
            by = verdict.caught_by or f"SURVIVED: {verdict.mutant.breaks}"
            print(f"{verdict.mutant.name:28} {verdict.seconds:6.1f} s  {by}", flush=True)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the copy is gone", file=sys.stderr)
        return 130
    print(f"{len(chosen) - len(survived)} of {len(chosen)} caught")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())

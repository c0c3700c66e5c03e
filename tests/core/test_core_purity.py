"""The coordinator is a function: nothing it imports can know the time, the dice or the disk."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

import yeto.core
from yeto.core.events import EVENTS, SessionResumed
from yeto.core.step import _TABLE

MODULES = sorted(Path(yeto.core.__file__).parent.glob("*.py"))
ALLOWED = {
    "__future__",
    "attrs",
    "collections.abc",
    "enum",
    "immutables",
    "math",
    "typing",
    "yeto.errors",
}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_only_pure_modules_are_imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported = [node.module or ""]
        else:
            continue
        for name in imported:
            assert name in ALLOWED or name == "yeto.core" or name.startswith("yeto.core."), name


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_nothing_is_opened_printed_awaited_or_kept_globally(path):
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.Global | ast.Nonlocal)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input", "id", "hash", "set"}
            assert node.func.id not in {"exec", "eval", "globals", "__import__"}


def test_what_is_made_without_its_init_has_all_fields_in_order():
    found = 0
    for path in MODULES:
        module = importlib.import_module(f"yeto.core.{path.stem}")
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="made"), args=[ast.Name(id=kind), ast.Dict(keys=keys)]):
                    names = [ast.literal_eval(key) for key in keys]
                    assert names == list(attrs.fields_dict(getattr(module, kind))), f"{path}: {kind}"
                    found += 1
    assert found


def test_every_event_has_a_place_and_every_module_a_theory():
    assert set(_TABLE) | {SessionResumed} == set(EVENTS.values())
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_importing_the_core_brings_in_no_heavy_module():
    heavy = ("torch", "numpy", "trio", "asyncio")
    code = f"import sys, yeto.core; print(*[m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""

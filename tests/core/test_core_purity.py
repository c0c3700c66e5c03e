"""The coordinator is a function: nothing it imports can know the time, the dice or the disk."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import yeto.core
from yeto.core.decisions import DECISIONS
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
            assert node.func.id not in {"open", "print", "input", "id", "hash", "set", "exec", "eval"}


def test_every_event_has_a_place_and_every_module_a_theory():
    assert set(_TABLE) | {SessionResumed} == set(EVENTS.values())
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_kinds_are_unique_and_frozen():
    assert sorted(EVENTS) == [
        "budget_reported",
        "budget_wait_passed",
        "checkpoint_failed",
        "checkpoint_written",
        "final_ack_received",
        "final_ack_timeout_passed",
        "first_estimate_deadline_passed",
        "fragment_initialised",
        "gate_opened",
        "grace_elapsed",
        "heartbeat",
        "hello_received",
        "learner_joined",
        "learner_left",
        "merge_failed",
        "merge_finished",
        "outer_step_applied",
        "push_offered",
        "push_received",
        "quorum_deadline_passed",
        "retry_due",
        "session_resumed",
        "start_timeout_passed",
        "stop_deadline_passed",
        "stop_requested",
        "svd_pool_drained",
        "svd_pool_poisoned",
        "upload_progress",
    ]
    assert sorted(DECISIONS) == [
        "attempt_discarded",
        "attempt_opened",
        "attempt_sealed",
        "broadcast_ordered",
        "checkpoint_ordered",
        "commit_ordered",
        "final_cut_ordered",
        "grace_opened",
        "ignored",
        "learner_refused",
        "learner_released",
        "merge",
        "merge_ordered",
        "push_accepted",
        "push_admitted",
        "push_refused",
        "quorum_reached",
        "rounds_started",
        "session_ended",
        "session_finalising",
        "session_opened",
        "session_released",
    ]


def test_importing_the_core_brings_in_no_heavy_module():
    heavy = ("torch", "numpy", "trio", "asyncio")
    code = f"import sys, yeto.core; print(*[m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""

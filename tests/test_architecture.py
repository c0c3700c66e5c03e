"""The rules between the packages, read from the source and from a real interpreter's sys.modules."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import yeto

sys.path.append(str(Path(__file__).parents[1] / "tools"))

import draw_packages
from draw_packages import imports

PACKAGE = Path(yeto.__file__).parent

ALLOWED = {
    "core": set(),
    "tape": {"core"},
    "wire": set(),
    "link": {"wire"},
    "merge": {"wire", "core"},
    "state": {"wire"},
    "layout": {"wire"},
    "syncer": {"core", "tape", "wire", "link", "merge", "state"},
    "learner": {"wire", "link", "layout"},
    "tuning": {"layout", "wire", "state"},
    "text": {"wire", "state", "learner", "tuning"},
    "diffusion": {"wire", "state", "learner", "tuning"},
    "view": {"core", "tape"},
    "sim": {"core", "tape", "learner"},
    "fleet": {"core", "state", "tape", "view", "wire"},
    "cli": {
        "core",
        "tape",
        "wire",
        "link",
        "state",
        "syncer",
        "learner",
        "tuning",
        "text",
        "diffusion",
        "view",
        "sim",
        "fleet",
    },
}
"""Which packages of ours each package may import; errors, hosts, programs and storage are open to all.

The core has stricter tests too."""


def test_every_package_has_a_rule():
    assert set(draw_packages.packages()) == set(ALLOWED)


def test_every_rule_is_used():
    graph = draw_packages.package_imports()
    unused = {
        f"{package} -> {other}" for package in ALLOWED for other in ALLOWED[package] - set(graph[package])
    }
    assert not unused, "nothing imports this: take it out of the rules"


def test_the_diagram_shows_the_imports_of_today():
    page = draw_packages.PAGE.read_text(encoding="utf-8")
    assert page == draw_packages.placed(page), "run tools/draw_packages.py --write"


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_packages_import_only_what_the_rule_allows(package):
    for path in sorted((PACKAGE / package).rglob("*.py")):
        for line, module in imports(path):
            parts = module.split(".")
            if parts[0] != "yeto" or parts[1:2] in (
                [],
                ["errors"],
                ["hosts"],
                ["programs"],
                ["storage"],
                [package],
            ):
                continue
            assert parts[1] in ALLOWED[package], f"{path}:{line}: {package} must not import {module}"


TASKS = ("tuning", "text", "diffusion")


@pytest.mark.parametrize("package", TASKS)
def test_tasks_take_only_the_task_types_from_the_learner(package):
    for path in sorted((PACKAGE / package).rglob("*.py")):
        for line, module in imports(path):
            if module.startswith("yeto.learner"):
                assert module == "yeto.learner.task", f"{path}:{line}: {module}"


def test_sim_takes_only_the_book_and_its_values_from_the_learner():
    allowed = {"yeto.learner.anchors", "yeto.learner.exchanged"}
    for path in sorted((PACKAGE / "sim").rglob("*.py")):
        for line, module in imports(path):
            if module.startswith("yeto.learner"):
                assert module in allowed, f"{path}:{line}: {module}"


@pytest.mark.parametrize("package", TASKS)
def test_tasks_use_state_for_export_only(package):
    users = {
        path.name
        for path in (PACKAGE / package).rglob("*.py")
        if any(module.startswith("yeto.state") for _, module in imports(path))
    }
    assert all(name.startswith("export") for name in users), users


def test_syncer_needs_no_model_library():
    loaded = loaded_by("import yeto.syncer.app, yeto.cli.run_syncer")
    assert "trio" in loaded
    assert not loaded & {"transformers", "peft", "datasets", "diffusers"}


def test_nothing_is_read_in_a_format_that_can_run_code():
    """What comes from a disk or a peer may be anybody's; the libraries that read models refuse such files."""
    runs_code = re.compile(
        r"\b(torch|joblib|np|numpy)\.load\(|allow_pickle|weights_only=False|yaml\.(unsafe_)?load\("
    )
    for path in PACKAGE.rglob("*.py"):
        modules = {module.split(".")[0] for _, module in imports(path)}
        assert not modules & {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}, path
        assert not runs_code.search(path.read_text(encoding="utf-8")), path


HEAVY = {"trio", "torch", "transformers", "peft", "diffusers", "datasets", "numba", "numpy", "matplotlib"}


@pytest.mark.parametrize(
    "statement",
    [
        "import yeto",
        "import yeto.core, yeto.tape",
        "from yeto.cli.main import build; build()(['--help'], result_action='return_value')",
        "from yeto.cli.main import main; main(['run', '--help'])",
        "from yeto.cli.main import main; main(['replay', '--help'])",
        "from yeto.cli.main import main; main(['simulate', '--help'])",
        "from yeto.cli.main import main; main(['shape', '--help'])",
        "from yeto.cli.main import main; main(['replay', {tape!r}])",
        "from yeto.cli.main import main; main(['replay', {tape!r}, '--state'])",
        "from yeto.cli.main import main; main(['replay', {tape!r}, '--round', '2'])",
        "from yeto.cli.main import main; main(['replay', {tape!r}, '--what-if', 'quorum=1'])",
        "from yeto.cli.main import main; main(['status', {tape!r}, '--once'])",
    ],
)
def test_light_commands_load_no_heavy_library(statement, fixtures):
    tape = str(fixtures / "tapes" / "two-learners-v1.jsonl")
    assert not loaded_by(statement.format(tape=tape)) & HEAVY


def loaded_by(statement):
    """Run a statement in a fresh interpreter; return the top-level modules it left loaded."""
    script = (
        "import sys\n"
        f"try:\n    {statement}\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "finally:\n    print('\\nLOADED', *{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rsplit("LOADED", 1)[1].split())

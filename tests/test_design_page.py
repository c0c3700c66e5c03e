"""docs/DESIGN.md and the README against the code: every module that they name is there, with what it does."""

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DESIGN = ROOT / "docs" / "DESIGN.md"

MODULE = re.compile(r"`(yeto/[\w/]+(?:\.py)?)`")
STEP = re.compile(r"^\| \d+ \| `(yeto/[\w/]+)\.py` \| (.+?) \|", re.MULTILINE)


def section(title):
    page = DESIGN.read_text(encoding="utf-8")
    return page.split(f"## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_that_a_page_names_is_there(page):
    named = MODULE.findall(page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(("title", "least"), [("The way of a push", 20), ("The way of a decision", 10)])
def test_every_function_on_a_way_is_where_it_says(title, least):
    steps = STEP.findall(section(title))
    assert len(steps) >= least
    for path, functions in steps:
        names = re.findall(r"`([\w.]+)`", functions)
        assert names, path
        for name in names:
            found = import_module(path.replace("/", "."))
            for part in name.split("."):
                found = getattr(found, part)
            assert callable(found)


@pytest.mark.parametrize("package", ["core", "fleet", "learner", "syncer"])
def test_the_first_page_of_a_large_package_names_its_modules(package):
    named = set(re.findall(r"``(\w+)``", import_module(f"yeto.{package}").__doc__))
    modules = {path.stem for path in (ROOT / "yeto" / package).glob("*.py")} - {"__init__"}
    assert named == modules

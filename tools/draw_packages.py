#!/usr/bin/env python3
"""Draw which package of yeto imports which, from the code, as the Mermaid diagram of docs/DESIGN.md.

    .venv/bin/python tools/draw_packages.py            # print the diagram
    .venv/bin/python tools/draw_packages.py --write    # put it in its place in docs/DESIGN.md

Imports of every file count, those inside functions too. An arrow is left out where a longer way leads to the
same package, so the diagram shows the order of the packages; tests/test_architecture.py holds each import.
"""

import argparse
import ast
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "yeto"
PAGE = ROOT / "docs" / "DESIGN.md"
LEAVES = {"errors", "hosts", "programs", "storage"}
"""Modules that every package may import; drawn, they would hide the rest."""

BEGIN = "<!-- drawn by tools/draw_packages.py -->\n```mermaid\n"
END = "```\n<!-- end of the drawing -->"


def imports(path: Path) -> list[tuple[int, str]]:
    """Return (line, dotted module) of every import of a file, wherever it stands."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level or not node.module:
                raise ValueError(f"{path}:{node.lineno}: a relative import; write the whole name")
            found.append((node.lineno, node.module))
    return found


def packages() -> list[str]:
    """Return the names of yeto's packages, sorted."""
    return sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def package_imports() -> networkx.DiGraph:
    """Return the packages as nodes, with an edge from each to every other one that it imports."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(packages())
    for package in packages():
        for path in (PACKAGE / package).rglob("*.py"):
            for _, module in imports(path):
                top, _, rest = module.partition(".")
                other = rest.partition(".")[0]
                if top == "yeto" and other and other != package and other not in LEAVES:
                    graph.add_edge(package, other)
    return graph


def diagram() -> str:
    """Return the lines of the Mermaid flowchart, without its fence."""
    reduced = networkx.transitive_reduction(package_imports())
    edges = sorted(f"    {package} --> {other}\n" for package, other in reduced.edges)
    return "flowchart TD\n" + "".join(edges)


def placed(page: str) -> str:
    """Return a page with the diagram of today between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE} has no place for the diagram: {BEGIN!r} to {END!r}")
    return before + BEGIN + diagram() + END + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write it into docs/DESIGN.md")
    if parser.parse_args().write:
        PAGE.write_text(placed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(diagram(), end="")


if __name__ == "__main__":
    main()

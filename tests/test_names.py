"""Names that others rely on: what the packages offer, the shared functions, the options of each command.

``names.txt`` holds them. A name that is added is a line more; one that is renamed or taken away breaks the
scripts of others, so docs/CHANGELOG.md has to say it. To write the file anew: ``python tests/test_names.py``.
Kinds and fields of the tape are frozen beside the tests of their codec.
"""

import inspect
import re
from importlib import import_module
from pathlib import Path

from cyclopts import App

import yeto
from yeto.cli import checkpoint, data, diffusion_export, export, keys, main, run

NAMES = Path(__file__).with_name("names.txt")

FUNCTIONS = [
    "yeto.core.initial_state",
    "yeto.core.next_timer",
    "yeto.core.step",
    "yeto.core.waiting_for",
    "yeto.layout.build_layout",
    "yeto.merge.apply_outer_step",
    "yeto.merge.average",
    "yeto.merge.correct_delta",
    "yeto.merge.examine_push",
    "yeto.merge.isotropic",
    "yeto.merge.learner_weight",
    "yeto.merge.merge_fragment",
    "yeto.merge.outer_step",
    "yeto.merge.radial_directional_average",
    "yeto.state.read_checkpoint",
    "yeto.state.write_checkpoint",
    "yeto.tape.read",
    "yeto.tape.replay",
    "yeto.wire.bf16.decode",
    "yeto.wire.bf16.encode",
    "yeto.wire.f32.decode",
    "yeto.wire.f32.encode",
    "yeto.wire.layout_fingerprint",
    "yeto.wire.q4.decode",
    "yeto.wire.q4.encode",
]
"""Functions that stand for themselves: scripts and checks call them, so their parameters are frozen too."""

FLAG = re.compile(r"(?<![-\w])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![-\w])")
EVERYWHERE = {
    *("--config", "--debug", "--help", "--version", "--role", "--lora", "--frame-bytes-max"),
    *("--nproc-per-node", "--nnodes", "--master-port", "--standalone", "--pid"),
    *(
        "--export-word",
        "--interval-s",
        "--to",
        "--cluster",
        "--detach-run",
        "--endpoint",
        "--env",
        "--secret",
        "--yes",
    ),
    *("--all", "--output", "--refresh", "--status", "--no-follow", "--python", "--quiet"),
}
"""Flags that are taken off the line before a command sees it, the name of a family (the --lora flags), what
only a program says (to an SVD worker, a fleet's head or its mirror), and those of torchrun, py-spy, SkyPilot
and uv."""


def packages():
    """Return the dotted name and the public names of every package that states some."""
    found = {}
    for path in sorted(Path(yeto.__file__).parent.glob("*/__init__.py")):
        package = import_module(f"yeto.{path.parent.name}")
        if hasattr(package, "__all__"):
            found[package.__name__] = sorted(package.__all__)
    return found


def signature(dotted):
    module, name = dotted.rsplit(".", 1)
    parameters = inspect.signature(getattr(import_module(module), name)).parameters.values()
    words, keyword_only = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            words.append("*")
        words.append(parameter.name + ("" if parameter.default is parameter.empty else "=..."))
    return f"{dotted}({', '.join(words)})"


def commands():
    """Return the app behind each command line."""
    found = {
        f"yeto {name}": main.build()[name]
        for name in ("replay", "status", "report", "dashboard", "simulate", "shape", "launch", "logs", "down")
    }
    found["yeto checkpoint inspect"] = checkpoint.checkpoint_app["inspect"]
    found["yeto data cache-latents"] = data.data_app["cache-latents"]
    found["yeto keys new"] = keys.keys_app["new"]
    found |= {f"yeto run --role {role}": run._role_app(role) for role in run.ROLES}
    return found | {"yeto-export": export.build(), "yeto-diffusion-export": diffusion_export.build()}


def options(app: App):
    """Return every option of a command, the negative ones (``--no-verify``) included."""
    arguments = app.assemble_argument_collection()
    words = {word for argument in arguments for word in (*argument.names, *argument.negatives)}
    return sorted(word for word in words if word.startswith("-"))


def frozen():
    """Return what ``names.txt`` has to hold."""
    sections = {f"{package}.__all__": names for package, names in packages().items()}
    sections["functions"] = [signature(name) for name in FUNCTIONS]
    sections |= {command: options(app) for command, app in commands().items()}
    return "\n".join("\n".join([f"[{title}]", *lines, ""]) for title, lines in sections.items())


def test_public_names_and_options_are_frozen():
    assert frozen() == NAMES.read_text(encoding="ascii")


def test_every_flag_that_a_page_or_a_message_names_is_there():
    known = {word for app in commands().values() for word in options(app)} | EVERYWHERE
    root = NAMES.parents[1]
    paths = [root / "README.md", *(root / "docs").glob("*.md"), *(root / "yeto").rglob("*.py")]
    for path in sorted(paths):
        # Their flags are those of tools/bench, tools/compare_diloco.py and python -m yeto.sim.campaign.
        if path.name not in ("BENCHMARKS.md", "LM_BENCHMARK.md", "campaign.py"):
            assert set(FLAG.findall(path.read_text(encoding="utf-8"))) <= known, path


def test_packages_that_import_on_first_use_know_where_each_public_name_is():
    lazy = {name: import_module(name) for name in packages() if hasattr(import_module(name), "_HOME")}
    assert sorted(lazy) == ["yeto.diffusion", "yeto.merge", "yeto.state", "yeto.text"]
    for name, package in lazy.items():
        assert sorted(package._HOME) == sorted(package.__all__), name


if __name__ == "__main__":
    NAMES.write_text(frozen(), encoding="ascii")

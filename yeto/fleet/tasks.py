"""The tasks that SkyPilot is given: one for the head, one for each island, as YAML text.

The rules: an island is a job of its own, so that a preempted one comes back alone. No secret is in the text:
the run's key travels as a file, and what a hub asks for by its variable's name. And the machines get the very
Yeto that launches them: its source travels along, its dependencies are installed there.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

import yeto
from yeto.errors import ConfigError
from yeto.fleet.commands import ADDRESS, KEY, PORT, Place, head_command, island_command
from yeto.fleet.launch import Launch, is_remote, island_name
from yeto.fleet.registry import Run

HOME: Final = "~/yeto-run"
"""Folder that head and islands work in."""
CODE: Final = "~/yeto-code"
"""Folder that holds Yeto's source."""
PYTHON: Final = "~/yeto-env/bin/python"
"""Python with Yeto's dependencies."""
INPUTS: Final = "inputs"
"""Folder in ``HOME`` of the models and rows that are no id and no URL."""
KEY_DROP: Final = "~/.yeto-secret/auth.key"
"""Where SkyPilot puts the key; it does not keep modes everywhere, so it is moved and closed first of all."""

ADDRESS_VARIABLE: Final = "SYNCER_ADDRESS"
"""Environment variable of an island's task with the head's ``HOST:PORT``; said when it is launched."""

PYTHON_VERSION: Final = "3.12"
HEAD_IDLE_MINUTES: Final = 10
"""The head's machine is given back so long after its work is done."""
RESTARTS_MAX: Final = 5
"""Times an island that ended with an error is started again; preemptions do not count."""

_STORES: Final = {"s3": "fsspec[s3]", "gs": "fsspec[gcs]", "gcs": "fsspec[gcs]", "abfs": "fsspec[abfs]"}
"""What fsspec needs to reach a URI of that scheme."""


@frozen(kw_only=True)
class Software:
    """What the machines run."""

    folder: str
    """Of this machine: the package ``yeto``."""
    requirements: tuple[str, ...]
    """What pip installs there."""


@frozen(kw_only=True)
class Task:
    """One task: its name, and the YAML that SkyPilot reads."""

    name: str
    """``head``, ``island-0``, ..."""
    text: str
    secrets: tuple[str, ...] = field(default=())
    """Environment variables of this machine whose values it is given when it is launched."""


def wanted_extras(launch: Launch) -> frozenset[str]:
    """Return the extras of Yeto that a launch needs on its machines."""
    flags = {word.partition("=")[0] for word in launch.learner_words}
    asked = {extra for extra in ("tensorboard", "wandb") if f"--{extra}" in flags}
    return frozenset(asked | ({"diffusion"} if launch.task == "diffusion" else set()))


def installed_software(extras: frozenset[str] = frozenset()) -> Software:
    """Return the Yeto that runs here.

    Args:
        extras: whose packages the machines get, too.

    Raises:
        ConfigError: nobody knows its dependencies.
    """
    try:
        stated = metadata.requires("yeto") or []
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            "yeto launch: this Yeto was not installed with pip, so its dependencies are unknown; "
            "run pip install -e . in its source"
        ) from error
    wanted = set()
    for line in stated:
        requirement, _, marker = line.partition(";")
        if "extra" not in marker or any(f'extra == "{extra}"' in marker for extra in extras):
            wanted.add(requirement.strip())
    return Software(folder=str(Path(yeto.__file__).parent), requirements=tuple(sorted(wanted)))


def make_tasks(launch: Launch, run: Run, software: Software, environ: Mapping[str, str]) -> list[Task]:
    """Return the head's task and one for each island.

    Args:
        launch: what is launched, on rented machines.
        run: its folder in the registry, which holds the key.
        software: what the machines run.
        environ: environment of this machine; names are taken from it, values never.
    """
    names = ("HF_TOKEN", *(("WANDB_API_KEY",) if "wandb" in wanted_extras(launch) else ()))
    secrets = tuple(name for name in names if environ.get(name))
    return [
        _head(launch, run, software, secrets),
        *(_island(launch, number, run, software, secrets) for number in range(len(launch.parsed()))),
    ]


def _head(launch: Launch, run: Run, software: Software, secrets: tuple[str, ...]) -> Task:
    inputs = _Inputs(launch.model)
    place = Place(host="0.0.0.0", port=PORT, input=inputs.there)
    resources = {
        **({} if launch.head_infra is None else {"infra": launch.head_infra}),
        "cpus": "4+",
        "memory": f"{launch.head_memory_gb}+",
        "disk_size": launch.disk_gb,
        # Nobody without the run's key gets past the first message there.
        "ports": PORT,
        "autostop": {"idle_minutes": HEAD_IDLE_MINUTES, "down": True},
    }
    return _task(
        "head",
        {
            "name": f"{launch.name}-head",
            "resources": resources,
            "file_mounts": _mounts(run, software, inputs),
            "secrets": dict.fromkeys(secrets),
            "setup": _setup(software, (launch.output, launch.mirror)),
            "run": _script(*_BEGIN, _python(head_command(launch, place))),
        },
        secrets,
    )


def _island(launch: Launch, number: int, run: Run, software: Software, secrets: tuple[str, ...]) -> Task:
    island = launch.parsed()[number]
    files = [launch.model, launch.data, launch.eval_data, launch.chat_template]
    inputs = _Inputs(*(file for file in files if file is not None))
    place = Place(host="", port=0, input=inputs.there)
    resources = {
        "infra": island.cloud + ("" if island.region is None else f"/{island.region}"),
        "accelerators": f"{island.gpu.name}:{island.count}",
        "use_spot": number not in launch.on_demand,
        "disk_size": launch.disk_gb,
        "job_recovery": {"max_restarts_on_errors": RESTARTS_MAX},
    }
    words = _python(island_command(launch, number, place))
    machines = (
        'export PET_NODE_RANK="$SKYPILOT_NODE_RANK"',
        'export PET_MASTER_ADDR="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"',
    )
    run_text = _script(
        *_BEGIN,
        # Read anew at every dial.
        f'echo "${ADDRESS_VARIABLE}" > {ADDRESS}',
        *(machines if island.nodes > 1 else ()),
        words,
    )
    return _task(
        island_name(number),
        {
            "name": f"{launch.name}-{island_name(number)}",
            "num_nodes": island.nodes,
            "resources": resources,
            "envs": {ADDRESS_VARIABLE: None},
            "file_mounts": _mounts(run, software, inputs),
            "secrets": dict.fromkeys(secrets),
            "setup": _setup(software, (launch.data, launch.eval_data)),
            "run": run_text,
        },
        secrets,
    )


class _Inputs:
    """The files and folders of this machine that a task needs, and what they are called there."""

    def __init__(self, *names: str) -> None:
        self.mounts: dict[str, str] = {}
        self._there: dict[str, str] = {}
        for name in names:
            if name in self._there or is_remote(name) or not Path(name).is_absolute():
                continue
            # Two of one name lie apart.
            self._there[name] = f"{INPUTS}/{len(self._there)}/{Path(name).name}"
            self.mounts[f"{HOME}/{self._there[name]}"] = name

    def there(self, name: str) -> str:
        """Return the name of an input on the machine."""
        return self._there.get(name, name)


def _mounts(run: Run, software: Software, inputs: _Inputs) -> dict[str, str]:
    return {KEY_DROP: str(run.key), f"{CODE}/yeto": software.folder, **inputs.mounts}


_BEGIN: Final = (
    f"mkdir -p {HOME} && cd {HOME}",
    f"chmod 600 {KEY_DROP} && install -m 600 {KEY_DROP} {KEY}",
    f"export PYTHONPATH={CODE.replace('~', '$HOME')}",
)


def _setup(software: Software, places: tuple[str | None, ...]) -> str:
    stores = {_STORES.get((place or "").partition("://")[0]) for place in places}
    wanted = [*software.requirements, *sorted(store for store in stores if store)]
    return _script(
        "command -v uv || python3 -m pip install --quiet uv",
        f"[ -x {PYTHON} ] || uv venv --python {PYTHON_VERSION} {PYTHON.removesuffix('/bin/python')}",
        # Not resolved here: a machine takes the build of torch that fits its accelerators.
        f"uv pip install --quiet --python {PYTHON} {shlex.join(wanted)}",
    )


def _python(words: list[str]) -> str:
    return f"exec {PYTHON} -m {shlex.join(words)}"


def on_head(words: list[str]) -> str:
    """Return the line for a shell on the head that runs words after ``python -m`` beside it."""
    return f"cd {HOME} && PYTHONPATH={CODE.replace('~', '$HOME')} {_python(words)}"


def _script(*lines: str) -> str:
    return "\n".join(("set -euo pipefail", *lines)) + "\n"


def _task(name: str, config: dict[str, Any], secrets: tuple[str, ...]) -> Task:
    kept = {key: value for key, value in config.items() if value not in ([], {})}
    return Task(name=name, text=_yaml(kept), secrets=secrets)


def _yaml(config: dict[str, Any]) -> str:
    # Not at the top: only rented fleets need it.
    import yaml

    # Of our own, so that nobody else's YAML changes.
    dumper = type("BlockDumper", (yaml.SafeDumper,), {})

    def block(writer: Any, text: str) -> Any:
        """Write scripts as blocks that people can read."""
        return writer.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    dumper.add_representer(str, block)  # type: ignore[attr-defined]
    text: str = yaml.dump(config, Dumper=dumper, sort_keys=False, width=1000, allow_unicode=True)
    return text

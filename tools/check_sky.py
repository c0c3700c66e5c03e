"""The part of tools/check-sky that runs in SkyPilot's environment: its parsers read what a dry run wrote."""

import shlex
import sys
from pathlib import Path

import sky
from sky.client.cli import command

ADDRESS = ("SYNCER_ADDRESS", "192.0.2.1:29400")


def check_task(path):
    """Have SkyPilot read a task, as sky launch would; return what it made of it."""
    text = path.read_text(encoding="utf-8")
    assert "never-shown" not in text, f"{path}: holds a secret"
    config = sky.utils.yaml_utils.safe_load(text)
    overrides = [ADDRESS] if "envs" in config else []
    task = sky.Task.from_yaml_config(config, env_overrides=overrides)
    (resources,) = task.resources
    machine = resources.accelerators or f"{resources.cpus} CPUs"
    return (
        f"{task.name}: {task.num_nodes} nodes, {resources.infra}, {machine}, "
        f"spot {resources.use_spot}, ports {resources.ports}"
    )


def check_command(line):
    """Have SkyPilot's command line read one of ours; a flag it does not know ends the check."""
    words = shlex.split(line, comments=True)
    assert words[0] == "sky", line
    program, context = command.cli, None
    rest = words[1:]
    while hasattr(program, "commands"):
        name, *rest = rest
        program = program.commands[name]
    context = program.make_context(program.name, list(rest), resilient_parsing=False)
    return f"sky {program.name}: {len(context.params)} parameters understood"


def main(folder):
    """Check everything in a folder of dry runs."""
    tasks = sorted(folder.glob("*-tasks/*.yaml"))
    assert len(tasks) >= 15, "the dry runs wrote less than they should"
    for path in tasks:
        print(f"{path.parent.name}/{path.name}: {check_task(path)}")
    lines = [
        line
        for path in sorted(folder.glob("*.commands"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("sky ")
    ]
    # What is not part of a launch.
    lines += [
        "sky jobs queue --all --output json",
        "sky status --refresh --output json",
        "sky jobs cancel --name a-island-0 --yes",
        "sky down --yes a-head",
        "sky logs a-head --no-follow",
        "sky logs a-head --status",
        "sky jobs logs --name a-island-0 --follow",
    ]
    for line in lines:
        check_command(line)
    print(f"SkyPilot {sky.__version__} reads {len(tasks)} tasks and {len(lines)} commands")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""What an operator may say about the pool, on the command line and in the environment."""

import sys

import attrs
import pytest

from yeto.cli.main import main
from yeto.cli.run_syncer import SyncerFlags
from yeto.core import CoreConfig
from yeto.errors import ConfigError
from yeto.syncer.config import SyncerConfig
from yeto.syncer.svd_interpreter import find_interpreter
from yeto.syncer.svd_settings import SvdSettings, parse_devices

SENTENCE = "does not prove that the daemon stopped the process that holds the GPU"
REMEDY = "run the syncer inside the container, with ISO_WORKER_PYTHON=python3"


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Write programs into a folder that is the first of PATH and the present one; return how."""

    def write(name, text="#!/bin/sh\nexit 0\n"):
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    for client in ("docker", "podman", "nerdctl"):
        write(client)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return write


def refused(python):
    with pytest.raises(ConfigError) as error:
        find_interpreter(python)
    message = str(error.value)
    assert message.startswith(f"--iso-worker-python {python}: starts a container (")
    assert SENTENCE in message
    assert message.endswith(REMEDY)


@pytest.mark.parametrize(
    "python",
    [
        "docker",
        "./podman",
        "docker run --gpus all image python3",
        "/usr/bin/docker run image python3",
        "sudo -n docker run image python3",
        "env A=1 nerdctl run image",
    ],
)
def test_a_container_client_is_refused(programs, python):
    refused(python)


def test_a_link_to_a_container_client_is_refused(programs, tmp_path):
    (tmp_path / "one").symlink_to("docker")
    (tmp_path / "python-of-the-image").symlink_to(tmp_path / "one")
    programs("client-29")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "docker").symlink_to(tmp_path / "client-29")
    (tmp_path / "python3.11").symlink_to("other/docker")
    for name in ("./one", "./python-of-the-image", "python3.11"):
        refused(name)


SCRIPTS = [
    '#!/bin/sh\nexec docker run -i --rm image python3 "$@"\n',
    '#!/usr/bin/env bash\nset -e\nsudo -u root env A=1 /usr/bin/docker run \\\n  image "$@"\n',
    '#!/bin/bash\nCLIENT=podman\n$CLIENT run image "$@"\n',
    '#!/bin/bash\nexport CLIENT="/opt/bin/nerdctl"\nexec "$CLIENT" run image\n',
    "#!/bin/bash\n${CLIENT:-docker} run image\n",
    "#!/bin/sh\nif true; then nerdctl run image; fi\n",
    "#!/bin/sh\n{ docker run image; }\n",
    '#!/bin/sh\nbash -c "docker run image python3"\n',
    "#!/bin/sh\nexport A=1; B=2 exec timeout 5 docker run image\n",
    "#!/bin/sh\nexec sudo -n -E docker compose run image\n",
    "#!/bin/sh\nid=$(docker run -d image)\n",
    '#!/bin/sh\necho "step #1"; docker run image\n',
    "#!/usr/bin/env -S docker run image\n",
    '#!/usr/bin/env python3\nimport os\nos.execvp("docker", ["docker", "run", "image"])\n',
    '#!/usr/bin/python3\nimport os\nos.system("/usr/bin/docker run image")\n',
]


@pytest.mark.parametrize("text", SCRIPTS)
def test_a_script_that_starts_a_container_is_refused(programs, text):
    programs("python-of-the-image", text)
    refused("./python-of-the-image")
    refused("python-of-the-image")


def test_a_script_that_starts_such_a_script_is_refused(programs):
    programs("inner", SCRIPTS[0])
    programs("middle", '#!/bin/sh\nexec sudo -u root env A=1 ./inner "$@"\n')
    programs("outer", '#!/bin/sh\ncd /\nmiddle "$@"\n')
    refused("outer")


@pytest.mark.parametrize(
    "text",
    [
        '#!/bin/sh\n# docker run is not used here\nexec python3 "$@"\n',
        '#!/bin/bash\nsource /opt/docker/settings.sh\ncd /srv/docker\nexec python3 "$@"\n',
        '#!/bin/sh\necho "this is not docker run"; exec /usr/bin/python3 "$@"\n',
        '#!/bin/sh\nexport CUDA_VISIBLE_DEVICES=0\nexec nice -n 5 python3 "$@"\n',
        '#!/bin/sh\nif command -v docker >/dev/null; then echo here; fi\nexec python3 "$@"\n',
        '#!/usr/bin/env python3\nprint("docker is not used")\n',
        "#!/bin/sh\nexec ./wrapper\n",  # itself
    ],
)
def test_other_scripts_are_taken(programs, text):
    path = programs("wrapper", text)
    assert str(find_interpreter("./wrapper")) == path


def test_this_interpreter_is_taken_as_it_is():
    assert str(find_interpreter(sys.executable)) == sys.executable  # a link, in a virtual environment


@pytest.mark.parametrize(
    ("python", "words"),
    [
        (" ", "is empty"),
        ("no-such-python", "no such program"),
        ("python3 -u", "one program, without arguments"),
        ("./rows.jsonl", "no such program that can be executed"),
    ],
)
def test_what_is_no_interpreter_is_said(programs, tmp_path, python, words):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=words):
        find_interpreter(python)


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ("", "names an empty device"),
        ("cuda:0,", "names an empty device"),
        ("cuda:0,,cuda:1", "names an empty device"),
        ("cuda:0,cuda:1,cuda:0", "cuda:0 is there twice"),
        ("cpu,cpu:0", "cpu:0 is there twice"),
        ("cuda:1,cuda:01", "cuda:01 is there twice"),
        ("cuda;0", "'cuda;0' is no device"),
        ("0", "'0' is no device"),
    ],
)
def test_devices_are_checked(devices, words):
    with pytest.raises(ConfigError) as error:
        SvdSettings(devices=parse_devices(devices)).validated()
    assert str(error.value).startswith(f"--iso-worker-devices {devices}: ")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"devices": ()}, "--iso-worker-devices: is empty"),
        ({"queue_capacity": 0}, "--iso-worker-queue-capacity 0"),
        ({"frame_bytes_max": 0}, "--iso-worker-frame-mib"),
        (
            {"startup_seconds": 0.0},
            r"startup-timeout-s 0.0 \(or YETO_ISO_WORKER_STARTUP_TIMEOUT_S\)",
        ),
        ({"request_seconds": float("nan")}, "--iso-worker-request-timeout-s nan"),
        ({"drain_seconds": float("inf")}, "--iso-worker-drain-timeout-s inf"),
    ],
)
def test_limits_are_checked(settings, words):
    with pytest.raises(ConfigError, match=words):
        SvdSettings(**({"devices": ("cpu",)} | settings)).validated()


CORE = CoreConfig(num_learners=2, total_steps=6, quorum=2, wait_for=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"iso_backend": "gpu"}, "--iso-backend gpu: must be one of scalar, torch-svd"),
        (
            {"iso_backend": "torch-svd"},
            "--iso-backend torch-svd: needs workers; .* --iso-worker-devices",
        ),
        ({"svd": SvdSettings(devices=("cpu",))}, "--iso-backend scalar has no workers"),
    ],
)
def test_backend_and_workers_belong_together(settings, words):
    with pytest.raises(ConfigError, match=words):
        SyncerConfig(core=CORE, **settings).validated()


def test_flags_become_settings():
    flags = SyncerFlags(learners=2, total_steps=1)
    assert (flags.config().iso_backend, flags.config().svd, flags.config().core.svd_pool) == (
        "scalar",
        None,
        False,
    )
    config = attrs.evolve(flags, iso_worker_devices="cuda:0, cuda:1", iso_worker_frame_mib=3).config()
    assert (config.iso_backend, config.core.svd_pool) == ("torch-svd", True)
    assert config.svd == SvdSettings(devices=("cuda:0", "cuda:1"), frame_bytes_max=3 << 20)
    assert (config.svd.queue_capacity, SvdSettings(devices=()).frame_bytes_max) == (16, 2 << 30)
    svd = config.svd
    assert (svd.startup_seconds, svd.request_seconds, svd.drain_seconds) == (300, 3540, 3600)


def run_main(tokens, capsys):
    with pytest.raises(SystemExit) as end:
        main(["run", "--role", "syncer", "--learners", "2", "--total-steps", "4", *tokens])
    return end.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("YETO_ISO_WORKER_STARTUP_TIMEOUT_S", "soon", "YETO_ISO_WORKER_STARTUP_TIMEOUT_S"),
        ("YETO_ISO_WORKER_REQUEST_TIMEOUT_S", "-1", "--iso-worker-request-timeout-s -1.0"),
        ("YETO_ISO_WORKER_DRAIN_TIMEOUT_S", "nan", "--iso-worker-drain-timeout-s nan"),
        ("YETO_ISO_WORKER_DEVICES", "cpu,cpu", "cpu is there twice"),
        ("YETO_ISO_BACKEND", "scalar", "--iso-backend scalar has no workers"),
        ("ISO_WORKER_PYTHON", "docker run image python3", SENTENCE),
        ("ISO_WORKER_PYTHON", "", "ISO_WORKER_PYTHON is empty"),
    ],
)
def test_the_environment_is_read_and_checked(monkeypatch, capsys, variable, value, words):
    monkeypatch.setenv(variable, value)
    devices = [] if variable == "YETO_ISO_WORKER_DEVICES" else ["--iso-worker-devices", "cpu"]
    code, said = run_main(devices, capsys)
    assert code == 2
    assert words in said
    assert said.count("\n") == 1

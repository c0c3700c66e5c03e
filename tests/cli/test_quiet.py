"""What a process prints of itself, and what it keeps of its libraries."""

import logging
import os
import subprocess
import sys

import pytest

from yeto.cli.quiet import configure_logging


@pytest.fixture
def root():
    """The logging tree as it was, after the test."""
    root, ours = logging.getLogger(), logging.getLogger("yeto")
    before = (root.level, list(root.handlers), ours.level)
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    ours.setLevel(before[2])


@pytest.mark.usefixtures("root")
def test_our_news_and_the_errors_of_others(capsys):
    configure_logging("learner 3")
    logging.getLogger("yeto.text.task").info("LoRA on %d modules", 28)
    logging.getLogger("yeto.text.model").warning("left out")
    logging.getLogger("yeto.text.model").debug("detail")
    logging.getLogger("somebody").warning("chatter")
    logging.getLogger("somebody").error("broken")
    assert capsys.readouterr().err == (
        "learner 3: LoRA on 28 modules\nlearner 3: warning: left out\nlearner 3: error: broken\n"
    )


def test_libraries_are_silenced_unless_the_user_wants_to_hear_them():
    program = (
        "import os, warnings\n"
        "from yeto.cli.quiet import silence_libraries\n"
        "silence_libraries()\n"
        "warnings.warn_explicit('old', UserWarning, 'x.py', 1, module='transformers.models')\n"
        "warnings.warn_explicit('mine', UserWarning, 'x.py', 1, module='mine')\n"
        "print(os.environ['TRANSFORMERS_VERBOSITY'], os.environ['HF_DATASETS_DISABLE_PROGRESS_BARS'])\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRANSFORMERS_", "PYTHONWARN"))}

    def run(env):
        words = [sys.executable, "-c", program]
        return subprocess.run(words, env=env, capture_output=True, text=True, check=True)

    done = run(environment)
    assert done.stdout == "error 1\n"
    assert "mine" in done.stderr
    assert "old" not in done.stderr
    assert run(environment | {"TRANSFORMERS_VERBOSITY": "info"}).stdout == "info 1\n"

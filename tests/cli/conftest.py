"""What the tests of commands share."""

import pytest
from recorded_run import record, record_with_restart

from yeto.cli.main import main


@pytest.fixture
def yeto(capsys):
    """Run ``yeto replay``; return exit code, stdout and stderr."""

    def run(*words):
        with pytest.raises(SystemExit) as end:
            main(["replay", *map(str, words)])
        printed = capsys.readouterr()
        return end.value.code, printed.out, printed.err

    return run


@pytest.fixture
def tape(tmp_path):
    """Return the tape of an undisturbed run."""
    path = tmp_path / "events.jsonl"
    record(path)
    return path


@pytest.fixture
def restarted(tmp_path):
    """Return a tape of four rounds, a fall back to step 2, and on to the end."""
    path = tmp_path / "restarted.jsonl"
    record_with_restart(path)
    return path

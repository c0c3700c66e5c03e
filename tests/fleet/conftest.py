"""What tests of the launch commands share."""

import pytest

from yeto.cli.main import main


@pytest.fixture
def yeto(capfd):
    """Run a command; return exit code, stdout and stderr, with those of the programs it runs."""

    def run(*words):
        with pytest.raises(SystemExit) as end:
            main([*map(str, words)])
        printed = capfd.readouterr()
        return end.value.code, printed.out, printed.err

    return run

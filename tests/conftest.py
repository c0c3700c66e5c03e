"""What all tests share."""

import os
from pathlib import Path

import pytest
import trio.testing
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# How long an example takes says how busy the machine is.
settings.register_profile("any pace", deadline=None)
settings.load_profile("any pace")


def pytest_addoption(parser):
    parser.addoption(
        "--rewrite-scripts",
        action="store_true",
        help="write what comes of the commands of fixtures/scripts/*.txt into them",
    )
    parser.addoption(
        "--campaign-seeds",
        type=int,
        default=300,
        help="seeds of the fault campaign (tests/sim/test_campaign.py)",
    )
    parser.addoption(
        "--svd-workers",
        type=int,
        default=2,
        help="SVD workers of the six-island run (tests/cli/test_supervisor_whole.py); the preset has 8",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "begins_early: long; a file marked so runs before the others")


def pytest_collection_modifyitems(items):
    """Let long files begin first: none is to be under way when everybody else has nothing left to do."""
    items.sort(key=lambda item: item.get_closest_marker("begins_early") is None)


@pytest.fixture(scope="session")
def campaign_seeds(request):
    """Return how many seeds the fault campaign runs."""
    return request.config.getoption("--campaign-seeds")


@pytest.fixture
def skipping_clock():
    """A clock that goes as any clock does, but can be set forward: nobody waits for what only time brings.

    So a limit may be longer than a busy machine makes anybody wait, and its end still costs nothing.
    """
    return trio.testing.MockClock(rate=1.0)


@pytest.fixture(scope="session")
def fixtures():
    """Return the folder of recorded fixtures."""
    return Path(__file__).parent.parent / "fixtures"

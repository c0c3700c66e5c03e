"""What all tests share."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def fixtures():
    """Return the folder of recorded fixtures."""
    return Path(__file__).parent.parent / "fixtures"

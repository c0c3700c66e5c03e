"""The times and numbers that docs/PROTOCOL.md promises to the other end are those of both our ends."""

from pathlib import Path

from yeto.core.sessions import SEEN_GENERATIONS
from yeto.learner.client import FINAL_PATIENCE_SECONDS
from yeto.learner.config import LearnerConfig
from yeto.learner.mailbox import Departures
from yeto.link.dial import BACKOFF_BASE_SECONDS, BACKOFF_CAP_SECONDS
from yeto.link.framing import (
    KEEPALIVE_IDLE_SECONDS,
    KEEPALIVE_INTERVAL_SECONDS,
    KEEPALIVE_PROBES,
    USER_TIMEOUT_SECONDS,
)
from yeto.link.group import HEARTBEAT_SECONDS
from yeto.syncer.config import Bounds
from yeto.wire.striping import PARTIALS_MAX

DOC = " ".join((Path(__file__).parents[2] / "docs" / "PROTOCOL.md").read_text(encoding="utf-8").split())


def test_what_is_promised_is_kept():
    bounds = Bounds()
    for sentence in (
        f"and within {bounds.handshake_seconds:g} seconds",
        f"when all are there; {bounds.handshake_seconds:g} seconds are given",
        f"No byte on control for {bounds.silence_seconds:g} seconds is silence",
        f"the syncer waits up to {bounds.second_look_seconds:g} second for the end",
        f"one of {bounds.pending_handshakes} places (`--max-pending-handshakes`)",
        f"Every {HEARTBEAT_SECONDS:g} seconds from a task beside training, and after the first two steps",
        f"randomly shortened waits of up to {BACKOFF_CAP_SECONDS:g} seconds",
        f"the last {SEEN_GENERATIONS:,} generations",
        f"at most {PARTIALS_MAX} messages",
    ):
        assert sentence in DOC
    assert (BACKOFF_BASE_SECONDS, Departures.EARLY_STEPS) == (1, 2)


def test_how_long_each_end_is_patient():
    """Nobody is told of these, but fleets rely on them: a dead machine, a relaunched one, a slow start."""
    config = LearnerConfig(syncer="head:1", output_dir=Path("out"))
    assert (config.first_connect_seconds, config.give_up_seconds) == (900, 3600)
    assert (FINAL_PATIENCE_SECONDS, Bounds().manifest_seconds) == (60, 5)
    assert (KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_PROBES) == (5, 5, 3)
    assert USER_TIMEOUT_SECONDS == 20

"""The simulated link waits as long as the real one: its times stand apart, for it loads none of it."""

import attrs

from yeto.learner.client import FINAL_PATIENCE_SECONDS
from yeto.learner.mailbox import Departures
from yeto.link.dial import BACKOFF_BASE_SECONDS, BACKOFF_CAP_SECONDS
from yeto.link.group import HEARTBEAT_SECONDS
from yeto.sim import client, learner, network
from yeto.syncer.config import Bounds


def test_the_simulated_link_has_the_times_of_the_real_one():
    assert client.BACKOFF_BASE_SECONDS == BACKOFF_BASE_SECONDS
    assert client.BACKOFF_CAP_SECONDS == BACKOFF_CAP_SECONDS
    assert client.HEARTBEAT_SECONDS == HEARTBEAT_SECONDS
    assert client.EARLY_BEATS == Departures.EARLY_STEPS
    assert learner.FINAL_PATIENCE_SECONDS == FINAL_PATIENCE_SECONDS
    assert attrs.fields(Bounds).silence_seconds.default == network.SILENCE_SECONDS

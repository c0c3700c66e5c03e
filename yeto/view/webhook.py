"""Alerts to an address: one POST of JSON when an alert begins, one when it is over.

Never in the way of what is shown: a thread of its own sends them, from a queue that drops the oldest when it
is full, with a time limit for each try and a few tries for each alert. What could not be sent is said once.
"""

from __future__ import annotations

import json
import logging
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from yeto.errors import ConfigError
from yeto.view.json import plain
from yeto.view.model import Alert, Moment

log = logging.getLogger(__name__)

QUEUED_MAX = 64
"""Messages that wait to be sent. More than the alerts that a run can have at a time, but for huge fleets."""
TRIES = 4
FIRST_PAUSE_SECONDS = 1.0
"""Doubles from try to try."""
TRY_SECONDS = 10.0
FAREWELL_SECONDS = 15.0
"""How long the end of the looking waits for what is still to be sent."""


class Webhook:
    """Tells an address what alerts begin and end; a context, at whose end the sending ends.

    Args:
        url: where to post.
        pause: waits so many seconds, or until the end; returns whether it is the end.

    Raises:
        ConfigError: it is no address.
    """

    def __init__(self, url: str, pause: Callable[[float], bool] | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--webhook {url}: give an address that begins with http:// or https://")
        self._url = url
        self._known: dict[tuple[str, str], Alert] = {}
        self._queue: deque[bytes] = deque(maxlen=QUEUED_MAX)
        self._news = threading.Condition()
        self._over = threading.Event()
        self._pause = self._over.wait if pause is None else pause
        self._failed = False
        self._thread = threading.Thread(target=self._send_all, name="yeto-webhook", daemon=True)

    def __enter__(self) -> Webhook:
        """Start to send."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send what is queued, as long as that does not take too long."""
        self._over.set()
        with self._news:
            self._news.notify()
        self._thread.join(FAREWELL_SECONDS)

    def tell(self, moment: Moment) -> None:
        """Queue what has changed since the moment before; returns at once."""
        present = {(alert.kind, alert.subject): alert for alert in moment.alerts}
        begun = [alert for key, alert in present.items() if key not in self._known]
        over = [alert for key, alert in self._known.items() if key not in present]
        self._known = present
        if begun or over:
            with self._news:
                self._queue += [_message(moment, "begun", alert) for alert in begun]
                self._queue += [_message(moment, "over", alert) for alert in over]
                self._news.notify()

    def _send_all(self) -> None:
        while True:
            with self._news:
                while not self._queue and not self._over.is_set():
                    self._news.wait()
                if not self._queue:
                    return
                message = self._queue.popleft()
            self._send(message)

    def _send(self, message: bytes) -> None:
        reason: object = None
        for attempt in range(TRIES):
            if attempt and self._pause(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1)):
                return
            request = urllib.request.Request(
                self._url, data=message, headers={"Content-Type": "application/json"}, method="POST"
            )
            try:
                with urllib.request.urlopen(request, timeout=TRY_SECONDS):
                    self._failed = False
                    return
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {error.reason}"
                if error.code < 500 and error.code != 429:
                    break  # it would say the same again
            except (OSError, ValueError) as error:
                reason = getattr(error, "reason", error)
        if not self._failed:
            log.warning("--webhook %s: an alert could not be sent: %s", self._url, reason)
        self._failed = True


def _message(moment: Moment, what: str, alert: Alert) -> bytes:
    body: dict[str, Any] = {
        # Chat services show this key of whatever is posted to them.
        "text": f"Yeto {moment.session.session_id}, round {moment.step}/{moment.total_steps}: "
        + (alert.sentence if what == "begun" else f"over: {alert.sentence}"),
        "what": what,
        "session_id": moment.session.session_id,
        "at": moment.now,
        "alert": plain(alert),
    }
    return json.dumps(body).encode()

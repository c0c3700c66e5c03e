"""Where a dashboard sees a run: in a tape, or at another dashboard."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from yeto.core.decisions import DECISIONS, FinalCutOrdered, Ignored, SessionEnded
from yeto.core.events import EVENTS, FinalAckReceived, LearnerJoined, LearnerLeft, SessionResumed
from yeto.errors import ConfigError, TapeError, YetoError
from yeto.tape import (
    EVERYTHING,
    Header,
    Record,
    RoundStory,
    Skimmer,
    complete_lines,
    open_tape,
)
from yeto.tape.rules import UPCASTS
from yeto.tape.story import sentence
from yeto.view.follow import Traffic, Watcher
from yeto.view.history import history_json
from yeto.view.json import moment_json
from yeto.view.model import Moment

STORY_RECORDS_MAX = 2000
"""Records of one round that are told: thousands of learners would make a page of megabytes."""
PAUSE_LINES = 4096
PAUSE_SECONDS = 0.001
_WITHOUT_NUMBER = tuple(
    cls.kind.encode()
    for cls in (
        *(FinalAckReceived, FinalCutOrdered, Ignored, LearnerJoined, LearnerLeft, SessionEnded),
        SessionResumed,
    )
)
"""Kinds of records that may be part of a round's story without its number in them."""
REMOTE_SECONDS = 10.0
REMOTE_BYTES_MAX = 64 << 20
"""Of an answer: a hundred times what a dashboard sends."""


class TapeSource:
    """A tape on this machine: not there yet, growing, ended, or replaced by another run's."""

    def __init__(self, path: Path, *, traffic: Traffic | None = None) -> None:
        """Look at a tape, which need not be there yet; ``traffic`` is known in its writer's process only."""
        self.name = str(path)
        self._path = path
        self._traffic = traffic
        self._watcher = Watcher(path, history=True, traffic=traffic)
        self._moment: Moment | None = None

    def advance(self, seconds: float) -> bool:
        """Read on; see :class:`~yeto.view.looks.Source`."""
        try:
            self._watcher.look(within=seconds)
            return not self._watcher.behind
        except YetoError:
            # Whatever was wrong with this file may be gone with it; then the next look reads all anew.
            self._watcher = Watcher(self._path, history=True, traffic=self._traffic)
            raise
        except OSError as error:
            raise TapeError(f"{self._path}: cannot be read: {error.strerror}") from error

    def status(self) -> dict[str, Any] | None:
        """Return the moment."""
        self._moment = self._watcher.moment()
        return None if self._moment is None else moment_json(self._moment)

    def history(self) -> dict[str, Any] | None:
        """Return the history."""
        history = self._watcher.history
        return None if history is None else history_json(history)

    def metrics(self) -> bytes:
        """Return the metrics of the last moment."""
        from yeto.view.metrics import render

        assert self._moment is not None, "they are asked for when there is a moment"
        return render(self._moment)

    def story(self, step: int, stopped: Callable[[], bool]) -> list[dict[str, Any]]:
        """Return the records of a round, read from the tape once more."""
        return tell_story(self._path, step, stopped)


def tell_story(path: Path, step: int, stopped: Callable[[], bool] = lambda: False) -> list[dict[str, Any]]:
    """Return the records that concern one round, each with its sentence; empty when none was opened.

    Of lines that cannot be part of it only the checksum is looked at: they neither hold its number nor are
    of a kind that goes without one.

    Args:
        path: the tape.
        step: the round.
        stopped: asked every few thousand lines; ends the reading.

    Raises:
        TapeError: the tape is damaged.
    """
    story = RoundStory(step)
    number = b"%d" % step
    skimmer = Skimmer(str(path), dict.fromkeys((*EVENTS, *DECISIONS), EVERYTHING))
    # Lines that have to be turned into the present format are understood one behind the other only.
    skip = True
    restarts: list[tuple[int, int]] = []
    records: list[Record] = []
    last = -1
    with open_tape(path) as file:
        for seq, line in enumerate(complete_lines(file, str(path))):
            if seq % PAUSE_LINES == 0:
                if stopped():
                    return []
                # Whoever else runs in this process comes first.
                time.sleep(PAUSE_SECONDS)
            if seq and skip and number not in line and not any(kind in line for kind in _WITHOUT_NUMBER):
                skimmer.check(line)
                continue
            record = skimmer.take(line)
            assert isinstance(record, Record), "whole records are asked for"
            body = record.body
            if isinstance(body, Header):
                skip = UPCASTS[body.format_version] is None
            elif isinstance(body, SessionResumed):
                restarts.append((record.seq, body.step))
            if isinstance(body, Ignored) and record.because != last:
                continue
            last = record.seq if record.because is None else last
            if story.concerns(record) and len(records) < STORY_RECORDS_MAX:
                records.append(record)
    if not story.found:
        return []
    return [
        {
            "seq": record.seq,
            "at": record.at,
            "kind": record.kind,
            "sentence": sentence(record),
            "superseded": any(seq > record.seq and below < step for seq, below in restarts),
        }
        for record in records
    ]


class RemoteSource:
    """Another dashboard, such as the one at a syncer's --http-port."""

    def __init__(self, url: str, token: str | None) -> None:
        """Look at a dashboard.

        Raises:
            ConfigError: that is no address of one.
        """
        split = urlsplit(url)
        if split.scheme not in ("http", "https") or not split.hostname:
            raise ConfigError(f"{url}: not an address; say http://HOST:PORT")
        if split.query or split.fragment or split.username:
            raise ConfigError(f"{split.hostname}: an address has no token in it; use --token-file")
        self.name = url
        self._split = split
        self._token = token
        self._status: dict[str, Any] | None = None

    def advance(self, seconds: float) -> bool:
        """Ask for the moment; see :class:`~yeto.view.looks.Source`."""
        self._status = self._json("/api/status")
        return True

    def status(self) -> dict[str, Any] | None:
        """Return the moment that was sent last."""
        return self._status

    def history(self) -> dict[str, Any] | None:
        """Return the history as it is sent now."""
        return self._json("/api/history")

    def metrics(self) -> bytes:
        """Return the metrics as they are sent now."""
        return self._get("/metrics")

    def story(self, step: int, stopped: Callable[[], bool]) -> list[dict[str, Any]]:
        """Return a round's records as they are sent now."""
        records = self._json(f"/api/round/{step}").get("records", [])
        return records if isinstance(records, list) else []

    def _json(self, path: str) -> dict[str, Any]:
        try:
            value = json.loads(self._get(path))
        except ValueError as error:
            raise YetoError(
                f"{self.name}: sent something else than JSON for {path}; is it a dashboard?"
            ) from error
        if not isinstance(value, dict):
            raise YetoError(f"{self.name}: sent something else than an object for {path}; is it a dashboard?")
        return value

    def _get(self, path: str) -> bytes:
        split = self._split
        assert split.hostname is not None
        headers = {} if self._token is None else {"authorization": f"Bearer {self._token}"}
        link: http.client.HTTPConnection
        if split.scheme == "https":
            context = ssl.create_default_context()
            link = http.client.HTTPSConnection(
                split.hostname, split.port, timeout=REMOTE_SECONDS, context=context
            )
        else:
            link = http.client.HTTPConnection(split.hostname, split.port, timeout=REMOTE_SECONDS)
        try:
            link.request("GET", quote(split.path.rstrip("/")) + path, headers=headers)
            answer = link.getresponse()
            body = answer.read(REMOTE_BYTES_MAX)
        except (OSError, http.client.HTTPException) as error:
            raise YetoError(f"{self.name}: no answer: {error}") from error
        finally:
            link.close()
        if answer.status == 401:
            raise YetoError(f"{self.name}: wants its token: --token-file FILE")
        if answer.status != 200:
            text = body[:300].decode(errors="replace").strip()
            raise YetoError(f"{self.name}: status {answer.status}: {text}")
        return body

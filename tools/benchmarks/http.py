"""Observers: rounds a second of a syncer that is scraped and followed, beside one that nobody looks at.

Both are ``yeto run --role syncer`` with bare learners that answer at once (`benchmarks.wire_crowd`), so the
machine is as busy as it gets; a real run leaves an observer more. The one that is looked at has
``--http-port``, five scrapes a second (``/metrics``, ``/healthz`` and ``/api/status`` by turns) and one open
page, which follows ``/events`` and asks for ``/api/history`` every five seconds.
"""

from __future__ import annotations

import http.client
import itertools
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from statistics import median
from typing import Final

from ports import free_port

from benchmarks.figures import Report, Target, figure_of
from benchmarks.wire_crowd import run_crowd

SCRAPE_SECONDS: Final = 0.2
HISTORY_SECONDS: Final = 5.0
PATHS: Final = ("/metrics", "/healthz", "/api/status")
UNHARMED: Final = Target(sense="at least", number=0.98, of="ratio")


@contextmanager
def observers(port: int) -> Iterator[list[int]]:
    """Scrape and follow the dashboard at a port; gives the list that statuses are put into."""
    over = threading.Event()
    statuses: list[int] = []

    @contextmanager
    def get(path: str) -> Iterator[http.client.HTTPResponse]:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as link:
            link.request("GET", path)
            with link.getresponse() as answer:
                yield answer

    def scrape() -> None:
        for path in itertools.cycle(PATHS):
            if over.wait(SCRAPE_SECONDS):
                return
            # Before its start and after its end the syncer does not answer.
            with suppress(OSError, http.client.HTTPException), get(path) as answer:
                answer.read()
                statuses.append(answer.status)

    def draw() -> None:
        while not over.wait(HISTORY_SECONDS):
            with suppress(OSError, http.client.HTTPException), get("/api/history") as answer:
                answer.read()

    def follow() -> None:
        while not over.wait(SCRAPE_SECONDS):
            with suppress(OSError, http.client.HTTPException), get("/events") as answer:
                while answer.read1(65536) and not over.is_set():
                    pass

    threads = [threading.Thread(target=work) for work in (scrape, draw, follow)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        over.set()
        for thread in threads:
            thread.join()


def measure(*, repeats: int, learners: int, rounds: int) -> Report:
    """Measure rounds a second with observers and without, in turn.

    Args:
        repeats: runs of each sort.
        learners: of each run.
        rounds: of each run.
    """
    watched, alone, answered = [], [], 0
    for _ in range(repeats):
        alone.append(_rounds_per_second(learners, rounds, port=None)[0])
        rate, statuses = _rounds_per_second(learners, rounds, port=free_port())
        watched.append(rate)
        answered += statuses.count(200)
    assert answered > 0, "the dashboard never answered"
    return Report(
        benchmark="http",
        what="a whole syncer with bare learners; 5 scrapes a second and one page that follows",
        settings={"learners": learners, "rounds": rounds, "repeats": repeats, "scrapes_answered": answered},
        figures=(
            figure_of(
                "rounds_per_second_observed",
                "rounds while observed",
                "rounds/s",
                watched,
                peer="nobody looks",
                peer_values=alone,
                target=UNHARMED,
            ),
        ),
    )


def _rounds_per_second(learners: int, rounds: int, *, port: int | None) -> tuple[float, list[int]]:
    flags = {} if port is None else {"http-port": port}
    with nullcontext([]) if port is None else observers(port) as statuses:
        crowd = run_crowd(learners=learners, rounds=rounds, processes=1, flags=flags)
    return median(crowd.pushes_per_second) / learners, statuses

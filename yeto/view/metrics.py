"""A moment in Prometheus' text format.

Whoever serves it renders one text for all who ask, at most once a second. What is not known is left out,
never zero. Counters are folds of the tape: they go on over restarts of the syncer, and go back only where a
restart takes rounds back, which Prometheus takes for a reset. Bytes that a running syncer counts begin anew
with it. Needs the extra ``http``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from yeto.core import Phase
from yeto.errors import ConfigError
from yeto.view.model import Moment, known_of_somebody

if TYPE_CHECKING:
    from prometheus_client.core import Metric

ROUND_PHASES = ("gathering", "grace", "merging", "merged", "committing", "retry")

Samples = Iterable[tuple[tuple[str, ...], float | None]]
"""Values by their labels; None is left out."""


def render(moment: Moment) -> bytes:
    """Return the metrics of a moment.

    Raises:
        ConfigError: prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.registry import Collector
    except ImportError as error:
        raise ConfigError("metrics need prometheus_client: pip install 'yeto[http]'") from error

    class Present(Collector):
        def collect(self) -> Iterator[Metric]:
            yield from _run(moment)
            yield from _learners(moment)
            yield from _parts(moment)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Present())
    return generate_latest(registry)


def _gauge(name: str, what: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(name, what, labels=labels)
    for values, value in samples:
        if value is not None:
            family.add_metric(values, value)
    return family


def _counter(name: str, what: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(name, what, labels=labels)
    for values, value in samples:
        if value is not None:
            family.add_metric(values, value)
    return family


def _one(value: float | None) -> Samples:
    return [((), value)]


def _age(moment: Moment, at: float | None) -> float | None:
    return None if at is None else max(0.0, moment.now - at)


def _run(moment: Moment) -> Iterator[Metric]:
    session = moment.session
    labels = ("session_id", "version")
    values = (session.session_id, session.software_version)
    yield _gauge("yeto_session_info", "Which session this is, and of which Yeto.", labels, [(values, 1.0)])
    yield _gauge(
        "yeto_phase",
        "1 for the phase that the session is in.",
        ("phase",),
        [((phase,), float(phase == moment.phase)) for phase in map(str, Phase)],
    )
    yield _gauge("yeto_step", "Rounds committed: the global step.", (), _one(moment.step))
    yield _gauge("yeto_total_steps", "Rounds to commit in all.", (), _one(moment.total_steps))
    yield _counter("yeto_commits", "Commits that stand.", (), _one(moment.committed))
    yield _counter("yeto_commits_superseded", "Commits taken back by restarts.", (), _one(moment.superseded))
    yield _counter("yeto_attempts", "Attempts opened.", (), _one(moment.attempts))
    yield _counter(
        "yeto_attempts_discarded",
        "Attempts discarded, by reason.",
        ("reason",),
        [((reason,), count) for reason, count in moment.discarded.items()],
    )
    yield _counter("yeto_restarts", "Starts of the syncer but the first.", (), _one(session.restarts))
    yield _counter("yeto_records", "Records on the tape.", (), _one(session.records))
    yield _gauge("yeto_merges_per_hour", "Pace of the last commits.", (), _one(moment.merges_per_hour))
    yield _gauge(
        "yeto_remaining_seconds",
        "Time left at that pace; absent while unknown.",
        (),
        _one(moment.eta_seconds),
    )
    yield _gauge(
        "yeto_last_commit_age_seconds",
        "Time since the last commit.",
        (),
        _one(_age(moment, moment.last_commit_at)),
    )
    yield _gauge(
        "yeto_wait_seconds",
        "How long the session has waited for what it waits for.",
        (),
        _one(_age(moment, moment.wait.since)),
    )
    yield _gauge("yeto_silent_seconds", "Time since the last record.", (), _one(moment.silent_seconds))
    for name, value in (
        ("quorum", moment.quorum_seconds_mean),
        ("grace", moment.grace_seconds_mean),
        ("merge", moment.merge_seconds_mean),
    ):
        yield _gauge(f"yeto_{name}_mean_seconds", f"Mean time of a {name}, over the tape.", (), _one(value))

    for name, what, value in (
        ("delta_cosine", "Mean cosine between the deltas of two learners.", moment.agreement.delta_cosine),
        (
            "norm_ratio",
            "Norm of the merged gradient beside that of the average.",
            moment.agreement.norm_ratio,
        ),
        (
            "offset_ratio",
            "Distance of the published model from the learners' mean, in average deltas.",
            moment.agreement.offset_ratio,
        ),
    ):
        yield _gauge(f"yeto_{name}", f"{what} Mean of the last rounds.", (), _one(value))


def _learners(moment: Moment) -> Iterator[Metric]:
    label = ("learner",)
    learners = [((str(one.learner),), one) for one in moment.learners]
    yield _gauge(
        "yeto_learner_connected",
        "1 while the learner is connected.",
        label,
        [(who, float(one.link == "connected")) for who, one in learners],
    )
    for name, what, field in (
        ("local_step", "Inner steps the learner has taken.", "local_step"),
        ("steps_per_second", "Inner steps a second, smoothed.", "steps_per_second"),
        ("tokens_per_second", "Raw tokens a second.", "tokens_per_second"),
        ("contribution_ratio", "Mean share in the standing commits.", "contribution"),
        ("staleness_steps", "Staleness of its last merged push, in global steps.", "staleness"),
        ("missed_in_a_row", "Rounds in a row that it gave nothing to.", "missed_in_a_row"),
        ("loss", "Loss a target, smoothed, from its log.", "loss"),
    ):
        samples = [(who, getattr(one, field)) for who, one in learners]
        if known_of_somebody(moment.learners, field):
            yield _gauge(f"yeto_learner_{name}", what, label, samples)
    yield _gauge(
        "yeto_learner_waited_seconds",
        "How long something has waited for the learner; 0 where nothing does.",
        label,
        [(who, _age(moment, one.waited_since) or 0.0) for who, one in learners],
    )
    for name, what, field in (
        ("merges", "Rounds that its work is in.", "merges"),
        ("merged_steps", "Inner steps in committed rounds.", "c_steps"),
        ("merged_tokens", "Raw tokens in committed rounds.", "c_tokens"),
        ("missed", "Commits it was a member of and gave nothing to.", "missed"),
        ("joins", "Times it connected.", "joins"),
        ("received_bytes", "Bytes it sent since this start, or those of pushes on the tape.", "bytes_in"),
        ("sent_bytes", "Bytes sent to it since this start.", "bytes_out"),
    ):
        samples = [(who, getattr(one, field)) for who, one in learners]
        if known_of_somebody(moment.learners, field):
            yield _counter(f"yeto_learner_{name}", what, label, samples)


def _parts(moment: Moment) -> Iterator[Metric]:
    label = ("fragment",)
    fragments = [((str(one.fragment),), one) for one in moment.fragments]
    yield _gauge(
        "yeto_fragment_version",
        "Global step at which the fragment was last committed.",
        label,
        [(which, one.version) for which, one in fragments],
    )
    yield _gauge(
        "yeto_fragment_age_seconds",
        "Time since that commit.",
        label,
        [(which, _age(moment, one.committed_at)) for which, one in fragments],
    )
    for name in ("delta_cosine", "norm_ratio", "offset_ratio"):
        yield _gauge(
            f"yeto_fragment_{name}",
            f"As yeto_{name}, of the fragment's last commit.",
            label,
            [(which, getattr(one, name)) for which, one in fragments],
        )
    phases = [one.phase for one in moment.rounds]
    yield _gauge(
        "yeto_open_rounds",
        "Open rounds, by what they are doing.",
        ("phase",),
        [((phase,), float(phases.count(phase))) for phase in ROUND_PHASES],
    )
    checkpoint = moment.checkpoint
    yield _gauge("yeto_checkpoint_step", "Step of the newest checkpoint.", (), _one(checkpoint.step))
    yield _gauge("yeto_checkpoint_age_seconds", "Its age.", (), _one(_age(moment, checkpoint.at)))
    yield _gauge("yeto_checkpoint_bytes", "Bytes it took.", (), _one(checkpoint.written_bytes))
    yield _gauge("yeto_checkpoint_seconds", "Time it took.", (), _one(checkpoint.seconds))
    yield _counter(
        "yeto_refusals",
        "Pushes and connections that were refused.",
        ("what", "reason", "learner"),
        [
            ((one.what, one.reason, "" if one.learner is None else str(one.learner)), one.count)
            for one in moment.refusals
        ],
    )
    yield _gauge(
        "yeto_alert",
        "1 for each alert; see docs/VIEW.md.",
        ("kind", "subject", "severity"),
        [((alert.kind, alert.subject, alert.severity), 1.0) for alert in moment.alerts],
    )
    yield _gauge("yeto_disk_free_bytes", "Room where the checkpoint goes.", (), _one(moment.disk_free_bytes))

"""Alerts: each is raised by its cause, with its numbers, and over when that is over."""

import json
import threading

import attrs
import pytest
from http_serving import Handler, serving
from recorded_run import Run, record
from view_tapes import ROOT

from yeto.core import CoreConfig
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.errors import ConfigError
from yeto.tape import read
from yeto.view import alerts
from yeto.view.agreement import ROUNDS
from yeto.view.board import NORM_SPIKE_TIMES, Board
from yeto.view.model import Live
from yeto.view.present import present
from yeto.view.webhook import QUEUED_MAX, TRIES, Webhook

CONFIG = CoreConfig(num_learners=2, total_steps=200, quorum=2, wait_for=2, sync_interval_steps=0.0)


def folded(path):
    board = Board()
    for entry in read(path):
        board.feed(entry)
    return board


def kinds(board, **how):
    return {(alert.kind, alert.subject) for alert in present(board, **how).alerts}


@pytest.fixture
def run(tmp_path):
    """Return a run of twelve commits that goes on."""
    run = Run(tmp_path / "events.jsonl", CONFIG)
    run.start()
    run.play(until=lambda state: state.step == 12)
    run.writer.flush()
    yield run
    run.close()


@pytest.fixture
def board(run, tmp_path):
    return folded(tmp_path / "events.jsonl")


def test_a_healthy_run_raises_none(board):
    assert present(board, now=board.at + 1.0, writer="running").alerts == ()


def test_no_commit_for_several_times_the_usual(board):
    usual = alerts.no_commit_after(board)
    assert usual >= alerts.NO_COMMIT_SECONDS
    last = board.commit_times[-1]
    assert ("no_commit", "run") not in kinds(board, now=last + usual - 1.0)
    (alert,) = (
        one
        for one in present(board, now=last + usual + 1.0, writer="running").alerts
        if one.kind == "no_commit"
    )
    assert (alert.value, alert.threshold) == (pytest.approx(usual + 1.0), usual)
    assert alert.since == last


def test_the_time_left_is_unknown_sooner_than_anybody_is_alarmed(board):
    last = board.commit_times[-1]
    assert board.pace() < 2.0
    assert present(board, now=last + 9.0).eta_seconds is not None
    moment = present(board, now=last + 11.0)
    assert moment.eta_seconds is None
    assert moment.alerts == ()


def test_a_member_that_gives_nothing_to_several_rounds_in_a_row(tmp_path):
    """Of two learners and a quorum of one, whoever answers first is all that is merged."""
    run = Run(tmp_path / "events.jsonl", attrs.evolve(CONFIG, quorum=1, grace_cap_seconds=0.0))
    run.start()
    obey, turned = run.obey, False

    def in_turn(order):
        if turned and isinstance(order, de.AttemptOpened):
            order = attrs.evolve(order, members=order.members[::-1])
        obey(order)

    def kinds_at(step):
        run.play(until=lambda state: state.step == step)
        run.writer.flush()
        return kinds(folded(tmp_path / "events.jsonl"))

    run.obey = in_turn
    assert kinds_at(alerts.MISSED_ROUNDS - 1) == set()
    assert kinds_at(alerts.MISSED_ROUNDS) == {("missed_rounds", "learner 1")}
    turned = True
    # What is gathered already goes on as it was.
    steps = alerts.MISSED_ROUNDS + CONFIG.pipeline
    assert ("missed_rounds", "learner 1") not in kinds_at(steps + 1)
    assert kinds_at(steps + alerts.MISSED_ROUNDS) == {("missed_rounds", "learner 0")}
    run.close()


def test_a_learner_whose_steps_stand_still(board):
    seat = board.shadow.seats[0]
    limit = max(alerts.STALLED_TIMES * seat.xi_step, alerts.STALLED_SECONDS)
    assert ("stalled_learner", "learner 0") not in kinds(board, now=seat.report_at + limit - 1.0)
    assert ("stalled_learner", "learner 0") in kinds(board, now=seat.report_at + limit + 1.0)


@pytest.mark.parametrize(
    ("times", "raised"), [(NORM_SPIKE_TIMES * 0.9, False), (NORM_SPIKE_TIMES * 1.1, True)]
)
def test_a_merged_gradient_far_above_the_ones_before(run, tmp_path, times, raised):
    tell = run.tell

    def spiked(event, after=0.25):
        if isinstance(event, ev.MergeFinished) and event.step == 13:
            event = attrs.evolve(event, gradient_norm=event.gradient_norm * times)
        return tell(event, after)

    run.tell = spiked
    run.play(until=lambda state: state.step == 14)
    run.writer.flush()
    board = folded(tmp_path / "events.jsonl")
    assert (("norm_spike", "round 13") in kinds(board)) == raised
    run.play(until=lambda state: state.step == 13 + alerts.RECENT_ROUNDS)
    run.writer.flush()
    assert kinds(folded(tmp_path / "events.jsonl")) == set()


def in_every_round(run, **figures):
    """Have every merge and outer step from here on tell these figures."""

    def told(event, after=0.25):
        known = {name: value for name, value in figures.items() if hasattr(event, name)}
        return Run.tell(run, attrs.evolve(event, **known), after)

    run.tell = told


DISAGREEMENTS = {
    "learners_disagree": ("learners", "delta_cosine", alerts.DELTA_COSINE, -0.01),
    "merge_inflates": ("merge", "norm_ratio", alerts.EXCESS * 2**0.5, 0.01),
    "published_ahead": ("published model", "offset_ratio", alerts.OFFSET_RATIO, 0.01),
}
"""By kind: subject, the figure, its threshold with two learners, and a step to the wrong side of it."""


@pytest.mark.parametrize("kind", DISAGREEMENTS)
def test_learners_that_disagree_for_several_rounds(run, tmp_path, kind):
    subject, figure, threshold, worse = DISAGREEMENTS[kind]

    def kinds_after(step):
        run.play(until=lambda state: state.step == step)
        run.writer.flush()
        return kinds(folded(tmp_path / "events.jsonl"))

    in_every_round(run, **{figure: threshold - worse})
    assert kinds_after(13 + ROUNDS) == set()
    in_every_round(run, **{figure: threshold + worse})
    assert kinds_after(13 + ROUNDS + 3) == set()
    # What was merged or told before goes on as it was for a round or two.
    assert kinds_after(13 + 2 * ROUNDS + CONFIG.pipeline) == {(kind, subject)}
    (alert,) = present(folded(tmp_path / "events.jsonl")).alerts
    assert alert.severity == "warning"
    assert "--outer direct" in alert.remedy
    assert f"last {ROUNDS} rounds" in alert.sentence
    assert (alert.value - alert.threshold) * worse > 0


def test_one_bad_round_is_no_disagreement(run, tmp_path):
    tell = run.tell

    def once(event, after=0.25):
        if isinstance(event, ev.MergeFinished) and event.step == 14:
            event = attrs.evolve(event, delta_cosine=-0.9, norm_ratio=1.5)
        if isinstance(event, ev.OuterStepApplied) and event.step == 14:
            event = attrs.evolve(event, offset_ratio=4.0)
        return tell(event, after)

    run.tell = once
    run.play(until=lambda state: state.step == 15)
    run.writer.flush()
    board = folded(tmp_path / "events.jsonl")
    assert board.agreement.by_fragment[13 % 2].offset_ratio == 4.0
    assert kinds(board) == set()


def test_a_push_that_is_not_finite_is_an_alert_for_some_rounds(tmp_path):
    board, seen = Board(), []
    for entry in read(ROOT / "fixtures" / "tapes" / "faulty-v1.jsonl"):
        board.feed(entry)
        if entry.kind == "push_refused" and entry.body.reason == "non_finite":
            assert ("non_finite", f"learner {entry.body.learner}") in kinds(board)
            seen.append(entry.seq)
        if entry.kind == "session_resumed":
            assert not {kind for kind, _ in kinds(board)} & {"non_finite", "norm_spike", "checkpoint_failed"}
        if entry.kind == "checkpoint_failed":
            assert ("checkpoint_failed", "disk") in kinds(board)
            seen.append("disk")
    assert "disk" in seen
    assert len(seen) > 3


def test_a_poisoned_pool():
    board, found = Board(), False
    for entry in read(ROOT / "fixtures" / "tapes" / "pool-v1.jsonl"):
        board.feed(entry)
        found |= ("pool_poisoned", "pool") in kinds(board)
    assert found
    assert kinds(board) == set()  # it was started again


def test_little_room_on_the_disk(board):
    needed = max(alerts.DISK_BYTES, alerts.DISK_CHECKPOINTS * board.written.written_bytes)
    assert ("disk_space", "disk") in kinds(board, live=Live(disk_free_bytes=needed - 1))
    assert ("disk_space", "disk") not in kinds(board, live=Live(disk_free_bytes=needed))
    assert ("disk_space", "disk") not in kinds(board)
    [alert] = alerts.find_alerts(board, now=board.at, writer="unknown", live=Live(disk_free_bytes=3 << 20))
    assert alert.sentence == "3.0 MiB are free where the checkpoint goes, 1.0 GiB are what it may need"


def test_a_syncer_that_is_gone(board, tmp_path):
    assert kinds(board, writer="gone") == {("syncer_gone", "syncer")}
    record(tmp_path / "ended.jsonl")
    assert kinds(folded(tmp_path / "ended.jsonl"), writer="gone") == set()


def test_every_kind_has_been_named():
    source = (ROOT / "docs" / "VIEW.md").read_text(encoding="utf-8")
    for kind in alerts.KINDS:
        assert f"`{kind}`" in source


class Receiver:
    """An address that takes what is posted, with the codes it is told to answer."""

    def __init__(self, codes=()):
        self.codes, self.bodies, self.news = list(codes), [], threading.Semaphore(0)
        receiver = self

        class Hook(Handler):
            def do_POST(self):
                receiver.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(receiver.codes.pop(0) if receiver.codes else 204)
                self.end_headers()
                receiver.news.release()

        self.served = serving(Hook)

    def __enter__(self):
        self.url = f"{self.served.__enter__()}/hook"
        return self

    def __exit__(self, *how):
        return self.served.__exit__(*how)

    def wait(self):
        assert self.news.acquire(timeout=60.0)


def test_the_webhook_is_told_what_begins_and_what_is_over(board):
    healthy, gone = present(board), present(board, writer="gone")
    with Receiver() as receiver, Webhook(receiver.url) as hook:
        for moment in (healthy, gone, gone, healthy):
            hook.tell(moment)
        receiver.wait()
        receiver.wait()
    assert [(one["what"], one["alert"]["kind"]) for one in receiver.bodies] == [
        ("begun", "syncer_gone"),
        ("over", "syncer_gone"),
    ]
    assert receiver.bodies[0]["text"].startswith(f"Yeto {healthy.session.session_id}, round 12/200: ")


def test_the_webhook_tries_again_but_not_for_ever(board, caplog):
    gone, pauses = present(board, writer="gone"), []

    def pause(seconds):
        pauses.append(seconds)
        return False

    with Receiver([500, 503]) as receiver, Webhook(receiver.url, pause) as hook:
        hook.tell(gone)
        for _ in range(3):
            receiver.wait()
    assert pauses == [1.0, 2.0]
    with Receiver([500] * TRIES) as receiver, Webhook(receiver.url, pause) as hook:
        hook.tell(gone)
        for _ in range(TRIES):
            receiver.wait()
    assert len(receiver.bodies) == TRIES
    with Receiver([404]) as receiver, Webhook(receiver.url, pause) as hook:
        hook.tell(gone)
        receiver.wait()
    assert len(receiver.bodies) == 1
    assert sum("an alert could not be sent" in message for message in caplog.messages) == 2


def test_a_webhook_that_does_not_answer_is_in_nobodys_way(board):
    """Nothing listens there; what is told is queued up to a bound, and the oldest goes."""
    healthy, gone = present(board), present(board, writer="gone")
    reached = threading.Event()

    def pause(_):
        reached.set()
        return True

    with Webhook("http://127.0.0.1:9/", pause) as hook:
        for _ in range(QUEUED_MAX):
            hook.tell(gone)
            hook.tell(healthy)
        assert len(hook._queue) <= QUEUED_MAX
        assert reached.wait(60.0)
    assert not hook._thread.is_alive()
    with pytest.raises(ConfigError, match="--webhook nowhere"):
        Webhook("nowhere")

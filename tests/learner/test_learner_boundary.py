"""Live parameters, mailboxes, and the crossing of the step boundary."""

import threading

import numpy as np
import pytest
import torch
from learner_fakes import TinyTask
from torch import nn

from yeto.errors import ConfigError, ProtocolError
from yeto.layout import build_layout
from yeto.learner.anchors import FragmentBook
from yeto.learner.boundary import Boundary
from yeto.learner.exchanged import Broadcast, Pull
from yeto.learner.fragments import LiveFragments, named_shapes
from yeto.learner.mailbox import Arrivals, Departures, FinalCut, Stop
from yeto.learner.push import encode_push
from yeto.learner.stopwatch import Stopwatch
from yeto.wire import f32, q4
from yeto.wire.layout import FragmentLayout, Layout, MergeMode, TensorSpec


def array(*numbers):
    return np.array(numbers, dtype=np.float32)


def broadcast(version, *numbers, fragment=0, generation=1, digest=None):
    return Broadcast(
        generation=generation,
        fragment=fragment,
        version=version,
        digest=str(numbers) if digest is None else digest,
        values=array(*numbers),
    )


def pull(step, *, attempt=1, fragment=0, generation=1):
    return Pull(generation=generation, fragment=fragment, step=step, attempt=attempt)


class Bench:
    """A boundary over parameters of one number each, one fragment per parameter or all in one."""

    def __init__(self, *start, alpha=0.5, error_feedback=False, together=False, carries=False):
        self.parameters = {f"p{i}": nn.Parameter(torch.tensor([value])) for i, value in enumerate(start)}
        specs = [TensorSpec(name=name, shape=(1,)) for name in self.parameters]
        layout = Layout(
            fragments=tuple(
                FragmentLayout(mode=MergeMode.AVG, tensors=tuple(tensors))
                for tensors in ([specs] if together else [[spec] for spec in specs])
            )
        )
        self.fragments = LiveFragments(layout, self.parameters)
        self.rings = []
        self.receipts = []
        self.book = FragmentBook(
            num_fragments=len(layout.fragments),
            alpha=alpha,
            error_feedback=error_feedback,
            carries=carries,
        )
        self.arrivals = Arrivals()
        self.departures = Departures(
            ring_pushes=lambda: self.rings.append("push"), ring_news=lambda: self.rings.append("news")
        )
        self.boundary = Boundary(
            fragments=self.fragments,
            book=self.book,
            arrivals=self.arrivals,
            departures=self.departures,
            stopwatch=Stopwatch(),
            on_broadcast=lambda broadcast, receipt: self.receipts.append(receipt.taken.value),
            on_answer=lambda answer: None,
        )
        self.arrivals.begin_generation(1)
        self.departures.begin_generation()

    def local(self, index=0):
        return self.parameters[f"p{index}"].item()

    def set_local(self, value, index=0):
        with torch.no_grad():
            self.parameters[f"p{index}"].fill_(value)

    def pushed(self, codec=f32):
        """Return what is to be pushed, in order, as (step, attempt, delta)."""
        found = []
        while (push := self.departures.take_push()) is not None:
            head, payload = encode_push(push, 3, codec.NAME)
            assert head.learner == 3
            found.append((head.step, head.attempt, float(codec.decode(payload, 1)[0])))
        return found


class TestFragments:
    def test_a_snapshot_is_a_copy_in_layout_order(self):
        task = TinyTask()
        parameters = task.trainable_parameters()
        layout = build_layout(named_shapes(parameters), fragments=1)
        fragments = LiveFragments(layout, parameters)
        expected = torch.cat(
            [parameters[spec.name].detach().reshape(-1) for spec in layout.fragments[0].tensors]
        )
        snapshot = fragments.snapshot(0)
        with torch.no_grad():
            parameters["layers.1.bias"].add_(1.0)
        assert torch.equal(torch.from_numpy(snapshot.values()), expected)

    def test_alpha_zero_copies_exactly_even_over_nan(self):
        bench = Bench(float("nan"))
        bench.fragments.blend(0, array(1.1), 0.0)
        assert bench.local() == np.float32(1.1)

    def test_parameters_must_be_float32(self):
        half = {"w": nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))}
        with pytest.raises(ConfigError, match=r"trainable parameter w is torch\.bfloat16"):
            named_shapes(half)
        with pytest.raises(ConfigError, match="no trainable parameter"):
            named_shapes({})


class TestCrossing:
    def test_the_worked_example(self):
        """alpha .25, local 10, global 4 -> 5.5 with anchor 4; later local 7.5 -> pushes 3.5."""
        bench = Bench(0.0, alpha=0.25)
        bench.arrivals.put_broadcast(broadcast(0, 0.0))
        bench.boundary.cross(0)
        bench.set_local(10.0)
        bench.book.count_step(1)
        bench.arrivals.put_broadcast(broadcast(1, 4.0))
        bench.boundary.cross(1)
        assert bench.local() == 5.5
        assert bench.book.saved().fragments[0].anchor == array(4.0)
        bench.set_local(7.5)
        bench.book.count_step(1)
        bench.arrivals.put_pull(pull(2))
        bench.boundary.cross(2)
        assert bench.pushed() == [(2, 1, 3.5)]

    def test_broadcasts_come_before_pulls(self):
        bench = Bench(0.0, alpha=0.0)
        bench.arrivals.put_broadcast(broadcast(0, 0.0))
        bench.boundary.cross(0)
        bench.set_local(5.0)
        bench.book.count_step(1)
        # The pull came first, but its round is based on the broadcast.
        bench.arrivals.put_pull(pull(2))
        bench.arrivals.put_broadcast(broadcast(1, 3.0))
        bench.boundary.cross(1)
        assert bench.pushed() == [], "nothing was done since the broadcast"
        bench.set_local(4.0)
        bench.book.count_step(1)
        bench.boundary.cross(2)
        assert bench.pushed() == [(2, 1, 1.0)]

    def test_a_final_cut_is_the_last_word(self):
        bench = Bench(0.0)
        cut = FinalCut(step=9, versions=(9,), digests=("x",), values=(array(1.0),))
        bench.arrivals.put_broadcast(broadcast(0, 7.0))
        bench.arrivals.put_final(cut)
        assert bench.boundary.cross(0) is cut
        assert bench.local() == 0.0
        assert bench.receipts == []

    def test_held_pulls_wait_and_the_newest_of_a_fragment_wins(self):
        bench = Bench(0.0, 0.0)
        for fragment in range(2):
            bench.arrivals.put_broadcast(broadcast(0, 0.0, fragment=fragment))
        bench.arrivals.put_pull(pull(1))
        bench.arrivals.put_pull(pull(2, fragment=1))
        bench.boundary.cross(0)
        bench.arrivals.put_pull(pull(1, attempt=2))
        bench.boundary.cross(0)
        assert bench.pushed() == []
        bench.set_local(1.0)
        bench.book.count_step(1)
        bench.boundary.cross(1)
        assert bench.pushed() == [(1, 2, 1.0), (2, 1, 0.0)]
        bench.boundary.cross(2)
        assert bench.pushed() == []

    def test_pulls_die_with_their_connection(self):
        bench = Bench(0.0)
        bench.arrivals.put_broadcast(broadcast(0, 0.0))
        bench.arrivals.put_pull(pull(1))
        bench.boundary.cross(0)
        bench.book.count_step(1)
        bench.arrivals.begin_generation(2)
        bench.arrivals.put_broadcast(broadcast(0, 0.0, generation=2))
        bench.boundary.cross(1)
        assert bench.pushed() == []
        bench.arrivals.put_pull(pull(1))
        bench.boundary.cross(1)
        assert bench.pushed() == [], "a pull of the old connection came late"
        bench.arrivals.put_pull(pull(1, generation=2))
        bench.boundary.cross(1)
        assert len(bench.pushed()) == 1

    def test_a_frozen_learner_repeats_its_answer(self):
        bench = Bench(0.0)
        bench.arrivals.put_broadcast(broadcast(0, 0.0))
        bench.boundary.cross(0)
        bench.set_local(8.0)
        bench.book.count_step(1)
        bench.book.freeze(1, 1)
        bench.arrivals.put_broadcast(broadcast(4, 3.0))
        for attempt in (1, 2):
            bench.arrivals.put_pull(pull(5, attempt=attempt))
            bench.boundary.cross(1)
            assert bench.pushed() == [(5, attempt, 5.0)]
        assert bench.local() == 8.0

    def test_quantised_pushes_feed_their_error_back(self):
        """residual = (1 - alpha)(d - q(d)), added to the first push after the round's broadcast."""
        bench = Bench(0.0, 0.0, alpha=0.25, error_feedback=True, together=True)
        bench.arrivals.put_broadcast(broadcast(0, 0.0, 0.0))
        bench.boundary.cross(0)

        def push(step):
            bench.book.count_step(1)
            bench.arrivals.put_pull(pull(step))
            bench.boundary.cross(1)
            _, payload = encode_push(bench.departures.take_push(), 0, "q4")
            return q4.decode(payload, 2)

        bench.set_local(1.0)
        bench.set_local(0.4, index=1)
        delta = array(1.0, 0.4)
        sent = push(2)
        assert sent.tolist() == [1.0, 0.5], "0.4 is not a level"
        owed = np.float32(0.75) * (delta - sent)
        bench.arrivals.put_broadcast(broadcast(2, 0.0, 0.0, digest="merged"))
        bench.boundary.cross(1)
        bench.set_local(1.0)
        bench.set_local(0.4, index=1)
        expected = q4.decode(q4.encode(delta + owed), 2)
        assert push(4).tolist() == expected.tolist() == [1.0, 0.25]


class TestCarrying:
    """``local := received + (local - anchor) - d`` on real parameters and through the real codecs."""

    def test_the_worked_example(self):
        """Anchor 4, local 7.5, pushes 3.5; then 2 more, and 5 is received: 5 + 2 = 7, and 2 are pushed."""
        bench = Bench(4.0, carries=True)
        bench.arrivals.put_broadcast(broadcast(0, 4.0))
        bench.arrivals.put_pull(pull(1))
        bench.boundary.cross(0)
        bench.set_local(7.5)
        bench.book.count_step(1)
        bench.boundary.cross(1)
        assert bench.pushed() == [(1, 1, 3.5)]
        bench.set_local(9.5)
        bench.book.count_step(1)
        bench.arrivals.put_broadcast(broadcast(1, 5.0))
        bench.arrivals.put_pull(pull(2))
        bench.boundary.cross(2)
        assert bench.local() == 7.0
        assert bench.pushed() == [(2, 1, 2.0)]
        assert bench.receipts == ["overwrote", "carried"]

    def test_nothing_done_since_the_push_ends_in_what_was_received_exactly(self):
        bench = Bench(0.1, carries=True)
        bench.arrivals.put_broadcast(broadcast(0, 0.1))
        bench.boundary.cross(0)
        bench.set_local(0.7)
        bench.book.count_step(1)
        bench.arrivals.put_pull(pull(1))
        bench.boundary.cross(1)
        bench.pushed()
        bench.arrivals.put_broadcast(broadcast(1, 0.3))
        bench.boundary.cross(2)
        assert bench.local() == np.float32(0.3)

    def test_what_quantisation_took_goes_into_the_next_push(self):
        """q4 sends 0.5 for 0.4; the missing -0.1 stays in the weights, and no residual adds it again."""
        bench = Bench(0.0, 0.0, carries=True, error_feedback=True, together=True)
        bench.arrivals.put_broadcast(broadcast(0, 0.0, 0.0))
        bench.boundary.cross(0)
        bench.set_local(1.0)
        bench.set_local(0.4, index=1)
        bench.book.count_step(1)
        bench.arrivals.put_pull(pull(1))
        bench.boundary.cross(1)
        _, payload = encode_push(bench.departures.take_push(), 0, "q4")
        assert q4.decode(payload, 2).tolist() == [1.0, 0.5]
        bench.arrivals.put_broadcast(broadcast(1, 0.0, 0.0, digest="merged"))
        bench.boundary.cross(2)
        assert [bench.local(0), bench.local(1)] == [0.0, pytest.approx(-0.1)]
        bench.book.count_step(1)
        bench.arrivals.put_pull(pull(2))
        bench.boundary.cross(3)
        _, payload = encode_push(bench.departures.take_push(), 0, "q4")
        assert q4.decode(payload, 2).tolist() == [0.0, pytest.approx(-0.1)]


class TestMailboxes:
    def test_one_broadcast_per_fragment_waits(self):
        arrivals = Arrivals()
        arrivals.begin_generation(1)
        arrivals.put_broadcast(broadcast(1, 1.0))
        arrivals.put_broadcast(broadcast(2, 2.0, fragment=1))
        arrivals.put_broadcast(broadcast(5, 5.0))
        arrivals.put_broadcast(broadcast(3, 3.0))
        assert [b.version for b in arrivals.take().broadcasts] == [2, 5]
        assert arrivals.take().broadcasts == ()

    def test_contradictions_are_fatal(self):
        arrivals = Arrivals()
        arrivals.put_broadcast(broadcast(1, 1.0))
        with pytest.raises(ProtocolError):
            arrivals.put_broadcast(broadcast(1, 2.0))

    def test_waiting_ends_with_mail_a_reason_to_stop_or_the_release(self):
        arrivals = Arrivals()
        for act in (
            lambda: arrivals.put_broadcast(broadcast(1, 1.0)),
            lambda: arrivals.stop(Stop(exit_code=4, reason="enough")),
            arrivals.release,
        ):
            thread = threading.Thread(target=arrivals.wait)
            thread.start()
            act()
            thread.join(timeout=100)
            assert not thread.is_alive()
            arrivals.take()

    def test_the_first_reason_to_stop_stays(self):
        arrivals = Arrivals()
        arrivals.stop(Stop(exit_code=1, reason="first"))
        arrivals.stop(Stop(exit_code=4, reason="second"))
        assert arrivals.stopping.reason == "first"

    def test_the_first_two_steps_of_a_connection_are_reported_at_once(self):
        bench = Bench(0.0)
        for step in range(1, 5):
            bench.departures.stepped(step)
        assert bench.rings == ["news", "news"]
        bench.departures.begin_generation()
        bench.departures.stepped(5)
        assert bench.rings == ["news"] * 3
        assert bench.departures.local_step == 5

    def test_unsent_pushes_die_with_their_connection(self):
        bench = Bench(0.0)
        bench.arrivals.put_broadcast(broadcast(0, 0.0))
        bench.book.count_step(1)
        bench.arrivals.put_pull(pull(1))
        bench.boundary.cross(1)
        # The broadcast reset the counters, so the answer takes another step.
        bench.book.count_step(1)
        bench.boundary.cross(1)
        bench.departures.begin_generation()
        assert bench.departures.take_push() is None

"""What a tape says about a checkpoint, over several timelines. The tapes are made up, record by record."""

import pytest
import torch

from yeto.core import CoreConfig
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.values import FragmentMark, SessionTerms
from yeto.errors import CheckpointError
from yeto.state import Checkpoint, FragmentVersion
from yeto.syncer.past import Past, find_past
from yeto.tape import Header, TapeWriter

CONFIG = CoreConfig(num_learners=3, total_steps=4, quorum=1, wait_for=1)
TERMS = SessionTerms(dtype="f32", num_fragments=1, fingerprint="f" * 64, contract="c" * 64)


def digest(step, run="a"):
    return run * 30 + f"{step:02x}"


def checkpoint(step, seq):
    values = torch.zeros(1)
    version = FragmentVersion(
        fragment=0,
        version=step,
        params=values,
        momentum=values,
        params_digest=digest(step),
        momentum_digest=digest(step),
    )
    return Checkpoint(
        step=step,
        fragments=(version,),
        layout=None,
        ledger=(),
        dtype="f32",
        iso_backend="scalar",
        fingerprint=TERMS.fingerprint,
        contract=TERMS.contract,
        tape_file="events.jsonl",
        tape_seq=seq,
    )


class Script:
    """Writes facts and what follows from them; ``seq`` is the number of the last record."""

    def __init__(self, path):
        self.path = path
        header = Header(software_version="0", wall_clock="2026", session_id="s", config=CONFIG)
        self.tape = TapeWriter.create(path, header)

    def tell(self, event, *decisions):
        because = self.tape.append_event(event)
        self.tape.append_decisions(decisions, because=because, at=event.at)
        return self.tape.next_seq - 1

    def saved(self, step, run="a"):
        """Commit a step and order its checkpoint."""
        event = ev.OuterStepApplied(
            at=0.0, step=step, attempt=1, finite=True, params_digest=None, momentum_digest=None, seconds=0.1
        )
        commit = de.RoundCommitted(
            step=step,
            fragment=0,
            attempt=1,
            base_version=step - 1,
            version=step,
            quorum=1,
            members=(0,),
            responders=(),
            missed=(),
            left_out=(),
            quorum_seconds=0.1,
            grace_seconds=None,
            merge_seconds=0.1,
            sync_seconds=None,
            gradient_norm=1.0,
            params_digest=digest(step, run),
            momentum_digest=digest(step, run),
            no_op=False,
            why="",
        )
        return self.tell(event, commit, de.CheckpointOrdered(step=step, final=True, why=""))

    def cut(self, step, *awaited, to=()):
        event = ev.LearnerLeft(at=0.0, learner=0, generation="a", reason="")
        order = de.FinalCutOrdered(step=step, versions=(step,), to=to, awaited=awaited, why="")
        self.tell(event, order)

    def ack(self, learner, step, *decisions):
        self.tell(ev.FinalAckReceived(at=0.0, learner=learner, generation="a", step=step), *decisions)

    def resumed(self, step, awaited=(), acked=()):
        mark = FragmentMark(
            fragment=0, version=step, params_digest=digest(step), momentum_digest=digest(step)
        )
        self.tell(
            ev.SessionResumed(
                at=0.0,
                wall_clock="2026",
                config=CONFIG,
                terms=TERMS,
                step=step,
                fragments=(mark,),
                ledger=(),
                checkpoint_seq=None,
                awaited=awaited,
                acked=acked,
            )
        )

    def find(self, step, seq):
        self.tape.flush()
        return find_past(self.path, checkpoint(step, seq))


@pytest.fixture
def script(tmp_path):
    script = Script(tmp_path / "tape")
    yield script
    script.tape.close()


def test_without_a_cut_nobody_is_awaited(script):
    seq = script.saved(2)
    assert script.find(2, seq) == Past(checkpoint_seq=seq)


def test_acks_that_were_taken_count_and_ignored_ones_do_not(script):
    seq = script.saved(4)
    script.cut(4, 0, 1)
    script.ack(0, 4)
    script.ack(1, 4, de.Ignored(event="final_ack_received", reason="other_cut", why=""))
    script.ack(2, 3)
    assert script.find(4, seq) == Past(checkpoint_seq=seq, awaited=(1,), acked=(0,))


def test_who_joins_while_finalising_is_awaited_only_while_it_stays(script):
    seq = script.saved(4)
    script.cut(4, 0)
    script.cut(4, 0, 2)
    assert script.find(4, seq).awaited == (0,)


def test_a_cut_goes_on_over_a_resume_of_its_step(script):
    seq = script.saved(4)
    script.cut(4, 0, 1)
    script.ack(0, 4)
    script.resumed(4, awaited=(1,), acked=(0,))
    script.cut(4, 1, 2)
    script.ack(1, 4)
    assert script.find(4, seq) == Past(checkpoint_seq=seq, awaited=(2,), acked=(0, 1))


def test_a_cut_of_a_timeline_that_was_fallen_back_from_does_not_count(script):
    script.saved(4)
    script.cut(4, 0, 1)
    script.ack(0, 4)
    script.resumed(3)
    seq = script.saved(4)
    assert script.find(4, seq) == Past(checkpoint_seq=seq)


def test_a_tape_without_the_checkpoint_is_refused(script):
    seq = script.saved(3)
    with pytest.raises(CheckpointError, match="never was at step 3 with these values"):
        script.find(3, seq + 1)
    with pytest.raises(CheckpointError, match="step 4"):
        script.find(4, seq)


def test_a_run_of_the_same_shape_is_another_run(script):
    seq = script.saved(3, run="b")
    with pytest.raises(CheckpointError, match="is not the tape of this checkpoint"):
        script.find(3, seq)


def test_a_tape_that_began_with_the_checkpoint_is_its_tape(script):
    script.resumed(3)
    assert script.find(3, 999) == Past(checkpoint_seq=None)

"""The metrics: Prometheus' own parser takes them, and they say what the moment says."""

import re

import attrs
import pytest
from prometheus_client.parser import text_string_to_metric_families
from view_tapes import ROOT, TAPES

from yeto.tape import find_restarts, read
from yeto.view.board import Board
from yeto.view.metrics import render
from yeto.view.present import present

FAULTY = ROOT / "fixtures" / "tapes" / "faulty-v1.jsonl"
TOLD = ROOT / "fixtures" / "tapes" / "two-learners-v3.jsonl"
"""Its merges say whether the learners agree."""


def parsed(moment):
    text = render(moment).decode()
    assert text.endswith("\n")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def moments(path):
    """Yield the moment after every eleventh record, and the last."""
    board, records = Board(find_restarts(path)), list(read(path))
    for entry in records:
        board.feed(entry)
        if entry.seq % 11 == 0 or entry is records[-1]:
            yield present(board, now=board.at + 1.5)


@pytest.mark.parametrize("path", [FAULTY, TOLD], ids=["faulty", "told"])
def test_the_samples_are_the_numbers_of_the_moment(path):
    for moment in moments(path):
        samples = parsed(moment)
        assert samples["yeto_step", ()] == moment.step
        assert samples["yeto_commits_superseded_total", ()] == moment.superseded
        assert samples["yeto_records_total", ()] == moment.session.records
        assert samples["yeto_silent_seconds", ()] == pytest.approx(1.5)
        phases = [
            dict(labels)["phase"]
            for (name, labels), value in samples.items()
            if name == "yeto_phase" and value
        ]
        assert phases == [moment.phase]
        for learner in moment.learners:
            label = (("learner", str(learner.learner)),)
            assert samples["yeto_learner_merges_total", label] == learner.merges
            assert samples["yeto_learner_connected", label] == (learner.link == "connected")
            waited = samples["yeto_learner_waited_seconds", label]
            assert (waited > 0) == (learner.waited_since is not None)
        for fragment in moment.fragments:
            assert (
                samples["yeto_fragment_version", (("fragment", str(fragment.fragment)),)] == fragment.version
            )
        # What is not known is not there.
        for name in ("delta_cosine", "norm_ratio", "offset_ratio"):
            assert samples.get((f"yeto_{name}", ())) == getattr(moment.agreement, name)
            for fragment in moment.fragments:
                label = (("fragment", str(fragment.fragment)),)
                assert samples.get((f"yeto_fragment_{name}", label)) == getattr(fragment, name)
        assert (("yeto_remaining_seconds", ()) in samples) == (moment.eta_seconds is not None)
        assert ("yeto_disk_free_bytes", ()) not in samples
        open_rounds = sum(value for (name, _), value in samples.items() if name == "yeto_open_rounds")
        assert open_rounds == len(moment.rounds)
        alerts = sum(name == "yeto_alert" for name, _ in samples)
        assert alerts == len(moment.alerts)


def test_names_and_help_follow_the_rules_and_the_page():
    page = (ROOT / "docs" / "VIEW.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(yeto_[a-z_]+)`", page))
    seen = set()
    for path in TAPES:
        *_, moment = moments(path)
        for family in text_string_to_metric_families(render(moment).decode()):
            assert family.documentation.endswith(".")
            assert re.fullmatch(r"yeto_[a-z_]+", family.name)
            seen.add(family.name + ("_total" if family.type == "counter" else ""))
    assert documented - seen == {"yeto_learner_loss", "yeto_learner_sent_bytes_total"}, "no tape tells them"
    assert seen < documented


def test_what_only_a_running_syncer_or_a_log_tells_is_there_when_told():
    *_, moment = moments(FAULTY)
    first = attrs.evolve(moment.learners[0], loss=1.5, bytes_in=3000, bytes_out=2000)
    samples = parsed(attrs.evolve(moment, learners=(first, *moment.learners[1:])))
    label = (("learner", "0"),)
    assert samples["yeto_learner_loss", label] == 1.5
    assert samples["yeto_learner_sent_bytes_total", label] == 2000
    assert samples["yeto_learner_received_bytes_total", label] == 3000
    assert ("yeto_learner_sent_bytes_total", (("learner", "1"),)) not in samples


def test_text_of_a_tape_is_escaped():
    *_, moment = moments(TAPES[0])
    strange = attrs.evolve(moment, session=attrs.evolve(moment.session, session_id='a"\n\\b'))
    names = {labels for (name, labels) in parsed(strange) if name == "yeto_session_info"}
    assert (("session_id", 'a"\n\\b'), ("version", moment.session.software_version)) in names

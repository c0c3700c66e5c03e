"""The worked example of docs/DESIGN.md and its picture: the numbers are the coordinator's own."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import attrs
import pytest
from core_fleet import Session, config

from yeto.core import decisions as de
from yeto.core.pacing import grace_seconds

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "DESIGN.md").read_text(encoding="utf-8")
EXAMPLE = PAGE.split("## Quorum and grace, by example\n")[1].split("\n## ")[0]
PICTURE = ET.parse(DOCS / "quorum-and-grace.svg").getroot()
SVG = "{http://www.w3.org/2000/svg}"


def formula():
    """Return gamma, tau, step, quorum, sync and the grace as the page computes it."""
    number = r"([\d.]+)"
    terms = rf"= {number} \* \({number} \* {number} - {number} - {number}\) = {number} s"
    (found,) = re.findall(terms, EXAMPLE)
    return tuple(map(float, found))


def moments():
    """Return the times of the page's table."""
    return [float(at) for at in re.findall(r"^\| ([\d.]+) s \|", EXAMPLE, re.MULTILINE)]


@pytest.fixture
def fleet():
    """Three learners of which the page tells, at the opening of a round."""
    _, _, slowest, _, sync, _ = formula()
    session = Session(config(num_learners=3, quorum=2, wait_for=3, pipeline=1))
    session.start()
    session.begun = session.at
    links = session.state.links
    for learner, xi_step in enumerate((0.2, 0.3, slowest)):
        links = links.set(learner, attrs.evolve(links[learner], xi_step=xi_step))
    session.state = attrs.evolve(session.state, links=links, xi_sync=sync)
    return session


def answer(session, learner, at):
    """Answer at a time after the opening, with an upload that takes none."""
    session.at = session.begun + at
    session.offer(learner, 1)
    if session.pick(de.PushAdmitted):
        session.receive(learner, 1)


def to_the_grace(session):
    """Let the two quick learners answer; return the grace that opens."""
    first, second, _ = moments()
    answer(session, 0, first)
    answer(session, 1, second)
    return session.only(de.GraceOpened)


def test_the_formula_of_the_page_is_the_coordinators():
    gamma, tau, slowest, quorum, sync, grace = formula()
    assert (gamma, tau) == (config().grace_gamma, config().grace_tau)
    cap = config().grace_cap_seconds
    terms = {"gamma": gamma, "tau": tau, "xi_step": slowest, "xi_quorum": quorum, "xi_sync": sync}
    assert grace_seconds(**terms, cap=cap) == pytest.approx(grace)
    assert f"`--grace-ms` ({cap:g} s)" in EXAMPLE.replace("\n", " ")


def test_the_table_is_what_the_coordinator_does(fleet):
    *_, quorum, _, grace = formula()
    _, second, sealed = moments()
    opened = to_the_grace(fleet)
    assert quorum == second
    assert opened.grace_seconds == pytest.approx(grace)
    assert opened.deadline - fleet.begun == pytest.approx(sealed)
    fleet.fire()
    seal = fleet.only(de.AttemptSealed)
    assert fleet.at - fleet.begun == pytest.approx(sealed)
    assert ([part.learner for part in seal.responders], seal.missed) == ([0, 1], (2,))


def test_the_slow_learner_in_time_and_too_late(fleet):
    in_time, too_late = map(float, re.findall(r"answers at ([\d.]+) s", EXAMPLE))
    state = fleet.state
    to_the_grace(fleet)
    answer(fleet, 2, in_time)
    seal = fleet.only(de.AttemptSealed)
    assert [part.learner for part in seal.responders] == [0, 1, 2]
    fleet.state = state
    to_the_grace(fleet)
    fleet.fire()
    answer(fleet, 2, too_late)
    assert fleet.only(de.PushRefused).reason == "out_of_round"


def test_the_picture_has_the_same_times():
    first, second, sealed = moments()
    in_time, too_late = map(float, re.findall(r"answers at ([\d.]+) s", EXAMPLE))
    *_, sync, grace = formula()
    shapes = {shape.get("id"): shape for shape in PICTURE.iter() if shape.get("id")}
    begin = float(shapes["gathering"].get("x"))
    scale = float(shapes["gathering"].get("width")) / second

    def at(shape, name):
        return (float(shapes[shape].get(name)) - begin) / scale

    assert at("answer-0", "cx") == pytest.approx(first)
    assert at("answer-1", "cx") == pytest.approx(second)
    assert at("in-time", "cx") == pytest.approx(in_time)
    assert at("too-late", "cx") == pytest.approx(too_late)
    assert at("grace", "x") == pytest.approx(second)
    assert float(shapes["grace"].get("width")) / scale == pytest.approx(grace)
    assert at("merging", "x") == pytest.approx(sealed)
    assert float(shapes["merging"].get("width")) / scale == pytest.approx(sync)
    words = [text.text for text in PICTURE.iter(f"{SVG}text")]
    axis = [text for text in PICTURE.iter(f"{SVG}text") if text.get("y") == "259"]
    for text in axis:
        seconds = float(text.text.removesuffix(" s"))
        assert (float(text.get("x")) - begin) / scale == pytest.approx(seconds)
    assert {float(text.text.removesuffix(" s")) for text in axis} == {
        0.0, first, second, in_time, sealed, too_late
    }  # fmt: skip
    assert f"grace, {grace:g} s" in words


def test_the_picture_stands_beside_the_example_and_needs_nothing_else():
    assert "](quorum-and-grace.svg)" in EXAMPLE
    text = (DOCS / "quorum-and-grace.svg").read_text(encoding="ascii")
    assert "<script" not in text
    assert re.findall(r"https?://\S+?[\"']", text) == ['http://www.w3.org/2000/svg"']

"""How far ahead of its run a fragment is: the right amount, what is kept of it, what settings tell."""

import json

import attrs
import pytest
import torch
from fake_learner import small_layout
from state_examples import COUNT, Run
from syncer_runs import bodies, fakes, make_config, running

from yeto.cli.common import run_app
from yeto.cli.main import build
from yeto.core import decisions as de
from yeto.errors import CheckpointError
from yeto.merge import outer_step
from yeto.state import OuterMark, open_checkpoint, read_checkpoint, read_manifest, write_checkpoint
from yeto.state.checkpoint import manifest_of
from yeto.state.lookahead import derived
from yeto.state.manifest import decode_manifest, encode_manifest

STOCK = {"outer_lr": 0.7, "outer_momentum": 0.9, "total_steps": 40, "closing_sweep": "plain"}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "yeto-state.ckpt"


def ahead(run, lookaheads):
    """Return a checkpoint whose fragments say these look-aheads."""
    checkpoint = run.checkpoint()
    fragments = tuple(
        attrs.evolve(part, lookahead=amount)
        for part, amount in zip(checkpoint.fragments, lookaheads, strict=True)
    )
    return attrs.evolve(checkpoint, fragments=fragments)


def test_it_is_the_distance_to_nesterovs_own_iterates():
    """In the form with two sequences: phi' = y - lr grad(y), y' = phi' + mu (phi' - phi)."""
    lr, mu = 0.7, 0.9
    generator = torch.Generator().manual_seed(0)
    theta, buffer = torch.randn(64, generator=generator), torch.zeros(64)
    y, phi = theta.double(), theta.double()
    for _ in range(6):
        gradient = torch.randn(64, generator=generator)
        theta, buffer = outer_step(theta, buffer, gradient, lr=lr, mu=mu)
        moved = y - lr * gradient.double()
        y, phi = moved + mu * (moved - phi), moved
        torch.testing.assert_close(theta.double(), y, rtol=0, atol=1e-5)
        torch.testing.assert_close(theta.double() + lr * mu * buffer.double(), phi, rtol=0, atol=1e-5)


def test_it_is_written_and_read(folder):
    write_checkpoint(folder, ahead(Run().commit(4), (0.63, 0.0, None)))
    assert [part.lookahead for part in read_checkpoint(folder).fragments] == [0.63, 0.0, None]
    stored = open_checkpoint(folder)
    assert stored.lookaheads == (0.63, 0.0, None)
    whole = read_checkpoint(folder).fragments[0]
    assert torch.equal(torch.from_numpy(stored.read_params(0)), whole.params)
    wanted = whole.params + torch.tensor(0.63) * whole.momentum
    assert torch.equal(torch.from_numpy(stored.read_params(0, 0.63)), wanted)


@pytest.mark.parametrize("amount", [-0.1, float("inf")])
def test_no_commit_leaves_such_a_lookahead(folder, amount):
    manifest = manifest_of(ahead(Run().commit(4), (0.5, 0.0, 0.0)))
    wrong = attrs.evolve(manifest.fragments[0], lookahead=amount)
    changed = attrs.evolve(manifest, fragments=(wrong, *manifest.fragments[1:]))
    if amount < 0:
        with pytest.raises(CheckpointError, match=r"fragments\[0\]: a look-ahead of -0.1 cannot be"):
            decode_manifest(encode_manifest(changed), "manifest")
    else:  # JSON has no such number
        with pytest.raises(CheckpointError, match="cannot be written"):
            encode_manifest(changed)


NORMALISED = STOCK | {"outer": "normalised", "outer_lr": 1.0}


@pytest.mark.parametrize(
    ("settings", "versions", "marks", "finish_target", "wanted"),
    [
        (STOCK, (4, 5, 3), None, None, (0.7 * 0.9,) * 3),
        (STOCK, (1, 0, 0), None, None, (0.7 * 0.9, 0.0, 0.0)),
        (STOCK | {"outer": "direct", "outer_momentum": 0.0}, (4, 5, 3), None, None, (0.0,) * 3),
        # The last round of each fragment is the sweep, if the run has two for each.
        (STOCK, (37, 38, 39), None, None, (0.7 * 0.9, 0.0, 0.0)),
        (STOCK, (40, 38, 39), None, None, (0.0,) * 3),
        (STOCK | {"closing_sweep": "off"}, (40, 38, 39), None, None, (0.7 * 0.9,) * 3),
        (STOCK | {"total_steps": 5}, (4, 5, 3), None, None, (0.7 * 0.9,) * 3),
        # A budget finish sweeps to its own target.
        (STOCK, (7, 8, 6), None, 9, (0.0, 0.0, 0.7 * 0.9)),
        # A step that applies a steady gradient once is not ahead of anything.
        (NORMALISED, (7, 5, 6), None, None, (0.0,) * 3),
        # Only no-ops and a sweep so far, of a run that goes on.
        (STOCK, (7, 5, 6), ((1, 1.0), (0, 0.0), (2, 1.9)), None, (0.7 * 0.9, 0.0, 0.7 * 0.9)),
        (STOCK | {"outer": "auto"}, (4, 5, 3), None, None, (None,) * 3),
        ({"outer_lr": 0.7}, (4, 5, 0), None, None, (None, None, 0.0)),
        ({"outer_lr": True, "outer_momentum": "0.9"}, (4, 5, 3), None, None, (None,) * 3),
        ({}, (4, 5, 3), None, None, (None,) * 3),
    ],
)
def test_what_the_settings_tell(settings, versions, marks, finish_target, wanted):
    if marks is not None:
        marks = [
            OuterMark(fragment=fragment, merges=merges, gain=gain)
            for fragment, (merges, gain) in enumerate(marks)
        ]
    found = derived(settings, versions, marks=marks, finish_target=finish_target)
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize("outer", ["stock", "normalised"])
async def test_a_run_keeps_what_it_ordered(tmp_path, outer):
    """Every checkpoint of a run and of its continuation beyond the closing sweep, against the tape."""
    count, end, further = 2, 6, 10
    core = {"outer": outer, "sync_interval_steps": 16.0}
    for target in (end, further):
        config = make_config(tmp_path, resume=target == further, total_steps=target, **core)
        config = attrs.evolve(config, keep_every=1)
        async with running(config, *fakes(layout=small_layout(num_fragments=count))) as run:
            assert await run.end() == 0
    orders = {order.step: order for order in bodies(config.event_tape, de.CommitOrdered)}
    assert sorted(orders) == list(range(1, further + 1))
    assert [step for step in orders if orders[step].sweep] == [5, 6, 9, 10]
    for step in range(further + 1):
        manifest = read_manifest(config.checkpoint_path / f"manifest-{step}.json")
        for entry in manifest.fragments:
            order = orders.get(entry.version)
            none = order is None or order.sweep or outer == "normalised"
            wanted = 0.0 if none else order.lr * order.momentum
            assert entry.lookahead == wanted, (step, entry.fragment)
        if step in (3, 4):  # before any sweep, the settings tell the same
            without = [attrs.evolve(entry, lookahead=None) for entry in manifest.fragments]
            told = attrs.evolve(manifest, fragments=tuple(without)).lookaheads
            assert told == tuple(entry.lookahead for entry in manifest.fragments)


def test_inspection_says_which_fragments_are_ahead(folder, capsys):
    def facts(lookaheads):
        write_checkpoint(folder, ahead(run.commit(), lookaheads))
        assert run_app(build, ["checkpoint", "inspect", str(folder)]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "look-ahead" in line]
        return line.split(maxsplit=1)[1]

    run = Run().commit(3)
    removes = "yeto-export removes it"
    assert facts((0.63, 0.0, 0.63)) == f"of Nesterov's momentum, in fragments 0, 2; {removes}"
    assert facts((0.0, 0.63, None)) == (
        f"of Nesterov's momentum, in fragments 1; {removes}; not stated of fragments 2"
    )
    assert facts((0.0,) * COUNT) == "none"
    assert facts((None,) * COUNT) == "not stated"
    assert run_app(build, ["checkpoint", "inspect", str(folder), "--json"]) == 0
    assert [part["lookahead"] for part in json.loads(capsys.readouterr().out)["fragments"]] == [None] * COUNT

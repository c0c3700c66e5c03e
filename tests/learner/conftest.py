"""Fixtures of the tests of the learner."""

from contextlib import asynccontextmanager

import pytest
import trio
from learner_fakes import Steps, TinyTask, config
from learner_runs import Run
from rank_processes import rank_template


@pytest.fixture(scope="session")
def template():
    """Return what starts processes without their imports; one for all files that a worker is given."""
    with rank_template() as made:
        yield made


@pytest.fixture
def learn(tmp_path):
    """Start a learner of a scripted syncer; its steps wait for ``run.gate``."""

    @asynccontextmanager
    async def start(syncer, *, address=None, free=False, seed=0, **changes):
        gate = Steps()
        if free:
            gate.open()
        settings = config(
            syncer=syncer.address if address is None else address,
            output_dir=tmp_path / "out",
            log_jsonl=tmp_path / "log.jsonl",
            **changes,
        )
        # Three rows each, so that every group has three targets.
        run = Run(settings, TinyTask(rows_per_batch=3, gate=gate, seed=seed))
        run.gate = gate
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run.run)
            try:
                yield run
            finally:
                # A training thread that waits at the gate would outlive the test.
                gate.open()
            nursery.cancel_scope.cancel()

    return start

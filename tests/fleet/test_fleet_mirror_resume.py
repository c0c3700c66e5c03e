"""A head whose disk is lost: the next one goes on from a mirror that lags, and the learners roll back."""

import shutil
from itertools import pairwise

import attrs
import pytest
import trio
from mirrored_run import CHECKPOINT, TAPE, brought_back, has_step, pusher
from syncer_runs import bodies, fakes, make_config, on_tape, running, until, verify

from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.state import read_checkpoint
from yeto.state.manifest import manifest_steps, read_manifest


def until_the_record(place, seq):
    """Cut the tape of a copy of a run right behind a record, and the next one in the middle."""
    lines = (place / TAPE).read_bytes().splitlines(keepends=True)
    (place / TAPE).write_bytes(b"".join(lines[: seq + 1]) + lines[seq + 1][:20])


@pytest.mark.parametrize("tape_is", ["longer", "shorter"])
async def test_a_syncer_goes_on_from_a_mirror_that_lags(tmp_path, tape_is):
    """The tape that comes back tells of commits above its checkpoint, or ends with the order to write it."""
    every = 4 if tape_is == "longer" else 1
    lost, mirror, new = tmp_path / "lost", str(tmp_path / "mirror"), tmp_path / "new"
    lost.mkdir()
    policy = {"total_steps": 20, "checkpoint_every": every}
    config = make_config(lost, **policy)
    learners = fakes(reconnects=True)
    async with trio.open_nursery() as dialling:
        async with running(config, *[]) as run:
            port = run.address.port
            for learner in learners:
                dialling.start_soon(learner.run, "127.0.0.1", port)
            if tape_is == "longer":
                await until(on_tape(config, de.RoundCommitted, 7))
                process = pusher(mirror, lost)
                pushed = await trio.to_thread.run_sync(process.push)
            else:
                await until(lambda: has_step(config.checkpoint_path, 5))
                copy = tmp_path / "copy"
                await trio.to_thread.run_sync(copied, lost, copy)
                until_the_record(copy, read_manifest(copy / CHECKPOINT).tape_seq)
                pushed = await trio.to_thread.run_sync(pusher(mirror, copy).push)
            # The learners go on and hold what the mirror knows nothing of.
            await until(lambda: any(version > pushed.index.step + 5 for _, version in learners[1].versions))
            run.stop()
            await run.ended.wait()
        shutil.rmtree(lost)

        restored = brought_back(mirror, new)
        assert restored.index == pushed.index
        step = read_checkpoint(new / CHECKPOINT).step
        told = [body.step for body in bodies(new / TAPE, de.RoundCommitted)]
        written = [body.step for body in bodies(new / TAPE, ev.CheckpointWritten)]
        if tape_is == "longer":
            assert max(told) > step
        else:
            assert max(told) == step > max(written)

        again = attrs.evolve(make_config(new, resume=True, **policy), port=port)
        async with running(again, *[]) as run:
            assert await run.end() == 0
        dialling.cancel_scope.cancel()
    assert verify(new / TAPE).state.step == 20
    assert learners[0].final_digests() == learners[1].final_digests()
    assert read_checkpoint(new / CHECKPOINT).step == 20
    for learner in learners:
        assert learner.released
        versions = [version for fragment, version in learner.versions if fragment == 0]
        assert any(later < earlier for earlier, later in pairwise(versions))
    # And the mirror goes on with what has come of it.
    end = pusher(mirror, new).push()
    assert end.index.step == 20
    brought_back(mirror, tmp_path / "end")
    assert (tmp_path / "end" / TAPE).read_bytes() == (new / TAPE).read_bytes()


def copied(source, target):
    """Copy the newest checkpoint of a folder that is being written to, and then the tape."""
    while True:
        shutil.rmtree(target, ignore_errors=True)
        (target / CHECKPOINT / "fragments").mkdir(parents=True)
        try:
            step = manifest_steps(source / CHECKPOINT)[0]
            name = f"{CHECKPOINT}/manifest-{step}.json"
            shutil.copy(source / name, target / name)
            for entry in read_manifest(target / CHECKPOINT).fragments:
                shutil.copy(source / CHECKPOINT / entry.file, target / CHECKPOINT / entry.file)
            shutil.copy(source / TAPE, target / TAPE)
            lines = (target / TAPE).read_bytes().count(b"\n")
            if lines > read_manifest(target / CHECKPOINT).tape_seq + 1:
                return
        except FileNotFoundError:
            continue

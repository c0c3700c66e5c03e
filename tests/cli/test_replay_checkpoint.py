"""``yeto replay --checkpoint``: the manifest against the tape, and the files against the manifest."""

import json
import shutil
import subprocess
import sys

import attrs
import numpy as np
import pytest
from recorded_run import SECONDS, Run, generation, record, record_with_restart

from yeto.cli import replay_checkpoint
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.state.fragmentfile import file_parts
from yeto.state.manifest import (
    FORMAT_VERSION,
    FRAGMENTS_FOLDER,
    LedgerEntry,
    Manifest,
    ManifestFragment,
    encode_manifest,
    fragment_file,
)
from yeto.wire.digest import digest


def params(fragment, version):
    return np.full(4, fragment + version / 8, dtype="<f4")


def momentum(version):
    return np.full(4, version / 4, dtype="<f4")


class TrueRun(Run):
    """A run whose digests are those of values that can be written down."""

    def start(self):
        self.join(0, 1)
        for fragment in range(2):
            first = {"fragment": fragment, "digest": digest(params(fragment, 0)), "finite": True}
            self.tell(ev.FragmentInitialised(at=0.0, learner=0, generation=generation(0), **first))

    def obey(self, order):
        if not isinstance(order, de.CommitOrdered):
            super().obey(order)
            return
        self.tell(
            ev.OuterStepApplied(
                at=0.0,
                step=order.step,
                attempt=order.attempt,
                finite=True,
                params_digest=digest(params(order.fragment, order.step)),
                momentum_digest=digest(momentum(order.step)),
                seconds=SECONDS,
            )
        )


@pytest.fixture
def tape(tmp_path):
    path = tmp_path / "events.jsonl"
    record(path, make=TrueRun)
    return path


@pytest.fixture
def restarted(tmp_path):
    path = tmp_path / "restarted.jsonl"
    record_with_restart(path, make=TrueRun)
    return path


@pytest.fixture
def stored(tmp_path):
    """Write the checkpoint of a state (as JSON), files and all; return its folder."""

    def store(state, **changes):
        folder = tmp_path / "state.ckpt"
        (folder / FRAGMENTS_FOLDER).mkdir(parents=True, exist_ok=True)
        fragments = []
        for mark in state["marks"]:
            values = params(mark["fragment"], mark["version"]), momentum(mark["version"])
            file = fragment_file(mark["fragment"], mark["version"])
            (folder / file).write_bytes(b"".join(file_parts(*values)))
            fragments.append(
                ManifestFragment(
                    fragment=mark["fragment"],
                    version=mark["version"],
                    file=file,
                    numel=4,
                    mode="rda",
                    shapes=((4,),),
                    params_digest=mark["params_digest"],
                    momentum_digest=mark["momentum_digest"] or digest(values[1]),
                )
            )
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            software_version="0.1.0",
            step=state["step"],
            iso_backend=0,
            dtype=state["terms"]["dtype"],
            layout_fingerprint=state["terms"]["fingerprint"],
            session_contract=state["terms"]["contract"],
            fragments=tuple(fragments),
            ledger=tuple(LedgerEntry(**entry) for entry in state["ledger"].values()),
            settings={},
        )
        content = encode_manifest(attrs.evolve(manifest, **changes))
        (folder / f"manifest-{manifest.step}.json").write_bytes(content)
        return folder

    return store


def test_a_checkpoint_that_agrees(yeto, restarted, stored):
    lines = restarted.read_text().splitlines()
    commits = [index for index, line in enumerate(lines) if '"kind":"merge","because"' in line]
    # Round 3 was committed twice; the checkpoint is of the timeline that stands.
    _, out, _ = yeto(restarted, "--until", commits[4], "--state")
    folder = stored(json.loads(out))
    code, out, _ = yeto(restarted, "--checkpoint", folder)
    assert code == 0
    assert out.splitlines() == [
        f"{folder}: step 3, versions, digests and ledger are what the tape says",
        f"{folder}: 2 fragment files have these digests",
    ]
    code, out, _ = yeto(restarted, "--checkpoint", folder / "manifest-3.json", "--json")
    assert (code, json.loads(out)["differences"]) == (0, [])


def test_a_checkpoint_before_the_first_commit_agrees(yeto, tape, stored):
    lines = tape.read_text().splitlines()
    written = next(index for index, line in enumerate(lines) if '"kind":"checkpoint_written"' in line)
    _, out, _ = yeto(tape, "--until", written, "--state")
    code, out, _ = yeto(tape, "--checkpoint", stored(json.loads(out)))
    assert (code, "step 0, " in out) == (0, True)


def test_a_checkpoint_that_differs(yeto, tape, stored):
    _, out, _ = yeto(tape, "--state")
    state = json.loads(out)
    state["marks"][0]["params_digest"] = "0" * 32
    state["marks"][1]["momentum_digest"] = "1" * 32
    state["ledger"]["1"]["c_tokens"] = 7
    folder = stored(state, session_contract="d" * 64)
    first, second = digest(params(0, 5)), digest(momentum(6))
    code, out, _ = yeto(tape, "--checkpoint", folder)
    assert code == 1
    assert out.splitlines() == [
        f"{folder}: not what the tape says",
        f"  session contract: {'d' * 64} in the checkpoint, {'c' * 64} on the tape",
        f"  fragment 0, params digest: {'0' * 32} in the checkpoint, {first} on the tape",
        f"  fragment 1, momentum digest: {'1' * 32} in the checkpoint, {second} on the tape",
        "  learner 1, (merges, steps, tokens): (6, 60, 7) in the checkpoint, (6, 60, 1200) on the tape",
        f"  {folder / fragment_file(0, 5)}: digest of params is {first}, the manifest says {'0' * 32}",
        f"  {folder / fragment_file(1, 6)}: digest of momentum is {second}, the manifest says {'1' * 32}",
    ]


def test_a_file_that_was_changed_or_lost_is_named(yeto, tape, stored):
    """The manifest agrees with the tape; what it stands for does not agree with the manifest."""
    _, out, _ = yeto(tape, "--state")
    folder = stored(json.loads(out))
    changed, lost = folder / fragment_file(0, 5), folder / fragment_file(1, 6)
    content = bytearray(changed.read_bytes())
    content[-1] ^= 1  # the last bit but seven of the momentum
    changed.write_bytes(content)
    lost.unlink()
    code, out, _ = yeto(tape, "--checkpoint", folder, "--json")
    said = json.loads(out)
    assert (code, said["step"], len(said["differences"])) == (1, 6, 2)
    assert said["differences"][0].startswith(f"{changed}: ")
    assert "momentum" in said["differences"][0]
    assert said["differences"][1] == f"{lost}: the file is missing"


def test_files_are_looked_at_before_a_run_that_goes_on_replaces_them(tape, stored, yeto, monkeypatch):
    _, out, _ = yeto(tape, "--state")
    folder = stored(json.loads(out))
    real = replay_checkpoint.manifest_differences

    def meanwhile(*arguments):
        # The tape was read; by now newer commits have replaced every file.
        shutil.rmtree(folder / FRAGMENTS_FOLDER)
        return real(*arguments)

    monkeypatch.setattr(replay_checkpoint, "manifest_differences", meanwhile)
    code, out, _ = yeto(tape, "--checkpoint", folder)
    assert (code, "2 fragment files have these digests" in out) == (0, True)


def test_a_checkpoint_beyond_the_tape(yeto, tape, stored):
    _, out, _ = yeto(tape, "--state")
    folder = stored(json.loads(out))
    spoiled = tape.read_text().splitlines(keepends=True)
    commits = [index for index, line in enumerate(spoiled) if '"kind":"merge","because"' in line]
    tape.write_text("".join(spoiled[: commits[-2] + 1]))
    code, out, _ = yeto(tape, "--checkpoint", folder)
    assert code == 1
    assert out == (
        f"{folder}: not what the tape says\n  the checkpoint is of step 6, the tape ends at step 5\n"
    )


def test_a_checkpoint_that_is_none(yeto, tape, tmp_path):
    code, out, err = yeto(tape, "--checkpoint", tmp_path / "none.ckpt")
    assert (code, out) == (1, "")
    assert "none.ckpt" in err


def test_neither_torch_nor_a_model_library_is_loaded(yeto, tape, stored):
    _, out, _ = yeto(tape, "--state")
    code = (
        "import sys\n"
        "from yeto.cli.main import main\n"
        "try: main(['replay', *sys.argv[1:]])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'torch', 'transformers', 'peft', 'datasets'}\n"
    )
    words = [sys.executable, "-c", code, tape, "--checkpoint", stored(json.loads(out))]
    subprocess.run(words, check=True, capture_output=True)

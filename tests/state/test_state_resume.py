"""Whether a checkpoint fits this start, who may use it, and the older single-file formats."""

import fcntl
import shutil
import struct
import subprocess
import sys

import pytest
import torch
from older_files import older_bytes
from state_examples import LAYOUT, NO_SPACE, CountingDisk, Crash, Run, same, version

from yeto.errors import CheckpointError, ConfigError
from yeto.state import (
    LedgerEntry,
    checkpoint_at,
    checkpoint_lock,
    inspect,
    kept_single_file,
    read_checkpoint,
    take_over,
    validate_resume,
    write_checkpoint,
)
from yeto.wire.layout import FragmentLayout, Layout, MergeMode, TensorSpec


class TestValidateResume:
    @pytest.fixture
    def checkpoint(self, tmp_path):
        write_checkpoint(tmp_path / "c", Run().commit(4).checkpoint())
        return read_checkpoint(tmp_path / "c")

    def check(self, checkpoint, changed=None, **terms):
        settings = {**checkpoint.settings, **(changed or {})}
        return validate_resume(checkpoint, settings=settings, iso_backend="scalar", **terms)

    def test_nothing_changed(self, checkpoint):
        assert self.check(checkpoint) == ()
        terms = {"fingerprint": "ab" * 32, "contract": "cd" * 32, "dtype": "bf16", "layout": LAYOUT}
        assert self.check(checkpoint, {"num_fragments": 3}, **terms) == ()

    def test_policy_may_change_and_is_listed(self, checkpoint):
        changes = self.check(checkpoint, {"quorum": 1, "outer_lr": 1.0, "new_in_this_version": 5})
        assert [str(change) for change in changes] == [
            "new_in_this_version: (absent) in the checkpoint, 5 now",
            "outer_lr: 0.7 in the checkpoint, 1.0 now",
            "quorum: 2 in the checkpoint, 1 now",
        ]

    @pytest.mark.parametrize(
        ("changed", "terms", "text"),
        [
            ({"num_learners": 4}, {}, "--learners: the checkpoint has 3, this start has 4"),
            ({"num_fragments": 8}, {}, "--fragments: the checkpoint has 3, this start has 8"),
            ({}, {"fingerprint": "00" * 32}, "layout fingerprint: the checkpoint has abab"),
            ({}, {"contract": "00" * 32}, "session contract: the checkpoint has cdcd"),
            ({}, {"dtype": "q4"}, "--wire-dtype: the checkpoint has bf16, this start has q4"),
            ({}, {"layout": Layout(fragments=LAYOUT.fragments[:2])}, "other sizes"),
        ],
    )
    def test_what_names_the_run_may_not_change(self, checkpoint, changed, terms, text):
        fault = ConfigError if text.startswith("--") else CheckpointError
        with pytest.raises(fault, match=text):
            self.check(checkpoint, changed, **terms)

    def test_the_backend_may_not_change(self, checkpoint):
        with pytest.raises(ConfigError, match="--iso-backend: the checkpoint has scalar, this start has"):
            validate_resume(checkpoint, settings=checkpoint.settings, iso_backend="torch-svd")


class TestLock:
    def test_another_process_is_refused(self, tmp_path):
        path = tmp_path / "yeto-state.ckpt"
        script = (
            "import sys; from yeto.state import checkpoint_lock\n"
            f"with checkpoint_lock({str(path)!r}):\n"
            "    print('held', flush=True); sys.stdin.read()"
        )
        holder = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with holder:
            assert holder.stdout.readline() == "held\n"
            with (
                pytest.raises(CheckpointError, match=r"another syncer .*--checkpoint-path"),
                checkpoint_lock(path),
            ):
                pass
            holder.kill()
        with checkpoint_lock(path):  # a killed process holds nothing
            pass

    def test_the_same_process_twice_is_refused_and_release_frees(self, tmp_path):
        with checkpoint_lock(tmp_path / "c"):
            with pytest.raises(CheckpointError, match="another syncer"), checkpoint_lock(tmp_path / "c"):
                pass
            assert not (tmp_path / "c").exists()
        with checkpoint_lock(tmp_path / "c"):
            pass

    def test_its_file_stays_only_beside_a_checkpoint(self, tmp_path):
        with checkpoint_lock(tmp_path / "c"):
            assert (tmp_path / "c.lock").exists()
        assert list(tmp_path.iterdir()) == []
        with checkpoint_lock(tmp_path / "c"):
            write_checkpoint(tmp_path / "c", Run().checkpoint())
        assert (tmp_path / "c.lock").exists()
        with checkpoint_lock(tmp_path / "c"):
            pass

    def test_a_lock_whose_file_is_gone_locks_nothing(self, tmp_path, monkeypatch):
        """Between opening and locking the file, its holder went away and took it along."""
        real, taken = fcntl.flock, []

        def late(descriptor, operation):
            if not taken:
                taken.append(descriptor)
                (tmp_path / "c.lock").unlink()
            real(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", late)
        with checkpoint_lock(tmp_path / "c"):
            assert taken
            with pytest.raises(CheckpointError, match="another syncer"), checkpoint_lock(tmp_path / "c"):
                pass

    def test_a_folder_that_cannot_be_written(self, tmp_path):
        with (
            pytest.raises(CheckpointError, match=r"c\.lock: cannot be locked: No such file or directory"),
            checkpoint_lock(tmp_path / "nowhere" / "c"),
        ):
            pass


class TestTakeOver:
    @pytest.fixture
    def file(self, tmp_path):
        path = tmp_path / "yeto-state.ckpt"
        path.write_bytes(legacy_bytes(3))
        return path

    def test_the_folder_gets_the_place_and_the_file_is_kept(self, file):
        data, checkpoint = file.read_bytes(), Run().commit(5).checkpoint()
        assert checkpoint_at(file) == file
        assert take_over(file, checkpoint) > 0
        assert same(read_checkpoint(file), checkpoint)
        assert kept_single_file(file).read_bytes() == data
        assert checkpoint_at(file) == file
        assert sorted(path.name for path in file.parent.iterdir()) == [file.name, f"{file.name}.single-file"]

    def test_killed_between_any_two_calls(self, file):
        data, checkpoint = file.read_bytes(), Run().commit(5).checkpoint()
        counting = CountingDisk()
        take_over(file, checkpoint, disk=counting)
        assert counting.calls > 10
        for stop in range(1, counting.calls + 1):
            shutil.rmtree(file)
            kept_single_file(file).rename(file)
            with pytest.raises(Crash):
                take_over(file, checkpoint, disk=CountingDisk(stop))
            found = read_checkpoint(checkpoint_at(file))
            assert found.step == 4 or same(found, checkpoint)
            assert data in [path.read_bytes() for path in file.parent.iterdir() if path.is_file()]
            # The next start goes on from what is there.
            write = take_over if checkpoint_at(file).is_file() else write_checkpoint
            write(file, checkpoint)
            assert same(read_checkpoint(file), checkpoint)
        assert file.is_dir()

    def test_a_full_disk_leaves_the_file(self, file):
        data = file.read_bytes()
        with pytest.raises(CheckpointError, match=r"cannot be written.*yeto-state.ckpt is intact"):
            take_over(file, Run().commit(5).checkpoint(), disk=CountingDisk(6, NO_SPACE))
        assert file.read_bytes() == data

    def test_the_name_of_an_older_file_is_not_taken_from_another(self, file):
        kept_single_file(file).write_bytes(b"precious")
        with pytest.raises(CheckpointError, match="single-file, which exists; move that away"):
            take_over(file, Run().commit(5).checkpoint())
        assert kept_single_file(file).read_bytes() == b"precious"


FINGERPRINT, CONTRACT = bytes(range(32)), bytes(range(32, 64))


def legacy_bytes(number, step=4, backend=1, contract=True, ledger=((0, 4, 40, 400), (3, 1, 2, 2**60))):
    """Return a checkpoint file of an older format."""
    parts = [version(fragment, at) for fragment, at in enumerate((4, 2, 3))]
    return older_bytes(
        number,
        step=step,
        fragments=[(part.version, part.params.tolist(), part.momentum.tolist()) for part in parts],
        ledger=ledger,
        backend=backend,
        fingerprint=FINGERPRINT,
        contract=CONTRACT if contract else None,
    )


class TestSingleFiles:
    @pytest.fixture
    def file(self, tmp_path):
        path = tmp_path / "yeto-state.bin"

        def make(data):
            path.write_bytes(data)
            return path

        return make

    @pytest.mark.parametrize("number", [1, 2, 3])
    def test_read(self, file, number):
        loaded = read_checkpoint(file(legacy_bytes(number)))
        assert (loaded.step, loaded.format) == (4, f"file-v{number}")
        assert loaded.iso_backend == (None if number == 1 else "torch-svd")
        assert loaded.fingerprint == (FINGERPRINT.hex() if number == 3 else None)
        assert loaded.contract == (CONTRACT.hex() if number == 3 else None)
        assert loaded.ledger[1] == LedgerEntry(learner=3, merges=1, c_steps=2, c_tokens=2**60)
        assert (loaded.layout, loaded.modes, loaded.dtype) == (None, (), None)
        for fragment, part in enumerate(loaded.fragments):
            expected = version(fragment, part.version)
            assert torch.equal(part.params, expected.params)
            assert torch.equal(part.momentum, expected.momentum)
            assert part.params_digest == expected.params_digest

    def test_the_contract_is_optional(self, file):
        assert read_checkpoint(file(legacy_bytes(3, contract=False))).contract is None

    @pytest.mark.parametrize("number", [1, 2, 3])
    def test_cut_anywhere(self, file, number):
        data = legacy_bytes(number)
        for size in range(len(data)):
            if number == 3 and size == len(data) - 36:
                continue  # exactly without the optional contract
            text = "neither a checkpoint folder" if size < 4 else r"offset \d+: .* are left"
            with pytest.raises(CheckpointError, match=text):
                read_checkpoint(file(data[:size]))

    @pytest.mark.parametrize("number", [1, 2, 3])
    def test_trailing_bytes(self, file, number):
        with pytest.raises(CheckpointError, match=r"offset \d+: .*(too many|contract|left)"):
            read_checkpoint(file(legacy_bytes(number) + b"\0"))

    @pytest.mark.parametrize(
        ("offset", "data", "text"),
        [
            (4, b"\x02", "offset 5: iso backend 2 before this offset is unknown"),
            (45, struct.pack("<I", 0), "offset 49: the number of fragments before this offset is 0"),
            (45, b"\xff" * 4, "offset 49: a list of 4294967295 fragments takes 68719476720 bytes"),
            (57, b"\xff" * 8, "offset 65: fragment 0 of 18446744073709551615 elements takes"),
            (57, struct.pack("<Q", 2**40), "fragment 0 of 1099511627776 elements"),
            (65, struct.pack("<f", float("nan")), "offset 65: fragment 0: params holds a value that is not"),
            (49, struct.pack("<Q", 1), "fragment 0 is at version 1, but after 4 steps"),
            (37, struct.pack("<Q", 5), "fragment 1 is at version 2, but after 5 steps"),
        ],
    )
    def test_what_cannot_be(self, file, offset, data, text):
        good = legacy_bytes(3)
        with pytest.raises(CheckpointError, match=text):
            read_checkpoint(file(good[:offset] + data + good[offset + len(data) :]))

    def test_ledger_and_trailer(self, file):
        with pytest.raises(CheckpointError, match="the ledger has learner 2 twice"):
            read_checkpoint(file(legacy_bytes(1, ledger=((2, 1, 1, 1), (2, 1, 1, 1)))))
        data = bytearray(legacy_bytes(3))
        data[-36 - 32] ^= 1
        with pytest.raises(CheckpointError, match=r"two layout fingerprints .* differ"):
            read_checkpoint(file(bytes(data)))
        data = bytearray(legacy_bytes(3))
        data[-36] ^= 1
        with pytest.raises(CheckpointError, match="no session contract"):
            read_checkpoint(file(bytes(data)))
        ledger_at = len(legacy_bytes(1, ledger=())) - 4
        data = bytearray(legacy_bytes(1))
        data[ledger_at : ledger_at + 4] = b"\xff" * 4
        with pytest.raises(CheckpointError, match="a ledger of 4294967295 entries takes"):
            read_checkpoint(file(bytes(data)))

    def test_inspection(self, file):
        found = inspect(file(legacy_bytes(2)))
        assert (found.format, found.step, found.valid) == ("file-v2", 4, True)
        assert [part.version for part in found.fragments] == [4, 2, 3]

    def test_resume_where_safe(self, file):
        single = Layout(
            fragments=tuple(
                FragmentLayout(mode=MergeMode.RDA, tensors=(TensorSpec(name="", shape=(part.numel,)),))
                for part in LAYOUT.fragments
            )
        )
        first, second, third = (read_checkpoint(file(legacy_bytes(number))) for number in (1, 2, 3))

        def check(checkpoint, iso_backend="torch-svd", **terms):
            return validate_resume(checkpoint, settings={"quorum": 1}, iso_backend=iso_backend, **terms)

        with pytest.raises(CheckpointError, match="never resumed"):
            check(first, layout=single)
        with pytest.raises(CheckpointError, match="does not state its tensors"):
            check(second)
        with pytest.raises(CheckpointError, match="every fragment has one tensor"):
            check(second, layout=LAYOUT)
        with pytest.raises(ConfigError, match="--iso-backend"):
            check(second, iso_backend="scalar", layout=single)
        assert check(second, layout=single) == ()
        with pytest.raises(CheckpointError, match="only against a learner's layout fingerprint"):
            check(third, layout=LAYOUT)
        with pytest.raises(CheckpointError, match="layout fingerprint: the checkpoint has 0001"):
            check(third, layout=LAYOUT, fingerprint="00" * 32)
        assert check(third, layout=LAYOUT, fingerprint=FINGERPRINT.hex()) == ()

"""How a pass is cut and shared out, and where the memory of a version comes from."""

import gc
import subprocess
import sys
import threading
import time

import pytest
import torch

from yeto.merge import memory
from yeto.merge.blocks import AHEAD, BLOCK, plan, run


class TestPlan:
    @pytest.mark.parametrize(
        "sizes",
        [
            (1,),
            (0,),
            (),
            (0, 3, 0),
            (BLOCK,),
            (BLOCK + 1,),
            (3 * BLOCK - 1, 2),
            (5,) * 40,
            (BLOCK - 1, 2, BLOCK),
        ],
    )
    def test_every_element_is_in_one_piece_and_one_block(self, sizes):
        cut = plan(sizes)
        covered, first = [], 0
        for tensor, start, stop in cut.pieces.tolist():
            assert 0 < stop - start <= BLOCK
            assert sum(sizes[:tensor]) <= start < stop <= sum(sizes[: tensor + 1])
            covered += range(start, stop) if stop < 1000 else [start, stop]
        assert covered == sorted(covered)
        at = 0
        for block in range(len(cut.blocks)):
            assert cut.blocks[block][0] == first
            first = cut.blocks[block][1]
            start, stop = cut.elements(block)
            assert start == at
            assert stop - start <= BLOCK
            at = stop
        assert (first, at) == (len(cut.pieces), sum(sizes))

    def test_small_tensors_share_a_block(self):
        assert len(plan((5,) * 40).blocks) == 1
        assert len(plan((BLOCK // 2, BLOCK // 2, 1)).blocks) == 2

    def test_pieces_count_from_the_beginning_of_their_tensor(self):
        assert plan((3, BLOCK + 4)).pieces.tolist() == [
            [0, 0, 3],
            [1, 3, BLOCK + 3],
            [1, BLOCK + 3, BLOCK + 7],
        ]

    @pytest.mark.parametrize("sizes", [(5,) * 40, (BLOCK - 1, 2, 0, 2 * BLOCK + 1, 3)])
    def test_one_tensor_is_cut_as_among_the_others(self, sizes):
        cut = plan(sizes)
        before = cut.pieces.tolist()
        for tensor in range(len(sizes)):
            alone = cut.one(tensor)
            assert alone.tensors == 1
            assert alone.pieces.tolist() == [[0, *piece[1:]] for piece in before if piece[0] == tensor]
            assert alone.blocks == cut.only([tensor]).blocks
        assert cut.pieces.tolist() == before, "plans are shared"

    def test_some_tensors_only(self):
        cut = plan((3, 4, 5)).only([0, 2])
        assert cut.pieces.tolist() == [[0, 0, 3], [2, 7, 12]]
        assert cut.blocks == ((0, 1), (1, 2)), "what lies between is not theirs"


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
class TestRun:
    def test_everything_once_and_chains_in_order(self, threads):
        count, computed, lock = 50, [], threading.Lock()
        chained = [[], []]

        def compute(block):
            if block % 7 == 0:
                time.sleep(0.001)
            with lock:
                computed.append(block)

        def chain(number):
            def follow(block):
                assert block in computed
                chained[number].append(block)

            return follow

        run(count, compute, [chain(0), chain(1)], threads)
        assert sorted(computed) == list(range(count))
        assert chained == [list(range(count))] * 2

    def test_nobody_runs_far_ahead_of_a_slow_chain(self, threads):
        begun, furthest = [], []

        def slow(block):
            time.sleep(0.002)
            furthest.append(max(begun) - block)

        run(30, begun.append, [slow], threads)
        assert len(furthest) == 30
        assert max(furthest) <= AHEAD * threads

    def test_as_many_threads_as_allowed(self, threads):
        seen, everybody = set(), threading.Barrier(threads, timeout=200)

        def compute(block):
            seen.add(threading.get_ident())
            everybody.wait()  # nobody gets past who has no company

        run(threads, compute, threads=threads)
        assert len(seen) == threads

    @pytest.mark.parametrize("where", ["compute", "chain"])
    def test_an_error_ends_the_pass_and_reaches_the_caller(self, threads, where):
        later = []

        def fails(block):
            if block == 3:
                raise RuntimeError("block 3")

        def watch(block):
            later.append(block)
            time.sleep(0.001)

        compute, chain = (fails, watch) if where == "compute" else (watch, fails)
        with pytest.raises(RuntimeError, match="block 3"):
            run(1000, compute, [chain], threads)
        assert len(later) < 100

    def test_no_block_is_no_work(self, threads):
        run(0, pytest.fail, [pytest.fail], threads)


class TestMemory:
    @pytest.fixture(autouse=True)
    def idle(self):
        """Nothing kept at the beginning and at the end."""
        gc.collect()
        memory._idle.clear()
        yield memory._idle
        memory._idle.clear()

    SIZE = memory.SMALL

    def test_is_taken_again_once_nobody_holds_it(self, idle):
        tensor = memory.empty_floats(self.SIZE)
        address, view = tensor.data_ptr(), tensor.view(2, -1)[1].numpy()[5:].data
        del tensor
        assert not idle, "a part of it is still in use"
        del view
        assert len(idle) == 1
        assert memory.empty_floats(self.SIZE).data_ptr() == address

    def test_two_holders_never_share(self):
        held = [memory.empty_floats(self.SIZE) for _ in range(6)]
        assert len({tensor.data_ptr() for tensor in held}) == 6
        for number, tensor in enumerate(held):
            tensor.fill_(number)
        assert [int(tensor.sum()) for tensor in held] == [number * self.SIZE for number in range(6)]

    def test_keeps_no_more_than_one_commit_takes(self, idle):
        held = [memory.empty_floats(self.SIZE) for _ in range(8)]
        held.clear()
        assert len(idle) == memory.IDLE

    def test_what_does_not_fit_is_left(self, idle):
        large = memory.empty_floats(4 * self.SIZE)
        address = large.data_ptr()
        del large
        small = memory.empty_floats(self.SIZE)
        assert small.data_ptr() != address
        assert len(idle) == 1
        nearly = memory.empty_floats(4 * self.SIZE - 1000)
        assert nearly.data_ptr() == address
        assert nearly.numel() == 4 * self.SIZE - 1000

    def test_large_arrays_begin_with_a_cache_line(self):
        held = [memory.empty_floats(self.SIZE + odd) for odd in range(4)]
        assert {tensor.data_ptr() % memory.LINE for tensor in held} == {0}

    def test_small_arrays_are_the_allocators(self, idle):
        memory.empty_floats(100)
        memory.empty_halves(100)
        assert not idle

    def test_encodings_are_taken_again_too(self):
        halves = memory.empty_halves(self.SIZE)
        address, bytes_ = halves.ctypes.data, halves.data.cast("B")
        del halves
        other = memory.empty_halves(self.SIZE)
        assert other.ctypes.data != address
        bytes_.release()
        del bytes_
        assert memory.empty_halves(self.SIZE).ctypes.data == address


def test_tensors_from_recycled_memory_are_ordinary():
    tensor = memory.empty_floats(memory.SMALL)
    tensor.zero_()
    assert tensor.dtype is torch.float32
    assert tensor.is_contiguous()
    assert (tensor + 1).sum() == memory.SMALL


def test_an_array_may_live_until_the_interpreter_ends():
    program = "from yeto.merge import memory; held = memory.empty_floats(memory.SMALL)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stderr == ""

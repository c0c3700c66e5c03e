"""How far a local run is, as it is printed where nothing can be redrawn."""

import trio

from yeto.cli.local_show import LINE_SECONDS, STARTING, show_run


async def test_a_tape_that_is_cut_back_to_what_is_durable_does_not_end_the_run(tape, autojump_clock, capsys):
    lines = tape.read_bytes().splitlines(keepends=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(show_run, tape)
        await trio.sleep(1.5 * LINE_SECONDS)
        tape.write_bytes(b"".join(lines[: len(lines) // 2]))
        await trio.sleep(2 * LINE_SECONDS)
        nursery.cancel_scope.cancel()
    whole, gone, shorter = capsys.readouterr().out.splitlines()
    assert gone == STARTING
    assert whole.startswith("round ")
    assert shorter.startswith("round ")
    assert shorter != whole

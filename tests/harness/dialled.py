"""The streams of a group, open before a word is said on them: nobody but a test wants them so."""

from yeto.link import Dialler


async def dial(host, port, num_streams, **settings):
    """Return the control stream, then the data streams; leaves none open when one fails."""
    dialler = Dialler(host, port, **settings)
    opened = []
    try:
        for _ in range(1 + num_streams):
            opened.append(await dialler.open())  # noqa: PERF401 - what is open must be known when one fails
    except BaseException:
        for stream in opened:
            await stream.close()
        raise
    return tuple(opened)

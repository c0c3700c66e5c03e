"""``--check``: would this learner get through to its syncer, would it train, and what H may it expect?

Each question is one line of answer; the first one that is answered with no ends the check as it would end
the learner. Nothing is trained and nothing written, and the syncer's run does not notice (`probe` says why).
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Generator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import trio
from attrs import frozen

from yeto.errors import ConfigError, DataError, ProtocolError, first_of
from yeto.hosts import with_port
from yeto.learner.config import LearnerConfig
from yeto.learner.probe import Probe
from yeto.link import Dialler, LinkClosed, LinkRefused, Target
from yeto.wire.legality import TensorSizes

if TYPE_CHECKING:
    import torch

    from yeto.learner.task import Task

CONNECT_SECONDS = 10.0
"""For each address, and for the look-up of the name."""

USUAL_INTERVAL_STEPS = 24
"""What a syncer's ``--sync-interval-steps`` is if it is not told; the check cannot ask for it."""


@frozen(kw_only=True)
class Link:
    """What the way to the syncer can do."""

    round_trip_seconds: float
    bytes_per_second: float
    """To the syncer, on one connection."""


@frozen(kw_only=True)
class Work:
    """What the learner would do and send."""

    num_fragments: int
    push_bytes: int
    """One push of every fragment."""
    step_seconds: float


def check_learner(config: LearnerConfig, make_task: Callable[[], Task]) -> int:
    """Answer everything on stdout, the H to expect last.

    Args:
        config: of the learner.
        make_task: loads model and data; called when the link is good.

    Returns:
        0, the exit code.

    Raises:
        YetoError: of the first thing that is wrong, with the exit code that a learner would have.
    """
    if not config.has_syncer:
        raise ConfigError("--check: with --syncer none there is nobody to reach; name a syncer")
    try:
        link = trio.run(check_link, config)
    except BaseExceptionGroup as group:
        # A Ctrl-C comes out of Trio's nurseries like this.
        raise first_of(group) from None
    work = check_task(config, make_task)
    exchange = exchange_seconds(link, work)
    steps = exchange / work.step_seconds
    _show(
        "exchange",
        f"{_figure(exchange)} s for all fragments: {_figure(work.push_bytes / 1e6)} MB up (--wire-dtype "
        f"{config.wire_dtype}), and {work.num_fragments} round trips",
    )
    _show(
        "H",
        f"{_figure(max(steps, USUAL_INTERVAL_STEPS))} steps between two merges of a fragment: the link takes "
        f"{_figure(steps)}, and the syncer's --sync-interval-steps ({USUAL_INTERVAL_STEPS} by default) is "
        "the floor",
    )
    return 0


def exchange_seconds(link: Link, work: Work) -> float:
    """Return how long every fragment takes once: its bytes up, and a round trip for the pull before each."""
    return work.push_bytes / link.bytes_per_second + work.num_fragments * link.round_trip_seconds


async def check_link(config: LearnerConfig) -> Link:
    """Answer what is asked of the syncer; takes seconds.

    Raises:
        LinkRefused: one side does not take the other's TLS.
        LinkClosed: nobody answers, or no syncer does.
        PermanentFailure: the syncer would refuse this learner's key.
    """
    try:
        probe = Probe(await _reach(config), config.auth_key)
        asks = await probe.authenticate()
    except LinkRefused:
        raise
    except (LinkClosed, ProtocolError) as error:
        raise LinkClosed(
            f"no syncer at {config.syncer}: {error}; check --syncer, and that the syncer runs and is "
            "reachable"
        ) from error
    found = "asks for a key, and this one is right" if asks else "asks for no key"
    _show("authentication", f"the syncer {found}")
    round_trip = await probe.round_trip()
    _show("round trip", f"{_figure(1000 * round_trip)} ms")
    rate = await probe.rate(round_trip)
    _show(
        "bandwidth up",
        f"at least {_figure(8e-6 * rate.bytes_per_second)} Mbit/s on one connection of "
        f"{max(1, config.wan_streams)} ({_figure(rate.bytes / 1e6)} MB in {_figure(rate.seconds)} s); "
        "down is not measured",
    )
    dates = "; the dates of the certificates are right" if config.tls else ""
    _show(
        "clock",
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC here, and never compared with another "
        f"machine's{dates}",
    )
    return Link(round_trip_seconds=round_trip, bytes_per_second=rate.bytes_per_second)


async def _reach(config: LearnerConfig) -> Dialler:
    """Dial every address of the syncer; return what opens more streams to the first that answers."""
    host, port = await Target.parse(config.syncer).address()
    found: list[Dialler] = []
    failures: list[LinkClosed] = []
    for address in await _addresses(host, port):
        dialler = Dialler(address, port, tls=config.tls, server_name=config.tls_server_name or host)
        name = with_port(address, port)
        begun = trio.current_time()
        try:
            with trio.move_on_after(CONNECT_SECONDS) as scope:
                await (await dialler.open()).close()
            if scope.cancelled_caught:
                raise LinkClosed(f"cannot connect to {name}: no answer within {CONNECT_SECONDS:.0f} s")
        except LinkClosed as error:
            _show("reach", str(error))
            failures.append(error)
        else:
            took = _figure(1000 * (trio.current_time() - begun))
            _show("reach", f"connected to {name}{' with TLS' if config.tls else ''} in {took} ms")
            found.append(dialler)
    if found:
        return found[0]
    for failure in failures:
        if isinstance(failure, LinkRefused):
            raise failure
    raise LinkClosed("; ".join(map(str, failures)) or f"{host} has no address")


async def _addresses(host: str, port: int) -> list[str]:
    """Return every address of a name.

    Raises:
        LinkClosed: it has none, or nobody says so.
    """
    with trio.move_on_after(CONNECT_SECONDS):
        try:
            found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
        except OSError as error:
            raise LinkClosed(f"{host} has no address: {error.strerror}") from error
        return list(dict.fromkeys(str(where[0]) for *_, where in found))
    raise LinkClosed(f"{host} was not looked up within {CONNECT_SECONDS:.0f} s")


def check_task(config: LearnerConfig, make_task: Callable[[], Task]) -> Work:
    """Load the task, take two micro batches through it, and throw the gradients away.

    Raises:
        YetoError: it cannot be loaded, or its rows have nothing to learn from.
    """
    import torch

    from yeto.learner.chance import accelerators
    from yeto.learner.equipment import layout_of
    from yeto.learner.identity import make_identity

    if config.torch_threads is not None:
        torch.set_num_threads(config.torch_threads)
    begun = time.perf_counter()
    task = make_task()
    parameters = task.trainable_parameters()
    layout = layout_of(config, parameters)
    # What could not be stated to the syncer is found here.
    make_identity(config, layout, task.binding(), ()).hello(config, 1)
    numels = [fragment.numel for fragment in layout.fragments]
    _show(
        "task",
        f"{sum(numels):,} parameters to train, in {len(numels)} fragments; loaded in "
        f"{_figure(time.perf_counter() - begun)} s",
    )
    batch_seconds = _micro_batch_seconds(task, accelerators(parameters.values()))
    step_seconds = config.grad_accum * batch_seconds
    _show(
        "step",
        f"{_figure(step_seconds)} s: {config.grad_accum} (--grad-accum) x {_figure(batch_seconds)} s for a "
        "micro batch, forward and backward",
    )
    push_bytes = sum(TensorSizes.of(numels, config.wire_dtype).delta)
    return Work(num_fragments=len(numels), push_bytes=push_bytes, step_seconds=step_seconds)


def _micro_batch_seconds(task: Task, devices: Sequence[torch.device]) -> float:
    """Return what the second micro batch took; in the first one everything happens for the first time."""
    import torch

    from yeto.learner.loop import EMPTY_GROUPS_MAX

    batches = task.batches()
    seconds = 0.0
    for _ in range(2):
        begun = time.perf_counter()
        batch = next((one for one in islice(batches, EMPTY_GROUPS_MAX) if one.targets), None)
        if batch is None:
            raise DataError(
                f"{EMPTY_GROUPS_MAX} micro batches in a row have no target to learn from; "
                "check the data's masks with --mask-report 5"
            )
        (task.loss(batch) / batch.targets).backward()  # type: ignore[no-untyped-call]
        for device in devices:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begun
    if isinstance(batches, Generator):
        # Processes may stand behind it.
        batches.close()
    return seconds


def _show(what: str, text: str) -> None:
    print(f"{what:<16}{text}", flush=True)


def _figure(number: float) -> str:
    """Return three digits of a number, all of a large one."""
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"

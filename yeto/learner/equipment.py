"""What every rank of a learner makes of its task: layout, inner loop, crew."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import frozen
from torch import nn

from yeto.errors import YetoError
from yeto.layout import build_layout
from yeto.learner.config import LearnerConfig
from yeto.learner.crew import Crew
from yeto.learner.exchanged import Values
from yeto.learner.fragments import LiveFragments, named_shapes
from yeto.learner.island import Island
from yeto.learner.loop import InnerLoop
from yeto.learner.saved import SavedLoop
from yeto.learner.saved_ranks import share_saved
from yeto.learner.stopwatch import Stopwatch
from yeto.learner.task import Task
from yeto.wire.digest import RunningDigest
from yeto.wire.fingerprint import layout_fingerprint
from yeto.wire.layout import Layout


@frozen(kw_only=True, eq=False)
class Equipment:
    """The parts, which belong together."""

    layout: Layout
    loop: InnerLoop
    crew: Crew
    initial: tuple[Values, ...] = ()
    """Every fragment as the model was built, before anything saved was put back; the head of learner 0 has
    them, when there is a syncer to send them to."""


def equip(
    config: LearnerConfig,
    task: Task,
    island: Island,
    stopwatch: Stopwatch,
    restored: Callable[[Layout], SavedLoop | None],
) -> Equipment:
    """Make everything that depends on a task's parameters; every rank does, at the same point.

    Args:
        config: how to train.
        task: with its parameters.
        island: this rank's.
        stopwatch: told where the time goes.
        restored: returns what an earlier process saved, if there is something to go on from; what it returns
            to the head is what counts.

    Raises:
        ConfigError: there is nothing to train, or a parameter is not float32.
        YetoError: the ranks have not built the same.
    """
    parameters = task.trainable_parameters()
    layout = layout_of(config, parameters)
    fragments = LiveFragments(layout, parameters)
    if island.size > 1:
        _require_same(island, layout, fragments)
    initial: tuple[Values, ...] = ()
    if config.has_syncer and config.learner_id == 0:
        initial = _built(island, fragments, len(layout.fragments))
    saved = share_saved(island, restored(layout))
    loop = InnerLoop(task, parameters, config, stopwatch, saved, island)
    crew = Crew(island=island, task=task, loop=loop, fragments=fragments)
    return Equipment(layout=layout, loop=loop, crew=crew, initial=initial)


def layout_of(config: LearnerConfig, parameters: Mapping[str, nn.Parameter]) -> Layout:
    """Return how a task's parameters are divided into fragments.

    Raises:
        ConfigError: there is nothing to train, or a parameter is not float32.
    """
    return build_layout(
        named_shapes(parameters),
        fragments=config.fragments,
        pattern=config.fragment_pattern,
        matrix_merge=config.matrix_merge,
    )


def _built(island: Island, fragments: LiveFragments, num_fragments: int) -> tuple[Values, ...]:
    """Return every fragment as it is now, to the head; all ranks call this together."""
    if island.is_head:
        return tuple(fragments.snapshot(fragment).values() for fragment in range(num_fragments))
    if fragments.is_sharded:
        for fragment in range(num_fragments):
            fragments.contribute(fragment)
    return ()


def _require_same(island: Island, layout: Layout, fragments: LiveFragments) -> None:
    """Compare what the ranks have built: unlike models would train on, and nobody would see it."""
    built = [layout_fingerprint(layout).hex()]
    if not fragments.is_sharded:
        # Of a sharded model each rank has another part.
        digest = RunningDigest()
        for fragment in range(len(layout.fragments)):
            digest.update(fragments.snapshot(fragment).values())
        built.append(digest.hex())
    for rank, other in enumerate(island.gather(built)):
        if other != built:
            raise YetoError(
                f"ranks {island.rank} and {rank} of this island have built different models; every rank "
                "needs the same command line, the same model files and the same versions of the software"
            )

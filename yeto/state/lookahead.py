"""How far ahead of its run a fragment was left by Nesterov's momentum.

Of a commit ``buf = mu buf + D; theta = theta - lr (D + mu buf)``, the last term moves in advance what the
buffer is expected to bring next time (Sutskever et al. 2013, section 3): outer gradients are measured there,
ahead of where the run has come to. It has come to ``theta + lr mu buf``, one gradient step from where they
were measured. ``lr mu`` of the last commit that moved a fragment, its *look-ahead*, is therefore kept with
it. It is 0 before the first commit, and after a round of the closing sweep, which leaves the buffer out.

It is 0 in a gain-normalised run, too. There a steady gradient is applied once a commit, so that ``theta`` is
where the learners are; ``theta + lr mu buf`` would be most of a commit behind them.

A manifest from before it was kept is asked for its settings instead. They are those of the syncer that wrote
it: where a run went on under others, or beyond a closing sweep, they hold for what was committed since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yeto.state.manifest import OuterMark


def derived(
    settings: Mapping[str, Any],
    versions: Sequence[int],
    *,
    marks: Sequence[OuterMark] | None,
    finish_target: int | None,
) -> tuple[float | None, ...]:
    """Return the look-ahead of each fragment as the settings of a syncer tell it.

    Args:
        settings: of the coordinator, as plain JSON values.
        versions: of each fragment: the step of its last commit.
        marks: what each buffer has gathered, if that was counted.
        finish_target: target of a budget finish, all of whose rounds are a closing sweep.

    Returns:
        For each fragment ``lr mu`` of its last commit; None where the settings do not tell.
    """
    return tuple(
        0.0
        if version == 0 or _swept(settings, version, len(versions), finish_target)
        else _of_settings(settings, None if marks is None else marks[fragment])
        for fragment, version in enumerate(versions)
    )


def _swept(settings: Mapping[str, Any], version: int, count: int, finish_target: int | None) -> bool:
    """Whether round ``version`` belonged to the closing sweep: the last round of each fragment."""
    if finish_target is not None:
        return version > finish_target - count
    target = settings.get("total_steps")
    if type(target) is not int or settings.get("closing_sweep") != "plain":
        return False
    return target >= 2 * count and version > target - count


def _of_settings(settings: Mapping[str, Any], mark: OuterMark | None) -> float | None:
    if mark is not None and mark.merges == 0:
        return 0.0
    lr, momentum = (_number(settings.get(name)) for name in ("outer_lr", "outer_momentum"))
    if lr is None or momentum is None:
        return None
    match settings.get("outer", "stock"):
        case "stock" | "direct":
            return lr * momentum
        case "normalised":
            return 0.0
    return None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

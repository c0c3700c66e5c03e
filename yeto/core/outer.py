"""The outer settings: how the pushes of a round are reduced, and with which numbers they are applied.

Everything here is scalars; the tensors are touched elsewhere, by exactly what is ordered. A run has one of
three kinds of outer step:

* ``stock``: Nesterov momentum as DiLoCo has it (arXiv 2311.08105), with lr 0.7 and mu 0.9::

      buf = mu buf + D;  theta -= lr (D + mu buf)

  A gradient D that stays the same is in the end applied lr / (1 - mu) = 7 times.
* ``direct``: lr 1, no momentum, the weighted average of every tensor whatever the layout's mode, and nothing
  corrected: the fragment becomes the mean of its learners' parameters.
* ``normalised``: the stock step on a buffer that is warmed up by merge count and divided by what it gathered.
  With k the merges of this fragment so far (0 at first) and g its gain (0 at first)::

      mu_k = min(mu, 1 - 1 / (k + 1));  buf = mu_k buf + D;  g = mu_k g + 1
      theta -= lr (D + mu_k buf) / (1 + mu_k g)

  A gradient that stays the same is applied exactly lr times a merge; lr is 1 and mu 0.9 unless told
  otherwise. It is the stock step with momentum ``mu_k`` and learning rate ``lr / (1 + mu_k g)``: these two
  are ordered.

``g`` is the number that the buffer's own recurrence makes of the gradient 1. It is counted for every kind,
with the momentum that each commit really had, so that a run may go on under another kind; a round of the
closing sweep and one that moved nothing leave the buffer, and so the counters, as they are.

Two configurations are of earlier days. One that is stock and states both numbers is what there was before
there were kinds; of that one the tape says what it always said. And ``auto`` left the choice to the rule in
`choose`: no flag asks for it any more (``--outer auto`` is settled before it comes here), tapes have it.
"""

from __future__ import annotations

from attrs import evolve, frozen

from yeto.core.config import CoreConfig
from yeto.core.decisions import CommitOrdered, MergeOrdered
from yeto.core.parts import replace
from yeto.core.values import OuterMark

NUMBERS = {"stock": (0.7, 0.9), "direct": (1.0, 0.0), "normalised": (1.0, 0.9)}
"""Learning rate and momentum of each kind, unless the operator states others."""

DENSE_STEPS = 8.0
"""H up to which momentum was found to do harm."""
SPARSE_STEPS = 16.0
"""H from which gain-normalised momentum was found to help."""
WARM_MERGES = 4
"""Merges of a fragment below which a momentum that has to warm up first cannot do much."""
GAIN_MAX = 1.5
"""Times that a constant gradient may be applied at a merge without a word of warning."""
LONG_RUN = 5.0
"""A run is long for a momentum mu when it has this many times 1 / (1 - mu) merges of each fragment."""


@frozen(kw_only=True, slots=False)
class Outer:
    """The outer settings in force."""

    kind: str
    """``stock``, ``direct`` or ``normalised``."""
    lr: float
    momentum: float
    """The momentum; with ``normalised`` the most that it comes to."""
    reason: str = ""
    """Why ``auto`` came to this kind; empty where it was asked for."""
    is_told: bool = True
    """Whether the tape speaks of it: of a configuration of old it does not."""
    warnings: tuple[str, ...] = ()
    """What there is to say against them, with the remedy. Never an error."""

    @property
    def sentence(self) -> str:
        """The settings in words."""
        up_to = "up to " if self.kind == "normalised" else ""
        reason = f" (auto: {self.reason})" if self.reason else ""
        return f"{self.kind}, lr {self.lr:g}, momentum {up_to}{self.momentum:g}{reason}"

    @property
    def plain(self) -> bool:
        """Whether pushes are averaged whatever the layout says, and not corrected."""
        return self.kind == "direct"

    def coefficients(self, mark: OuterMark) -> tuple[float, float]:
        """Return learning rate and momentum of the next commit of a fragment; ``mark`` is from before it."""
        if self.kind != "normalised":
            return self.lr, self.momentum
        momentum = min(self.momentum, mark.merges / (mark.merges + 1))
        return self.lr / (1.0 + momentum * (momentum * mark.gain + 1.0)), momentum

    def momentum_scale(self, mark: OuterMark) -> float | None:
        """Return what makes the buffer the mean gradient that a push is corrected against.

        Returns:
            None for 1 - momentum, of which the stock buffer is 1 / (1 - mu) times the mean in the long run.
        """
        if self.kind != "normalised":
            return None
        return 1.0 / mark.gain if mark.gain > 0.0 else 1.0

    def advanced(self, mark: OuterMark) -> OuterMark:
        """Return the counters of a fragment after a commit that moved its buffer."""
        _, momentum = self.coefficients(mark)
        return replace(mark, merges=mark.merges + 1, gain=momentum * mark.gain + 1.0)


def is_normalised(order: MergeOrdered) -> bool:
    """Return whether the step of a merge is divided by what the momentum buffer has gathered.

    Only of such a step is it ordered what makes the buffer a mean gradient.
    """
    return order.momentum_scale is not None


def lookahead(order: CommitOrdered, *, normalised: bool) -> float:
    """Return how many times its momentum buffer a commit leaves a fragment ahead of the run.

    Nesterov's momentum moves in advance what it expects next (:mod:`yeto.state.lookahead`). A round of the
    closing sweep leaves the buffer out, and a step that is divided by its gain is where the learners are.

    Args:
        order: of a commit that moves something.
        normalised: whether the step is divided by what the buffer has gathered.
    """
    return 0.0 if order.sweep or normalised else order.lr * order.momentum


def unmoved(num_fragments: int) -> tuple[OuterMark, ...]:
    """Return the counters of fragments whose buffer is zero."""
    return tuple(OuterMark(fragment=p, merges=0, gain=0.0) for p in range(num_fragments))


def impossible(mark: OuterMark, commits: int) -> bool:
    """Return whether counters cannot be those of a fragment that was committed so often.

    A commit multiplies the gain by a momentum below 1 and adds 1, so it lies between 1 and the merges.
    """
    gained = 1.0 <= mark.gain <= mark.merges if mark.merges else mark.gain == 0.0
    return not (0 <= mark.merges <= commits and gained)


def commits_at(version: int, fragment: int, num_fragments: int) -> int:
    """Return how often a fragment was committed when it came to a version."""
    return 0 if version == 0 else (version - fragment - 1) // num_fragments + 1


def derived(config: CoreConfig, versions: tuple[int, ...]) -> tuple[OuterMark, ...]:
    """Return counters for a checkpoint that has none, as far as they can be told.

    Every committed round is taken for a merge, and the momentum for that of the present settings: there was
    only the stock step then, and whoever goes on with a run seldom changes its momentum.

    Args:
        config: the present settings.
        versions: of each fragment.
    """
    momentum = stock_momentum(config)
    marks = []
    for fragment, version in enumerate(versions):
        merges = commits_at(version, fragment, len(versions))
        gain = 0.0
        # Step by step, as it would have been counted: a power is rounded otherwise on other machines.
        for _ in range(merges):
            before, gain = gain, momentum * gain + 1.0
            if gain == before:
                break
        marks.append(OuterMark(fragment=fragment, merges=merges, gain=gain))
    return tuple(marks)


def stock_momentum(config: CoreConfig) -> float:
    """Return the momentum that a buffer is scaled by where no other scale is ordered."""
    return NUMBERS["stock"][1] if config.outer_momentum is None else config.outer_momentum


def with_numbers(config: CoreConfig) -> CoreConfig:
    """Return the same settings with the kind's own numbers stated; those of ``auto`` are not known yet."""
    if config.outer == "auto":
        return config
    lr, momentum = _numbers(config, config.outer)
    return evolve(config, outer_lr=lr, outer_momentum=momentum)


def resolved(config: CoreConfig, *, num_fragments: int, target: int) -> Outer:
    """Return the outer settings in force, once the number of fragments is known.

    Args:
        config: the settings.
        num_fragments: P.
        target: the last global step of the run.
    """
    merges = planned_merges(config, num_fragments=num_fragments, target=target)
    kind, reason = config.outer, ""
    if kind == "auto":
        kind, reason = choose(
            interval=config.sync_interval_steps, merges=merges, num_learners=config.num_learners
        )
    lr, momentum = _numbers(config, kind)
    old = config.outer == "stock" and None not in (config.outer_lr, config.outer_momentum)
    outer = Outer(kind=kind, lr=lr, momentum=momentum, reason=reason, is_told=not old)
    # The finish of a budget is a sweep.
    return outer if config.budget_finish else replace(outer, warnings=_warnings(config, outer, merges))


def planned_merges(config: CoreConfig, *, num_fragments: int, target: int) -> int:
    """Return how often each fragment is merged in the whole run: K = steps / P, or N / H of a budget of N."""
    merges = target // num_fragments
    steps, interval = config.learner_budget_steps, config.sync_interval_steps
    if steps is not None and interval > 0:
        merges = min(merges, int(steps / interval))
    return merges


def choose(*, interval: float, merges: int, num_learners: int) -> tuple[str, str]:
    """Return the kind that ``auto`` stands for, and the reason.

    By measurements with LoRA on a model of 135 M parameters, 96 inner steps, constant inner learning rate, in
    loss on held-out rows against one synchronous group (docs/DESIGN.md, "The outer step"):

    ===========  ======  =========  ==============  ==================================================
    H            K       M          kind            evidence
    ===========  ======  =========  ==============  ==================================================
    any          any     1          direct          none needed: there is nothing to average
    0 (no H)     any     2 or more  direct          extrapolated from H 4: merges follow each other closely
    up to 8      any     2 or more  direct          measured at H 4, K 24, M 2: +0.8 % (stock +4.7 %)
    8 to 16      any     2 or more  direct          extrapolated: the safer neighbour
    16 and more  to 3    2 or more  direct          extrapolated: the momentum is hardly warm when it ends
    16 and more  from 4  2 or more  normalised      measured at H 16, K 6: M 2 -0.7 and -3.1 % (direct -0.3
                                                    and -1.4), M 4 +1.7 % (+2.2); beyond, extrapolated
    ===========  ======  =========  ==============  ==================================================

    Args:
        interval: H, inner steps between two merges of a fragment; 0 for no throttle.
        merges: K, planned merges of each fragment.
        num_learners: M.
    """
    if num_learners == 1:
        return "direct", "one learner has nothing to average"
    if interval <= 0:
        return "direct", "without a sync interval merges follow each other closely"
    if interval <= DENSE_STEPS:
        return "direct", f"at most {DENSE_STEPS:g} steps between merges, here {interval:g}"
    if interval < SPARSE_STEPS:
        return "direct", f"fewer than {SPARSE_STEPS:g} steps between merges, here {interval:g}"
    if merges < WARM_MERGES:
        return "direct", f"{merges} merges of each fragment are too few for a momentum"
    return "normalised", f"{interval:g} steps between merges, {merges} merges of each fragment"


def _numbers(config: CoreConfig, kind: str) -> tuple[float, float]:
    lr, momentum = NUMBERS[kind]
    return (
        lr if config.outer_lr is None else config.outer_lr,
        momentum if config.outer_momentum is None else config.outer_momentum,
    )


def _warnings(config: CoreConfig, outer: Outer, merges: int) -> tuple[str, ...]:
    """Return what measurements say against the settings; ``choose`` has what was measured."""
    interval, momentum = config.sync_interval_steps, outer.momentum
    if momentum == 0.0:
        return ()
    dense = interval <= DENSE_STEPS
    often = f"{interval:g} steps apart" if interval > 0 else "without a sync interval"
    if outer.kind == "normalised":
        untried = f"momentum on merges {often} was never measured; --outer direct was"
        return (untried,) if dense else ()
    found = []
    gain = outer.lr / (1.0 - momentum)
    if dense:
        found.append(f"momentum on merges {often} was found to train worse; use --outer direct")
    elif gain > GAIN_MAX and merges * (1.0 - momentum) < LONG_RUN:
        found.append(
            f"this momentum applies a steady gradient {gain:.1f} times, and {merges} merges of each fragment "
            "are few: before the closing sweep the model is ahead of its learners; use --outer auto"
        )
    if config.closing_sweep == "off":
        found.append(
            "without a closing sweep the result is ahead of its learners, in short runs by up to 13 % of the "
            "loss; use --closing-sweep plain"
        )
    return tuple(found)

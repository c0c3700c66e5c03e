"""The coordinator: a pure function from facts to decisions. No clock, no randomness, no I/O.

``step(state, event)`` is the whole of it: the same state and the same fact give the same new state and
the same decisions, on every machine, for ever. Time comes in with the facts; deadlines live in the state
and :func:`next_timer` names the earliest.

* Words: ``events``, ``decisions``, the ``values`` in them, ``config``; ``later`` for what joined them later.
* The machine: ``step`` with the table of handlers, the ``state`` and its ``parts``, ``timers``, ``resume``.
* A session's way: ``sessions`` and ``members``, ``opening``, ``pushes``, ``sealing``, ``commits``,
  ``checkpoints``, ``ending``; ``rounds`` for attempts that come to nothing.
* Numbers: ``pacing``, ``weights``, ``outer``. For people: ``status``.
"""

from yeto.core.config import CoreConfig
from yeto.core.parts import Phase
from yeto.core.state import State, initial_state
from yeto.core.status import waiting_for
from yeto.core.step import step
from yeto.core.timers import Timer, next_timer
from yeto.core.weights import learner_weight

__all__ = [
    "CoreConfig",
    "Phase",
    "State",
    "Timer",
    "initial_state",
    "learner_weight",
    "next_timer",
    "step",
    "waiting_for",
]

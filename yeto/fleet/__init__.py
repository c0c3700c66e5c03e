"""Fleets: which islands a budget buys, how they are launched, watched and torn down; runs on this machine.

SkyPilot rents the machines; nothing here provisions one, and nothing trains.

* What to rent: ``grammar`` for the words of an island, ``gpus``, ``catalogue`` and ``offers``, ``models``
  and ``memory``, ``shapes``, ``value``, ``solve``, ``plan``.
* A launch: ``launch`` is what was asked for, ``registry`` where it is written down, ``commands`` what its
  head and islands run; ``head`` is the former. Rented: ``tasks`` and ``skypilot``. On this machine:
  ``controller``, and ``detached`` to reach it.
* Processes: ``children``, each of them begun by ``child``, and ``keeper``, which keeps them alive;
  ``processes`` that somebody else began. ``streams`` keeps what libraries print off stdout.
* Other runs on this machine: ``local``, a syncer and its learners; ``supervisor``, both phases of a learner
  budget.
* Copies of checkpoint and tape: ``store``, ``mirror`` with ``mirror_push``, ``mirror_restore``,
  ``mirror_copies`` and ``mirror_tape``.
"""

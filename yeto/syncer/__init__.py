"""The Trio shell around the coordinator: carries decisions out and decides nothing.

* The process: ``app`` joins everything below in one nursery; ``config``, and ``start`` with ``past`` and
  ``adoption``: what a run begins with.
* Decisions: the ``pump`` owns the state and the tape, ``dispatch`` gives each decision to who carries it out.
* Connections: ``acceptor``, ``listener`` with ``newcomers`` and ``allowances``: who comes in; a ``group`` for
  each learner, in the ``registry``; what it sends goes to its ``receivers``. ``words`` makes text fit to log.
* Tensors: ``session`` with the ``initial`` values; ``rounds``, ``attempts`` and ``jobs``: from pushes to
  versions; ``broadcasts`` and the ``checkpointer``: what becomes of those.
* Decompositions in processes of their own: ``svd_merges``, ``svd_pool``, ``svd_child``, ``svd_settings``,
  ``svd_interpreter``.
* Proof: the ``recorder`` writes ``payloads``; ``recorded``, ``reexecute`` and ``reexecute_round`` read them.

docs/DESIGN.md, "The way of a push" and "The way of a decision", follows one of each through them.
"""

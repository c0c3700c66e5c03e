"""Does it train as well as one synchronous group? ``tools/compare_diloco.py`` finds out.

Two sides with the same devices, rows, batch and tokens: M islands of G ranks through a syncer, and one
synchronous group of M x G ranks. Both are the commands that a user starts, as processes of their own that
speak over sockets; what is scored is what the syncer's checkpoint exports to. An arm of the comparison
differs from the base settings in what its row of :mod:`comparing.settings` says and in nothing else, and is
compared with the synchronous group of its own size and seed alone. Where the two did not train on the same
tokens, step by step, the run is invalid, and says so.

Rooms: ``settings`` (the arms), ``recipe`` (what both sides share), ``processes`` (children that are forked,
not started), ``groups`` (one run), ``logs`` and ``measured`` (what the learners and the tape say of it),
``scoring``, ``results`` (what is kept, and going on with it), ``summary`` (pairs and spreads), ``report``,
``plots``, ``campaign`` (all runs) and ``command`` (the flags).
"""

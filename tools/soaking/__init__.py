"""``tools/soak``: one real syncer, many fake learners, and death at random.

``run`` plays it, ``watch`` holds the tape against the rules while it is written, ``learner`` and ``syncer``
are the processes that are killed.
"""

"""``tools/crash_campaign``: a real syncer, killed or refused at every system call that writes something.

``calls`` stands between a process and the system and brings about the fault; ``process`` is what is hit;
``scene`` plays one point: learners, a syncer that falls, those that go on; ``judge`` holds what is left
against the rules; ``plan`` counts the points, ``campaign`` plays them all. ``export`` does the same to
``yeto-export``, ``full`` on a disk that is really full, ``long`` at random through a long run.
"""

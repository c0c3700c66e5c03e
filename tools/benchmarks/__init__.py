"""Benchmarks: how fast each part is, beside what this machine could do at best.

A bare number says more about a machine and its other users than about the code. So every figure here stands
beside a *peer* that was measured in the same run on the same data: a physical limit (copying memory, writing
and fsyncing a file), or the barest program for the same job. Measure and peer take turns, several times, and
the ratio is the median of the ratios of neighbours: what slows one down for a while slows the other too.

``docs/BENCHMARKS.md`` says what each figure means and what was measured where.
"""

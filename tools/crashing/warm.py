"""Read by the server that forks, and by nobody else: makes once what every process would make for itself."""

from __future__ import annotations

import gc
from pathlib import Path

import crashing.process  # noqa: F401
from yeto.tape import encode, read

TAPE = Path(__file__).parents[2] / "fixtures" / "tapes" / "two-learners-v1.jsonl"

# How lines of the tape are read and written is found out with the first line of each kind.
for record in read(TAPE):
    encode(seq=record.seq, at=record.at, body=record.body, because=record.because)
# Forked processes need not look through all that was imported for what they could throw away.
gc.collect()
gc.freeze()

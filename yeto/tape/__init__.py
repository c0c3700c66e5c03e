"""The tape: everything the coordinator was told and everything it decided, one JSON line each.

``read`` gives the records of a tape, ``replay`` proves that its decisions follow from its events, and
``TapeWriter`` is the only thing that writes one.
"""

from yeto.tape.codec import Decoder, encode
from yeto.tape.reader import Restart, complete_lines, find_restarts, open_tape, read
from yeto.tape.records import FORMAT_VERSION, HEADER_KIND, RULES_VERSION, Header, Record, round_at
from yeto.tape.summary import Summary
from yeto.tape.writer import Tail, TapeFile, TapeWriter

__all__ = [
    "FORMAT_VERSION",
    "HEADER_KIND",
    "RULES_VERSION",
    "Decoder",
    "Header",
    "Record",
    "Restart",
    "Summary",
    "Tail",
    "TapeFile",
    "TapeWriter",
    "complete_lines",
    "encode",
    "find_restarts",
    "open_tape",
    "read",
    "round_at",
]

"""The tape: everything the coordinator was told and everything it decided, one JSON line each.

``read`` gives the records of a tape, ``replay`` proves that its decisions follow from its events, and
``TapeWriter`` is the only thing that writes one.
"""

from yeto.tape.codec import Decoder, encode
from yeto.tape.compare import Difference, first_difference
from yeto.tape.past import Mark, Past, PastFold, find_past
from yeto.tape.reader import Restart, complete_lines, find_restarts, open_tape, read
from yeto.tape.records import FORMAT_VERSION, HEADER_KIND, RULES_VERSION, Header, Record, round_at
from yeto.tape.replay import Divergence, Replayer, ReplayResult, replay, state_to_json
from yeto.tape.skim import EVERYTHING, Item, Skimmed, Skimmer
from yeto.tape.story import RoundStory, describe, printable
from yeto.tape.summary import Spread, Summary
from yeto.tape.writer import Tail, TapeFile, TapeWriter

__all__ = [
    "EVERYTHING",
    "FORMAT_VERSION",
    "HEADER_KIND",
    "RULES_VERSION",
    "Decoder",
    "Difference",
    "Divergence",
    "Header",
    "Item",
    "Mark",
    "Past",
    "PastFold",
    "Record",
    "ReplayResult",
    "Replayer",
    "Restart",
    "RoundStory",
    "Skimmed",
    "Skimmer",
    "Spread",
    "Summary",
    "Tail",
    "TapeFile",
    "TapeWriter",
    "complete_lines",
    "describe",
    "encode",
    "find_past",
    "find_restarts",
    "first_difference",
    "open_tape",
    "printable",
    "read",
    "replay",
    "round_at",
    "state_to_json",
]

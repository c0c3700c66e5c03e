"""Trio streams that carry the wire protocol; shared by syncer and learner.

``framing`` puts frames on a stream, ``inbox`` receives bulk messages into the buffers of those who want them,
``outbox`` holds what waits for a peer, ``group`` runs all streams of one learner's connection in one
nursery, ``dial`` opens them.
"""

from yeto.link.dial import Target, backoff, dial
from yeto.link.errors import LinkClosed, LinkOverflow
from yeto.link.framing import FrameStream, set_socket_options
from yeto.link.group import Group, Places
from yeto.link.inbox import Inbox, new_buffer, receive_bulk
from yeto.link.outbox import Outbox, bulk_writer, write_control

__all__ = [
    "FrameStream",
    "Group",
    "Inbox",
    "LinkClosed",
    "LinkOverflow",
    "Outbox",
    "Places",
    "Target",
    "backoff",
    "bulk_writer",
    "dial",
    "new_buffer",
    "receive_bulk",
    "set_socket_options",
    "write_control",
]

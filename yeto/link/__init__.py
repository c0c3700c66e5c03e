"""Trio streams that carry the wire protocol; shared by syncer and learner.

``framing`` puts frames on a stream, which ``tls`` may encrypt, and makes a socket's system calls by
``direct``; ``inbox`` receives bulk messages into the buffers of those who want them, ``outbox`` holds what
waits for a peer, ``group`` runs all streams of one learner's connection in one nursery, ``dial`` opens them.
"""

from yeto.link.dial import Dialler, Target, backoff
from yeto.link.errors import LinkClosed, LinkOverflow, LinkRefused
from yeto.link.framing import FrameStream, set_socket_options
from yeto.link.group import Group, Places
from yeto.link.inbox import Inbox, new_buffer, receive_bulk
from yeto.link.outbox import Outbox, write_bulk, write_control
from yeto.link.tls import TlsContext, TlsStream, accept_tls
from yeto.link.tls_files import client_context, server_context
from yeto.link.traffic import Traffic

__all__ = [
    "Dialler",
    "FrameStream",
    "Group",
    "Inbox",
    "LinkClosed",
    "LinkOverflow",
    "LinkRefused",
    "Outbox",
    "Places",
    "Target",
    "TlsContext",
    "TlsStream",
    "Traffic",
    "accept_tls",
    "backoff",
    "client_context",
    "dial",
    "new_buffer",
    "receive_bulk",
    "server_context",
    "set_socket_options",
    "write_bulk",
    "write_control",
]

"""How a link ends without anybody breaking the protocol.

`LinkClosed` is the ordinary end: the peer went away, the network failed, or this side gave up on a peer that
does not read. Whoever runs a group catches it together with ``ProtocolError`` at the connection's edge, turns
its message into a reason and goes on; a learner redials. `LinkRefused` is the end that dialling again does
not mend by itself.
"""

from __future__ import annotations

from yeto.errors import YetoError


class LinkClosed(YetoError):
    """The connection is over; the message says how that showed."""


class LinkOverflow(LinkClosed):
    """More waits to be sent to a peer than may wait: it reads too slowly, or not at all."""


class LinkRefused(LinkClosed):
    """One side does not take the other's TLS: a certificate, a name, or none where one is needed.

    Dialling again helps only if somebody exchanges a file or a flag meanwhile.
    """

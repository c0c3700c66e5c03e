"""What a process has sent and received over TCP so far, as the kernel has counted it.

Nothing here needs more than Python itself: it also runs inside the peers, whose sockets belong to a library.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from typing import Final

_ACKED_AND_RECEIVED: Final = struct.Struct("=QQ")
_OFFSET: Final = 120
"""Of ``tcpi_bytes_acked`` in Linux's ``struct tcp_info``; ``tcpi_bytes_received`` follows."""


def tcp_bytes() -> int | None:
    """Return the payload bytes that the open TCP sockets of this process have sent and received.

    Returns:
        None where the system does not tell (anything but Linux).
    """
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return None
    total = 0
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return None
    for name in descriptors:
        # It may be closed meanwhile, or be of another family.
        with suppress(OSError, ValueError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                    continue
                info = copy.getsockopt(socket.IPPROTO_TCP, option, 256)
            total += sum(_ACKED_AND_RECEIVED.unpack_from(info, _OFFSET))
    return total

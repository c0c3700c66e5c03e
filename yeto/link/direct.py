"""A socket's own system calls, with the event loop only where there is something to wait for.

Trio's methods give way to other tasks after each call that succeeded at once, and translate and guard each of
them. For slices of megabytes that is nothing. For the frames of a tiny fragment it costs several times the
system call, and a syncer with hundreds of learners does little else.

The rules kept: whoever reads gives way on every call, so that a fast peer starves nobody; whoever writes does
so unless the bytes are few and all of them went out at once. What was read is returned: a cancellation comes
before the call or waits for the next one, so that who only looked for a moment has lost nothing. Errors are
the system's, except that a socket that was closed on this side is ``trio.ClosedResourceError``, as it is
everywhere in Trio.
"""

from __future__ import annotations

import os
from typing import Final

import trio

FEW_BYTES: Final = 64 * 1024
"""Written without giving way: far below what anybody would wait for."""


async def receive(sock: trio.socket.SocketType, most: int) -> bytes:
    """Return the next bytes, at most so many; none at the peer's end of the stream."""
    await trio.lowlevel.checkpoint_if_cancelled()
    try:
        data = os.read(_descriptor(sock), most)
    except BlockingIOError:
        while True:
            await trio.lowlevel.wait_readable(sock)
            try:
                return os.read(_descriptor(sock), most)
            except BlockingIOError:
                continue
    await trio.lowlevel.cancel_shielded_checkpoint()
    return data


async def receive_into(sock: trio.socket.SocketType, view: memoryview) -> int:
    """Read the next bytes into a view that is not empty; return how many, 0 at the peer's end."""
    await trio.lowlevel.checkpoint_if_cancelled()
    try:
        got = os.readv(_descriptor(sock), (view,))
    except BlockingIOError:
        while True:
            await trio.lowlevel.wait_readable(sock)
            try:
                return os.readv(_descriptor(sock), (view,))
            except BlockingIOError:
                continue
    await trio.lowlevel.cancel_shielded_checkpoint()
    return got


async def send_all(sock: trio.socket.SocketType, data: bytes | memoryview) -> None:
    """Send all bytes; cancelled, it may have sent some of them."""
    with memoryview(data) as view:
        sent = _write(sock, view)
        if sent == len(view):
            if sent > FEW_BYTES:
                await trio.lowlevel.checkpoint()
            return
        while sent < len(view):
            await trio.lowlevel.wait_writable(sock)
            sent += _write(sock, view[sent:])


def _write(sock: trio.socket.SocketType, view: memoryview) -> int:
    try:
        return os.write(_descriptor(sock), view)
    except BlockingIOError:
        return 0


def _descriptor(sock: trio.socket.SocketType) -> int:
    number = sock.fileno()
    if number < 0:
        raise trio.ClosedResourceError("the socket was closed")
    return number

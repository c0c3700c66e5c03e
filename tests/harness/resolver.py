"""A name that has the addresses a test wants it to have."""

import trio
from trio import socket as trio_socket


class Resolver(trio.abc.HostnameResolver):
    """Gives every name the same addresses and counts the questions."""

    def __init__(self, *addresses):
        self._addresses = addresses
        self.asked = []

    async def getaddrinfo(self, host, port, family=0, type=0, proto=0, flags=0):
        self.asked.append(host)
        return [
            (
                trio_socket.AF_INET6 if ":" in address else trio_socket.AF_INET,
                trio_socket.SOCK_STREAM,
                trio_socket.IPPROTO_TCP,
                "",
                (address, port),
            )
            for address in self._addresses
        ]

    async def getnameinfo(self, sockaddr, flags):
        raise NotImplementedError

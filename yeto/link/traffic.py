"""How many bytes went each way: of a stream, or of all streams that count together."""

from __future__ import annotations

from attrs import define


@define(eq=False)
class Traffic:
    """Bytes of frames, without what TLS and the network add; they only grow.

    One event loop counts here. Any thread may look.
    """

    received: int = 0
    sent: int = 0

    def add(self, other: Traffic) -> None:
        """Count what was counted elsewhere."""
        self.received += other.received
        self.sent += other.sent

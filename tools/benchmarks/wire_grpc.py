"""The same transfer by gRPC: a streaming call whose messages are 4 MiB of bytes, no protobuf in between.

gRPC is for the benchmark only (extra ``bench``); whoever has not installed it gets a sentence instead of a
figure. Its messages arrive as objects of their own, so they are copied to where they belong, which is part of
what receiving with it means.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final

HOST: Final = "127.0.0.1"
MESSAGE_BYTES: Final = 4 * 1024 * 1024
PATIENCE_SECONDS: Final = 60.0
_OPTIONS: Final = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_SERVICE: Final = "yeto.bench.Wire"

MISSING: Final = "gRPC is not installed, so push has no such peer (pip install 'yeto[bench]')"


def is_installed() -> bool:
    """Whether grpcio is there."""
    return importlib.util.find_spec("grpc") is not None


class GrpcReceiver:
    """A server that writes what is streamed to it into one buffer; a context manager."""

    def __init__(self, target: memoryview) -> None:
        """Receive into ``target``."""
        import grpc

        self._target = target
        self._arrived = threading.Event()
        self._arrived_at = 0.0
        self._server = grpc.server(ThreadPoolExecutor(1), options=_OPTIONS)
        handler = grpc.stream_unary_rpc_method_handler(self._take)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, {"Push": handler}),)
        )
        self.port = self._server.add_insecure_port(f"{HOST}:0")

    def __enter__(self) -> GrpcReceiver:
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.stop(None).wait()

    def wait(self) -> float:
        """Wait for the next transfer; return when its last byte was in the buffer (``perf_counter``)."""
        if not self._arrived.wait(PATIENCE_SECONDS):
            raise RuntimeError("the other process is gone")
        self._arrived.clear()
        return self._arrived_at

    def _take(self, messages: Iterator[bytes], _: Any) -> bytes:
        filled = 0
        for message in messages:
            self._target[filled : filled + len(message)] = message
            filled += len(message)
        self._arrived_at = time.perf_counter()
        self._arrived.set()
        return b""


class GrpcSender:
    """A client that streams one buffer; a context manager."""

    def __init__(self, port: int) -> None:
        """Connect to the receiver's port, when first used."""
        import grpc

        self._channel = grpc.insecure_channel(f"{HOST}:{port}", options=_OPTIONS)
        self._push = self._channel.stream_unary(f"/{_SERVICE}/Push")

    def __enter__(self) -> GrpcSender:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.close()

    def send(self, source: memoryview) -> None:
        """Send all of it."""
        starts = range(0, len(source), MESSAGE_BYTES)
        self._push(
            (bytes(source[start : start + MESSAGE_BYTES]) for start in starts), timeout=PATIENCE_SECONDS
        )

"""What libraries print on stdout has no place there: whoever asks for JSON reads it.

Such lines come from C code as well as from Python, and from loggers that keep the stream they began with. So
it is the descriptor that is turned, for a while.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Have whatever this process prints on stdout appear on stderr; for one thread at a time."""
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        # It may lie in a buffer yet.
        sys.stdout.flush()
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)

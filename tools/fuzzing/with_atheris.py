"""libFuzzer through atheris: the library is instrumented while it is imported, and mutated inputs grow.

libFuzzer leaves the process by itself, so this is the main module of a child: ``python -m
fuzzing.with_atheris TARGET FOLDER SECONDS``, with inputs as files in FOLDER, which it adds to; a crash is a
file beside it.
"""

from __future__ import annotations

import logging
import sys

import atheris

from fuzzing.limits import INPUT_BYTES_MAX, INPUT_SECONDS, RSS_MIB_MAX


def main() -> None:
    logging.disable(logging.CRITICAL)
    name, folder, seconds, artifacts = sys.argv[1:]
    with atheris.instrument_imports(include=["yeto", "fuzz_targets", "fuzz_connections"]):
        from fuzz_targets import CONNECTIONS, TARGETS

        if name in CONNECTIONS:
            import fuzz_connections  # noqa: F401 - imported here, it is instrumented
    target = TARGETS[name]
    words = [
        sys.argv[0],
        folder,
        f"-max_total_time={seconds}",
        f"-artifact_prefix={artifacts}/crash-{name}-",
        f"-timeout={INPUT_SECONDS}",
        f"-rss_limit_mb={RSS_MIB_MAX}",
        f"-max_len={INPUT_BYTES_MAX}",
        "-print_final_stats=1",
    ]
    atheris.Setup(words, lambda data: target(data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()

"""Codecs: values to wire bytes and back, beside copying the same f32 values. One thread, CPU seconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.figures import Figure, figure_of
from benchmarks.timing import cpu_clock, rates, take_turns
from yeto.wire import bf16, q4


def codec_figures(*, repeats: int, elements: int) -> list[Figure]:
    """Measure encoding and decoding of q4 and bf16.

    Args:
        repeats: samples of each figure.
        elements: f32 values; speed is counted in their bytes, whatever their encoding takes.
    """
    values = np.random.default_rng(0).standard_normal(elements, dtype=np.float32)
    out = np.empty_like(values)

    def copy() -> None:
        np.copyto(out, values)

    figures = []
    for name, codec in (("q4", q4), ("bf16", bf16)):
        data = bytearray(codec.encoded_size(elements))
        codec.encode_into(values, data)
        works: dict[str, Callable[[], object]] = {
            "encode": partial(codec.encode_into, values, data),
            "decode": partial(codec.decode, data, elements, out),
        }
        for deed, work in works.items():
            ours, copies = take_turns(repeats, work, copy, clock=cpu_clock)
            figures.append(
                figure_of(
                    f"{name}_{deed}_gb_per_second",
                    f"{name}, {deed}",
                    "GB/s",
                    rates(4e-9 * elements, ours),
                    peer="copy of the f32 values",
                    peer_values=rates(4e-9 * elements, copies),
                )
            )
    return figures

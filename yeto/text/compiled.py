"""``--compile on``: a model's transformer blocks through torch.compile.

Block by block, because equal blocks share one compilation: a deep model compiles as fast as a flat one. In
place, because a wrapper would put a piece into every name, and names are what learners agree on; the compiled
and the plain model have the same layout, the same checkpoint and the same adapter.

Only training is compiled. A held-out row has a length of its own, and a compilation for each would cost more
than it saves, so what only looks runs as written.

The compiler is a program of its own (Inductor calls a C++ compiler on a CPU, Triton on an accelerator), and
what it cannot do shows when the first pass runs, so one is run before the rows are touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
from torch import nn

from yeto.errors import ConfigError
from yeto.tuning.shard import transformer_blocks

BACKEND: Final = "inductor"
"""PyTorch's own default."""

MESSAGE_CHARACTERS: Final = 300
"""Of what the compiler says in its first paragraph."""


def compile_model(module: nn.Module) -> None:
    """Have every transformer block compiled when it is first used; without blocks, the whole model."""
    for block in transformer_blocks(module) or [module]:
        block.compile(backend=BACKEND)


def as_written() -> AbstractContextManager[Any]:
    """Return a context in which compiled blocks run as they were written."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def compiler_told() -> Iterator[None]:
    """Say what a compiler could not do as a person can use it.

    Raises:
        ConfigError: instead of the compiler's own error.
    """
    try:
        yield
    except RuntimeError as error:
        # Where it comes from, not what it is: to import the classes would load the compiler.
        modules = {one.__module__ for one in type(error).__mro__}
        if not any(name.startswith(("torch._dynamo", "torch._inductor")) for name in modules):
            raise
        # Behind it come the compiler's own hints for its authors.
        first = " ".join(str(error).strip().split("\n\n", 1)[0].split())
        if len(first) > MESSAGE_CHARACTERS:
            first = first[:MESSAGE_CHARACTERS] + " …"
        raise ConfigError(
            f"--compile on: the model cannot be compiled here: {first}; say --compile off (on a CPU, "
            "torch.compile also needs a C++ compiler: install g++, or name one in CXX)"
        ) from error

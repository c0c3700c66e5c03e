"""Read by the server that forks, and by nobody else: what every child would load for itself, loaded once.

Threads that torch or a tokenizer starts do not outlive a fork, so nothing is computed here.
"""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from importlib import import_module

from yeto.cli.quiet import silence_libraries

silence_libraries()

import yeto.cli.main  # noqa: E402
import yeto.cli.run_learner  # noqa: E402
import yeto.cli.run_syncer  # noqa: E402
import yeto.learner.app  # noqa: E402
import yeto.syncer.app  # noqa: E402
import yeto.text.evaluate  # noqa: E402
import yeto.text.export  # noqa: E402
import yeto.text.task  # noqa: E402, F401
from comparing.processes import MODEL  # noqa: E402


def load_architecture(model: str) -> None:
    """Import the module that defines a model; transformers finds it only when a model is made."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    # Whatever is wrong with the model is for the first child to say.
    with suppress(Exception):
        import_module(MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.from_pretrained(model))].__module__)


if MODEL in os.environ:
    load_architecture(os.environ[MODEL])
# Forked processes need not look through all that was imported for what they could throw away.
gc.collect()
gc.freeze()

"""Loads from the hub on request, a line of JSON for each: a process in which the hub is not switched off.

It has an empty cache, and does not wait between tries: it prints how long it would have. What it has read of
a file it keeps a thousand bytes at a time, so that small files can be cut.
"""

import json
import sys
import time

from huggingface_hub import constants

from yeto.errors import YetoError
from yeto.text.config import TextConfig
from yeto.text.model import load_base
from yeto.text.tokenizer import load_tokenizer
from yeto.tuning import hub
from yeto.tuning.identity import identify
from yeto.tuning.rows import Cursor, open_source

constants.DOWNLOAD_CHUNK_SIZE = 1000
waits = []
time.sleep = waits.append


def tokenizer(name):
    loaded = load_tokenizer(TextConfig(model=name))
    return {"template": loaded.chat_template, "tokens": len(loaded)}


def model(name):
    return {"parameters": sum(p.numel() for p in load_base(TextConfig(model=name), "auto").parameters())}


def identity(name):
    return identify(name).binding()


def pipeline(name):
    """Find a pipeline and load its denoiser and its text encoder from what has come."""
    import torch

    from yeto.diffusion.pipeline import find_pipeline, load_parts

    found = find_pipeline(name)
    loaded = load_parts(found, ("unet", "text_encoder", "tokenizer", "scheduler"), torch.float32)
    parameters = sum(p.numel() for part in (loaded.unet, loaded.text_encoder) for p in part.parameters())
    return {"identity": found.identity.binding(), "parameters": parameters}


def rows(name):
    return {"rows": [row.value["text"] for row in open_source(name).rows(Cursor())]}


def forget(name):
    """Be as a new process would."""
    hub._fetched_by_now.clear()
    return {}


print("ready", flush=True)
for line in sys.stdin:
    what, name = json.loads(line)
    waits.clear()
    try:
        answer = globals()[what](name)
    except YetoError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer | {"waits": waits}), flush=True)

"""``yeto-export.json``: what an exported folder was made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

import yeto
from yeto.state import StoredCheckpoint
from yeto.tuning.export_lookahead import Fate
from yeto.tuning.identity import ModelIdentity

FACTS_FILE: Final = "yeto-export.json"


def write_facts(
    folder: Path,
    stored: StoredCheckpoint,
    *,
    kind: str,
    identity: ModelIdentity,
    tuning: str,
    lora: Mapping[str, Any] | None,
    fate: Fate,
    verified: Any,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write the file.

    Args:
        folder: of the export.
        stored: the checkpoint.
        kind: what was written.
        identity: of the base model.
        tuning: ``lora`` or ``full``.
        lora: settings of the adapter.
        fate: what became of the look-ahead.
        verified: an attrs object with what loading the export back showed; None if it was not.
        more: facts that only one task has.
    """
    state = stored.facts
    facts = {
        "format_version": 1,
        "software_version": yeto.__version__,
        "kind": kind,
        "base_model": identity.binding(),
        "tuning": tuning,
        "lora": lora,
        "checkpoint": {
            "digest": state.digest,
            "format": state.format,
            "step": state.step,
            "versions": [part.version for part in stored.fragments],
            "params_digests": [part.params_digest for part in stored.fragments],
            "layout_fingerprint": state.fingerprint,
            "session_contract": state.contract,
        },
        "lookahead": {
            "outcome": fate.word,
            "momentum_times": list(stored.lookaheads),
        },
        "ledger": [attrs.asdict(entry) for entry in state.ledger],
        "settings": state.settings,
        "verified": None if verified is None else attrs.asdict(verified),
        **(more or {}),
    }
    text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
    (folder / FACTS_FILE).write_text(text, encoding="utf-8")

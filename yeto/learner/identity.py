"""What a learner states about itself: fixed once the task is loaded, the same on every connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from yeto.learner.config import LearnerConfig
from yeto.learner.exchanged import Values
from yeto.wire import codecs
from yeto.wire.contract import TrainingManifest
from yeto.wire.digest import digest
from yeto.wire.fingerprint import layout_fingerprint
from yeto.wire.hello import Hello, HelloLayout
from yeto.wire.layout import Layout


@frozen(kw_only=True, eq=False)
class InitialFragment:
    """One fragment's initial value as learner 0 sends it, and as everybody will decode it."""

    payload: bytes = field(repr=False)
    digest: str
    values: Values = field(repr=False)


@frozen(kw_only=True, eq=False)
class Identity:
    """The learner's side of the session's terms."""

    layout: Layout
    fingerprint: bytes
    contract: bytes
    manifest: bytes | None = field(repr=False)
    """Payload of MANIFEST; None when it is not to be sent."""
    initial: tuple[InitialFragment, ...] = ()
    """Learner 0's initial fragments, kept as they were before the first step; empty for all others."""

    def hello(self, config: LearnerConfig, generation: int) -> bytes:
        """Return the payload of this connection's HELLO, authenticated when there is a key."""
        hello = Hello(
            learner=config.learner_id,
            generation=generation,
            dtype=config.wire_dtype,
            layout=HelloLayout.of(self.layout),
            fingerprint=self.fingerprint,
            contract=self.contract,
            num_streams=config.wan_streams,
            profile=config.profile,
        )
        return hello.encode(config.auth_key)


def make_identity(
    config: LearnerConfig, layout: Layout, binding: Mapping[str, Any], initial: tuple[InitialFragment, ...]
) -> Identity:
    """Return the identity that follows from a loaded task.

    Raises:
        ConfigError: the binding has no canonical form, or the manifest is too large to be sent.
    """
    manifest = TrainingManifest(binding=dict(binding), merge_alpha=config.merge_alpha, layout=layout)
    return Identity(
        layout=layout,
        fingerprint=layout_fingerprint(layout),
        contract=manifest.contract(),
        manifest=manifest.encode() if config.send_manifest else None,
        initial=initial,
    )


def initial_fragment(values: Values, wire_dtype: str) -> InitialFragment:
    """Return a fragment as INIT carries it: its bytes, their digest, and the values they decode to."""
    codec = codecs.by_name(codecs.bulk_dtype(wire_dtype))
    payload = codec.encode(values)
    return InitialFragment(payload=payload, digest=digest(payload), values=codec.decode(payload, values.size))

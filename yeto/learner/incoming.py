"""What one connection brings, decoded: broadcasts, and the parts of the final cut put together."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from yeto.errors import ProtocolError
from yeto.learner.exchanged import Broadcast, Values
from yeto.learner.fragments import is_finite
from yeto.learner.mailbox import FinalCut
from yeto.wire import codecs, f32
from yeto.wire.digest import digest
from yeto.wire.messages import BroadcastHeader, FinalFragmentHeader, FinalManifest
from yeto.wire.striping import Buffer


@frozen(kw_only=True, eq=False)
class FinalPart:
    """One fragment of a final cut."""

    version: int
    digest: str
    values: Values


class Incoming:
    """Decodes a generation's tensors; a final cut is complete with its manifest and every fragment."""

    def __init__(self, generation: int, numels: Sequence[int], wire_dtype: str) -> None:
        """Begin with nothing received.

        Args:
            generation: of the connection.
            numels: elements of each fragment.
            wire_dtype: of the session.
        """
        self._generation = generation
        self._numels = numels
        self._bulk_codec = codecs.by_name(codecs.bulk_dtype(wire_dtype))
        self._manifest: FinalManifest | None = None
        self._parts: dict[int, FinalPart] = {}

    def broadcast(self, head: BroadcastHeader, buffer: Buffer) -> Broadcast:
        """Decode a broadcast; in any thread.

        Raises:
            ProtocolError: a value is not finite.
        """
        values = self._bulk_codec.decode(buffer, self._numels[head.fragment])
        _require_finite(values, "BCAST_FRAGMENT", head.fragment, head.version)
        return Broadcast(
            generation=self._generation,
            fragment=head.fragment,
            version=head.version,
            digest=digest(buffer),
            values=values,
        )

    def final(self, head: FinalFragmentHeader, buffer: Buffer) -> FinalPart:
        """Decode a fragment of a final cut; in any thread.

        Raises:
            ProtocolError: a value is not finite.
        """
        values = f32.decode(buffer, self._numels[head.fragment])
        _require_finite(values, "FINAL_FRAGMENT", head.fragment, head.version)
        return FinalPart(version=head.version, digest=digest(buffer), values=values)

    def cut_by(self, manifest: FinalManifest) -> FinalCut | None:
        """Take the manifest; return the cut, if that makes it complete."""
        self._manifest = manifest
        return self._complete()

    def cut_with(self, fragment: int, part: FinalPart) -> FinalCut | None:
        """Take one fragment; return the cut, if that makes it complete."""
        self._parts[fragment] = part
        return self._complete()

    def _complete(self) -> FinalCut | None:
        manifest = self._manifest
        if manifest is None:
            return None
        found = [self._parts.get(fragment) for fragment in range(len(self._numels))]
        parts = [part for part in found if part is not None]
        if tuple(part.version for part in parts) != manifest.versions:
            return None
        self._manifest = None
        self._parts.clear()
        return FinalCut(
            step=manifest.step,
            versions=manifest.versions,
            digests=tuple(part.digest for part in parts),
            values=tuple(part.values for part in parts),
        )


def _require_finite(values: Values, what: str, fragment: int, version: int) -> None:
    """Values that are no numbers never reach the weights, whoever sent them."""
    if not is_finite(values):
        raise ProtocolError(
            f"{what}: fragment {fragment}, version {version} holds values that are not finite"
        )

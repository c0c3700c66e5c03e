"""What the session's tensors look like, and their committed values.

The coordinator knows names and digests only; this is the other half. It holds the layout that the session's
terms stand for, the store of committed fragment versions, and the training manifest.

Two things get into the store: initial values and outer steps. Both are computed beside the pump and put in
by it, when the coordinator has taken the event that reports them. So the store never runs ahead of the
state, and a snapshot taken while a decision is carried out is exactly the cut that the decision means.
"""

from __future__ import annotations

from attrs import frozen

from yeto.core.decisions import LearnerRefused
from yeto.core.values import Member, SessionTerms
from yeto.state import FragmentStore, FragmentVersion
from yeto.syncer.words import VALUE_CHARS_MAX, in_one_line
from yeto.wire.contract import TrainingManifest, from_where_they_part
from yeto.wire.hello import Hello, HelloLayout
from yeto.wire.layout import FragmentLayout, Layout, MergeMode
from yeto.wire.legality import TensorSizes

EXPLAINED = ("fingerprint", "contract")
"""Fields of a refusal that are hashes: what differs behind them is in the training manifests."""


@frozen(kw_only=True)
class Terms:
    """The terms of the open session with the sizes behind them."""

    stated: SessionTerms
    hello_layout: HelloLayout
    layout: Layout
    """Without names: what merging needs."""
    sizes: TensorSizes

    @classmethod
    def of(cls, stated: SessionTerms, hello_layout: HelloLayout) -> Terms:
        """Join the coordinator's terms with the layout of the HELLO or checkpoint that fixed them."""
        return cls(
            stated=stated,
            hello_layout=hello_layout,
            layout=hello_layout.as_layout(),
            sizes=TensorSizes.of(hello_layout.numels, stated.dtype),
        )


class Session:
    """Layout, store and manifest of one session."""

    def __init__(self) -> None:
        """Start without terms; a HELLO or a checkpoint brings them."""
        self.terms: Terms | None = None
        self.store = FragmentStore(0)
        self.manifest: TrainingManifest | None = None
        self.opener: Member | None = None
        """Whose HELLO fixed the terms, while its initial values are wanted."""
        # Fragments of which no initial value is on its way yet.
        self._missing: set[int] = set()
        # Values that were received and examined, and that the coordinator has not judged yet.
        self._staged: dict[tuple[Member, int], FragmentVersion] = {}

    def open(self, stated: SessionTerms, hello_layout: HelloLayout, opener: Member | None) -> None:
        """Fix the terms; initial values are wanted from ``opener``."""
        self.terms = Terms.of(stated, hello_layout)
        self.opener = opener
        self._missing = set(range(len(hello_layout.fragments)))
        self.store = FragmentStore(len(hello_layout.fragments))

    @property
    def asks_for_iso(self) -> bool:
        """Whether the open session's layout wants matrices of a fragment decomposed."""
        return self.terms is not None and any(
            fragment.mode is MergeMode.ISO for fragment in self.terms.layout.fragments
        )

    def restore(self, versions: tuple[FragmentVersion, ...], manifest: TrainingManifest | None) -> None:
        """Take the values of a checkpoint, after ``open``."""
        for version in versions:
            self.store.put(version)
        self.manifest = manifest

    def complete(self) -> None:
        """Take note that every fragment has its initial value: no more are wanted."""
        self.opener = None
        self._staged.clear()

    def release(self) -> None:
        """Forget the terms: the learner that fixed them is gone before everything was initialised."""
        self.terms = None
        self.opener = None
        self.manifest = None
        self._staged.clear()

    def require_terms(self) -> Terms:
        """Return the terms; there are some whenever the coordinator orders anything about tensors."""
        assert self.terms is not None, "nothing about tensors is ordered before a session is open"
        return self.terms

    def fits(self, hello: Hello) -> bool:
        """Whether a HELLO that states the session's fingerprint states its sizes too."""
        return self.terms is None or self.terms.hello_layout == hello.layout

    def fragment_layout(self, fragment: int) -> FragmentLayout:
        """Return the layout of one fragment."""
        return self.require_terms().layout.fragments[fragment]

    def expect(self, member: Member, fragment: int) -> bool:
        """Whether an initial value is wanted; from now on no second one is, as the set is sent only once."""
        wanted = member == self.opener and fragment in self._missing
        if wanted:
            self._missing.remove(fragment)
        return wanted

    def waits_for(self, member: Member) -> bool:
        """Whether initial values are wanted of this member, and none is on its way yet."""
        return member == self.opener and len(self._missing) == len(self.require_terms().layout.fragments)

    def stage(self, member: Member, version: FragmentVersion) -> None:
        """Hold an initial value until the coordinator has judged it."""
        self._staged[member, version.fragment] = version

    def settle(self, member: Member, fragment: int, *, taken: bool) -> None:
        """Put a staged initial value into the store, or drop it."""
        version = self._staged.pop((member, fragment), None)
        if taken and version is not None:
            self.store.put(version)

    def offer_manifest(self, manifest: TrainingManifest) -> None:
        """Keep the first manifest of a learner that holds the session's contract."""
        terms = self.terms
        if self.manifest is None and terms is not None and manifest.contract().hex() == terms.stated.contract:
            self.manifest = manifest

    def explain(self, refusal: LearnerRefused, manifest: TrainingManifest | None) -> str:
        """Return the text of a refusal: for another contract or layout, with what differs when known."""
        if refusal.field not in EXPLAINED or manifest is None or self.manifest is None:
            return refusal.why
        difference = self.manifest.first_difference(manifest)
        if difference is None:
            return refusal.why
        name, *values = difference
        name = in_one_line(name, VALUE_CHARS_MAX)
        ours, theirs = (
            in_one_line(text, VALUE_CHARS_MAX) for text in from_where_they_part(*map(repr, values))
        )
        return (
            f"{name} differs: the session has {ours}, learner {refusal.learner} has {theirs}; "
            "start every learner of a run with the same model, tuning, seed, number of learners, "
            "chat template, --fragments, --fragment-pattern and --matrix-merge"
        )

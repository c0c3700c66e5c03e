"""Going on from an older single file, which does not say which tensors it holds: the first learner does.

Until somebody has said a HELLO that fits the file there is no session, and nothing is written but the tape.
A HELLO that does not fit is turned away with the reason, for good, and the next one is looked at. The first
that fits fixes the session: the coordinator is told of a resume just before it is told of that HELLO, so on
the tape the run goes on as from a checkpoint of our own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from yeto.core.events import SessionResumed
from yeto.core.values import SessionTerms
from yeto.errors import YetoError
from yeto.state import Checkpoint, validate_resume
from yeto.syncer.receivers import Facts
from yeto.syncer.session import Session
from yeto.wire.hello import Hello

log = logging.getLogger("yeto.syncer")


class Adoption:
    """Holds the file's values until the first HELLO that they belong to."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        settings: Mapping[str, Any],
        iso_backend: str,
        resumed: Callable[[SessionTerms], SessionResumed],
        session: Session,
        facts: Facts,
    ) -> None:
        """Put ``checkpoint`` into ``session`` and tell ``facts`` of it, once its terms are known."""
        self._checkpoint: Checkpoint | None = checkpoint
        self._settings = settings
        self._iso_backend = iso_backend
        self._resumed = resumed
        self._session = session
        self._facts = facts

    async def look_at(self, hello: Hello, terms: SessionTerms) -> str | None:
        """Begin the session if a HELLO fits the file; return why not if it does not."""
        checkpoint = self._checkpoint
        if checkpoint is None or hello.learner >= self._settings["num_learners"]:
            return None  # the coordinator's to judge
        try:
            validate_resume(
                checkpoint,
                settings=self._settings,
                iso_backend=self._iso_backend,
                fingerprint=terms.fingerprint,
                contract=terms.contract,
                dtype=terms.dtype,
                layout=hello.layout.as_layout(),
            )
        except YetoError as error:
            return str(error)
        # Before the wait below: who comes during it is queued behind the resume, like any learner of a run.
        self._checkpoint = None
        self._session.open(terms, hello.layout, None)
        self._session.restore(checkpoint.fragments, None)
        log.info("learner %d states the tensors of the older checkpoint, and they fit", hello.learner)
        await self._facts.tell(self._resumed(terms))
        return None

"""Looking at a run through the dashboard of another process, by the status that it serves."""

from __future__ import annotations

from pathlib import Path

from yeto.errors import YetoError
from yeto.view.json import moment_of
from yeto.view.model import Moment
from yeto.view.sources import RemoteSource


class RemoteWatcher:
    """The moments of a dashboard.

    Args:
        url: its address, such as http://127.0.0.1:8080.
        token_file: holds what it asks for beyond its own machine, if it does.
    """

    def __init__(self, url: str, token_file: Path | None = None) -> None:
        token = None
        if token_file is not None:
            from yeto.view.door import read_token

            token = read_token(token_file)
        self._url = url
        self._source = RemoteSource(url, token)
        self._moment: Moment | None = None

    def look(self) -> bool:
        """Ask for the present moment; return whether it is another than the last one.

        Raises:
            YetoError: it does not answer, or answers something else.
        """
        before = self._moment
        self._source.advance(0.0)
        value = self._source.status()
        if value is None:
            return False
        try:
            self._moment = moment_of(value)
        except ValueError as error:
            raise YetoError(
                f"{self._url}: sent something else than the status of a run: {error}; is it a dashboard, and "
                "of a Yeto that is not newer than this one?"
            ) from error
        return self._moment != before

    def moment(self) -> Moment | None:
        """Return what the last look saw; None before the first."""
        return self._moment

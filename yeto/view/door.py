"""Who may look: the rules that every request meets before anything of the run is touched.

Observers only look, so only GET and HEAD are served, and a body is refused. What a page elsewhere could make
a browser ask is refused, too: on this machine a name in ``Host`` that is not this machine's own is a
stranger's name that was pointed here (DNS rebinding), and beyond this machine nothing is shown without the
token, which a page of another origin does not have. The answers forbid to be framed, guessed at, stored or
read by others.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from attrs import field, frozen

from yeto.errors import ConfigError
from yeto.hosts import is_loopback
from yeto.view.page import SERVED_POLICY

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN_CHARACTERS_MIN = 16
"""Fewer could be guessed over a network."""
TOKEN_BYTES_MAX = 4096
REQUEST_BYTES_MAX = 16 * 1024
"""Of a request's path and headers; what a browser sends is a tenth of that."""

HEADERS = (
    (b"content-security-policy", SERVED_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
"""Of every answer."""


def new_token() -> str:
    """Return a token that nobody guesses."""
    return secrets.token_urlsafe(24)


def read_token(path: Path, flag: str = "--token-file") -> str:
    """Return the token in a file, without the white space around it.

    Raises:
        ConfigError: there is none, or it is too short.
    """
    try:
        with path.open("rb") as file:
            token = file.read(TOKEN_BYTES_MAX).decode("ascii").strip()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path}: holds more than printable ASCII") from error
    if len(token) < TOKEN_CHARACTERS_MIN or not token.isprintable() or " " in token:
        raise ConfigError(f"{flag} {path}: a token is one word of at least {TOKEN_CHARACTERS_MIN} characters")
    return token


@frozen(kw_only=True)
class Door:
    """What a request must have.

    Args:
        token: asked of every request, if there is one. ``?token=`` in the address of the page becomes a
            cookie and leaves the address bar; programs send it as ``Authorization: Bearer``.
        local: only the names of this machine itself are served.
    """

    token: str | None = field(repr=False)
    local: bool

    @property
    def cookie_name(self) -> str:
        """Cookies of one host go to all its ports, so another run's must have another name."""
        return f"yeto-{self._cookie_value()[:8]}"

    def _cookie_value(self) -> str:
        assert self.token is not None
        return hashlib.sha256(b"yeto cookie\0" + self.token.encode()).hexdigest()

    def refusal(self, method: str, headers: Mapping[str, str], query: str) -> tuple[int, str] | None:
        """Return status and sentence of what is refused, or None."""
        if method not in ("GET", "HEAD"):
            return 405, "only GET and HEAD are served here"
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return 413, "a request has no body here"
        if self.local and not is_loopback(host_of(headers.get("host", ""))):
            return 421, "this is served to this machine only, as localhost"
        if self.token is not None and not self._knows(headers, query):
            return 401, "the token is missing or wrong: open the address that was printed at the start"
        return None

    def _knows(self, headers: Mapping[str, str], query: str) -> bool:
        assert self.token is not None
        given = []
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given.append((credentials.strip(), self.token))
        cookie = _cookies(headers.get("cookie", "")).get(self.cookie_name)
        if cookie is not None:
            given.append((cookie, self._cookie_value()))
        asked = asked_token(query)
        if asked is not None:
            given.append((asked, self.token))
        return any(hmac.compare_digest(one.encode(), right.encode()) for one, right in given)

    def cookie(self) -> str:
        """Return the header that has a browser remember the token."""
        return f"{self.cookie_name}={self._cookie_value()}; HttpOnly; SameSite=Strict; Path=/"


def asked_token(query: str) -> str | None:
    """Return the token in a query string, if there is one."""
    try:
        found = parse_qs(query, max_num_fields=8).get("token")
    except ValueError:
        return None
    return found[0] if found else None


def host_of(header: str) -> str:
    """Return the host in a Host header, without its port and the brackets of an IPv6 address."""
    if header.startswith("["):
        host, _, port = header[1:].partition("]")
        return host if port == "" or port.startswith(":") else header
    return header.rpartition(":")[0] if header.count(":") == 1 else header


def _cookies(header: str) -> dict[str, str]:
    jar: SimpleCookie = SimpleCookie()
    try:
        jar.load(header)
    except CookieError:
        return {}
    return {name: morsel.value for name, morsel in jar.items()}


class Guarded:
    """An app behind a door."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have it answered."""
        if scope["type"] != "http":
            # A web socket is refused by its protocol's own answer.
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        method = scope["method"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        query = scope["query_string"].decode("latin-1")

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *HEADERS]}
            await send(message)

        size = len(scope["raw_path"]) + len(query) + sum(map(len, [*headers, *headers.values()]))
        refusal = self._door.refusal(method, headers, query)
        if size > REQUEST_BYTES_MAX:
            refusal = 431, f"a request has at most {REQUEST_BYTES_MAX} bytes here"
        if refusal is not None:
            await _answer(send_guarded, method, *refusal)
        elif self._door.token is not None and scope["path"] == "/" and asked_token(query) is not None:
            # So that the token does not stay in the address bar, in the history and on screenshots.
            moved = [(b"location", b"./"), (b"set-cookie", self._door.cookie().encode())]
            await _answer(send_guarded, method, 303, "this way", moved)
        else:
            await self._app(scope, receive, send_guarded)


async def _answer(send: Send, method: str, status: int, sentence: str, headers: Any = ()) -> None:
    body = f"{sentence}\n".encode()
    more = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", b"%d" % len(body)),
        *headers,
    ]
    if status == 405:
        more.append((b"allow", b"GET, HEAD"))
    if status == 401:
        more.append((b"www-authenticate", b"Bearer"))
    more.append((b"cache-control", b"no-store"))
    await send({"type": "http.response.start", "status": status, "headers": more})
    await send({"type": "http.response.body", "body": b"" if method == "HEAD" else body})

"""The page's files, and the two ways they are put together: joined inside a report, or served one by one.

Each file is read once. The README beside them says which is which, and what of them is not ours.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

MODULES = (
    *("format.js", "verdict.js", "keys.js", "charts.js", "rounds.js", "grid.js"),
    *("tables.js", "story.js", "plots.js", "main.js"),
)
"""Our modules; each imports only from those before it."""
STYLES = ("uplot.css", "page.css")
LIBRARY = "uplot.js"
TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}

_IMPORT = re.compile(r"^import \{[^}]*\} from \"\./[a-z]+\.js\";\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const) )", re.MULTILINE)

COMMON_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:"
SERVED_POLICY = (
    f"{COMMON_POLICY}; script-src 'self'; style-src 'self'; connect-src 'self'; frame-ancestors 'none'"
)
"""Of the served page: nothing but what this server itself has, and no page around it."""


@cache
def text(name: str) -> str:
    """Return one of the page's files."""
    return files(__name__).joinpath(name).read_text("utf-8")


@cache
def served(name: str) -> tuple[bytes, str] | None:
    """Return the bytes and media type of a file that the page asks for; None if it asks for no such."""
    if name not in (*MODULES, *STYLES, LIBRARY):
        return None
    return text(name).encode(), TYPES[name[name.rindex(".") :]]


@cache
def served_page() -> str:
    """Return the page that fetches its files and its data."""
    styles = "\n".join(f'<link rel="stylesheet" href="page/{name}">' for name in STYLES)
    scripts = f'<script src="page/{LIBRARY}"></script>\n<script type="module" src="page/main.js"></script>'
    return _filled("", styles, scripts)


@cache
def joined() -> str:
    """Return all modules as one: without imports, since everything is there, and without exports."""
    return "".join(_EXPORT.sub("", _IMPORT.sub("", text(name))) for name in MODULES)


def whole_page(data: dict[str, Any]) -> str:
    """Return a page that has everything inside itself and asks the network for nothing.

    Args:
        data: plain JSON values.
    """
    styles = [text(name) for name in STYLES]
    library, module = text(LIBRARY), joined()
    # No "<" stands in the data, so nothing in it ends the element or begins a comment.
    encoded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    policy = (
        f"{COMMON_POLICY}; script-src {_hash(library)} {_hash(module)}; "
        f"style-src {' '.join(map(_hash, styles))}"
    )
    return _filled(
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        "\n".join(f"<style>{style}</style>" for style in styles),
        f'<script type="application/json" id="data">{encoded}</script>\n'
        f'<script>{library}</script>\n<script type="module">{module}</script>',
    )


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def _filled(policy: str, styles: str, scripts: str) -> str:
    page = text("index.html")
    for place, filling in (("CSP", policy), ("STYLES", styles), ("SCRIPTS", scripts)):
        before, after = page.split(f"<!--{place}-->")
        page = before + filling + after
    return page

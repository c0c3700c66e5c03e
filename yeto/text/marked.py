"""The library's own renderer with one thing changed: a generation block is not called, it is marked.

The library renders each generation block by a call of a macro through the sandbox and counts the letters of
all that was written before. Here the block's pieces are written where they stand, between two strings that
are known by identity, whatever a message says. Environment, filters, sandbox and white space are the
library's; this is right only for templates that write their blocks in order, and for chats that need
nothing done to them beforehand. The text is a template's for good once its first row came out the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from transformers.utils import chat_template_utils

# Long and odd, so that a row in which they were not recognized could not be taken for a good one.
_OPENING = "\ufdd0 generation block \ufdd1"
_CLOSING = "\ufdd0 end of generation block \ufdd1"


class _Marks(Extension):
    """Writes the two marks around a generation block, in a scope of its own as the macro's was."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)
    priority = 200  # after the library's own extension for this tag, whose place it takes

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opening, closing = (
            nodes.Output([nodes.Name(name, "load")]) for name in ("yeto_opening", "yeto_closing")
        )
        return nodes.Scope([opening, *body, closing]).set_lineno(line)


@lru_cache(maxsize=16)
def marking(template: str) -> Template | None:
    """Compile a template that writes its blocks in order; None if the library does not show its renderer."""
    compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
    if compile_template is None:
        return None
    environment = compile_template(template).environment.overlay(extensions=[_Marks])
    # As one dict: every row copies the globals, and from a chain of maps that takes as long as a short row.
    return Template.from_code(environment, environment.compile(template), dict(environment.globals))


def render_marked(
    template: Template, messages: Sequence[dict[str, Any]], special: dict[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """Render a chat without tools.

    Args:
        template: of :func:`marking`.
        messages: roles and texts.
        special: the tokenizer's special tokens by name, for the template.

    Returns:
        The text, and of each block its first letter and the one behind its last.
    """
    context = template.new_context(
        {
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
            **special,
            "yeto_opening": _OPENING,
            "yeto_closing": _CLOSING,
        }
    )
    pieces: list[str] = []
    spans = []
    place = start = 0
    for piece in template.root_render_func(context):
        if piece is _OPENING:
            start = place
        elif piece is _CLOSING:
            spans.append((start, place))
        else:
            pieces.append(piece)
            place += len(piece)
    return "".join(pieces), spans

"""What a chat template's text alone tells about its generation blocks.

A renderer that counts characters as they are written knows where a generation block stands, if nothing
changes the text afterwards. A block inside a macro, a ``set`` or a filter is written somewhere else first,
and what is counted there need not be where the text ends up. Templates without such blocks write in order;
the syntax tree decides, no row has to.
"""

from __future__ import annotations

import re
from functools import lru_cache

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

GENERATION = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
END_GENERATION = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
# The same kind of Jinja call block as generation blocks are, so whitespace control acts alike on both.
_MARK_MACRO = "{% macro yeto_mark() %}{{ yeto_opening + caller() + yeto_closing }}{% endmacro %}"
_IN_ORDER = (nodes.Template, nodes.If, nodes.For, nodes.With, nodes.Scope)


def has_generation(template: str) -> bool:
    """Tell whether a template says anywhere what the assistant generates."""
    return GENERATION.search(template) is not None


@lru_cache(maxsize=16)
def with_marks(template: str) -> str:
    """Return a template that writes ``yeto_opening`` and ``yeto_closing`` around its generation blocks."""
    marked = GENERATION.sub(r"{%\1 call yeto_mark() \2%}", template)
    return _MARK_MACRO + END_GENERATION.sub(r"{%\1 endcall \2%}", marked)


@lru_cache(maxsize=16)
def writes_in_order(template: str) -> bool:
    """Tell whether every generation block goes straight to the output, so that counting finds it.

    A template that does not parse is not one: rendering it will say why.
    """
    try:
        tree = _PARSER.parse(template)
    except TemplateSyntaxError:
        return False
    # Inside a generation block these mean something else than outside; nobody has a use for them.
    special = any(name.name in ("caller", "varargs", "kwargs") for name in tree.find_all(nodes.Name))
    return has_generation(template) and not special and _in_order(tree, outermost=True)


def _in_order(node: nodes.Node, *, outermost: bool) -> bool:
    if _is_generation_block(node):
        return outermost and all(_in_order(child, outermost=False) for child in node.iter_child_nodes())
    if not isinstance(node, _IN_ORDER) or (isinstance(node, nodes.For) and node.recursive):
        outermost = False
    return all(_in_order(child, outermost=outermost) for child in node.iter_child_nodes())


def _is_generation_block(node: nodes.Node) -> bool:
    return isinstance(node, nodes.CallBlock) and isinstance(node.call.node, nodes.ExtensionAttribute)


class _Generation(Extension):
    """Parses generation blocks as the renderer does; nothing is rendered here."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_generation"), [], [], body).set_lineno(line)


_PARSER = Environment(extensions=[_Generation, loopcontrols])

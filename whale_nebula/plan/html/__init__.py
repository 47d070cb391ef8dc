"""A plan as one HTML file: a graph with pan and zoom, the schedule, the layers of each stage, tables.

All content is static SVG and tables; the script in the page adds only panning, pointing and opening of details. All
text from a plan is escaped in one place, where elements are created.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


class Markup(str):
    """Text that is already markup; a plain string is escaped.

    >>> element("b", "a < b", Markup("<i>c</i>"), title='say "x"')
    '<b title="say &quot;x&quot;">a &lt; b<i>c</i></b>'
    """

    __slots__ = ()


Child = str | None
Attribute = str | int | float | bool | None


def element(name: str, /, *children: Child | Iterable[Child], **attributes: Attribute) -> Markup:
    """One element. A trailing underscore in an attribute's name is removed; others become dashes."""
    content = "".join(_text(child) for child in _flatten(children))
    attributes_text = "".join(_attribute(key, value) for key, value in attributes.items())
    return Markup(f"<{name}{attributes_text}>{content}</{name}>")


def join_markup(*children: Child | Iterable[Child]) -> Markup:
    """Concatenate markup and texts, which are escaped."""
    return Markup("".join(_text(child) for child in _flatten(children)))


def _flatten(children: Iterable[Child | Iterable[Child]]) -> Iterable[Child]:
    for child in children:
        if child is None or isinstance(child, str):
            yield child
        else:
            yield from child


def _text(child: Child) -> str:
    if child is None:
        return ""
    return child if isinstance(child, Markup) else escape(child)


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    text = f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
    return f' {name}="{escape(text)}"'

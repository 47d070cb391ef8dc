"""Documentation extension that converts examples and sections of docstrings to Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

SECTIONS = ("Args", "Returns")


def render_docstring(text: str) -> str:
    """Convert the examples of a docstring to code blocks, and its sections (Args, Returns) to lists.

    >>> print(render_docstring("One.\\n\\nArgs:\\n    a: a number,\\n        at least 1."))
    One.
    <BLANKLINE>
    **Args**
    <BLANKLINE>
    - `a`: a number, at least 1.
    """
    return "\n\n".join(map(_render_block, text.split("\n\n")))


def _render_block(block: str) -> str:
    if block.lstrip().startswith(">>>"):
        return f"```pycon\n{block}\n```"
    title, _, body = block.partition(":\n")
    if title not in SECTIONS:
        return block
    items = re.sub(r"\n {5,}", " ", body).splitlines()
    return "\n".join([f"**{title}**\n", *(re.sub(r"^ {4}(\w+):", r"- `\1`:", each).strip() for each in items)])


class Examples(griffe.Extension):
    """Renders the examples and sections of every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each function, class and module."""
        if obj.docstring is not None:
            obj.docstring.value = render_docstring(obj.docstring.value)

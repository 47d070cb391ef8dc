"""For the documentation: examples in docstrings become code blocks, which Markdown would make quotations of."""

from __future__ import annotations

from typing import Any

import griffe


def fenced(text: str) -> str:
    """The text with a fence around each example.

    >>> print(fenced("One:\\n\\n>>> 1 + 1\\n2"))
    One:
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    blocks = text.split("\n\n")
    return "\n\n".join(f"```pycon\n{block}\n```" if block.lstrip().startswith(">>>") else block for block in blocks)


class Examples(griffe.Extension):
    """Puts fences around the examples of every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each function, class and module."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

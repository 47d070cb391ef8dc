"""Scopes as a tree of text, recorded and not run."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from whale_nebula.scopes import public
from whale_nebula.scopes.frames import Frame, Stack, use_stack


@dataclass
class Node:
    """One line of the tree and what stands inside it."""

    text: str
    children: list[Node] = field(default_factory=list)

    def lines(self, indent: str = "") -> Iterator[str]:
        """The line and, further in, those inside."""
        yield indent + self.text
        for node in self.children:
            yield from node.lines(indent + "  ")


@dataclass
class Tree:
    """All scopes that were entered, in the order in which they were; `str` draws them."""

    roots: list[Node] = field(default_factory=list)
    _nodes: dict[Frame, Node] = field(default_factory=dict, repr=False)

    def record_scope(self, frame: Frame, around: Sequence[Frame], missing: str | None) -> None:
        """Take down a scope."""
        frame.touched = True
        self._nodes[frame] = node = Node(format_line(describe_scope(frame), missing))
        self._place(around).append(node)

    def record_statement(self, text: str, around: Sequence[Frame], missing: str | None) -> None:
        """Take down a call that is not a scope."""
        self._place(around).append(Node(format_line(text, missing)))

    def _place(self, around: Sequence[Frame]) -> list[Node]:
        known = [self._nodes[frame] for frame in around if frame in self._nodes]
        return known[-1].children if known else self.roots

    def __str__(self) -> str:
        return "".join(f"{line}\n" for root in self.roots for line in root.lines())


@contextlib.contextmanager
def record_scopes() -> Iterator[Tree]:
    """Take scopes down instead of asking for their engines.

    >>> import whale_nebula as nb
    >>> with record_scopes() as tree:
    ...     with nb.cluster(), nb.split():
    ...         pass
    >>> print(tree, end="")
    cluster
      split
    """
    tree = Tree()
    with use_stack(Stack(recorder=tree)):
        yield tree


def describe_scope(frame: Frame) -> str:
    """A scope in one line: a stage by its key and cluster, others by the options that are not as usual.

    >>> from whale_nebula.site import Site
    >>> describe_scope(Frame("pipeline", {"micro_batch": 4, "in_flight": None}, Site("train.py", 3)))
    'pipeline micro_batch=4'
    """
    if frame.kind == "stage":
        return f"stage {frame.key} on {frame.cluster}"
    parameters = inspect.signature(getattr(public, frame.kind)).parameters
    unusual = {name: value for name, value in frame.options.items() if value != parameters[name].default}
    texts = {n: ",".join(map(str, value)) if isinstance(value, tuple) else value for n, value in unusual.items()}
    return " ".join([frame.kind, *(f"{name}={text}" for name, text in texts.items())])


def format_line(text: str, missing: str | None) -> str:
    return f"{text}  [not yet: {missing}]" if missing else text

"""Scopes as a tree of text."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field

from whale_nebula.scopes import public
from whale_nebula.scopes.frames import Frame, Stack, open_frames, use_stack, watchers


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

    @contextlib.contextmanager
    def enter(self, frame: Frame) -> Iterator[None]:
        """Take down a scope, as a watcher; it counts as used."""
        frame.touched = True
        known = [self._nodes[outer] for outer in open_frames() if outer in self._nodes]
        self._nodes[frame] = node = Node(describe_scope(frame))
        (known[-1].children if known else self.roots).append(node)
        yield

    def __str__(self) -> str:
        return "".join(f"{line}\n" for root in self.roots for line in root.lines())


@contextlib.contextmanager
def record_scopes() -> Iterator[Tree]:
    """Take down the scopes that are entered in this context.

    >>> import whale_nebula as nb
    >>> with record_scopes() as tree:
    ...     with nb.cluster(), nb.split():
    ...         pass
    >>> print(tree, end="")
    cluster
      split
    """
    tree = Tree()
    watchers.append(tree)
    try:
        with use_stack(Stack()):
            yield tree
    finally:
        watchers.remove(tree)


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

"""A graph as text and back: what the golden tests of every pass are written in.

One op a line: its number, what it is, what it reads, its attributes, its outputs, what capture knows.

    arguments %0
    %0 = input x float32[?,4]
    %1 = capture dense/kernel resource[]
    %2 = ReadVariableOp(%1) {dtype="float32"} float32[4,8] stateful
    %3 = MatMul(%0, %2) {transpose_b=false} float32[?,8] @gpu ^%1 "dense/MatMul"
    %4 = Const {value=(0, 1)} int32[2]
    %5 = While[cond, body](%4, %3) int32[2], float32[?,8] compress=2
    return %5:1
    func cond(%0, %1)
      ...
      return %2

Only a Const has a constant; it is written as the attribute `value`. Blank lines and lines that start with #
are for the reader. Numbers may have gaps in a text written by hand: the ops are then numbered anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from whale_nebula.ir.graph import CAPTURE, FEED, HOLDER, INPUT, Attribute, Graph, Op
from whale_nebula.ir.scan import scan_graph
from whale_nebula.spec import Spec

_ROLES = (INPUT, CAPTURE, HOLDER, FEED)
_BARE = re.compile(r"[A-Za-z_][\w./:-]*")


def to_text(graph: Graph, *, names: bool = True) -> str:
    """The text of a graph; without names it is the same for two traces of the same program.

    >>> from whale_nebula.spec import Spec, Value
    >>> x = Op(0, "Placeholder", outputs=(Spec("float32", (None,)),), name="x", role=INPUT)
    >>> y = Op(1, "Neg", inputs=(Value(0),), outputs=(Spec("float32", (None,)),), name="neg", stage="gpu")
    >>> print(to_text(Graph((x, y), returns=(Value(1),)), names=False), end="")
    %0 = input x float32[?]
    %1 = Neg(%0) float32[?] @gpu
    return %1
    """
    return "".join(f"{line}\n" for line in _Printer(graph, names).lines())


def from_text(text: str) -> Graph:
    r"""The graph that a text describes.

    >>> graph = from_text("%0 = input x float32[?,4]\n%7 = Neg(%0) float32[?,4] @gpu")
    >>> graph.ops[1].inputs, graph.ops[1].stage, len(graph)
    ((Value(op=0, out=0),), 'gpu', 2)
    """
    return scan_graph(text)


class _Printer:
    """Functions are named by the order in which they are first called where names are left out."""

    def __init__(self, graph: Graph, names: bool) -> None:
        self.graph, self.names = graph, names
        self.called = tuple(_called(graph))
        self.aliases = {name: name if names else f"f{number}" for number, name in enumerate(self.called)}

    def lines(self) -> Iterator[str]:
        if self.graph.arguments:
            yield f"arguments {_join(f'%{index}' for index in self.graph.arguments)}"
        yield from self._body(self.graph)
        for name in self.called:
            function = self.graph.functions[name]
            yield f"func {_word(self.aliases[name])}({_join(f'%{index}' for index in function.arguments)})"
            yield from (f"  {line}" for line in self._body(function))

    def _body(self, graph: Graph) -> Iterator[str]:
        yield from (" ".join(self._op(op)) for op in graph.ops)
        if graph.returns:
            yield f"return {_join(map(str, graph.returns))}"

    def _op(self, op: Op) -> Iterator[str]:
        held = op.role in _ROLES and op.type == "Placeholder" and not op.inputs and not op.functions
        yield f"%{op.index} ="
        yield f"{op.role} {_word(op.name)}" if held else self._call(op)
        attributes = _attributes(op)
        if attributes:
            yield f"{{{_join(f'{_word(key)}={_attribute(value)}' for key, value in attributes.items())}}}"
        if op.outputs:
            yield _specs(op.outputs)
        yield from self._marks(op)
        if op.role and not held:
            yield f"role={_word(op.role)}"
        if op.name and not held and (self.names or op.role):
            yield json.dumps(op.name)

    def _call(self, op: Op) -> str:
        bodies = f"[{_join(_word(self.aliases[name]) for name in op.functions)}]" if op.functions else ""
        return f"{op.type}{bodies}({_join(map(str, op.inputs))})" if op.inputs or bodies else op.type

    def _marks(self, op: Op) -> Iterator[str]:
        if op.stage is not None:
            yield f"@{_word(op.stage)}"
        if op.control:
            yield " ".join(f"^%{index}" for index in op.control)
        if op.stateful:
            yield "stateful"
        if op.compress is not None:
            yield f"compress={op.compress}"


def _called(graph: Graph) -> Iterator[str]:
    """Every function that a graph calls, directly or not, each once, callers first."""
    seen: set[str] = set()
    queue = [graph]
    while queue:
        for name in (name for op in queue.pop(0).ops for name in op.functions):
            if name not in seen:
                seen.add(name)
                yield name
                queue.append(graph.functions[name])


def _attributes(op: Op) -> Mapping[str, Attribute]:
    found: dict[str, Attribute] = {} if op.constant is None else {"value": op.constant}
    return found | {key: op.attributes[key] for key in sorted(op.attributes)}


def _attribute(value: Attribute) -> str:
    if isinstance(value, tuple):
        return f"({_join(map(_attribute, value))})"
    if isinstance(value, bool | str):
        return json.dumps(value)
    return repr(value)


@lru_cache(4096)
def _specs(outputs: tuple[Spec, ...]) -> str:
    """Many ops give tensors of the same few forms."""
    return _join(map(str, outputs))


@lru_cache(4096)
def _word(text: str) -> str:
    return text if _BARE.fullmatch(text) else json.dumps(text)


def _join(parts: Iterable[str]) -> str:
    return ", ".join(parts)

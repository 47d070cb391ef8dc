"""The text form of a graph, and its parser; the golden tests of all passes use it.

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
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NoReturn

from whale_nebula.ir.graph import CAPTURE, FEED, HOLDER, INPUT, Attribute, Graph, Op
from whale_nebula.spec import Spec, Value

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<text>"(?:[^"\\]|\\.)*")
    | (?P<value>%\d+(?::\d+)?)
    | (?P<spec>\w+\[(?:\*|(?:\?|\d+)(?:,(?:\?|\d+))*)?\](?!\())
    | (?P<number>-(?:inf|nan)\b|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)
    | (?P<word>[A-Za-z_][\w./:-]*)
    | (?P<mark>[=(){}\[\],@^])
    )""",
    re.VERBOSE,
)
_ROLES = (INPUT, CAPTURE, HOLDER, FEED)
_NUMBERS = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan"), "-nan": float("nan")}


class TextError(ValueError):
    """A line of a graph's text that says nothing we know."""


def scan_graph(text: str) -> Graph:
    """The graph that a text describes, the functions that it calls with it."""
    functions: dict[str, Graph] = {}
    main = block = _Block("")
    blocks: list[_Block] = []
    for number, line in enumerate(text.splitlines(), start=1):
        scanner = _Scanner(line, number)
        if scanner.done() or line.lstrip().startswith("#"):
            continue
        if scanner.take("func"):
            block = _Block(scanner.word(), [value.op for value in scanner.values("(", ")")])
            blocks.append(block)
        else:
            block.read(scanner)
    functions.update((each.name, each.graph(functions)) for each in blocks)
    return main.graph(functions)


@dataclass
class _Block:
    """The lines of one graph."""

    name: str
    arguments: list[int] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    returns: tuple[Value, ...] = ()

    def read(self, scanner: _Scanner) -> None:
        if scanner.take("arguments"):
            self.arguments = [value.op for value in scanner.values()]
        elif scanner.take("return"):
            self.returns = scanner.values()
        else:
            self.ops.append(scanner.op())
        if not scanner.done():
            scanner.fail("the line should end")

    def graph(self, functions: Mapping[str, Graph]) -> Graph:
        """Number the ops anew, which changes nothing where they are dense already."""
        numbers = {op.index: new for new, op in enumerate(self.ops)}
        if len(numbers) < len(self.ops):
            raise TextError("two ops have the same number")
        try:
            ops = tuple(_renumber_inputs(op, numbers) for op in self.ops)
            returns = tuple(Value(numbers[op], out) for op, out in self.returns)
            return Graph(ops, functions, tuple(numbers[op] for op in self.arguments), returns)
        except KeyError as missing:
            raise TextError(f"%{missing.args[0]} is read, but no line makes it") from None


def _renumber_inputs(op: Op, numbers: Mapping[int, int]) -> Op:
    inputs = tuple(Value(numbers[source], out) for source, out in op.inputs)
    control = tuple(numbers[source] for source in op.control)
    return replace(op, index=numbers[op.index], inputs=inputs, control=control)


class _Scanner:
    """The tokens of one line."""

    def __init__(self, line: str, number: int) -> None:
        self.line, self.number, self.at = line.rstrip(), number, 0
        self.kind, self.token = "", ""
        if self.line and not self.line.lstrip().startswith("#"):
            self._step()

    def _step(self) -> None:
        if self.at >= len(self.line):
            self.kind, self.token = "", ""
            return
        found = _TOKEN.match(self.line, self.at)
        if found is None or found.lastgroup is None:
            self.fail(f"cannot read {self.line[self.at :].strip()!r}")
        self.at, self.kind, self.token = found.end(), found.lastgroup, found[found.lastgroup]

    def fail(self, why: str) -> NoReturn:
        raise TextError(f"line {self.number}: {why}: {self.line.strip()!r}")

    def done(self) -> bool:
        return not self.kind

    def take(self, token: str) -> bool:
        """Step over a token if it is the next one."""
        if self.token != token:
            return False
        self._step()
        return True

    def expect(self, token: str) -> None:
        if not self.take(token):
            self.fail(f"{token!r} should stand where {self.token!r} does")

    def next(self, kind: str) -> str:
        """The next token, which must be of this kind."""
        if self.kind != kind:
            self.fail(f"a {kind} should stand where {self.token!r} does")
        token = self.token
        self._step()
        return token

    def word(self) -> str:
        """A name, bare or in quotes."""
        return str(json.loads(self.next("text"))) if self.kind == "text" else self.next("word")

    def value(self) -> Value:
        op, _, out = self.next("value")[1:].partition(":")
        return Value(int(op), int(out or 0))

    def values(self, opening: str = "", closing: str = "") -> tuple[Value, ...]:
        """Values with commas between them."""
        if opening:
            self.expect(opening)
        found = []
        while self.kind == "value":
            found.append(self.value())
            if not self.take(","):
                break
        if closing:
            self.expect(closing)
        return tuple(found)

    def op(self) -> Op:
        """`%3 = Type[bodies](inputs) {attributes} specs marks`."""
        index = self.value().op
        self.expect("=")
        head = self.word()
        held = head in _ROLES and self.kind in ("word", "text")
        role, name = (head, self.word()) if held else ("", "")
        functions = self._functions()
        inputs = self.values("(", ")") if self.token == "(" else ()  # noqa: S105
        attributes = self._attributes()
        constant = attributes.pop("value", None) if head == "Const" else None
        op = Op(
            index=index,
            type="Placeholder" if held else head,
            inputs=inputs,
            outputs=self._specs(),
            name=name,
            role=role,
            attributes=attributes,
            constant=constant if isinstance(constant, tuple) else None,  # type: ignore[arg-type]
            functions=functions,
        )
        return self._read_marks(op)

    def _functions(self) -> tuple[str, ...]:
        found = []
        if self.take("["):
            while not self.take("]"):
                found.append(self.word())
                self.take(",")
        return tuple(found)

    def _attributes(self) -> dict[str, Attribute]:
        found: dict[str, Attribute] = {}
        if self.take("{"):
            while not self.take("}"):
                key = self.word()
                self.expect("=")
                found[key] = self._attribute()
                self.take(",")
        return found

    def _attribute(self) -> Attribute:
        if self.take("("):
            items = []
            while not self.take(")"):
                items.append(self._attribute())
                self.take(",")
            return tuple(items)
        if self.kind == "text":
            return self.word()
        if self.kind == "number":
            return _number(self.next("number"))
        return self._bool()

    def _bool(self) -> Attribute:
        word = self.next("word")
        if word in _NUMBERS:
            return _NUMBERS[word]
        if word not in ("true", "false"):
            self.fail(f"{word!r} is no value")
        return word == "true"

    def _specs(self) -> tuple[Spec, ...]:
        found = []
        while self.kind == "spec":
            found.append(_spec(self.next("spec")))
            self.take(",")
        return tuple(found)

    def _read_marks(self, op: Op) -> Op:
        while not self.done():
            if self.take("@"):
                op = replace(op, stage=self.word())
            elif self.take("^"):
                op = replace(op, control=(*op.control, self.value().op))
            elif self.take("stateful"):
                op = replace(op, stateful=True)
            elif self.take("compress"):
                self.expect("=")
                op = replace(op, compress=int(self.next("number")))
            elif self.take("role"):
                self.expect("=")
                op = replace(op, role=self.word())
            else:
                op = replace(op, name=str(json.loads(self.next("text"))))
        return op


def _number(token: str) -> int | float:
    if token in _NUMBERS:
        return _NUMBERS[token]
    return int(token) if re.fullmatch(r"-?\d+", token) else float(token)


def _spec(token: str) -> Spec:
    dtype, _, rest = token.partition("[")
    axes = rest[:-1]
    if axes == "*":
        return Spec(dtype, None)
    return Spec(dtype, tuple(None if axis == "?" else int(axis) for axis in axes.split(",") if axis))


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
        self.called = tuple(_called_functions(graph))
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


def _called_functions(graph: Graph) -> Iterator[str]:
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

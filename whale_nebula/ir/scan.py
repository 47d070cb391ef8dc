"""Reading the text form of a graph: lines into ops, ops into graphs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
            ops = tuple(_renumbered(op, numbers) for op in self.ops)
            returns = tuple(Value(numbers[op], out) for op, out in self.returns)
            return Graph(ops, functions, tuple(numbers[op] for op in self.arguments), returns)
        except KeyError as missing:
            raise TextError(f"%{missing.args[0]} is read, but no line makes it") from None


def _renumbered(op: Op, numbers: Mapping[int, int]) -> Op:
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
        return self._marked(op)

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

    def _marked(self, op: Op) -> Op:
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

"""The text form of a graph, and its parser; the golden tests of all passes use it.

One op per line: its number, type, inputs, attributes, outputs, and annotations of the capture.

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

Only a Const has a constant; it is written as the attribute `value`. Blank lines and lines that start with # are
ignored. Numbers may have gaps in a text written by hand: the ops are then renumbered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from whale_nebula.ir.graph import CAPTURE, FEED, HOLDER, INPUT, Attribute, Graph, Op
from whale_nebula.spec import Spec, Value

_ROLES = (INPUT, CAPTURE, HOLDER, FEED)
_TEXT = r'"(?:[^"\\]|\\.)*"'
_BARE = r"[A-Za-z_][\w./:-]*"
_WORD = rf"(?:{_TEXT}|{_BARE})"
_VALUE = r"%\d+(?::\d+)?"
_SPEC = r"\w+\[[*?,\d]*\]"
_FUNCTION = re.compile(rf"func\s+({_WORD})\((.*)\)")
_TOKEN = re.compile(rf"(?P<text>{_TEXT})|\binf\b|\bnan\b|(?P<key>{_BARE})(?=\s*=)|,?\s*\)|[(=]")
_JSON = {"(": "[", ")": "]", "=": ":", "inf": "Infinity", "nan": "NaN"}


class TextError(ValueError):
    """An invalid line in a graph's text."""


# ---------------------------------------------------------------------- reading
def from_text(text: str) -> Graph:
    r"""The graph that a text describes, with the functions that it calls.

    >>> graph = from_text("%0 = input x float32[?,4]\n%7 = Neg(%0) float32[?,4] @gpu")
    >>> graph.ops[1].inputs, graph.ops[1].stage, len(graph)
    ((Value(op=0, out=0),), 'gpu', 2)
    """
    functions: dict[str, Graph] = {}
    blocks: list[tuple[str, Graph]] = [("", Graph(()))]
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        name, graph = blocks[-1]
        if not line or line.startswith("#"):
            continue
        if found := _FUNCTION.fullmatch(line):
            arguments = tuple(value.op for value in _read_values(found[2]))
            blocks.append((_read_word(found[1]), Graph((), arguments=arguments)))
        elif found := re.fullmatch(rf"(arguments|return)\s+({_VALUE}(?:,\s*{_VALUE})*)", line):
            values = tuple(_read_values(found[2]))
            holds = {"returns": values} if found[1] == "return" else {"arguments": tuple(value.op for value in values)}
            blocks[-1] = name, replace(graph, **holds)
        elif found := _OP.fullmatch(line):
            blocks[-1] = name, replace(graph, ops=(*graph.ops, _read_op(found)))
        else:
            raise TextError(f"cannot parse line {number}: {line!r}")
    functions.update((name, _renumber(graph, functions)) for name, graph in blocks[1:])
    return _renumber(blocks[0][1], functions)


def _renumber(graph: Graph, functions: Mapping[str, Graph]) -> Graph:
    """Renumber the ops, which changes nothing if their numbers have no gaps."""
    numbers = {op.index: new for new, op in enumerate(graph.ops)}
    if len(numbers) < len(graph.ops):
        raise TextError("two ops have the same number")

    def renumber(values: Iterable[Value]) -> tuple[Value, ...]:
        return tuple(Value(numbers[op], out) for op, out in values)

    try:
        ops = tuple(
            replace(
                op,
                index=numbers[op.index],
                inputs=renumber(op.inputs),
                control=tuple(numbers[source] for source in op.control),
            )
            for op in graph.ops
        )
        return Graph(ops, functions, tuple(numbers[op] for op in graph.arguments), renumber(graph.returns))
    except KeyError as missing:
        raise TextError(f"%{missing.args[0]} is read, but no line defines it") from None


def _read_op(line: re.Match[str]) -> Op:
    attributes = _read_attributes(line["attributes"] or "")
    constant = attributes.pop("value", None) if line["type"] == "Const" else None
    op = Op(
        index=int(line["index"]),
        type=line["type"] or "Placeholder",
        inputs=_read_values(line["inputs"] or ""),
        outputs=tuple(_read_spec(*spec) for spec in re.findall(r"(\w+)\[([^]]*)\]", line["outputs"] or "")),
        name=_read_word(line["held_name"] or ""),
        role=line["role"] or "",
        attributes=attributes,
        constant=constant if isinstance(constant, tuple) else None,  # type: ignore[arg-type]
        functions=tuple(map(_read_word, re.findall(_WORD, line["functions"] or ""))),
    )
    marks = {str(found.lastgroup): found[0] for found in _MARK.finditer(line["marks"])}
    return replace(op, **{field: _MARKS[field].read(text) for field, text in marks.items()})


def _read_word(text: str) -> str:
    return str(json.loads(text)) if text.startswith('"') else text


def _read_values(text: str) -> tuple[Value, ...]:
    return tuple(Value(int(op), int(out or 0)) for op, out in re.findall(r"%(\d+)(?::(\d+))?", text))


def _read_spec(dtype: str, axes: str) -> Spec:
    if axes == "*":
        return Spec(dtype, None)
    return Spec(dtype, tuple(None if axis == "?" else int(axis) for axis in axes.split(",") if axis))


def _read_attributes(text: str) -> dict[str, Attribute]:
    """Parse attributes: JSON, except for bare keys, tuples, and numbers that JSON does not allow."""

    def translate(found: re.Match[str]) -> str:
        if found["key"]:
            return json.dumps(found["key"])
        return found["text"] or _JSON[found[0].lstrip(", ")]

    def to_tuples(value: Any) -> Attribute:
        return tuple(map(to_tuples, value)) if isinstance(value, list) else value

    try:
        found = json.loads(f"{{{_TOKEN.sub(translate, text)}}}")
    except ValueError:
        raise TextError(f"cannot parse attributes: {text!r}") from None
    return {key: to_tuples(value) for key, value in found.items()}


# ---------------------------------------------------------------------- writing
def to_text(graph: Graph, *, names: bool = True) -> str:
    """The text of a graph. Without `names` of ops and functions it is the same for two traces of the same program.

    Without names, functions are numbered in the order of their first call.

    >>> from whale_nebula.spec import Spec, Value
    >>> x = Op(0, "Placeholder", outputs=(Spec("float32", (None,)),), name="x", role=INPUT)
    >>> y = Op(1, "Neg", inputs=(Value(0),), outputs=(Spec("float32", (None,)),), name="neg", stage="gpu")
    >>> print(to_text(Graph((x, y), returns=(Value(1),)), names=False), end="")
    %0 = input x float32[?]
    %1 = Neg(%0) float32[?] @gpu
    return %1
    """
    called = tuple(_list_called_functions(graph))
    aliases = {name: name if names else f"f{number}" for number, name in enumerate(called)}
    lines = [f"arguments {_join(f'%{index}' for index in graph.arguments)}"] if graph.arguments else []
    lines += _list_body_lines(graph, aliases, names)
    for name in called:
        body = graph.functions[name]
        lines.append(f"func {_format_word(aliases[name])}({_join(f'%{index}' for index in body.arguments)})")
        lines += [f"  {line}" for line in _list_body_lines(body, aliases, names)]
    return "".join(f"{line}\n" for line in lines)


def _list_called_functions(graph: Graph) -> Iterator[str]:
    """Every function that a graph calls, directly or not, each once, callers first."""
    seen: set[str] = set()
    queue = [graph]
    while queue:
        for name in (name for op in queue.pop(0).ops for name in op.functions):
            if name not in seen:
                seen.add(name)
                yield name
                queue.append(graph.functions[name])


def _list_body_lines(graph: Graph, aliases: Mapping[str, str], names: bool) -> Iterator[str]:
    yield from (" ".join(_list_op_parts(op, aliases, names)) for op in graph.ops)
    if graph.returns:
        yield f"return {_join(map(str, graph.returns))}"


def _list_op_parts(op: Op, aliases: Mapping[str, str], names: bool) -> Iterator[str]:
    held = op.role in _ROLES and op.type == "Placeholder" and not op.inputs and not op.functions
    bodies = f"[{_join(_format_word(aliases[name]) for name in op.functions)}]" if op.functions else ""
    inputs = f"({_join(map(str, op.inputs))})" if op.inputs or bodies else ""
    yield f"%{op.index} ="
    yield f"{op.role} {_format_word(op.name)}" if held else f"{op.type}{bodies}{inputs}"
    attributes: dict[str, Attribute] = {} if op.constant is None else {"value": op.constant}
    attributes |= {key: op.attributes[key] for key in sorted(op.attributes)}
    if attributes:
        yield f"{{{_join(f'{_format_word(key)}={_format_attribute(value)}' for key, value in attributes.items())}}}"
    if op.outputs:
        yield _format_specs(op.outputs)
    hidden = ("role", "name") if held else () if names or op.role else ("name",)
    marks = (mark.write(getattr(op, field)) for field, mark in _MARKS.items() if field not in hidden)
    yield from filter(None, marks)


def _format_attribute(value: Attribute) -> str:
    if isinstance(value, tuple):
        return f"({_join(map(_format_attribute, value))})"
    if isinstance(value, bool | str):
        return json.dumps(value)
    return repr(value)


@lru_cache(4096)
def _format_specs(outputs: tuple[Spec, ...]) -> str:
    """The text of an op's outputs, cached as many ops have the same few forms."""
    return _join(map(str, outputs))


@lru_cache(4096)
def _format_word(text: str) -> str:
    return text if re.fullmatch(_BARE, text) else json.dumps(text)


def _join(parts: Iterable[str]) -> str:
    return ", ".join(parts)


class _Mark(NamedTuple):
    """The text form of an op's field, after its outputs: how it is written ("" for the default) and parsed."""

    pattern: str
    write: Callable[[Any], str]
    read: Callable[[str], Any]


_MARKS = {
    "stage": _Mark(
        rf"@{_WORD}", lambda key: "" if key is None else f"@{_format_word(key)}", lambda text: _read_word(text[1:])
    ),
    "control": _Mark(
        r"\^%\d+(?:\s+\^%\d+)*",
        lambda ops: " ".join(f"^%{op}" for op in ops),
        lambda text: tuple(value.op for value in _read_values(text)),
    ),
    "stateful": _Mark("stateful", lambda stateful: "stateful" * stateful, bool),
    "compress": _Mark(
        r"compress=-?\d+",
        lambda scope: "" if scope is None else f"compress={scope}",
        lambda text: int(text.removeprefix("compress=")),
    ),
    "role": _Mark(
        rf"role={_WORD}",
        lambda role: role and f"role={_format_word(role)}",
        lambda text: _read_word(text.removeprefix("role=")),
    ),
    "name": _Mark(_TEXT, lambda name: name and json.dumps(name), _read_word),
}
"""The marks by field of `Op`, in the order in the text."""
_MARK = re.compile("|".join(f"(?P<{field}>{mark.pattern})" for field, mark in _MARKS.items()))
_OP = re.compile(
    rf"""%(?P<index>\d+)\s*=\s*
    (?:(?P<role>{"|".join(_ROLES)})\s+(?P<held_name>{_WORD})(?![\w\[]) | (?P<type>{_BARE}))
    (?:\[(?P<functions>{_WORD}(?:,\s*{_WORD})*)\](?=\())?
    (?:\((?P<inputs>[^)]*)\))?
    (?:\s*\{{(?P<attributes>(?:{_TEXT}|[^"}}])*)\}})?
    (?:\s*(?P<outputs>{_SPEC}(?:,\s*{_SPEC})*))?
    (?P<marks>(?:\s+(?:{"|".join(mark.pattern for mark in _MARKS.values())}))*)""",
    re.VERBOSE,
)

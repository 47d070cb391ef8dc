"""The canonical form of a program, shared by all traces of it, from which digests are computed.

Ops are ordered as the results depend on them, so the form does not depend on the order of the trace, nor on ops that
no result needs. Names of ops, functions and others that are numbered within a process are removed; functions are
identified by their content, variables by their path.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple

from whale_nebula.ir.graph import CAPTURE, FEED, HOLDER, INPUT, Attribute, Graph, Op
from whale_nebula.ir.program import Program
from whale_nebula.ir.text import to_text
from whale_nebula.spec import Value

_LOCAL_ATTRIBUTES = frozenset(
    {"shared_name", "container", "config_proto", "config", "executor_type", "token", "debug_name"}
)
"""Attributes for where and how an op runs, not what it computes; so are all that start with _."""
_TEXT_OPS = frozenset({"Assert", "Print", "PrintV2", "StringFormat"})
"""Ops with texts for people, which contain names of the trace."""
_NO_NUMBER = Value(-1)


def canonical_lines(program: Program) -> tuple[str, ...]:
    r"""The canonical text: pipeline, stages, local SGD, codecs, splits, inputs, variables, ops, requests, results.

    >>> from whale_nebula.ir.program import Leaf
    >>> from whale_nebula.ir.text import from_text
    >>> graph = from_text("%0 = input x float32[?]\n%1 = Neg(%0) float32[?]")
    >>> leaves = (Leaf(0, "x", graph.ops[0].outputs[0]),)
    >>> print(*canonical_lines(Program(graph, leaves, returns=(Value(1),))), sep="\n")
    pipeline micro_batch=1 schedule=eager-1f1b in_flight=None recompute=False coupled=error
    input x float32[?] batched
    %0 = input x float32[?]
    %1 = Neg(%0) float32[?]
    returns (%1)
    """
    functions = _Functions(program.graph.functions)
    ordered = _order_ops(program.graph, functions, _find_roots(program), _Forms(program))
    return (*_list_header(program), *to_text(ordered.graph).splitlines(), *_list_footer(program, ordered))


def _list_header(program: Program) -> Iterator[str]:
    pipe = program.pipeline
    yield (
        f"pipeline micro_batch={pipe.micro_batch} schedule={pipe.schedule} in_flight={pipe.in_flight} "
        f"recompute={pipe.recompute} coupled={pipe.coupled}"
    )
    for number, stage in enumerate(program.stages):
        copies = "" if stage.replicas == 1 else f" replicas={stage.replicas}"
        speeds = f" speeds={':'.join(map(repr, stage.speeds))}" if stage.speeds else ""
        shards = "" if stage.shards == 1 else f" shards={stage.shards}"
        shards += " shared_slots" * stage.shared_slots + " shared_gradients" * stage.shared_gradients
        coded = "" if stage.compress is None else f" compress={stage.compress}"
        yield f"stage {number} {stage.key} cluster={stage.cluster}{copies}{speeds}{shards}{coded}"
    if program.local_sgd is not None:
        yield f"apart {program.local_sgd}"
    for number, (forward, backward) in enumerate(program.compressions):
        yield f"compress {number} {forward}, backward {backward}"
    for split in program.splits:
        path = program.variable_ops[split.variable].path
        yield f"split {path} axis={split.axis} stage={program.stages[split.stage].key}"
    for leaf in program.leaves:
        yield f"input {leaf.name} {leaf.spec} {'batched' if leaf.batched else 'whole'}"
    for each in sorted(program.variables, key=lambda variable: variable.path):
        yield f"variable {each.path} {each.spec} {'trainable' if each.trainable else 'not trainable'}"


class _Form(NamedTuple):
    """Differences between an op's canonical form and the trace."""

    name: str = ""
    stage: str | None = None
    compress: int | None = None
    attributes: Mapping[str, Attribute] = {}


@dataclass
class _Functions:
    """Functions named by their content, so that equal ones become one."""

    source: Mapping[str, Graph]
    graphs: dict[str, Graph] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)
    _by_text: dict[str, str] = field(default_factory=dict)

    def name(self, original: str) -> str:
        """The name of a function by content; a recursive call is named 'itself'."""
        if original not in self._names:
            self._names[original] = "itself"
            self.graphs.setdefault("itself", Graph(()))
            graph = self.source[original]
            stateful = (op.index for op in graph.ops if op.stateful)
            roots = (*graph.arguments, *(value.op for value in graph.returns), *stateful)
            body = _order_ops(graph, self, roots, lambda op: _Form(attributes=_select_attributes(graph, op))).graph
            text = to_text(replace(body, functions=self.graphs))
            self._names[original] = self._by_text.setdefault(text, f"f{len(self._by_text)}")
            self.graphs[self._names[original]] = body
        return self._names[original]


@dataclass(frozen=True)
class _Ordered:
    graph: Graph
    numbers: Mapping[int, int]

    def value(self, value: Value) -> Value:
        """The value in the canonical numbering; `_NO_NUMBER` if no root needs it."""
        return Value(self.numbers[value.op], value.out) if value.op in self.numbers else _NO_NUMBER


def _order_ops(graph: Graph, functions: _Functions, roots: Iterable[int], form: Callable[[Op], _Form]) -> _Ordered:
    """The ops that roots need, in canonical order, each in its canonical form."""
    order = _order(graph, roots)
    numbers = {index: number for number, index in enumerate(order)}
    ops = tuple(_renumber_op(graph.ops[index], form(graph.ops[index]), numbers, functions) for index in order)
    arguments = tuple(numbers[index] for index in graph.arguments if index in numbers)
    returns = tuple(Value(numbers[op], out) for op, out in graph.returns if op in numbers)
    return _Ordered(Graph(ops, functions.graphs, arguments, returns), numbers)


def _order(graph: Graph, roots: Iterable[int]) -> list[int]:
    """The ops in depth-first order, each after all that it depends on."""
    opened: set[int] = set()
    done: dict[int, None] = {}
    for root in roots:
        stack = [root]
        while stack:
            index = stack[-1]
            op = graph.ops[index]
            before = [] if index in opened else [*(v.op for v in op.inputs), *sorted(op.control)]
            opened.add(index)
            waiting = [b for b in before if b not in opened]
            if waiting:
                stack.extend(reversed(waiting))
            else:
                done.setdefault(stack.pop())
    return list(done)


def _renumber_op(op: Op, form: _Form, numbers: Mapping[int, int], functions: _Functions) -> Op:
    """The op in canonical form, constructed directly, as `replace` takes three times as long."""
    return Op(
        index=numbers[op.index],
        type=op.type,
        inputs=tuple(Value(numbers[source], out) for source, out in op.inputs),
        outputs=op.outputs,
        control=tuple(sorted(numbers[source] for source in op.control)),
        name=form.name,
        role=op.role,
        stage=form.stage,
        compress=form.compress,
        stateful=op.stateful,
        attributes=form.attributes,
        constant=op.constant,
        functions=tuple(functions.name(name) for name in op.functions),
    )


def _select_attributes(graph: Graph, op: Op) -> dict[str, Attribute]:
    found = {k: v for k, v in op.attributes.items() if not k.startswith("_") and k not in _LOCAL_ATTRIBUTES}
    if op.type == "Const" and "content" in found:
        readers = {reader.type for reader in graph.consumers(Value(op.index))}
        if readers and readers <= _TEXT_OPS:
            del found["content"]
    return found


def _find_roots(program: Program) -> Iterator[int]:
    """The ops of a step's outputs: gradients, effects and results."""
    for request in program.requests:
        yield from (value.op for value in request.targets)
        yield from (flow.gradient.op for flow in request.flows)
        yield from (value.op for part in request.parts for value in part.values)
    yield from (op.index for op in program.graph.ops if op.stateful and not op.role)
    yield from (value.op for value in (*program.returns, *program.loss_weights))


class _Forms:
    """The canonical forms of a step's own ops, with the capture's annotations."""

    def __init__(self, program: Program) -> None:
        self.program, self.names = program, _name_placeholders(program)

    def __call__(self, op: Op) -> _Form:
        """The annotations of an op: whether it is stamped by a scope, part of a backward, and after which requests."""
        program, name = self.program, self.names.get(op.index, "")
        if op.role:
            return _Form(name, None, op.compress)
        label, request = program.labels.get(op.index), program.request_of(op.index)
        marks: dict[str, Attribute] = {}
        if request is not None:
            marks["_request"] = request
        elif op.stateful and program.requests:
            marks["_after"] = sum(each.start <= op.index for each in program.requests)
        if op.stage is not None:
            marks["_stamped"] = True
        stage = None if label is None else program.stages[label].key
        return _Form(name, stage, op.compress, _select_attributes(program.graph, op) | marks)


def _list_footer(program: Program, ordered: _Ordered) -> Iterator[str]:
    """Requests and results."""
    value, numbers = ordered.value, ordered.numbers
    for request in program.requests:
        sources = [str(Value(numbers[op])) if op in numbers else "-" for op in request.origins]
        flows = [f"{f.stage}: {value(f.boundary)} {value(f.gradient)}" for f in request.flows]
        parts = [f"{p.stage}: {p.source} {_join(map(value, p.values))}" for p in request.parts]
        kinds = [f"{h.source} {'slices' if h.sparse else 'dense'}" for h in request.holders]
        yield (
            f"request {request.index} targets {_join(map(value, request.targets))} sources {_join(sources)} "
            f"flows {_join(flows, '; ')} parts {_join(parts, '; ')} gives {_join(kinds, '; ')}"
        )
    yield f"returns {_join(map(value, program.returns))}"
    if program.loss_weights:
        yield f"weights {_join(map(value, program.loss_weights))}"


def _join(items: Iterable[object], between: str = ", ") -> str:
    return "(" + between.join(map(str, items)) + ")"


def _name_placeholders(program: Program) -> dict[int, str]:
    """Names, independent of the trace, for the ops that are placeholders."""
    found = {op.index: "constant" for op in program.graph.ops if op.role == CAPTURE}
    found |= {op.index: op.name for op in program.graph.ops if op.role in (FEED, INPUT, HOLDER)}
    found |= {variable.op: variable.path for variable in program.variables}
    found |= {leaf.op: leaf.name for leaf in program.leaves}
    for request in program.requests:
        arrivals = enumerate(request.arrivals)
        found |= {arrival.feed.op: f"arrival/{request.index}/{number}" for number, arrival in arrivals}
        found |= {v.op: f"gradient/{request.index}/{h.source}" for h in request.holders for v in h.values}
    return found


_OP = re.compile(r"%(\d+) = (.*)")
_WORDS = {
    "pipeline": "the pipeline",
    "stage": "stage {}",
    "apart": "local SGD",
    "split": "the split of {}",
    "compress": "codec {}",
    "input": "input {}",
    "variable": "variable {}",
    "value": "{}",
    "request": "gradient request {}",
    "returns": "the return value of the step",
    "weights": "the loss weights",
    "func": "function {}",
}


def program_digest(program: Program) -> str:
    """Digest of a program, equal for every trace of it in any process: 64 hexadecimal digits.

    >>> from whale_nebula.ir.text import from_text
    >>> one = Program(from_text('%0 = VarHandleOp resource[] "a"'))
    >>> program_digest(one) == program_digest(Program(from_text('%0 = VarHandleOp resource[] "b_1"')))
    True
    """
    return digest_lines(canonical_lines(program))


def digest_lines(lines: Iterable[str]) -> str:
    """The hash of canonical lines.

    >>> digest_lines(["a", "b"])[:8]
    '911169dd'
    """
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def format_subgraph(graph: Graph, ops: Sequence[int], feeds: Sequence[Value], fetches: Sequence[Value]) -> str:
    """Canonical text of a subgraph: equal for all that compute the same in the same order, independent of names.

    >>> from whale_nebula.ir.text import from_text
    >>> lines = ["%0 = input x float32[?]", *(f"%{n} = Neg(%{n - 1}) float32[?]" for n in (1, 2))]
    >>> graph = from_text(chr(10).join(lines))
    >>> one, two = (format_subgraph(graph, [n], [Value(n - 1)], [Value(n)]) for n in (1, 2))
    >>> one == two
    True
    """
    functions, inside = _Functions(graph.functions), set(ops)
    read = dict.fromkeys([*feeds, *(v for op in ops for v in graph.ops[op].inputs if v.op not in inside)])
    roles = (CAPTURE if graph.ops[value.op].role == CAPTURE else FEED for value in read)
    ends = [Op(n, role, outputs=(graph.spec(v),)) for n, (v, role) in enumerate(zip(read, roles, strict=True))]
    numbers = {value: Value(number) for number, value in enumerate(read)}
    places = {op: number for number, op in enumerate(ops, len(ends))}
    numbers |= {value: Value(places[op], value.out) for op in ops for value in graph.ops[op].values}
    made = [
        Op(
            places[op.index], op.type, tuple(numbers[value] for value in op.inputs), op.outputs, stateful=op.stateful,
            attributes=_select_attributes(graph, op), constant=op.constant,
            functions=tuple(map(functions.name, op.functions)),
        )
        for op in (graph.ops[index] for index in ops)
    ]  # fmt: skip
    text = to_text(Graph((*ends, *made), functions.graphs))
    return f"{text}\nreturn {_join(map(str, (numbers[value] for value in fetches)))}"


OWN_SIDE, OTHER_SIDE = "here", "there"
SideNames = tuple[str, str]
"""The names of the two sides in the description of a difference."""


def describe_first_difference(
    local: Program | Sequence[str], remote: Program | Sequence[str], words: SideNames = (OWN_SIDE, OTHER_SIDE)
) -> str:
    """The first difference between two programs (or their lines) in words; "" if they are equal.

    >>> describe_first_difference(["variable w float32[2] trainable"], ["variable w float32[3] trainable"])
    'variable w: float32[2] trainable here, float32[3] trainable there'
    """
    # the "arguments" line follows from the ops
    lines = (canonical_lines(each) if isinstance(each, Program) else each for each in (local, remote))
    one, two = ([line for line in each if not line.startswith("arguments ")] for each in lines)
    pairs = list(zip_longest(one, two))
    at = find_first_difference(one, two)
    if at == len(pairs):
        return ""
    mine, theirs = pairs[at]
    inside = next((line for line, _ in reversed(pairs[:at]) if line and line.startswith("func ")), "")
    indented = (mine or theirs or "").startswith("  ")
    return _describe_difference(mine, theirs, words) + (
        f" (in {_split_line(inside)[0]})" if indented and inside else ""
    )


def find_first_difference(local: Sequence[str], remote: Sequence[str]) -> int:
    """The index of the first line that differs or exists on one side only; the number of lines if they are equal.

    >>> [find_first_difference(*pair) for pair in (("ab", "ac"), ("a", "ab"), ("a", "a"))]
    [1, 1, 1]
    """
    pairs = list(zip_longest(local, remote))
    return next((n for n, (mine, theirs) in enumerate(pairs) if mine != theirs), len(pairs))


def _describe_difference(mine: str | None, theirs: str | None, words: SideNames) -> str:
    here, there = words
    if mine is None or theirs is None:
        what, rest = _split_line(mine or theirs or "")
        return f"{what} ({rest}) exists only {there if mine is None else here}"
    (what, rest), (other, others) = _split_line(mine), _split_line(theirs)
    if what == other:
        return f"{what}: {rest} {here}, {others} {there}"
    return f"{what} ({rest}) {here} is in the position of {other} ({others}) {there}"


def _split_line(line: str) -> tuple[str, str]:
    """Split a line into its subject and its content."""
    line = line.strip()
    op = _OP.fullmatch(line)
    if op:
        return f"op {op[1]}", op[2]
    kind, _, rest = line.partition(" ")
    words = _WORDS.get(kind, kind)
    if "{}" not in words:
        return words, rest
    name, _, rest = rest.partition(" ")
    return words.format(name.partition("(")[0]), rest

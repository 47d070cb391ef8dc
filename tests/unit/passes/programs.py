"""Programs as text, for the tests of the passes.

The ops are lines of `ir.text`; numbers may have gaps. What a capture knows besides stands between them:

    stages a b=npu                  the stages in order, each with its cluster (its own name, if none is said)
    micro 2                         micro-batches
    codecs fp16 none                a compress scope: its forward and its backward codec
    request of %6 for %1, %2        here tape.gradient was asked; what follows is the backward ...
    arrival %8 of %5                ... fed by the gradient of a boundary,
    flow b: %7 for %5               ... giving a share of such a gradient,
    part b: %9 for %2               ... and gradients of the sources,
    end                             ... until here
    gradient %10 of %2              the placeholder that the user got; two of them are IndexedSlices
    returns %6

Behind `=>` stands what the pass under test should say of an op.
"""

import difflib
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from whale_nebula.ir.cut import Cut, Worker
from whale_nebula.ir.graph import CAPTURE, INPUT, Graph
from whale_nebula.ir.program import (
    Arrival,
    Flow,
    GradientPart,
    Holder,
    Leaf,
    Pipeline,
    Program,
    Request,
    Stage,
    Variable,
)
from whale_nebula.ir.text import from_text
from whale_nebula.passes.label import label
from whale_nebula.passes.pipeline import cut_program, list_cut
from whale_nebula.spec import Spec, Value

_DIRECTIVES = ("stages", "micro", "codecs", "request", "arrival", "flow", "part", "end", "gradient", "returns")


@dataclass
class _Asked:
    """A request while its lines are read; ops by the numbers of the text."""

    start: int
    targets: list[Value]
    sources: list[int]
    stop: int = -1
    arrivals: list[tuple[Value, Value]] = field(default_factory=list)
    flows: list[tuple[str, Value, Value]] = field(default_factory=list)
    parts: list[tuple[str, int, list[Value]]] = field(default_factory=list)
    holders: list[tuple[int, list[Value]]] = field(default_factory=list)


@dataclass
class Read:
    """A program that was read, what is expected of its ops, and the numbers that the text gives them."""

    program: Program
    expected: dict[int, str]
    written: list[int]

    def name(self, op: int) -> str:
        return f"%{self.written[op]} {self.program.graph.ops[op].type}"


def read(text: str) -> Read:
    """The program of a text."""
    return _Reader(textwrap.dedent(text)).read()


def program_of(text: str) -> Program:
    """The same, where only the program matters."""
    return read(text).program


class _Reader:
    def __init__(self, text: str) -> None:
        self.lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        self.stages: list[Stage] = []
        self.codecs: list[tuple[str, str]] = []
        self.requests: list[_Asked] = []
        self.returns: list[Value] = []
        self.micro = 1
        self.graph_lines: list[str] = []
        self.numbers: dict[int, int] = {}
        self.expected: dict[int, str] = {}

    def read(self) -> Read:
        for line in self.lines:
            word, _, rest = line.partition(" ")
            if word in _DIRECTIVES:
                getattr(self, f"_{word}")(rest)
            else:
                self._line(line)
        graph = from_text("\n".join(self.graph_lines))
        return Read(self._program(graph), self.expected, list(self.numbers))

    def _line(self, line: str) -> None:
        op, _, said = line.partition("=>")
        self.graph_lines.append(op)
        found = re.match(r"%(\d+) =", op)
        if found:
            self.numbers[int(found[1])] = len(self.numbers)
            if said:
                self.expected[len(self.numbers) - 1] = said.strip()

    def _program(self, graph: Graph) -> Program:
        requests = tuple(self._made(number, asked) for number, asked in enumerate(self.requests))
        keys = [stage.key for stage in self.stages]
        skip = frozenset(op for request in requests for op in request.backward)
        leaves = [op for op in graph.ops if op.role == INPUT]
        captures = [op for op in graph.ops if op.role == CAPTURE]
        return Program(
            graph=graph,
            leaves=tuple(Leaf(op.index, op.name, op.outputs[0]) for op in leaves),
            variables=tuple(Variable(op.index, op.name, Spec("float32", (4, 4))) for op in captures),
            stages=tuple(self.stages),
            requests=requests,
            returns=tuple(self._at(value) for value in self.returns),
            pipeline=Pipeline(micro_batch=self.micro),
            compressions=tuple(self.codecs),
            labels=label(graph, keys, skip=skip),
        )

    def _made(self, number: int, asked: _Asked) -> Request:
        places = [self.numbers[source] for source in asked.sources]
        return Request(
            index=number,
            start=asked.start,
            backward=frozenset(range(asked.start, asked.stop)),
            targets=tuple(map(self._at, asked.targets)),
            sources=tuple(f"%{source}" for source in asked.sources),
            origins=tuple(places),
            holders=tuple(Holder(asked.sources.index(s), tuple(map(self._at, v))) for s, v in asked.holders),
            arrivals=tuple(Arrival(self._at(value), self._at(feed)) for feed, value in asked.arrivals),
            flows=tuple(Flow(self._number(s), self._at(value), self._at(g)) for s, g, value in asked.flows),
            parts=tuple(
                GradientPart(self._number(s), asked.sources.index(source), tuple(map(self._at, values)))
                for s, source, values in asked.parts
            ),
        )

    def _at(self, value: Value) -> Value:
        return Value(self.numbers[value.op], value.out)

    def _number(self, key: str) -> int:
        return [stage.key for stage in self.stages].index(key)

    # ------------------------------------------------------------------ directives
    def _stages(self, rest: str) -> None:
        for word in rest.split():
            key, _, cluster = word.partition("=")
            self.stages.append(Stage(key, cluster or key))

    def _micro(self, rest: str) -> None:
        self.micro = int(rest)

    def _codecs(self, rest: str) -> None:
        forward, backward = rest.split()
        self.codecs.append((forward, backward))

    def _request(self, rest: str) -> None:
        of, _, sources = rest.partition(" for ")
        self.requests.append(_Asked(len(self.numbers), _values(of), [v.op for v in _values(sources)]))

    def _end(self, rest: str) -> None:
        self.requests[-1].stop = len(self.numbers)

    def _arrival(self, rest: str) -> None:
        feed, value = _values(rest)
        self.requests[-1].arrivals.append((feed, value))

    def _flow(self, rest: str) -> None:
        stage, _, values = rest.partition(":")
        gradient, value = _values(values)
        self.requests[-1].flows.append((stage, gradient, value))

    def _part(self, rest: str) -> None:
        stage, _, values = rest.partition(":")
        *gradient, source = _values(values)
        self.requests[-1].parts.append((stage, source.op, gradient))

    def _gradient(self, rest: str) -> None:
        *holders, source = _values(rest)
        self.requests[-1].holders.append((source.op, holders))

    def _returns(self, rest: str) -> None:
        self.returns = _values(rest)


def _values(text: str) -> list[Value]:
    return [Value(int(op), int(out or 0)) for op, out in re.findall(r"%(\d+)(?::(\d+))?", text)]


# ---------------------------------------------------------------------- checks
def check(text: str, say: Callable[[Program], Callable[[int], str]]) -> Program:
    """Compare each line with `=>` with what `say` says of its op."""
    found = read(text)
    said = say(found.program)
    expected = [f"{found.name(op)} => {words}" for op, words in found.expected.items()]
    got = [f"{found.name(op)} => {said(op)}" for op in found.expected]
    assert got == expected, "\n" + "\n".join(difflib.ndiff(expected, got))
    assert expected, "nothing is expected of any op"
    return found.program


def cases(name: str) -> list[Any]:
    """The programs of a file of this folder, each below a line `== what is promised`, as parameters of a test."""
    sections = (Path(__file__).parent / f"{name}.txt").read_text("utf-8").split("== ")[1:]
    return [pytest.param(text, id=title) for title, _, text in (each.partition("\n") for each in sections)]


def alone(program: Program) -> list[Worker]:
    """One worker that runs all stages."""
    return [Worker("local/0", "local", tuple(range(len(program.stages))))]


def apart(program: Program) -> list[Worker]:
    """A worker for each stage."""
    return [Worker(f"{stage.key}/0", stage.cluster, (n,)) for n, stage in enumerate(program.stages)]


def cut(text: str, workers: Callable[[Program], Sequence[Worker]] = alone) -> Cut:
    """The plan of a text's program."""
    program = program_of(text)
    return cut_program(program, workers(program))


def cut_text(text: str, workers: Callable[[Program], Sequence[Worker]] = alone) -> str:
    """All that the passes made of a program, a line each."""
    found = read(text)
    plan = cut_program(found.program, workers(found.program))
    return "\n".join(list_cut(plan, found.written.__getitem__))

"""Programs as text, for the tests of the passes.

The ops are lines of `ir.text`; numbers may have gaps. Other facts of a capture stand between them:

    stages a b=npu                  the stages in order, each with its cluster (by default the stage's key)
    micro 2                         micro-batches
    codecs fp16 none                a compress scope: its forward and its backward codec
    request of %6 for %1, %2        a call of tape.gradient; the following lines are the backward ...
    arrival %8 of %5                ... fed by the gradient of a boundary,
    flow b: %7 for %5               ... producing a share of such a gradient,
    part b: %9 for %2               ... and gradients of the sources,
    end                             ... until here
    gradient %10 of %2              the placeholder returned to the user; two of them are IndexedSlices
    returns %6

The text after `=>` is the expected description of an op by the pass under test.
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
from whale_nebula.passes.label import label_ops
from whale_nebula.passes.pipeline import cut_program, list_cut
from whale_nebula.spec import Spec, Value

_DIRECTIVES = ("stages", "micro", "codecs", "request", "arrival", "flow", "part", "end", "gradient", "returns")


@dataclass
class _RequestLines:
    """The lines of a request; ops by the numbers of the text."""

    start: int
    targets: list[Value]
    sources: list[int]
    stop: int = -1
    arrivals: list[tuple[Value, Value]] = field(default_factory=list)
    flows: list[tuple[str, Value, Value]] = field(default_factory=list)
    parts: list[tuple[str, int, list[Value]]] = field(default_factory=list)
    holders: list[tuple[int, list[Value]]] = field(default_factory=list)


@dataclass
class ParsedProgram:
    """A program, the expectations of its ops, and the numbers of the ops in the text."""

    program: Program
    expected: dict[int, str]
    written: list[int]

    def name(self, op: int) -> str:
        return f"%{self.written[op]} {self.program.graph.ops[op].type}"


def parse_text(text: str) -> ParsedProgram:
    """Parse a program with its expectations."""
    return _ProgramParser(textwrap.dedent(text)).parse()


def parse_program(text: str) -> Program:
    """Parse a program, without its expectations."""
    return parse_text(text).program


class _ProgramParser:
    def __init__(self, text: str) -> None:
        self.lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        self.stages: list[Stage] = []
        self.codecs: list[tuple[str, str]] = []
        self.requests: list[_RequestLines] = []
        self.returns: list[Value] = []
        self.micro = 1
        self.graph_lines: list[str] = []
        self.numbers: dict[int, int] = {}
        self.expected: dict[int, str] = {}

    def parse(self) -> ParsedProgram:
        for line in self.lines:
            word, _, rest = line.partition(" ")
            if word in _DIRECTIVES:
                getattr(self, f"_read_{word}")(rest)
            else:
                self._read_line(line)
        graph = from_text("\n".join(self.graph_lines))
        return ParsedProgram(self._build_program(graph), self.expected, list(self.numbers))

    def _read_line(self, line: str) -> None:
        op, _, expectation = line.partition("=>")
        self.graph_lines.append(op)
        found = re.match(r"%(\d+) =", op)
        if found:
            self.numbers[int(found[1])] = len(self.numbers)
            if expectation:
                self.expected[len(self.numbers) - 1] = expectation.strip()

    def _build_program(self, graph: Graph) -> Program:
        requests = tuple(self._build_request(number, asked) for number, asked in enumerate(self.requests))
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
            returns=tuple(self._value_at(value) for value in self.returns),
            pipeline=Pipeline(micro_batch=self.micro),
            compressions=tuple(self.codecs),
            labels=label_ops(graph, keys, skip=skip),
        )

    def _build_request(self, number: int, asked: _RequestLines) -> Request:
        places = [self.numbers[source] for source in asked.sources]
        return Request(
            index=number,
            start=asked.start,
            backward=frozenset(range(asked.start, asked.stop)),
            targets=tuple(map(self._value_at, asked.targets)),
            sources=tuple(f"%{source}" for source in asked.sources),
            origins=tuple(places),
            holders=tuple(Holder(asked.sources.index(s), tuple(map(self._value_at, v))) for s, v in asked.holders),
            arrivals=tuple(Arrival(self._value_at(value), self._value_at(feed)) for feed, value in asked.arrivals),
            flows=tuple(
                Flow(self._stage_number(s), self._value_at(value), self._value_at(g)) for s, g, value in asked.flows
            ),
            parts=tuple(
                GradientPart(self._stage_number(s), asked.sources.index(source), tuple(map(self._value_at, values)))
                for s, source, values in asked.parts
            ),
        )

    def _value_at(self, value: Value) -> Value:
        return Value(self.numbers[value.op], value.out)

    def _stage_number(self, key: str) -> int:
        return [stage.key for stage in self.stages].index(key)

    # ------------------------------------------------------------------ directives
    def _read_stages(self, rest: str) -> None:
        for word in rest.split():
            key, _, cluster = word.partition("=")
            self.stages.append(Stage(key, cluster or key))

    def _read_micro(self, rest: str) -> None:
        self.micro = int(rest)

    def _read_codecs(self, rest: str) -> None:
        forward, backward = rest.split()
        self.codecs.append((forward, backward))

    def _read_request(self, rest: str) -> None:
        of, _, sources = rest.partition(" for ")
        self.requests.append(
            _RequestLines(len(self.numbers), _parse_values(of), [v.op for v in _parse_values(sources)])
        )

    def _read_end(self, rest: str) -> None:
        self.requests[-1].stop = len(self.numbers)

    def _read_arrival(self, rest: str) -> None:
        feed, value = _parse_values(rest)
        self.requests[-1].arrivals.append((feed, value))

    def _read_flow(self, rest: str) -> None:
        stage, _, values = rest.partition(":")
        gradient, value = _parse_values(values)
        self.requests[-1].flows.append((stage, gradient, value))

    def _read_part(self, rest: str) -> None:
        stage, _, values = rest.partition(":")
        *gradient, source = _parse_values(values)
        self.requests[-1].parts.append((stage, source.op, gradient))

    def _read_gradient(self, rest: str) -> None:
        *holders, source = _parse_values(rest)
        self.requests[-1].holders.append((source.op, holders))

    def _read_returns(self, rest: str) -> None:
        self.returns = _parse_values(rest)


def _parse_values(text: str) -> list[Value]:
    return [Value(int(op), int(out or 0)) for op, out in re.findall(r"%(\d+)(?::(\d+))?", text)]


# ---------------------------------------------------------------------- checks
def check_op_texts(text: str, describe: Callable[[Program], Callable[[int], str]]) -> Program:
    """Compare the expectation of each line, after `=>`, with the description of its op by `describe`."""
    found = parse_text(text)
    describe_op = describe(found.program)
    expected = [f"{found.name(op)} => {words}" for op, words in found.expected.items()]
    got = [f"{found.name(op)} => {describe_op(op)}" for op in found.expected]
    assert got == expected, "\n" + "\n".join(difflib.ndiff(expected, got))
    assert expected, "the text has no expectations"
    return found.program


def list_cases(name: str) -> list[Any]:
    """The programs of a file of this folder, each below a line `== title`, as parameters of a test."""
    sections = (Path(__file__).parent / f"{name}.txt").read_text("utf-8").split("== ")[1:]
    return [pytest.param(text, id=title) for title, _, text in (each.partition("\n") for each in sections)]


def assign_one_worker(program: Program) -> list[Worker]:
    """Assign all stages to one worker."""
    return [Worker("local/0", "local", tuple(range(len(program.stages))))]


def assign_worker_per_stage(program: Program) -> list[Worker]:
    """Assign each stage to a worker of its own."""
    return [Worker(f"{stage.key}/0", stage.cluster, (n,)) for n, stage in enumerate(program.stages)]


def compile_text(text: str, workers: Callable[[Program], Sequence[Worker]] = assign_one_worker) -> Cut:
    """Compile the program of a text."""
    program = parse_program(text)
    return cut_program(program, workers(program))


def format_cut(text: str, workers: Callable[[Program], Sequence[Worker]] = assign_one_worker) -> str:
    """List the cut of a program as text."""
    found = parse_text(text)
    plan = cut_program(found.program, workers(found.program))
    return "\n".join(list_cut(plan, found.written.__getitem__))

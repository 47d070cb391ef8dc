"""Golden texts of folds: a graph in its text form, and behind `=>` what each op's outputs are said to be."""

import difflib
import textwrap
from collections.abc import Iterable

from whale_nebula.ir.graph import INPUT, Graph
from whale_nebula.ir.text import from_text
from whale_nebula.passes.rules import Folding, fold
from whale_nebula.spec import Value


def read(text: str) -> Graph:
    """The graph of a golden text."""
    return from_text("\n".join(line.partition("=>")[0] for line in textwrap.dedent(text).splitlines()))


def batched(graph: Graph) -> dict[int, int]:
    """Inputs with an unknown size are batched along the first such axis."""
    shapes = {op.index: op.outputs[0].shape for op in graph.ops if op.role == INPUT}
    return {index: shape.index(None) for index, shape in shapes.items() if shape is not None and None in shape}


def folding(text: str, *, targets: Iterable[int] = (), skip: Iterable[int] = ()) -> Folding:
    """The folds of a golden text's graph."""
    graph, left_out = read(text), set(skip)
    return fold(graph, batched(graph), targets=[Value(op) for op in targets], skip=left_out.__contains__)


def check(text: str, *, targets: Iterable[int] = (), skip: Iterable[int] = ()) -> Folding:
    """Compare every line that says `=> states` with what the pass says; several outputs are joined by `|`."""
    found = folding(text, targets=targets, skip=skip)
    expected, got = [], []
    ops = [line for line in textwrap.dedent(text).splitlines() if line.lstrip().startswith("%")]
    ops = ops[: len(read(text))]
    for op, line in zip(read(text).ops, ops, strict=True):
        states = " | ".join(str(found.of(value)) for value in op.values)
        said = line.partition("=>")[2].strip()
        expected.append(f"%{op.index} {op.type} => {said or states}")
        got.append(f"%{op.index} {op.type} => {states}")
    assert got == expected, "\n" + "\n".join(difflib.ndiff(expected, got))
    return found


def reason(text: str, op: int = -1, out: int = 0) -> str:
    """Why an output of the last op, or of another, is coupled or comes after."""
    return folding(text).of(Value(op if op >= 0 else len(read(text)) - 1, out)).reason

"""Golden texts of folds: a graph in its text form, with the expected folds of each op's outputs after `=>`.

Outputs are separated by `|`; a fold may be followed by `, as ` and its reason. Lines that begin with # give the values
that are differentiated (`# targets %8`), fed from the whole batch or grown (`# fed %7`, `# grown`).
"""

import difflib
import re
import textwrap
from collections.abc import Iterable

from whale_nebula.ir.graph import INPUT, Graph
from whale_nebula.ir.text import from_text
from whale_nebula.passes.rules import Folding, fold
from whale_nebula.spec import Value


def parse_graph(text: str) -> Graph:
    """Parse the graph of a golden text."""
    return from_text("\n".join(line.partition("=>")[0] for line in textwrap.dedent(text).splitlines()))


def list_batched_inputs(graph: Graph) -> dict[int, int]:
    """Map each input with an unknown size to the first such axis."""
    shapes = {op.index: op.outputs[0].shape for op in graph.ops if op.role == INPUT}
    return {index: shape.index(None) for index, shape in shapes.items() if shape is not None and None in shape}


def fold_text(text: str, *, skip: Iterable[int] = ()) -> Folding:
    """Fold the graph of a golden text."""
    graph = parse_graph(text)
    return fold(
        graph, list_batched_inputs(graph), targets=find_remark(text, "targets") or (), skip=set(skip).__contains__
    )


def find_remark(text: str, what: str) -> tuple[Value, ...] | None:
    """Return the values in a remark; None without such a remark."""
    found = re.search(rf"^# {what}\b(.*)$", text, re.MULTILINE)
    return None if found is None else tuple(Value(int(op)) for op in re.findall(r"%(\d+)", found[1]))


def check_folds(text: str) -> None:
    """Compare the folds of all lines with expectations, and the remarks on fed and grown values."""
    graph, found = parse_graph(text), fold_text(text)
    lines = [line for line in text.splitlines() if line.startswith("%")]
    expected, got = [], []
    for op, line in zip(graph.ops, lines, strict=True):
        expected_states = [state.strip() for state in line.partition("=>")[2].split("|")]
        states = [found.fold_of(value) for value in op.values]
        if expected_states != [""]:
            expected.append(f"%{op.index} {op.type} => {' | '.join(expected_states)}")
            pairs = zip(states, expected_states, strict=True)
            words = [f"{state}, as {state.reason}" if ", as " in each else str(state) for state, each in pairs]
            got.append(f"%{op.index} {op.type} => {' | '.join(words)}")
    assert got == expected, "\n" + "\n".join(difflib.ndiff(expected, got))
    for what, values in (("fed", found.wholes), ("grown", tuple(edge.value for edge in found.grows))):
        assert find_remark(text, what) in (None, values), what

"""Golden texts of folds: a graph in its text form, and behind `=>` what each op's outputs are said to be.

Outputs are parted by `|`; a state may be followed by `, as ` and its reason. Lines that begin with # say besides what
is differentiated (`# targets %8`), and what should be fed from the whole batch or grown (`# fed %7`, `# grown`).
"""

import difflib
import re
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


def folding(text: str, *, skip: Iterable[int] = ()) -> Folding:
    """The folds of a golden text's graph."""
    graph = read(text)
    return fold(graph, batched(graph), targets=listed(text, "targets") or (), skip=set(skip).__contains__)


def listed(text: str, what: str) -> tuple[Value, ...] | None:
    """The values that a line of remark names; None where there is no such line."""
    found = re.search(rf"^# {what}\b(.*)$", text, re.MULTILINE)
    return None if found is None else tuple(Value(int(op)) for op in re.findall(r"%(\d+)", found[1]))


def check(text: str) -> None:
    """Compare every line that says `=> states` with what the pass says; what is fed and grown, where that is said."""
    graph, found = read(text), folding(text)
    lines = [line for line in text.splitlines() if line.startswith("%")]
    expected, got = [], []
    for op, line in zip(graph.ops, lines, strict=True):
        said = [state.strip() for state in line.partition("=>")[2].split("|")]
        states = [found.of(value) for value in op.values]
        if said != [""]:
            expected.append(f"%{op.index} {op.type} => {' | '.join(said)}")
            pairs = zip(states, said, strict=True)
            words = [f"{state}, as {state.reason}" if ", as " in each else str(state) for state, each in pairs]
            got.append(f"%{op.index} {op.type} => {' | '.join(words)}")
    assert got == expected, "\n" + "\n".join(difflib.ndiff(expected, got))
    for what, values in (("fed", found.wholes), ("grown", tuple(edge.value for edge in found.grows))):
        assert listed(text, what) in (None, values), what

"""The placement of unstamped ops; reads and writes of one state between two stages are in one of them."""

import itertools
import random

import pytest

from tests.unit.passes.programs import check_op_texts, list_cases, parse_program
from whale_nebula.ir.graph import Graph
from whale_nebula.ir.program import Program
from whale_nebula.passes.label import NEVER_CUT, find_sink_side, label_jointly, label_ops


def describe_labels(program: Program):
    return lambda op: program.stages[program.labels[op]].key if op in program.labels else "-"


@pytest.mark.parametrize("text", list_cases("labels"))
def test_unscoped_ops_are_labelled_for_the_fewest_crossing_bytes(text: str) -> None:
    check_op_texts(text, describe_labels)


def test_fixed_label_is_kept() -> None:
    program = parse_program("""
        stages a b
        %0 = input x float32[?,6]
        %1 = Greater(%0, %0) bool[?,6] @a
        %2 = Cast(%1) {SrcT="bool", DstT="float32"} float32[?,6]
        %3 = Mul(%2, %2) float32[?,6] @b
    """)
    assert label_ops(program.graph, ["a", "b"])[2] == 1
    assert label_ops(program.graph, ["a", "b"], fixed={2: 0})[2] == 0


def test_program_without_stages_has_no_labels() -> None:
    assert label_ops(parse_program("%0 = input x float32[?]\n%1 = Exp(%0) float32[?]").graph, []) == {}


# -------------------- Ops that save bytes only together: late ones, as each tensor counts once; and the minimum
@pytest.mark.parametrize("seed", range(40))
def test_label_jointly_finds_the_cheapest_labels(seed: int) -> None:
    """Of small programs whose free ops all start early, every labelling is tried."""
    program = _draw_program(random.Random(seed))
    graph, free = program.graph, [op for op in program.graph.ops if op.stage is None and not op.role]
    early = {op.index: int(op.stage == "b") for op in graph.ops if not op.role}
    found = {**early, **label_jointly(graph, early, free, 2)}
    every = ({**early, **dict(zip([op.index for op in free], chosen, strict=True))} for chosen in _list_choices(free))
    least = min(_count_crossing_bytes(graph, each) for each in every if _is_ordered(graph, each))
    assert _is_ordered(graph, found)
    assert _count_crossing_bytes(graph, found) == least
    if _count_crossing_bytes(graph, early) == least:
        assert found == early


def _list_choices(free: list) -> itertools.product:
    return itertools.product((0, 1), repeat=len(free))


def _draw_program(drawn: random.Random) -> Program:
    """Two tensors of the first stage, six ops without one, and two of the last that read some of these."""
    lines = ["stages a b", "%0 = input x float32[?]"]
    lines += [f"%{n} = Exp(%0) float32[?,{drawn.randint(1, 20)}] @a" for n in (1, 2)]
    for n in range(3, 9):
        read = sorted(drawn.sample(range(1, n), k=min(n - 1, drawn.randint(1, 2))))
        lines.append(f"%{n} = AddN({', '.join(f'%{r}' for r in read)}) float32[?,{drawn.randint(1, 20)}]")
    read = sorted(drawn.sample(range(1, 8), k=3))
    lines += [f"%9 = AddN(%8, {', '.join(f'%{r}' for r in read)}) float32[] @b", "%10 = Neg(%8) float32[] @b"]
    return parse_program("\n".join(lines))


def _count_crossing_bytes(graph: Graph, labels: dict[int, int]) -> int:
    values = [value for op in graph.ops if op.index in labels for value in op.values]
    late = [v for v in values if not labels[v.op] and any(labels[c.index] for c in graph.consumers(v))]
    return sum(graph.spec(value).nbytes() for value in late)


def _is_ordered(graph: Graph, labels: dict[int, int]) -> bool:
    """No op runs before what it reads; what nobody reads stays where it is."""
    ordered = all(labels.get(v.op, 0) <= labels[i] for i in labels for v in graph.ops[i].inputs)
    idle = [i for i in labels if graph.ops[i].stage is None and not any(map(graph.consumers, graph.ops[i].values))]
    return ordered and not any(labels[i] for i in idle)


def test_stateful_ops_and_readers_of_gradients_are_not_moved() -> None:
    program = parse_program("""
        stages a b
        %0 = input x float32[?]
        %1 = Exp(%0) float32[?,10] @a
        %2 = RandomUniform(%1) float32[?,6] stateful
        %3 = Max(%1) float32[?,6]
        %4 = Mul(%2, %3) float32[?,6] @b
        %5 = holder g float32[?,6]
        %6 = Mul(%5, %1) float32[?,6]
        %7 = Mul(%5, %1) float32[?,6]
        %8 = Mul(%6, %7) float32[?,6] @b
    """)
    graph = program.graph
    free = [graph.ops[n] for n in (2, 3, 6, 7)]
    assert label_jointly(graph, {1: 0, 2: 0, 3: 0, 4: 1, 6: 0, 7: 0, 8: 1}, free, 2) == {}
    assert label_ops(graph, ["a", "b"])[3] == 0


Edges = dict[tuple[object, object], int]


def _cut_cost(edges: Edges, far: set[object]) -> int:
    return sum(size for (start, end), size in edges.items() if start not in far and end in far)


@pytest.mark.parametrize("seed", range(60))
def test_far_side_is_the_smallest_minimum_cut(seed: int) -> None:
    drawn = random.Random(seed)
    inner = list(range(5))
    nodes = ["s", *inner, "t"]
    pairs = [pair for pair in itertools.permutations(nodes, 2) if pair[0] != "t" and pair[1] != "s"]
    edges: Edges = {pair: drawn.randint(0, 9) for pair in pairs if drawn.random() < 0.5}
    found = find_sink_side(edges, "s", "t")
    cuts = [{"t", *chosen} for n in range(6) for chosen in itertools.combinations(inner, n)]
    least = min(_cut_cost(edges, cut) for cut in cuts)
    assert _cut_cost(edges, found & {*inner, "t"}) == least
    assert found <= set.intersection(*(cut for cut in cuts if _cut_cost(edges, cut) == least))


def test_uncuttable_edge_keeps_its_ends_on_one_side() -> None:
    assert find_sink_side({("s", 1): 3, (1, 2): NEVER_CUT, (2, "t"): 5}, "s", "t") == {1, 2, "t"}
    assert find_sink_side({("s", 1): 5, (1, 2): NEVER_CUT, (2, "t"): 3}, "s", "t") == {"t"}


def test_far_side_of_an_empty_network_is_the_sink() -> None:
    assert find_sink_side({}, "s", "t") == {"t"}

"""Ops that save bytes only together: what runs late because each tensor is counted once."""

import itertools
import random

import pytest

from tests.unit.passes.programs import check, program_of
from tests.unit.passes.test_label import said
from whale_nebula.ir.graph import Graph
from whale_nebula.ir.program import Program
from whale_nebula.passes.label import jointly, label

MASKED_LOSS = """
stages a b
%0 = input x int32[?,6]
%1 = NotEqual(%0, %0) bool[?,6] @a
%2 = Exp(%0) float32[?,6,8] @a
%3 = Neg(%2) float32[?,6,50] @b
%4 = Max(%3) float32[?,6]                          => b
%5 = Cast(%1) float32[?,6]                         => b
%6 = Shape(%5) int32[2]                            => b
%7 = Prod(%6) int32[]                              => b
%8 = Cast(%7) float32[]                            => b
%9 = Sum(%5) float32[]                             => b
%10 = DivNoNan(%8, %9) float32[]                   => b
%11 = Cast(%5) bool[?,6]                           => b
%12 = SelectV2(%11, %10) float32[?,6]              => b
%13 = Mul(%4, %12) float32[?,6]                    => b
%14 = Sum(%13) float32[]                           => b
"""


def test_what_keras_makes_of_a_mask_is_made_where_the_loss_is() -> None:
    """The mask crosses once, and neither the scale nor a second mask besides."""
    check(MASKED_LOSS, said)


def test_a_mask_that_crosses_anyway_is_counted_once() -> None:
    check(MASKED_LOSS + "%15 = Where(%1) int64[?,2] @b\n", said)


def test_two_tensors_that_are_larger_together_are_made_late() -> None:
    check(
        """
        stages a b
        %0 = input x float32[?]
        %1 = Exp(%0) float32[?,10] @a
        %2 = Sum(%1) float32[?,6]                          => b
        %3 = Max(%1) float32[?,6]                          => b
        %4 = Mul(%2, %3) float32[?,6] @b
        """,
        said,
    )


def test_two_tensors_that_are_as_large_together_are_made_early() -> None:
    check(
        """
        stages a b
        %0 = input x float32[?]
        %1 = Exp(%0) float32[?,12] @a
        %2 = Sum(%1) float32[?,6]                          => a
        %3 = Max(%1) float32[?,6]                          => a
        %4 = Mul(%2, %3) float32[?,6] @b
        """,
        said,
    )


def test_what_an_op_of_its_own_stage_reads_stays() -> None:
    check(
        """
        stages a b
        %0 = input x float32[?]
        %1 = Exp(%0) float32[?,10] @a
        %2 = Sum(%1) float32[?,6]                          => a
        %3 = Max(%1) float32[?,6]                          => a
        %4 = Mul(%2, %3) float32[?,6] @b
        %5 = Mul(%2, %3) float32[?,6] @a
        """,
        said,
    )


def test_each_group_moves_for_itself() -> None:
    """One pair of sums is cheaper late, another is not."""
    check(
        """
        stages a b
        %0 = input x float32[?]
        %1 = Exp(%0) float32[?,10] @a
        %2 = Sum(%1) float32[?,6]                          => b
        %3 = Max(%1) float32[?,6]                          => b
        %4 = Exp(%0) float32[?,20] @a
        %5 = Sum(%4) float32[?,6]                          => a
        %6 = Max(%4) float32[?,6]                          => a
        %7 = AddN(%2, %3, %5, %6) float32[?,6] @b
        """,
        said,
    )


def test_over_three_stages_a_tensor_is_counted_once_a_stage() -> None:
    check(
        """
        stages a b c
        %0 = input x float32[?]
        %1 = Exp(%0) float32[?,10] @a
        %2 = Sum(%1) float32[?,6]                          => c
        %3 = Max(%1) float32[?,6]                          => c
        %4 = Neg(%1) float32[?,6] @b
        %5 = AddN(%2, %3, %4) float32[?,6] @c
        """,
        said,
    )


def test_a_penalty_stays_with_its_variable() -> None:
    check(
        """
        stages a b
        %0 = input x float32[?,4]
        %1 = capture w resource[]
        %2 = ReadVariableOp(%1) float32[] stateful @a
        %3 = Mul(%0, %2) float32[?,4] @a
        %4 = Exp(%3) float32[?,4] @b
        %5 = ReadVariableOp(%1) float32[] stateful         => a
        %6 = Square(%5) float32[]                          => a
        %7 = Exp(%6) float32[]                             => a
        %8 = Neg(%6) float32[]                             => a
        %9 = AddN(%4, %7, %8) float32[?,4] @b
        """,
        said,
    )


# ---------------------------------------------------------------------- against all labellings
@pytest.mark.parametrize("seed", range(40))
def test_no_other_labels_of_the_group_are_cheaper(seed: int) -> None:
    """Of small programs whose free ops all start early, every labelling is tried."""
    program = _drawn(random.Random(seed))
    graph, free = program.graph, [op for op in program.graph.ops if op.stage is None and not op.role]
    early = {op.index: int(op.stage == "b") for op in graph.ops if not op.role}
    found = {**early, **jointly(graph, early, free, 2)}
    every = ({**early, **dict(zip([op.index for op in free], chosen, strict=True))} for chosen in _chosen(free))
    least = min(_crossing(graph, each) for each in every if _in_order(graph, each))
    assert _in_order(graph, found)
    assert _crossing(graph, found) == least
    if _crossing(graph, early) == least:
        assert found == early


def _chosen(free: list) -> itertools.product:
    return itertools.product((0, 1), repeat=len(free))


def _drawn(drawn: random.Random) -> Program:
    """Two tensors of the first stage, six ops without one, and two of the last that read some of these."""
    lines = ["stages a b", "%0 = input x float32[?]"]
    lines += [f"%{n} = Exp(%0) float32[?,{drawn.randint(1, 20)}] @a" for n in (1, 2)]
    for n in range(3, 9):
        read = sorted(drawn.sample(range(1, n), k=min(n - 1, drawn.randint(1, 2))))
        lines.append(f"%{n} = AddN({', '.join(f'%{r}' for r in read)}) float32[?,{drawn.randint(1, 20)}]")
    read = sorted(drawn.sample(range(1, 8), k=3))
    lines += [f"%9 = AddN(%8, {', '.join(f'%{r}' for r in read)}) float32[] @b", "%10 = Neg(%8) float32[] @b"]
    return program_of("\n".join(lines))


def _crossing(graph: Graph, labels: dict[int, int]) -> int:
    values = [value for op in graph.ops if op.index in labels for value in op.values]
    late = [v for v in values if not labels[v.op] and any(labels[c.index] for c in graph.consumers(v))]
    return sum(graph.spec(value).nbytes() for value in late)


def _in_order(graph: Graph, labels: dict[int, int]) -> bool:
    """No op runs before what it reads; what nobody reads stays where it is."""
    ordered = all(labels.get(v.op, 0) <= labels[i] for i in labels for v in graph.ops[i].inputs)
    idle = [i for i in labels if graph.ops[i].stage is None and not any(map(graph.consumers, graph.ops[i].values))]
    return ordered and not any(labels[i] for i in idle)


def test_what_touches_state_or_hangs_on_a_gradient_stays() -> None:
    program = program_of("""
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
    assert jointly(graph, {1: 0, 2: 0, 3: 0, 4: 1, 6: 0, 7: 0, 8: 1}, free, 2) == {}
    assert label(graph, ["a", "b"])[3] == 0

"""Completion of layouts: graphs as text, and behind `=>` the layouts of what each op makes and what crosses before."""

from __future__ import annotations

import textwrap

import pytest

from tests.unit.passes.rules.states import batched, read
from whale_nebula.ir.layout import SPLIT, Layout, Layouts, count_bytes
from whale_nebula.passes.layouts import Question, complete_layouts
from whale_nebula.passes.rules import fold
from whale_nebula.spec import Value


def complete(text: str, split: dict[int, int], *, count: int = 2, wholes: tuple[int, ...] = ()) -> Layouts:
    """Complete a graph of which these variables are split along these axes."""
    graph = read(text)
    variables = {op: Layout(SPLIT, axis) for op, axis in split.items()}
    folds = fold(graph, batched(graph)).folds
    ends = [Value(op) for op in wholes]
    return complete_layouts(Question(graph, range(len(graph)), count, variables, folds=folds, wholes=ends))


def check(text: str, split: dict[int, int], **options: object) -> Layouts:
    """Compare each line that says something with what the completion says."""
    found, graph = complete(text, split, **options), read(text)  # type: ignore[arg-type]
    lines = [line for line in textwrap.dedent(text).splitlines() if line.startswith("%")]
    for op, line in zip(graph.ops, lines, strict=True):
        crossing = [f"{each.value} {each.kind}" for each in found.reshards.get(op.index, ())]
        got = ", ".join([*(str(found.layout(value)) for value in op.values), *crossing])
        expected = line.partition("=>")[2].strip() or got
        assert f"%{op.index} {op.type} => {got}" == f"%{op.index} {op.type} => {expected}"
    return found


def crossing(found: Layouts) -> list[str]:
    """What crosses between devices."""
    return [f"{each.value} {each.kind}" for each in found.collectives]


PAIR = """
%0 = input x float32[?,16]
%1 = capture w1 resource[]                                 => split(1)
%2 = capture b1 resource[]                                 => split(0)
%3 = capture w2 resource[]                                 => split(0)
%4 = ReadVariableOp(%1) float32[16,64] stateful
%5 = MatMul(%0, %4) float32[?,64]                          => split(1)
%6 = ReadVariableOp(%2) float32[64] stateful
%7 = BiasAdd(%5, %6) float32[?,64]                         => split(1)
%8 = Relu(%7) float32[?,64]                                => split(1)
%9 = ReadVariableOp(%3) float32[64,16] stateful            => split(0)
%10 = MatMul(%8, %9) float32[?,16]                         => partial
%11 = Tanh(%10) float32[?,16]                              => whole, %10 all-reduce
%12 = MatMul(%11, %9) {transpose_b=true} float32[?,64]     => split(1)
%13 = ReluGrad(%12, %7) float32[?,64]                      => split(1)
%14 = MatMul(%8, %11) {transpose_a=true} float32[64,16]    => split(0)
%15 = BiasAddGrad(%13) float32[64]                         => split(0)
%16 = MatMul(%0, %13) {transpose_a=true} float32[16,64]    => split(1)
%17 = MatMul(%13, %4) {transpose_b=true} float32[?,16]     => partial
%18 = AssignSubVariableOp(%1, %16) stateful
%19 = AssignSubVariableOp(%2, %15) stateful
%20 = AssignSubVariableOp(%3, %14) stateful
"""
"""Two dense layers, forward, backward and update: the last line of the backward is what the layer before is given."""


def test_a_pair_of_dense_layers_needs_one_all_reduce_each_way() -> None:
    """From one annotation: the first by columns, so the second by rows, and what updates them in the same pieces."""
    found = check(PAIR, {1: 1}, wholes=(17,))
    assert [(str(each.value), each.kind) for each in found.collectives] == [
        ("%10", "all-reduce"),
        ("%17", "all-reduce"),
    ]
    assert [each.nbytes for each in found.collectives] == [count_bytes("all-reduce", 32 * 16 * 4, 2)] * 2
    assert not found.notes


SOFTMAX = """
%0 = input x float32[?,16]
%1 = input y int32[?]
%2 = capture w resource[]
%3 = ReadVariableOp(%2) float32[16,100] stateful
%4 = MatMul(%0, %3) float32[?,100]                                                => split(1)
%5 = SparseSoftmaxCrossEntropyWithLogits(%4, %1) float32[?], float32[?,100]       => whole, split(1)
%6 = Const {value=(0,)} int32[1]
%7 = Mean(%5, %6) float32[]                                                       => whole
%8 = MatMul(%0, %5:1) {transpose_a=true} float32[16,100]                          => split(1)
%9 = MatMul(%5:1, %3) {transpose_b=true} float32[?,16]                            => partial
%10 = AssignSubVariableOp(%2, %8) stateful
%11 = Const {value=(1,)} int32[]
%12 = ArgMax(%4, %11) int64[?]                                                    => whole
"""


def test_logits_of_a_split_classifier_are_never_whole() -> None:
    found = check(SOFTMAX, {2: 1}, count=3, wholes=(7, 9, 12))
    assert crossing(found) == ["%9 all-reduce"]
    assert found.together == {5, 12}


TABLE = """
%0 = input ids int32[?,7]
%1 = capture table resource[]
%2 = ResourceGather(%1, %0) {dtype="float32", batch_dims=0} float32[?,7,16] stateful
%3 = Tanh(%2) float32[?,7,16]
"""


@pytest.mark.parametrize(("axis", "layouts"), [(0, ["partial", "whole"]), (1, ["split(2)", "split(2)"])])
def test_a_table_by_rows_or_by_columns(axis: int, layouts: list[str]) -> None:
    found = complete(TABLE, {1: axis})
    assert [str(found.layout(Value(op))) for op in (2, 3)] == layouts


HEADS = """
%0 = input x float32[?,5,16]
%1 = capture w resource[]
%2 = ReadVariableOp(%1) float32[16,32] stateful
%3 = BatchMatMulV2(%0, %2) float32[?,5,32]           => split(2)
%4 = Const {value=(-1, 5, 8, 4)} int32[4]
%5 = Reshape(%3, %4) float32[?,5,8,4]                => split(2)
%6 = Const {value=(0, 2, 1, 3)} int32[4]
%7 = Transpose(%5, %6) float32[?,8,5,4]              => split(1)
%8 = BatchMatMulV2(%7, %7) {adj_y=true} float32[?,8,5,5]  => split(1)
%9 = Softmax(%8) float32[?,8,5,5]                    => split(1)
%10 = Reshape(%9, %11) float32[?,200]                => whole, %9 all-gather
%11 = Const {value=(-1, 200)} int32[2]
"""


def test_an_axis_is_followed_through_reshapes_in_units() -> None:
    """8 heads over 3 devices: what is made of the projection is cut where heads are."""
    graph = HEADS.replace("%10 = Reshape(%9, %11) float32[?,200]                => whole, %9 all-gather\n", "")
    found = complete(graph.replace("%11 =", "%10 ="), {1: 1}, count=3)
    assert str(found.layout(Value(8))) == "split(1)"


UNKNOWN_OP = """
%0 = input x float32[?,16]
%1 = capture w resource[]
%2 = ReadVariableOp(%1) float32[16,32] stateful
%3 = MatMul(%0, %2) float32[?,32]
%4 = NobodyKnows(%3) float32[?,32]                   => whole, %3 all-gather
%5 = Relu(%4) float32[?,32]                          => whole
"""


def test_what_no_rule_knows_is_run_whole_and_said() -> None:
    found = check(UNKNOWN_OP, {1: 1})
    assert found.notes == ("NobodyKnows is run whole on every device: no rule says what it does to axes ()",)

"""Where ops go that no scope stamped; what reads and writes one state between two stages lies in one of them."""

import pytest

from tests.unit.passes.programs import apart, cases, check, cut, program_of
from whale_nebula.ir.program import Program
from whale_nebula.passes.label import label


def said(program: Program):
    return lambda op: program.stages[program.labels[op]].key if op in program.labels else "-"


@pytest.mark.parametrize("text", cases("labels"))
def test_ops_without_a_scope_go_where_the_fewest_bytes_cross(text: str) -> None:
    check(text, said)


def test_what_an_earlier_call_said_stays() -> None:
    program = program_of("""
        stages a b
        %0 = input x float32[?,6]
        %1 = Greater(%0, %0) bool[?,6] @a
        %2 = Cast(%1) {SrcT="bool", DstT="float32"} float32[?,6]
        %3 = Mul(%2, %2) float32[?,6] @b
    """)
    assert label(program.graph, ["a", "b"])[2] == 1
    assert label(program.graph, ["a", "b"], fixed={2: 0})[2] == 0


def test_without_stages_there_are_no_labels() -> None:
    assert label(program_of("%0 = input x float32[?]\n%1 = Exp(%0) float32[?]").graph, []) == {}


GAP = """
stages a b
%0 = input x float32[?,8]
%1 = capture seed resource[]
%2 = Tanh(%0) float32[?,8] @a
%3 = ReadVariableOp(%1) int64[2] stateful
%4 = Const {value=(0, 1)} int64[2]
%5 = ReadVariableOp(%1) int64[2] stateful
%6 = AddV2(%5, %4) int64[2]
%7 = AssignVariableOp(%1, %6) ^%3 ^%5 stateful
%8 = Shape(%2) int32[2]
%9 = StatelessRandomNormalV2(%8, %3) float32[?,8]
%10 = Mul(%2, %9) float32[?,8]
%11 = Exp(%10) float32[?,8] @b
returns %11
"""
"""Noise between two stages: its seed is read, counted on, and drawn from."""


def test_with_micro_batches_and_in_several_processes_it_is_cut() -> None:
    for workers in (None, apart):
        plan = cut(GAP.replace("stages a b", "stages a b\nmicro 4"), *filter(None, [workers]))
        assert [str(boundary.value) for boundary in plan.boundaries] == ["%10"]
    assert plan.held == {"seed": ("a/0",)}


def test_what_the_forward_does_not_need_stays_where_it_was() -> None:
    """A counter of an optimizer is read for the updates of all stages; its labels are of no use."""
    program = program_of("""
        stages a b
        %0 = input x float32[?,8]
        %1 = capture wa resource[]
        %2 = capture count resource[]
        %3 = ReadVariableOp(%1) float32[8] stateful @a
        %4 = Mul(%0, %3) float32[?,8] @a
        %5 = Exp(%4) float32[?,8] @b
        %6 = ReadVariableOp(%2) float32[] stateful
        %7 = AssignSubVariableOp(%1, %6) stateful
        %8 = AssignAddVariableOp(%2, %6) stateful
    """)
    labels = label(program.graph, ["a", "b"])
    assert (labels[6], labels[7], labels[8]) == (0, 0, 1)

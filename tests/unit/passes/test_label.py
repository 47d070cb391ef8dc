"""The placement of unstamped ops; reads and writes of one state between two stages are in one of them."""

import pytest

from tests.unit.passes.programs import cases, check, program_of
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

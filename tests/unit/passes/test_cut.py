"""Fragments: what runs as one function, what it is fed, and what it gives."""

import pytest

from tests.unit.passes.examples import EXAMPLES
from tests.unit.passes.programs import GOLDEN, apart, check_golden, cut, cut_text


@pytest.mark.parametrize("name", EXAMPLES)
def test_alone(name: str) -> None:
    check_golden(f"{name}.alone", cut_text(EXAMPLES[name]))


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_worker_for_each_stage(name: str) -> None:
    check_golden(f"{name}.apart", cut_text(EXAMPLES[name], apart))


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem.partition(".")[0] for path in GOLDEN.glob("*.txt")} == set(EXAMPLES)


def test_a_backward_reads_variables_anew_instead_of_keeping_them() -> None:
    plan = cut("""
        stages a b
        %0 = input x float32[?,4]
        %1 = capture w resource[]
        %2 = ReadVariableOp(%1) float32[4,4] stateful @a
        %3 = Tanh(%0) float32[?,4] @a
        %4 = MatMul(%3, %2) float32[?,4] @a
        %5 = Const {value=(0, 1)} int32[2]
        %6 = Mean(%4, %5) float32[] @b
        request of %6 for %1
        %7 = Fill(%6) float32[?,4]
        flow b: %7 for %4
        %8 = feed arrival float32[?,4]
        arrival %8 of %4
        %9 = MatMul(%8, %2) float32[?,4]
        %10 = MatMul(%9, %3) float32[4,4]
        part a: %10 for %1
        end
        %11 = holder g float32[4,4]
        gradient %11 of %1
        %12 = AssignSubVariableOp(%1, %11) stateful ^%2
    """)
    backward = plan.phases[0].stages[0].backward
    assert backward is not None
    assert [plan.program.graph.ops[op].type for op in backward.ops] == ["ReadVariableOp", "MatMul", "MatMul"]


BEFORE_AND_AFTER = """
    stages a
    %0 = input x float32[?]
    %1 = capture count resource[]
    %2 = ReadVariableOp(%1) float32[] stateful @a
    %3 = Const {value=(1.0)} float32[]
    %4 = AssignAddVariableOp(%1, %3) stateful ^%2
    %5 = ReadVariableOp(%1) float32[] stateful @a ^%4
    %6 = Mul(%0, %2) float32[?] @a
    %7 = Mul(%6, %5) float32[?] @a
    returns %7
"""


def test_a_forward_that_reads_a_counter_before_and_after_gets_both_values() -> None:
    plan = cut(BEFORE_AND_AFTER)
    forward = plan.phases[0].stages[0].forward
    assert forward is not None
    assert plan.phases[0].prologue["local/0"].ops == (2, 3, 4)
    assert 2 not in forward.ops and 5 in forward.ops


def test_what_an_effect_of_the_prologue_gives_is_fed_and_not_made_again() -> None:
    plan = cut("""
        stages a
        %0 = input x float32[?]
        %1 = capture count resource[]
        %2 = StatefulPartitionedCall[add](%1) float32[] stateful
        %3 = Mul(%0, %2) float32[?] @a
        returns %3
        func add(%0)
          %0 = Placeholder resource[]
          %1 = Const {value=(1.0)} float32[]
          %2 = AssignAddVariableOp(%0, %1) stateful
          %3 = ReadVariableOp(%0) float32[] stateful ^%2
          return %3
    """)
    forward = plan.phases[0].stages[0].forward
    assert forward is not None and 2 not in forward.ops
    assert plan.phases[0].prologue["local/0"].ops == (2,)

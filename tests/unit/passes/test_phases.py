"""When each op runs: once before the micro-batches, for each of them, or once after; and in which phase."""

from collections.abc import Callable

import pytest

from tests.unit.passes.examples import DESCENT, TWO_STAGES
from tests.unit.passes.programs import cases, check, program_of
from whale_nebula.ir.program import Program
from whale_nebula.passes.phases import Parts, split_parts

KINDS = ("prologue", "forward", "update")


def said(program: Program) -> Callable[[int], str]:
    parts = split_parts(program)
    return lambda op: words(parts, op)


def words(parts: Parts, op: int) -> str:
    """`-` is any time: the op runs wherever it is read."""
    if op not in parts.part:
        return "-"
    phase, kind = divmod(parts.part[op], 3)
    return KINDS[kind] if parts.phases == 1 else f"{KINDS[kind]} {phase}"


@pytest.mark.parametrize("text", cases("phases"))
def test_each_op_has_its_time(text: str) -> None:
    check(text, said)


SEED = """
    stages a
    micro 3
    %0 = input x float32[?,4]
    %1 = capture seed resource[]
    %2 = ReadVariableOp(%1) int64[2] stateful @a
    %3 = Const {value=(1)} int64[]
    %4 = AddV2(%2, %3) int64[2] @a
    %5 = AssignVariableOp(%1, %4) stateful @a ^%2                => forward
    %6 = Shape(%0) int32[2] @a
    %7 = Const {value=(1)} int32[]
    %8 = StatelessRandomUniformV2(%6, %2, %7) float32[?,4] @a    => forward
    %9 = Mul(%0, %8) float32[?,4] @a                             => forward
"""


def test_a_seed_advances_with_each_micro_batch() -> None:
    assert split_parts(check(SEED, said)).forward_written == frozenset({1})


METRIC = """
    stages a
    micro 2
    %0 = input x float32[?]
    %1 = capture total resource[]
    %2 = capture w resource[]
    %3 = ReadVariableOp(%2) float32[] stateful @a
    %4 = Mul(%0, %3) float32[?] @a
    %5 = Const {value=(0)} int32[1]
    %6 = Sum(%4, %5) float32[]
    %7 = AssignAddVariableOp(%1, %6) stateful
    %8 = ReadVariableOp(%1) float32[] stateful ^%7
    returns %8
"""


def test_a_metric_of_merged_values_waits_for_the_update_of_several_micro_batches() -> None:
    program = program_of(METRIC)
    parts = split_parts(program, once=frozenset({7}))
    assert words(parts, 7) == "update"


def test_a_write_that_the_forward_reads_is_forward() -> None:
    program = check(
        """
        stages a
        %0 = input x float32[?]
        %1 = capture mean resource[]
        %2 = Mean(%0) float32[] @a                               => -
        %3 = AssignVariableOp(%1, %2) stateful @a                => forward
        %4 = ReadVariableOp(%1) float32[] stateful @a ^%3        => forward
        %5 = Sub(%0, %4) float32[?] @a                           => forward
        returns %5
        """,
        said,
    )
    assert split_parts(program).forward_written == frozenset({1})


@pytest.mark.parametrize(
    "effect", ["PrintV2(%5) stateful", "CheckNumerics(%5) float32[] stateful", "PyFunc(%5) float32[] stateful"]
)
def test_numbers_that_are_printed_or_checked_do_not_wait(effect: str) -> None:
    program = check(
        f"""
        stages a
        micro 2
        %0 = input x float32[?]
        %1 = Exp(%0) float32[?] @a
        %2 = Const {{value=(0)}} int32[1]
        %3 = Sum(%1, %2) float32[]                               => forward
        %4 = Const {{value=(2.0)}} float32[]
        %5 = Mul(%3, %4) float32[]                               => forward
        %6 = {effect}                                            => forward
        """,
        said,
    )
    assert split_parts(program).phases == 1


SECOND_TAPE = """
    stages a b
    %0 = input x float32[?]
    %1 = capture wa resource[]
    %2 = capture wb resource[]
    %3 = ReadVariableOp(%2) float32[] stateful @b
    %4 = Mul(%0, %3) float32[?] @b                               => forward 0
    %5 = Mean(%4) float32[]
    request of %5 for %2
    end
    %6 = holder g0 float32[]
    gradient %6 of %2
    %7 = AssignSubVariableOp(%2, %6) stateful ^%3                => update 0
    %8 = ReadVariableOp(%1) float32[] stateful @a
    %9 = Mul(%0, %8) float32[?] @a                               => forward 0
    %10 = ReadVariableOp(%2) float32[] stateful @b ^%7           => update 0
    %11 = Mul(%9, %10) float32[?] @b                             => forward 1
    %12 = Mean(%11) float32[]                                    => forward 1
    request of %12 for %1
    end
    %13 = holder g1 float32[]
    gradient %13 of %1
    %14 = AssignSubVariableOp(%1, %13) stateful                  => update 1
"""


def test_a_second_tape_after_the_first_update_is_a_second_phase() -> None:
    program = check(SECOND_TAPE, said)
    assert split_parts(program).phase_of == (0, 1)


def test_two_tapes_and_then_two_applies_are_one_phase() -> None:
    program = check(
        """
        stages a
        %0 = input x float32[?]
        %1 = capture w resource[]
        %2 = ReadVariableOp(%1) float32[] stateful @a
        %3 = Mul(%0, %2) float32[?] @a                           => forward
        %4 = Mean(%3) float32[]
        request of %4 for %1
        end
        %5 = holder g0 float32[]
        gradient %5 of %1
        %6 = Square(%3) float32[?] @a                            => forward
        %7 = Mean(%6) float32[]
        request of %7 for %1
        end
        %8 = holder g1 float32[]
        gradient %8 of %1
        %9 = AssignSubVariableOp(%1, %5) stateful ^%2            => update
        %10 = AssignSubVariableOp(%1, %8) stateful ^%9           => update
        """,
        said,
    )
    assert split_parts(program).phase_of == (0, 0)


def test_a_read_may_not_run_after_a_write_that_followed_it() -> None:
    program = program_of("""
        stages a
        %0 = input x float32[?]
        %1 = capture rate resource[]
        %2 = ReadVariableOp(%1) float32[] stateful
        %3 = Neg(%2) float32[]
        %4 = AssignVariableOp(%1, %3) stateful ^%2
        %5 = ReadVariableOp(%1) float32[] stateful @a ^%4
        %6 = Mul(%0, %5) float32[?] @a
        returns %2, %6
    """)
    parts = split_parts(program)
    assert words(parts, 4) == "prologue"
    assert parts.latest == {2: parts.part[4]}


def test_values_of_inputs_alone_are_pure() -> None:
    program = program_of("""
        stages a
        %0 = input x float32[?]
        %1 = capture w resource[]
        %2 = Shape(%0) int32[1]
        %3 = Cast(%2) float32[1]
        %4 = ReadVariableOp(%1) float32[1] stateful
        %5 = Mul(%3, %4) float32[1]
    """)
    assert split_parts(program).pure == frozenset({0, 2, 3})


def test_rows_that_a_stage_makes_of_inputs_alone_stay_with_the_stage() -> None:
    program = check(
        """
        stages a
        %0 = input x float32[?]
        %1 = Exp(%0) float32[?] @a                               => forward
        %2 = Const {value=(0)} int32[1]
        %3 = Sum(%0, %2) float32[] @a                            => -
        %4 = Exp(%0) float32[?]                                  => -
        """,
        said,
    )
    assert split_parts(program).pure == frozenset({0, 3, 4})


def test_gradients_of_two_stages_are_one_phase() -> None:
    parts = split_parts(program_of(TWO_STAGES + DESCENT))
    assert parts.phases == 1
    assert {words(parts, op) for op in parts.effects} == {"update"}

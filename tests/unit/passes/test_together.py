"""What reads and writes one state between two stages lies in one of them."""

from tests.unit.passes.programs import apart, check, cut, program_of
from tests.unit.passes.test_label import said
from whale_nebula.passes.label import label

GAP = """
stages a b
%0 = input x float32[?,8]
%1 = capture seed resource[]
%2 = Tanh(%0) float32[?,8] @a
%3 = ReadVariableOp(%1) int64[2] stateful               => a
%4 = Const {value=(0, 1)} int64[2]
%5 = ReadVariableOp(%1) int64[2] stateful               => a
%6 = AddV2(%5, %4) int64[2]                             => a
%7 = AssignVariableOp(%1, %6) ^%3 ^%5 stateful          => a
%8 = Shape(%2) int32[2]                                 => a
%9 = StatelessRandomNormalV2(%8, %3) float32[?,8]       => a
%10 = Mul(%2, %9) float32[?,8]                          => a
%11 = Exp(%10) float32[?,8] @b
returns %11
"""
"""Noise between two stages: its seed is read, counted on, and drawn from."""


def test_a_seed_is_counted_on_where_it_is_drawn_from() -> None:
    check(GAP, said)


def test_with_micro_batches_and_in_several_processes_it_is_cut() -> None:
    for workers in (None, apart):
        plan = cut(GAP.replace("stages a b", "stages a b\nmicro 4"), *filter(None, [workers]))
        assert [str(boundary.value) for boundary in plan.boundaries] == ["%10"]
    assert plan.held == {"seed": ("a/0",)}


def test_one_generator_in_two_gaps_is_drawn_from_in_the_first() -> None:
    check(
        """
        stages a b c
        %0 = input x float32[?,8]
        %1 = capture seed resource[]
        %2 = Tanh(%0) float32[?,8] @a
        %3 = ReadVariableOp(%1) int64[2] stateful               => b
        %4 = AssignAddVariableOp(%1, %3) stateful               => b
        %5 = StatelessRandomNormalV2(%3) float32[8]             => b
        %6 = Mul(%2, %5) float32[?,8]                           => b
        %7 = Exp(%6) float32[?,8] @b
        %8 = ReadVariableOp(%1) int64[2] ^%4 stateful           => b
        %9 = AssignAddVariableOp(%1, %8) stateful               => b
        %10 = StatelessRandomNormalV2(%8) float32[8]            => c
        %11 = Mul(%7, %10) float32[?,8] @c
        """,
        said,
    )


def test_an_average_that_is_read_after_its_write_stays_with_it() -> None:
    check(
        """
        stages a b
        %0 = input x float32[?,8]
        %1 = capture average resource[]
        %2 = Tanh(%0) float32[?,8] @a
        %3 = Const {value=(0)} int32[1]
        %4 = Mean(%2, %3) float32[8]                            => a
        %5 = AssignVariableOp(%1, %4) stateful                  => a
        %6 = ReadVariableOp(%1) float32[8] ^%5 stateful         => a
        %7 = Sub(%2, %6) float32[?,8] @b
        """,
        said,
    )


def test_a_write_that_is_made_of_a_later_stage_stays_there() -> None:
    check(
        """
        stages a b
        %0 = input x float32[?,8]
        %1 = capture state resource[]
        %2 = ReadVariableOp(%1) float32[8] stateful             => a
        %3 = Mul(%0, %2) float32[?,8] @a
        %4 = Exp(%3) float32[8] @b
        %5 = AssignVariableOp(%1, %4) stateful                  => b
        """,
        said,
    )


def test_a_variable_of_a_stage_decides_for_itself() -> None:
    check(
        """
        stages a b
        %0 = input x float32[?,8]
        %1 = capture seed resource[]
        %2 = Tanh(%0) float32[?,8] @a
        %3 = ReadVariableOp(%1) int64[2] stateful @b
        %4 = AssignAddVariableOp(%1, %3) stateful               => b
        %5 = StatelessRandomNormalV2(%3) float32[8] @b
        %6 = Mul(%2, %5) float32[?,8] @b
        """,
        said,
    )


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

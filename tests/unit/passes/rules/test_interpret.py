"""What comes from inputs alone is fed from the whole batch, and sums are grown, but only where that is
right."""

import pytest

from tests.unit.passes.rules.states import batched, check, folding, read
from whale_nebula.passes.rules import Edge, fold
from whale_nebula.passes.rules.fixes import Recount
from whale_nebula.spec import Value

MASKED = """
    %0 = input x float32[?,4]
    %1 = input mask float32[?,4]
    %2 = capture w float32[4]
    %3 = Mul(%0, %2) float32[?,4]
    %4 = Mul(%3, %1) float32[?,4]                                   => rows(0)
    %5 = Const {value=(0, 1)} int32[2]
    %6 = Sum(%4, %5) float32[]                                      => sum
    %7 = Sum(%1, %5) float32[]                                      => whole
"""


def test_a_denominator_of_inputs_alone_is_fed() -> None:
    found = check(MASKED + "    %8 = RealDiv(%6, %7) float32[]                                  => sum")
    assert found.wholes == (Value(7),)


def test_a_denominator_that_a_variable_takes_part_in_is_not() -> None:
    found = check(
        MASKED.replace("Sum(%1, %5)", "Sum(%3, %5)").replace("whole", "sum")
        + """
    %8 = RealDiv(%6, %7) float32[]                                  => after
    """,
        targets=[8],
    )
    assert (found.wholes, found.grows) == ((), ())


def test_functions_of_inputs_alone_are_put_off_until_something_else_reads_them() -> None:
    found = check("""
        %0 = input mask float32[?,4]
        %1 = capture w float32[]
        %2 = Const {value=(0, 1)} int32[2]
        %3 = Sum(%0, %2) float32[]                                      => sum of inputs
        %4 = Const {value=(1.0)} float32[]
        %5 = Maximum(%3, %4) float32[]                                  => after of inputs
        %6 = Sqrt(%5) float32[]                                         => whole
        %7 = RealDiv(%1, %6) float32[]                                  => whole
    """)
    assert found.wholes == (Value(6),)


def test_inputs_may_be_measured_by_their_own_batch() -> None:
    found = check("""
        %0 = input x float32[?,4]
        %1 = Const {value=(0)} int32[1]
        %2 = Mean(%0, %1) float32[4]                                    => whole
        %3 = Sub(%0, %2) float32[?,4]                                   => rows(0) of inputs
        %4 = Max(%3, %1) float32[4]                                     => whole
        %5 = RealDiv(%3, %4) float32[?,4]                               => rows(0) of inputs
    """)
    assert found.wholes == (Value(2), Value(4))


def test_what_is_fed_is_fed_to_all_who_read_it_before_or_after() -> None:
    found = check("""
        %0 = input mask float32[?]
        %1 = capture w float32[]
        %2 = Const {value=(0)} int32[1]
        %3 = Sum(%0, %2) float32[]                                      => whole
        %4 = Neg(%3) float32[]                                          => whole
        %5 = RealDiv(%1, %3) float32[]                                  => whole
    """)
    assert found.wholes == (Value(3),)


def test_what_is_only_written_into_a_variable_may_be_a_sum() -> None:
    found = check("""
        %0 = input x float32[?]
        %1 = capture total resource[]
        %2 = Const {value=(0)} int32[1]
        %3 = Sum(%0, %2) float32[]                                      => sum of inputs
        %4 = AssignAddVariableOp(%1, %3) stateful
        %5 = ReadVariableOp(%1) float32[] stateful                      => whole
        %6 = AddV2(%5, %3) float32[]                                    => after
        %7 = AssignVariableOp(%1, %6) stateful
    """)
    assert found.wholes == ()


def test_counts_that_shapes_are_made_of_stay_those_of_the_micro_batch() -> None:
    found = check("""
        %0 = input x float32[?,4]
        %1 = Shape(%0) int32[2]
        %2 = capture w float32[]
        %3 = Fill(%1, %2) float32[?,4]                                  => rows(0)
    """)
    assert found.wholes == ()


LOSSES = """
    %0 = input x float32[?,4]
    %1 = capture w float32[4]
    %2 = Mul(%0, %1) float32[?,4]
    %3 = Const {value=(0, 1)} int32[2]
    %4 = Sum(%2, %3) float32[]                                      => sum
    %5 = Mean(%2, %3) float32[]                                     => mean
"""


def test_sums_grow_to_means_where_they_are_added_in_what_is_differentiated() -> None:
    text = LOSSES + "    %6 = AddV2(%4, %5) float32[]                                    => STATE"
    assert check(text.replace("STATE", "mean"), targets=[6]).grows == (Edge(6, 0, Value(4)),)
    assert check(text.replace("STATE", "after")).grows == ()


def test_counts_grow_only_where_nothing_else_helps() -> None:
    text = (
        LOSSES
        + """
    %6 = Size(%2) int32[]
    %7 = Cast(%6) float32[]                                         => count
    %8 = RealDiv(%4, %7) float32[]                                  => mean
    %9 = Const {value=(8.0)} float32[]
    %10 = Maximum(%7, %9) float32[]                                 => whole
    %11 = RealDiv(%4, %10) float32[]                                => sum
    """
    )
    assert check(text, targets=[8, 11]).grows == (Edge(10, 0, Value(7)),)


def test_what_was_grown_already_is_not_grown_again() -> None:
    found = check(
        LOSSES
        + """
    %6 = feed grow float32[]                                        => inverse
    %7 = Mul(%4, %6) float32[]                                      => mean
    %8 = AddV2(%7, %5) float32[]                                    => mean
    %9 = feed share float32[]                                       => count
    %10 = Mul(%8, %9) float32[]                                     => sum
    """,
        targets=[10],
    )
    assert (found.wholes, found.grows) == ((), ())


def test_ops_that_are_left_out_are_wholes_to_their_readers() -> None:
    found = folding(LOSSES + "    %6 = Exp(%4) float32[]\n    %7 = Exp(%6) float32[]", skip=[6])
    assert str(found.of(Value(6))) == "whole"
    assert str(found.of(Value(7))) == "whole"


def test_holders_and_captures_are_wholes() -> None:
    check("""
        %0 = holder gradient float32[4,4]                               => whole
        %1 = capture w resource[]                                       => whole
        %2 = Placeholder float32[?]                                     => whole
        %3 = input whole float32[4]                                     => whole
        %4 = Mul(%0, %3) float32[4,4]                                   => whole
    """)


SHAPED_BY_THE_MODEL = """
    %0 = input mask float32[?,1]
    %1 = input z float32[?,4]
    %2 = capture w float32[4,4]
    %3 = MatMul(%1, %2) float32[?,4]
    %4 = Shape(%3) int32[2]
    %5 = Const {value=(1,)} float32[]
    %6 = Fill(%4, %5) float32[?,4]
    %7 = Mul(%0, %6) float32[?,4]
    %8 = Const {value=(0, 1)} int32[2]
    %9 = Sum(%7, %8) float32[]
    %10 = Mul(%3, %7) float32[?,4]
    %11 = Sum(%10, %8) float32[]
    %12 = RealDiv(%11, %9) float32[]
"""


def test_what_has_only_its_shape_of_the_model_counts_the_rows_of_the_input_that_it_meets() -> None:
    graph = read(SHAPED_BY_THE_MODEL)
    found = fold(graph, batched(graph), targets=[Value(12)], recounting=True)
    assert found.recounts == (Recount(Edge(6, 0, Value(4)), Value(0), 0, (None, 4)),)
    assert found.wholes == (Value(9),)
    assert fold(graph, batched(graph), targets=[Value(12)]).recounts == ()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("%9 = Sum(%7, %8)", "%9 = Mean(%6, %8)"),  # a mean of ones alone: it meets no input
        ("%3 = MatMul(%1, %2) float32[?,4]", "%3 = MatMul(%1, %2) float32[?,?]"),  # not all sizes are known
    ],
)
def test_nothing_is_recounted_where_it_would_not_help_or_cannot_be_known(before: str, after: str) -> None:
    graph = read(SHAPED_BY_THE_MODEL.replace(before, after))
    assert fold(graph, batched(graph), targets=[Value(12)], recounting=True).recounts == ()

"""Where ops go that no scope stamped."""

from tests.unit.passes.examples import DENSE_TANH
from tests.unit.passes.programs import check, program_of
from whale_nebula.ir.program import Program
from whale_nebula.passes.label import label

PENALISED = (
    DENSE_TANH
    + """\
%6 = Mean(%4, %5) float32[]                        => b
%7 = ReadVariableOp(%1) float32[4,8] stateful      => a
"""
)


def said(program: Program):
    return lambda op: program.stages[program.labels[op]].key if op in program.labels else "-"


def test_a_mask_is_widened_where_it_is_read_so_that_fewer_bytes_cross() -> None:
    check(
        """
        stages a b
        %0 = input x float32[?,6]
        %1 = Greater(%0, %0) bool[?,6] @a
        %2 = Cast(%1) {SrcT="bool", DstT="float32"} float32[?,6]  => b
        %3 = Exp(%0) float32[?,6] @b
        %4 = Mul(%3, %2) float32[?,6] @b
        """,
        said,
    )


def test_a_sum_is_taken_where_its_terms_are_so_that_fewer_bytes_cross() -> None:
    check(
        """
        stages a b
        %0 = input x float32[?,6,64]
        %1 = Exp(%0) float32[?,6,64] @a
        %2 = Const {value=(2)} int32[1]
        %3 = Sum(%1, %2) float32[?,6]  => a
        %4 = Exp(%3) float32[?,6] @b
        """,
        said,
    )


def test_a_penalty_goes_to_the_owner_of_its_variable_and_crosses_as_a_scalar() -> None:
    square = """\
%8 = Square(%7) float32[4,8]                       => a
%9 = Sum(%8, %5) float32[]                         => a
%10 = AddV2(%6, %9) float32[]                      => b
"""
    check(PENALISED + square, said)


def test_a_variable_that_one_op_of_two_stages_reads_stays_with_its_owner() -> None:
    check(
        """
        stages a b
        %0 = input x float32[?,4]
        %1 = capture w resource[]
        %2 = ReadVariableOp(%1) float32[4] stateful @a
        %3 = Mul(%0, %2) float32[?,4] @a
        %4 = Exp(%3) float32[?,4] @b
        %5 = ReadVariableOp(%1) float32[4] stateful        => a
        %6 = Mul(%4, %5) float32[?,4]                      => b
        """,
        said,
    )


def test_what_is_made_of_inputs_alone_goes_to_its_reader() -> None:
    check(
        """
        stages a b
        %0 = input x float32[?,4]
        %1 = NotEqual(%0, %0) bool[?,4]                    => b
        %2 = Cast(%1) float32[?,4]                         => b
        %3 = Exp(%0) float32[?,4] @a
        %4 = Mul(%3, %2) float32[?,4] @b
        """,
        said,
    )


def test_what_several_stages_read_goes_to_the_first_of_them() -> None:
    check(
        """
        stages a b c
        %0 = input x float32[?,4]
        %1 = Neg(%0) float32[?,4]                          => a
        %2 = Exp(%1) float32[?,4] @a
        %3 = Mul(%2, %1) float32[?,4] @b
        %4 = Mul(%3, %1) float32[?,4] @c
        """,
        said,
    )


def test_what_nobody_reads_stays_where_its_inputs_are() -> None:
    check(
        """
        stages a b
        %0 = input x float32[?,4]
        %1 = Exp(%0) float32[?,4] @a
        %2 = Neg(%1) float32[?,4]                          => a
        %3 = Exp(%1) float32[?,4] @b
        """,
        said,
    )


def test_inputs_captures_constants_and_backwards_have_no_stage() -> None:
    check(
        """
        stages a b
        %0 = input x float32[?,4]                          => -
        %1 = capture w resource[]                          => -
        %2 = Const {value=(0, 1)} int32[2]                 => -
        %3 = Exp(%0) float32[?,4] @b                       => b
        %4 = Mean(%3, %2) float32[]                        => b
        request of %4 for %1
        %5 = OnesLike(%4) float32[]                        => -
        end
        %6 = holder g float32[4]                           => -
        gradient %6 of %1
        """,
        said,
    )


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


def test_a_variable_of_a_later_stage_is_read_early_where_an_early_stage_needs_it() -> None:
    """A shared layer, called once in no scope and once in the second stage: both stages hold its variable."""
    check(
        """
        stages a b
        %0 = input x float32[?,4]
        %1 = capture w resource[]
        %2 = ReadVariableOp(%1) float32[4,4] stateful      => a
        %3 = MatMul(%0, %2) float32[?,4]                   => a
        %4 = Exp(%3) float32[?,4] @a
        %5 = ReadVariableOp(%1) float32[4,4] stateful @b
        %6 = MatMul(%4, %5) float32[?,4] @b
        """,
        said,
    )


def test_penalties_are_scaled_where_their_variables_are() -> None:
    scaled = """\
%8 = L2Loss(%7) float32[]                          => a
%9 = Const {value=(0.01)} float32[]
%10 = Mul(%9, %8) float32[]                        => a
%11 = AddV2(%6, %10) float32[]                     => b
"""
    check(PENALISED + scaled, said)

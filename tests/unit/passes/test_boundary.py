"""What crosses from stage to stage: which tensors, to whom, how coded, and whether gradients return."""

from tests.unit.passes.examples import CUT_BATCH, TWO_STAGES
from tests.unit.passes.programs import cut
from whale_nebula.ir.cut import Boundary


def boundaries(text: str) -> tuple[Boundary, ...]:
    return cut(text).boundaries


def test_what_only_the_backward_of_another_stage_reads_crosses_too() -> None:
    text = TWO_STAGES.replace(
        "%5 = MatMul(%0, %4) float32[?,8] @a",
        "%5 = MatMul(%0, %4) float32[?,8] @a\n%50 = Neg(%5) float32[?,2] @a",
    )
    text = text.replace("%12 = Mul(%11, %8)", "%12 = Mul(%50, %8)")
    assert [b.value.op for b in boundaries(text)] == [5, 6]


def test_else_the_one_around_the_consumer_counts() -> None:
    (only,) = boundaries(CUT_BATCH.replace(" compress=0", ""))
    assert (only.codec, only.backward_codec) == ("bf16", "bf16")


def test_truth_values_are_sent_in_a_bit_each() -> None:
    (only,) = boundaries("""
        stages a b
        codecs fp16 fp16
        %0 = input x float32[?]
        %1 = capture w resource[]
        %2 = ReadVariableOp(%1) float32[] stateful @a
        %3 = Greater(%0, %2) bool[?] @a compress=0
        %4 = LogicalNot(%3) bool[?] @b
        returns %4
    """)
    assert only.codec == "bits"


def test_layouts_of_several_micro_batches() -> None:
    plan = cut("""
        stages a b
        micro 2
        %0 = input x float32[?,4]
        %1 = capture w resource[]
        %2 = ReadVariableOp(%1) float32[4] stateful @a
        %3 = Mul(%0, %2) float32[?,4] @a
        %4 = Const {value=(0)} int32[1]
        %5 = Sum(%3, %4) float32[4] @a
        %6 = Neg(%2) float32[4] @a
        %7 = AddV2(%5, %5) float32[4] @b
        %8 = AddV2(%3, %6) float32[?,4] @b
        returns %7, %8
    """)
    assert {b.value.op: b.layout for b in plan.boundaries} == {3: "rows", 5: "partial", 6: "whole"}

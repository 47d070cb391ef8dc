"""What crosses from stage to stage: which tensors, to whom, how coded, and whether gradients return."""

from tests.unit.passes.examples import CUT_BATCH, FROZEN, PENALTY, SKIP, TIED, TWO_STAGES
from tests.unit.passes.programs import cut
from whale_nebula.ir.cut import Boundary


def boundaries(text: str) -> tuple[Boundary, ...]:
    return cut(text).boundaries


def test_a_skip_over_a_stage_is_one_boundary_with_two_destinations() -> None:
    skipping, plain = boundaries(SKIP)
    assert (skipping.source, skipping.destinations) == (0, (1, 2))
    assert (plain.source, plain.destinations) == (1, (2,))


def test_a_penalty_crosses_as_a_scalar() -> None:
    plan = cut(PENALTY)
    assert [str(plan.program.graph.spec(b.value)) for b in plan.boundaries] == ["float32[?,8]", "float32[]"]


def test_what_only_the_backward_of_another_stage_reads_crosses_too() -> None:
    text = TWO_STAGES.replace(
        "%5 = MatMul(%0, %4) float32[?,8] @a",
        "%5 = MatMul(%0, %4) float32[?,8] @a\n%50 = Neg(%5) float32[?,2] @a",
    )
    text = text.replace("%12 = Mul(%11, %8)", "%12 = Mul(%50, %8)")
    assert [b.value.op for b in boundaries(text)] == [5, 6]


def test_a_frozen_part_gets_no_gradient() -> None:
    (only,) = boundaries(FROZEN)
    assert not only.backward


def test_a_tied_variable_is_no_boundary_and_has_parts_in_two_stages() -> None:
    plan = cut(TIED)
    assert [(part.stage, len(part.values)) for part in plan.program.requests[0].parts] == [(1, 1), (0, 2)]
    assert [plan.program.graph.ops[b.value.op].type for b in plan.boundaries] == ["ResourceGather"]


def test_the_codec_around_the_producer_counts() -> None:
    (only,) = boundaries(CUT_BATCH)
    assert (only.codec, only.backward_codec) == ("fp16", "none")


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


def test_slots_are_numbered_in_the_order_of_the_trace() -> None:
    assert [b.slot for b in boundaries(SKIP)] == [0, 1]

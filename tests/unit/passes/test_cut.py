"""Cuts: fragments and what they are fed, what crosses between stages and how, and which worker runs what."""

from typing import Any

import pytest

from tests.golden.files import FOLDER, check_golden
from tests.unit.passes.examples import CUT_BATCH, DESCENT, EXAMPLES, ONCE, SKIP, TWO_STAGES
from tests.unit.passes.programs import alone, apart, cut, cut_text, program_of
from whale_nebula.errors import BatchCoupledError
from whale_nebula.ir.cut import Boundary, Worker
from whale_nebula.ir.program import Program
from whale_nebula.passes.pipeline import cut_program


@pytest.mark.parametrize("workers", [alone, apart], ids=["alone", "apart"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_cut_is_the_golden_one(name: str, workers: Any, request: pytest.FixtureRequest) -> None:
    check_golden(request, f"passes/{name}.{workers.__name__}.txt", cut_text(EXAMPLES[name], workers))


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem.partition(".")[0] for path in (FOLDER / "passes").iterdir()} == set(EXAMPLES)


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


def two_of_three(program: Program) -> list[Worker]:
    return [Worker("a/0", "a", (0,)), Worker("npu/0", "npu", (1, 2))]


def test_every_stage_is_a_virtual_device_on_a_worker() -> None:
    for workers, names in {
        alone: ["local/0"] * 3,
        apart: ["a/0", "b/0", "c/0"],
        two_of_three: ["a/0", "npu/0", "npu/0"],
    }.items():
        plan = cut(SKIP, workers)
        assert [(d.stage, d.worker) for d in plan.devices] == list(enumerate(names))


def test_fragments_of_a_stage_are_its_workers() -> None:
    plan = cut(SKIP, two_of_three)
    owners = {piece.stage: {f.worker for f in (piece.forward, piece.backward) if f} for piece in plan.phases[0].stages}
    assert owners == {0: {"a/0"}, 1: {"npu/0"}, 2: {"npu/0"}}


def test_the_order_of_the_stages_is_not_that_of_the_workers() -> None:
    def swapped(program: Program) -> list[Worker]:
        return [Worker("b/0", "b", (1,)), Worker("a/0", "a", (0,))]

    plan = cut(TWO_STAGES + DESCENT, swapped)
    assert plan.held == {"wa": ("a/0",), "wb": ("b/0",)}
    assert {name: len(rounds[0].ops) for name, rounds in plan.phases[0].updates.items()} == {
        "a/0": 1,
        "b/0": 1,
    }


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_worker_without_a_stage_is_given_the_results_wherever_its_name_stands(at: int) -> None:
    def one_idle(program: Program) -> list[Worker]:
        found = apart(program)
        return [*found[:at], Worker("idle/0", "idle", ()), *found[at:]]

    plan = cut(TWO_STAGES + DESCENT, one_idle)
    [loss] = plan.program.returns
    [crossing] = [each for each in plan.phases[-1].crossings if each.value == loss]
    assert crossing.destinations == ("a/0", "idle/0")


def test_with_one_micro_batch_nothing_is_merged_and_nothing_computed_beforehand() -> None:
    plan = cut(CUT_BATCH.replace("micro 2", "micro 1"))
    assert set(plan.merges.values()) == {"only"} and plan.whole == {}


COUPLED = """
    stages a
    micro 2
    %0 = input x float32[?,4]
    %1 = capture w resource[]
    %2 = ReadVariableOp(%1) float32[4] stateful @a
    %3 = Mul(%0, %2) float32[?,4] @a
    %4 = MatMul(%3, %3) {transpose_b=true} float32[?,?] @a "negatives"
    %5 = Const {value=(0, 1)} int32[2]
    %6 = Mean(%4, %5) float32[] @a
    returns %6
"""


def test_a_value_that_couples_rows_is_refused_at_its_line() -> None:
    program = program_of(COUPLED)
    with pytest.raises(BatchCoupledError) as caught:
        cut_program(program, alone(program), lambda op: f"train.py:{op}")
    assert "train.py:4" in caught.value.where
    assert "nb.pipeline(micro_batch=1)" in caught.value.mend


def test_one_micro_batch_may_couple_its_rows() -> None:
    assert len(cut(COUPLED.replace("micro 2", "micro 1")).phases) == 1


def test_what_the_forward_writes_is_named_so_that_it_can_be_put_back() -> None:
    assert cut(ONCE).forward_written == ("count",)
    assert cut(TWO_STAGES + "returns %10").forward_written == ()

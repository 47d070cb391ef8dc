"""Cuts: fragments and their inputs, boundaries between stages, and the assignment to workers."""

from typing import Any

import pytest

from tests.golden.files import FOLDER, check_golden
from tests.unit.passes.examples import DESCENT, EXAMPLES, ONCE, SKIP, TWO_STAGES
from tests.unit.passes.programs import alone, apart, cases, cut, cut_text, program_of
from whale_nebula.errors import BatchCoupledError
from whale_nebula.ir.cut import Worker
from whale_nebula.ir.program import Program
from whale_nebula.passes.pipeline import cut_program

CUTS = {**EXAMPLES, **{case.id.replace(" ", "_"): case.values[0] for case in cases("cuts")}}


@pytest.mark.parametrize("workers", [alone, apart], ids=["alone", "apart"])
@pytest.mark.parametrize("name", CUTS)
def test_a_cut_is_the_golden_one(name: str, workers: Any, request: pytest.FixtureRequest) -> None:
    check_golden(request, f"passes/{name}.{workers.__name__}.txt", cut_text(CUTS[name], workers))


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem.partition(".")[0] for path in (FOLDER / "passes").iterdir()} == set(CUTS)


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

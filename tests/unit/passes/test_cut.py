"""Cuts: fragments and their inputs, boundaries between stages, and the assignment to workers."""

import pytest

from tests.golden.files import FOLDER, check_golden
from tests.unit.passes.examples import DESCENT, EXAMPLES, ONCE, SKIP, TWO_STAGES
from tests.unit.passes.programs import (
    assign_one_worker,
    assign_worker_per_stage,
    compile_text,
    format_cut,
    list_cases,
    parse_program,
)
from whale_nebula.errors import BatchCoupledError
from whale_nebula.ir.cut import Worker
from whale_nebula.ir.program import Program
from whale_nebula.passes.pipeline import cut_program

CUTS = {**EXAMPLES, **{case.id.replace(" ", "_"): case.values[0] for case in list_cases("cuts")}}
WORKERS = {"alone": assign_one_worker, "apart": assign_worker_per_stage}
"""Assignments of stages to workers, by the name that golden files have."""


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", CUTS)
def test_cut_matches_the_golden_file(name: str, workers: str, request: pytest.FixtureRequest) -> None:
    check_golden(request, f"passes/{name}.{workers}.txt", format_cut(CUTS[name], WORKERS[workers]))


def test_cut_golden_files_all_belong_to_a_case() -> None:
    assert {path.stem.partition(".")[0] for path in (FOLDER / "passes").iterdir()} == set(CUTS)


def assign_last_two_to_one_worker(program: Program) -> list[Worker]:
    return [Worker("a/0", "a", (0,)), Worker("npu/0", "npu", (1, 2))]


def test_stage_is_a_virtual_device_on_its_worker() -> None:
    for workers, names in {
        assign_one_worker: ["local/0"] * 3,
        assign_worker_per_stage: ["a/0", "b/0", "c/0"],
        assign_last_two_to_one_worker: ["a/0", "npu/0", "npu/0"],
    }.items():
        plan = compile_text(SKIP, workers)
        assert [(d.stage, d.worker) for d in plan.devices] == list(enumerate(names))


def test_fragments_of_a_stage_run_on_its_worker() -> None:
    plan = compile_text(SKIP, assign_last_two_to_one_worker)
    owners = {piece.stage: {f.worker for f in (piece.forward, piece.backward) if f} for piece in plan.phases[0].stages}
    assert owners == {0: {"a/0"}, 1: {"npu/0"}, 2: {"npu/0"}}


def test_worker_order_may_differ_from_stage_order() -> None:
    def assign_in_reverse(program: Program) -> list[Worker]:
        return [Worker("b/0", "b", (1,)), Worker("a/0", "a", (0,))]

    plan = compile_text(TWO_STAGES + DESCENT, assign_in_reverse)
    assert plan.variable_workers == {"wa": ("a/0",), "wb": ("b/0",)}
    assert {name: len(rounds[0].ops) for name, rounds in plan.phases[0].updates.items()} == {
        "a/0": 1,
        "b/0": 1,
    }


@pytest.mark.parametrize("at", [0, 1, 2])
def test_worker_without_a_stage_receives_the_results(at: int) -> None:
    def add_idle_worker(program: Program) -> list[Worker]:
        found = assign_worker_per_stage(program)
        return [*found[:at], Worker("idle/0", "idle", ()), *found[at:]]

    plan = compile_text(TWO_STAGES + DESCENT, add_idle_worker)
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


def test_coupled_rows_are_refused_with_their_line() -> None:
    program = parse_program(COUPLED)
    with pytest.raises(BatchCoupledError) as caught:
        cut_program(program, assign_one_worker(program), lambda op: f"train.py:{op}")
    assert "train.py:4" in caught.value.where
    assert "nb.pipeline(micro_batch=1)" in caught.value.mend


def test_coupled_rows_are_accepted_in_one_micro_batch() -> None:
    assert len(compile_text(COUPLED.replace("micro 2", "micro 1")).phases) == 1


def test_variables_written_by_the_forward_are_listed() -> None:
    assert compile_text(ONCE).forward_written == ("count",)
    assert compile_text(TWO_STAGES + "returns %10").forward_written == ()

"""Stages are mapped to workers: all to one, one to each, or several to one."""

import pytest

from tests.unit.passes.examples import DESCENT, SKIP, TWO_STAGES
from tests.unit.passes.programs import alone, apart, cut
from whale_nebula.ir.cut import Worker
from whale_nebula.ir.program import Program


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

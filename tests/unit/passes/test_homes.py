"""The workers that hold a variable and can compute the inputs of an update; replicas on workers, and their speeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.passes.examples import GLOBAL_NORM, TWO_STAGES
from tests.unit.passes.programs import check, program_of
from whale_nebula.ir.cut import Cut
from whale_nebula.ir.graph import Graph
from whale_nebula.ir.layout import Layouts
from whale_nebula.ir.program import Pipeline, Program, Stage
from whale_nebula.passes.owners import Homes
from whale_nebula.passes.phases import SMALL, split_parts
from whale_nebula.passes.replicas import devices, orders, speeds, spread


def homes(program: Program) -> Homes:
    """Each stage on a worker of its own."""
    return Homes(program, split_parts(program), [frozenset({stage}) for stage in range(len(program.stages))])


def said(program: Program) -> Callable[[int], str]:
    """The stages whose workers can compute an op, and the rounds in which they do."""
    found, keys = homes(program), [stage.key for stage in program.stages]

    def say(op: int) -> str:
        if found.of(op) == found.everywhere:
            where = "everywhere"
        else:
            where = ", ".join(keys[worker] for worker in sorted(found.of(op)))
        rounds = {found.round_of(op, worker) for worker in found.of(op)}
        return where if rounds == {0} else f"{where}, round {max(rounds)}"

    return say


def test_an_effect_without_a_variable_runs_once() -> None:
    program = program_of("""
        stages a b
        %0 = input x float32[?]
        %1 = Const {value=(1)} float32[]
        %2 = PrintV2(%1) stateful
        %3 = Exp(%0) float32[?] @b
    """)
    assert homes(program).of_effect(program.graph.ops[2]) == frozenset({0})


def test_a_small_value_of_the_forward_may_go_everywhere_and_a_large_one_stays() -> None:
    rows = SMALL // 4 + 1
    check(
        f"""
        stages a b
        %0 = input x float32[?,4]
        %1 = capture w resource[]
        %2 = ReadVariableOp(%1) float32[4] stateful @a
        %3 = Mul(%0, %2) float32[?,4] @a                  => a
        %4 = Const {{value=(0)}} int32[1]
        %5 = Sum(%3, %4) float32[4] @a                    => everywhere
        %6 = Fill(%3) float32[{rows}] @a                  => a
        """,
        said,
    )


def test_a_write_waits_on_every_holder_for_what_one_of_them_makes() -> None:
    """The worker of another stage clips what a replica's variable is given: the other replica reads that later."""
    program = program_of("""
        stages a b
        %0 = capture w resource[]
        %1 = capture v resource[]
        %2 = ReadVariableOp(%0) float32[4] stateful @a
        %3 = ReadVariableOp(%1) float32[4] stateful @b
        %4 = Mul(%2, %3) float32[4]
        %5 = AssignSubVariableOp(%0, %4) stateful
    """)
    found = Homes(program, split_parts(program), [frozenset({0, 1}), frozenset({0})])
    assert found.of(4) == {0} and found.of_effect(program.graph.ops[5]) == {0, 1}
    assert [found.round_of(5, worker) for worker in (0, 1)] == [0, 1]


@pytest.mark.parametrize(("shards", "expected"), [(1, {0}), (2, {0, 1})])
def test_all_devices_of_a_split_stage_update_what_they_hold(shards: int, expected: set[int]) -> None:
    """A norm over all gradients crosses to the one that does not run the other stage."""
    made = program_of(TWO_STAGES + GLOBAL_NORM)
    first, second = made.stages
    program = replace(made, stages=(replace(first, shards=shards), second))
    found = Homes(program, split_parts(program), [frozenset({0, 1}), frozenset({0})])
    scaled, _ = [op.index for op in program.graph.ops if op.type == "Mul"][-2:]
    assert found.of(scaled) == expected
    assert {found.round_of(scaled, worker) for worker in expected} == {shards - 1}


TWO = [Stage("a", "gpu", replicas=2), Stage("b", "gpu", replicas=2)]


@pytest.mark.parametrize(
    ("stages", "workers", "expected"),
    [
        (TWO, {"gpu": [1.0, 2.0]}, [(1.0, 2.0), (1.0, 2.0)]),
        (TWO, {"gpu": [1.0, 2.0, 3.0, 4.0]}, [(1.0, 3.0), (2.0, 4.0)]),
        (TWO, {"gpu": [2.0, 2.0]}, [(), ()]),
        (TWO, {}, [(), ()]),
        ([Stage("a", "gpu", replicas=2, shards=2)], {"gpu": [1.0, 2.0, 4.0, 3.0]}, [(1.0, 3.0)]),
        ([Stage("a", "gpu", replicas=4)], {"gpu": [1.0, 2.0]}, [(0.5, 1.0, 0.5, 1.0)]),
        ([Stage("a", "gpu"), Stage("b", "npu", replicas=2)], {"gpu": [1.0, 2.0], "npu": [3.0, 1.0]}, [(), (3.0, 1.0)]),
    ],
)
def test_a_replica_is_as_fast_as_its_worker(
    stages: list[Stage], workers: dict[str, list[float]], expected: list[tuple[float, ...]]
) -> None:
    assert speeds(stages, workers) == expected


def test_the_speeds_are_those_of_the_workers_that_the_replicas_are_given_to() -> None:
    names = {"gpu": ["gpu/0", "gpu/1", "gpu/2", "gpu/3"]}
    told = dict(zip(names["gpu"], (1.0, 2.0, 3.0, 4.0), strict=True))
    found = devices(Program(Graph(()), stages=tuple(TWO)), spread(TWO, names))
    by_stage = [tuple(told[device.worker] for device in found if device.stage == stage) for stage in range(2)]
    assert by_stage == speeds(TWO, {"gpu": list(told.values())})


def test_replicas_of_several_devices_take_neighbours_and_even_out_by_shard() -> None:
    """Pieces are gathered in TensorFlow's order: task 10 comes before task 8."""
    stages, names = (Stage("a", "gpu", replicas=3, shards=4),), [f"gpu/{letter}" for letter in "abcdefghijkl"]
    workers = tuple(spread(stages, {"gpu": names}))
    program = Program(Graph(()), stages=stages)
    layouts = {0: Layouts(4, {})}
    plan = Cut(program, workers, devices(program, workers), (), (), {}, {}, {}, layouts=layouts)
    assert plan.routing.hosts == (("gpu/a", "gpu/e", "gpu/k"),)
    assert plan.group_of(0, "gpu/i") == ("gpu/k", "gpu/l", "gpu/i", "gpu/j")
    assert plan.routings["gpu/c"].hosts == plan.routings["gpu/i"].hosts == (("gpu/c", "gpu/g", "gpu/i"),)
    assert plan.routings["gpu/g"].turns(0, "gpu/g", 6) == (1, 4)


def test_orders_are_there_only_where_speeds_are_unlike() -> None:
    plain, uneven = Stage("a", "gpu", replicas=2), Stage("b", "npu", replicas=2, speeds=(1.0, 2.0))
    pipeline = Pipeline(micro_batch=3)
    assert orders(Program(Graph(()), stages=(plain, uneven), pipeline=pipeline)) == ((), (1, 0, 1))
    assert orders(Program(Graph(()), stages=(plain, plain), pipeline=pipeline)) == ()

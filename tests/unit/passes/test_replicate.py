"""Replicas on workers, and their speeds."""

from __future__ import annotations

import pytest

from whale_nebula.ir.graph import Graph
from whale_nebula.ir.program import Pipeline, Program, Stage
from whale_nebula.passes.replicas import devices, orders, speeds, spread

TWO = [Stage("a", "gpu", replicas=2), Stage("b", "gpu", replicas=2)]


@pytest.mark.parametrize(
    ("stages", "workers", "expected"),
    [
        (TWO, {"gpu": [1.0, 2.0]}, [(1.0, 2.0), (1.0, 2.0)]),
        (TWO, {"gpu": [1.0, 2.0, 3.0, 4.0]}, [(1.0, 3.0), (2.0, 4.0)]),
        (TWO, {"gpu": [2.0, 2.0]}, [(), ()]),
        (TWO, {}, [(), ()]),
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


def test_orders_are_there_only_where_speeds_are_unlike() -> None:
    plain, uneven = Stage("a", "gpu", replicas=2), Stage("b", "npu", replicas=2, speeds=(1.0, 2.0))
    pipeline = Pipeline(micro_batch=3)
    assert orders(Program(Graph(()), stages=(plain, uneven), pipeline=pipeline)) == ((), (1, 0, 1))
    assert orders(Program(Graph(()), stages=(plain, plain), pipeline=pipeline)) == ()

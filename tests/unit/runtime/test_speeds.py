"""Measured speeds of replicas, and the resulting orders, the same in all processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.ir.cut import Boundary, Cut, VirtualDevice, Worker
from whale_nebula.ir.graph import Graph
from whale_nebula.ir.program import Pipeline, Program, Stage
from whale_nebula.ir.routing import Seat, order, shares, take_counts
from whale_nebula.ir.text import from_text
from whale_nebula.report.records import Span
from whale_nebula.runtime.step.clock import Clocks, LineClock, StageClock
from whale_nebula.runtime.step.measured import (
    EVERY,
    WORTH,
    Look,
    better_orders,
    changes,
    hear_speeds,
    looked_at,
    replicas,
    slowness,
)
from whale_nebula.spec import Value


def plan(micro_batch: int = 6, *hosts: str, speeds: tuple[float, ...] = (), turns: tuple[int, ...] = ()) -> Cut:
    """A generator on one worker, and a second stage in replicas on these."""
    hosts = hosts or ("npu/0", "npu/1")
    stages = Stage("gpu", "gpu"), Stage("npu", "npu", replicas=len(hosts), speeds=speeds)
    program = Program(Graph(()), stages=stages, pipeline=Pipeline(micro_batch=micro_batch))
    found = [VirtualDevice(0, worker="gpu/0"), *(VirtualDevice(1, r, worker=host) for r, host in enumerate(hosts))]
    return Cut(program, (), tuple(found), (), (), {}, {}, {}, orders=((), turns) if turns else ())


def sheets(**seconds: Any) -> dict[str, Any]:
    """What workers npu/0, npu/1 ... told of stage 1."""
    return {f"npu/{name[1:]}": {"speeds": {"1": each}} for name, each in seconds.items()}


def step(*seconds: float, kind: str = "fused") -> Clocks:
    """The clocks of a step in which stage 1 took so long for its micro-batches."""
    spans = [Span("npu.0", f"{kind} {m}", 0.0, took, m) for m, took in enumerate(seconds)]
    coded = Span("npu.0", "encode backward 0", 0.0, 9.0, 0)
    clock = StageClock("npu.0", 0.0, spans=[*spans, coded])
    return Clocks({Seat(1): clock}, StageClock("once", 0.0), LineClock(0, 0, 0.0))


def test_a_look_takes_the_median_of_its_steps_and_not_the_one_that_warms_up() -> None:
    look = Look()
    for steps, seconds in enumerate([(9.0, 9.0), (0.2, 0.1), (0.2, 0.2), (5.0, 0.2)]):
        assert not look.told
        look.add(steps, step(*seconds))
    assert look.told == {"1": 0.2}


def test_what_a_stage_does_forward_and_backward_and_in_each_phase_counts_together() -> None:
    look = Look()
    for steps in range(4):
        both = step(0.25, 0.25, kind="forward")
        both.stages[Seat(1)].spans.append(Span("npu.0", "backward 0", 0.0, 0.5, 0))
        both.stages[Seat(1)].spans.append(Span("npu.0", "forward 0", 0.0, 0.125, 0, phase=1))
        look.add(steps, both)
    assert look.told == {"1": 0.875}


def test_what_was_seen_stays_until_the_next_look_is_complete() -> None:
    look = Look()
    for steps in range(2 * EVERY):
        look.add(steps, step(0.5 if steps < EVERY else 0.25))
        assert look.told == ({} if steps < 3 else {"1": 0.5} if steps < EVERY + 3 else {"1": 0.25})


@pytest.mark.parametrize("said", [None, "0.1", float("nan"), float("inf"), -1.0, 0.0, True, [0.1], {}])
def test_what_is_no_number_of_seconds_is_not_heard(said: Any) -> None:
    assert hear_speeds(plan(), sheets(_0=0.1, _1=0.2)) == {1: {"npu/0": 0.1, "npu/1": 0.2}}
    assert hear_speeds(plan(), sheets(_0=0.1, _1=said)) == {}


def test_a_stage_is_known_once_all_of_its_replicas_are() -> None:
    assert hear_speeds(plan(), sheets(_0=0.1)) == {}
    assert hear_speeds(plan(), {**sheets(_0=0.1), "npu/1": {}}) == {}
    assert hear_speeds(plan(), {**sheets(_0=0.1), "npu/1": {"speeds": [0.1]}}) == {}


def test_who_is_faster_gets_more() -> None:
    cut = plan()
    assert better_orders(cut, {1: {"npu/0": 0.2, "npu/1": 0.1}}) == ((), (1, 0, 1))
    assert better_orders(cut, {1: {"npu/0": 0.1, "npu/1": 0.2}}) == ((), (0, 1, 0))


def test_noise_moves_nothing() -> None:
    assert better_orders(plan(6), {1: {"npu/0": 0.2, "npu/1": 0.15}}) == ()
    assert better_orders(plan(2), {1: {"npu/0": 0.4, "npu/1": 0.1}}) == ()


def test_what_has_moved_goes_back_where_the_others_catch_up() -> None:
    cut = plan(turns=(1, 0, 1))
    assert better_orders(cut, {1: {"npu/0": 0.1, "npu/1": 0.1}}) == ()
    assert list(changes(cut, plan())) == ["the replicas of npu take 3 : 3 micro-batches, and took 2 : 4"]


def test_what_the_config_says_is_not_moved() -> None:
    assert better_orders(plan(speeds=(1.0, 1.0)), {1: {"npu/0": 0.4, "npu/1": 0.1}}) == ()


def test_replicas_on_one_worker_share_what_it_does() -> None:
    cut = plan(9, "npu/0", "npu/1", "npu/0")
    assert take_counts(better_orders(cut, {1: {"npu/0": 0.1, "npu/1": 0.1}})[1], 3, 9)[1] in (4, 5)


@given(
    told=st.lists(st.floats(0.001, 1.0), min_size=2, max_size=5),
    noise=st.lists(st.floats(0.97, 1.03), min_size=5, max_size=5),
    micro_batch=st.integers(2, 24),
)
def test_what_has_moved_stays_while_little_changes(told: list[float], noise: list[float], micro_batch: int) -> None:
    hosts = [f"npu/{number}" for number in range(len(told))]
    count = max(micro_batch, len(hosts))
    best = order(shares([1.0 / each for each in told], count))
    cut = plan(count, *hosts, turns=best)
    shaken = [each * much for each, much in zip(told, noise, strict=False)]
    assert 1.0 / (1.0 - WORTH) > 1.03 / 0.97
    assert better_orders(cut, {1: dict(zip(hosts, shaken, strict=True))}) == cut.orders


def test_all_numbers_of_a_report_follow_from_the_same_look() -> None:
    cut, heard = plan(turns=(1, 0, 1)), {1: {"npu/0": 0.2, "npu/1": 0.1}}
    assert slowness(heard, cut) == {1: (1.0, 0.5)}
    found = replicas(cut, heard, 6)["npu"]
    assert [each.compute_seconds for each in found.replicas] == pytest.approx([0.4, 0.4])


def test_looks_come_now_and_then() -> None:
    assert sum(map(looked_at, range(1000))) <= 50


@pytest.mark.parametrize(
    ("codec", "moves"), [("none", True), ("int8", True), ("rank(4)", False), ("int8, delta id", False)]
)
def test_what_codecs_remember_does_not_depend_on_what_was_measured(codec: str, moves: bool) -> None:
    graph = from_text("%0 = input x float32[?,64]")
    cut = plan()
    workers = Worker("gpu/0", "gpu", (0,)), Worker("npu/0", "npu", (1,)), Worker("npu/1", "npu", (1,))
    boundary = Boundary(0, Value(0), 0, 0, (1,), True, codec=codec)
    cut = replace(cut, program=replace(cut.program, graph=graph), workers=workers, boundaries=(boundary,))
    assert bool(better_orders(cut, {1: {"npu/0": 0.2, "npu/1": 0.1}})) is moves

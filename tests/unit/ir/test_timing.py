"""The drawn schedule of a plan, and the statement of its assumptions."""

from dataclasses import replace

import pytest

import whale_nebula as nb
from whale_nebula.plan.records import PlanBoundary, PlanLink, PlanStage
from whale_nebula.plan.timing import (
    CALL,
    SPEED,
    Assumptions,
    Coding,
    count_held,
    duration,
    find_assumptions,
    list_codec_seconds,
    predict_times,
    step_text,
)
from whale_nebula.wire.frame import wire_bytes

SIZE = 100_000


def stage(name: str, flops: int = 3, runs: str = "FB") -> PlanStage:
    return PlanStage(name, name, "local/0", 1, 1, (), 0, (), (), (runs,), forward_flops=flops, activation_bytes=10)


def plan(rate: float | None, delay: float = 0.0, *, count: int = 4, schedule: str = "eager-1f1b") -> nb.Plan:
    """Two stages with a line between them."""
    boundary = PlanBoundary("b0", "a", ("b",), "float32", (None, 4), 0, "none", SIZE, True, "none", SIZE)
    line = PlanLink("", SIZE * count, wire_bytes(SIZE) * count, count, rate, delay)
    return nb.Plan(
        name="step", stages={"a": stage("a"), "b": stage("b", 6)}, boundaries=(boundary,),
        links={"a->b": line, "b->a": line}, once=(), tied=(), micro_batch=count, rows=(8,) * count,
        schedule=schedule, in_flight=None, versions={}, threads={}, notes=(), lines=(),
    )  # fmt: skip


def test_free_lines_take_nothing_and_stages_are_equal() -> None:
    found = predict_times(plan(None))
    assert str(found.assumed) == "assuming equal stages: forward 1, backward 2, transfers 0"
    assert found.seconds == (4 + 1) * 3


def test_stages_on_a_slow_line_compute_at_a_speed_that_is_said() -> None:
    rate, delay = 8e6, 0.01
    taken = 8 * wire_bytes(SIZE) / rate
    found = predict_times(plan(rate, delay))
    assert found.assumed == Assumptions(SPEED)
    assert str(found.assumed) == "assuming that stages compute at 1 TFLOP/s, plus 500 µs for each call"
    works = 4 * CALL  # of both stages, forward and backward, where a few FLOPs are nothing
    assert found.seconds == pytest.approx(4 * taken + taken + 2 * delay + works, rel=1e-6), "it waits for the line"


def test_large_stages_take_what_their_flops_take() -> None:
    given = plan(8e6)
    large = {name: replace(stage(name), forward_flops=4 * 10**12, backward_flops=8 * 10**12) for name in given.stages}
    (phase,) = predict_times(replace(given, stages=large)).phases
    assert phase.timeline.busy(0) == pytest.approx(4 * (1.0 + 2.0 + 2 * CALL))
    assert predict_times(replace(given, stages=large), Assumptions(10 * SPEED)).seconds < phase.timeline.seconds / 5


def test_a_stage_of_two_phases_computes_half_in_each() -> None:
    given = plan(8e6)
    both = {name: replace(stage(name), forward_flops=8 * 10**12, runs=("F", "F")) for name in given.stages}
    first, second = predict_times(replace(given, stages=both)).phases
    assert first.timeline.busy(0) == pytest.approx(second.timeline.busy(0)) == pytest.approx(4 * (1.0 + CALL))


def test_a_line_with_nothing_but_delay_takes_time_too() -> None:
    assert find_assumptions(plan(None, 0.02)) == Assumptions(SPEED)
    assert find_assumptions(plan(None)) == Assumptions()


def test_what_clusters_exchange_once_is_part_of_a_step() -> None:
    given = plan(None, 0.05)
    drawn = predict_times(given).seconds
    assert step_text(given) == f"estimated step time: {duration(drawn)}, plus updates"
    said = step_text(replace(given, exchange_seconds=0.05))
    assert said.startswith(f"estimated step time: {duration(drawn + 0.05)} ({duration(drawn)} as drawn, 50 ms for ")


def test_what_is_held_follows_the_schedule() -> None:
    assert count_held(plan(None, schedule="gpipe")) == {"a": 4, "b": 1}
    assert count_held(plan(None, schedule="1f1b")) == {"a": 2, "b": 1}
    assert count_held(plan(8e6, 0.01)) == {"a": 4, "b": 1}
    forward = {name: replace(each, runs=("F",)) for name, each in plan(None).stages.items()}
    assert count_held(replace(plan(None), stages=forward)) == {"a": 0, "b": 0}


def test_a_limit_of_the_users_own_is_kept() -> None:
    assert count_held(replace(plan(8e6, 0.01), in_flight=2)) == {"a": 2, "b": 1}


def test_a_boundary_for_two_stages_of_a_cluster_crosses_once() -> None:
    given = plan(8e6)
    both = replace(given.boundaries[0], destinations=("b", "c"))
    stages = {**given.stages, "c": replace(stage("c"), cluster="b")}
    found = predict_times(replace(given, stages=stages, boundaries=(both,)))
    (phase,) = found.phases
    assert len([span for span in phase.timeline.of("a->b") if span.seconds]) == 4


# -------------------- The stages of a plan to which codec times are charged
TAKEN = {"codec_seconds": 0.8, "encode_seconds": 0.6, "backward_codec_seconds": 0.4, "backward_encode_seconds": 0.1}


def coded(given: nb.Plan, **more: object) -> nb.Plan:
    return replace(given, boundaries=(replace(given.boundaries[0], **TAKEN, **more),))


def near(found: Coding) -> object:
    return pytest.approx(tuple(found))


def test_who_sends_encodes_and_who_reads_decodes_both_ways() -> None:
    found = list_codec_seconds(coded(plan(8e6)), ["a", "b"])
    assert found["a"] == near(Coding(0.15, 0.075))
    assert found["b"] == near(Coding(0.05, 0.025))


def test_two_clusters_decode_apart_and_two_stages_of_one_once() -> None:
    given = coded(plan(8e6), destinations=("b", "c", "d"))
    stages = {**given.stages, "c": stage("c"), "d": replace(stage("d"), cluster="b")}
    found = list_codec_seconds(replace(given, stages=stages), list(stages))
    assert found["b"] == near(Coding(0.025, 0.025 / 3)) and found["c"] == near(found["b"])
    assert found["d"] == near(Coding(0.0, 0.025 / 3))
    assert sum(each.forward for each in found.values()) == pytest.approx(0.2)
    assert sum(each.backward for each in found.values()) == pytest.approx(0.1)


def test_nothing_is_encoded_within_a_cluster_nor_for_a_stage_that_takes_no_part() -> None:
    given = coded(plan(8e6))
    same = replace(given, stages={"a": stage("a"), "b": replace(stage("b"), cluster="a")})
    assert not any(map(any, list_codec_seconds(same, ["a", "b"]).values()))
    assert list_codec_seconds(given, ["a"]) == {"a": Coding()}
    assert not any(map(any, list_codec_seconds(plan(8e6), ["a", "b"]).values()))


def test_the_drawing_and_the_step_count_it_where_lines_take_time() -> None:
    slow, free = plan(8e6), plan(None)
    (before,), (after,) = predict_times(slow).phases, predict_times(coded(slow)).phases
    assert after.timeline.busy(0) == pytest.approx(before.timeline.busy(0) + 4 * (0.15 + 0.075))
    assert after.timeline.busy(1) == pytest.approx(before.timeline.busy(1) + 4 * (0.05 + 0.025))
    assert predict_times(coded(slow)).seconds > predict_times(slow).seconds
    assert " with codecs, " in step_text(coded(slow)) and "codecs" not in step_text(slow)
    assert predict_times(coded(free)).seconds == predict_times(free).seconds and not find_assumptions(free).timed
    assert " with codecs, " in step_text(replace(coded(slow), exchange_seconds=0.1))

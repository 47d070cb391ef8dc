"""The drawn schedule of a plan, and the statement of its assumptions."""

from dataclasses import replace

import pytest

import whale_nebula as nb
from whale_nebula.plan.records import PlanBoundary, PlanLink, PlanStage
from whale_nebula.plan.timing import (
    CALL,
    Coding,
    count_held,
    describe_assumptions,
    duration,
    list_codec_seconds,
    predict_times,
    step_text,
    takes_time,
)
from whale_nebula.wire.frame import count_wire_bytes

SIZE = 100_000


def make_stage(name: str, flops: int = 3, runs: str = "FB") -> PlanStage:
    return PlanStage(name, name, "local/0", 1, 1, (), 0, (), (), (runs,), forward_flops=flops, activation_bytes=10)


def make_plan(rate: float | None, delay: float = 0.0, *, count: int = 4, schedule: str = "eager-1f1b") -> nb.Plan:
    """Two stages with a line between them."""
    boundary = PlanBoundary("b0", "a", ("b",), "float32", (None, 4), 0, "none", SIZE, True, "none", SIZE)
    line = PlanLink("", SIZE * count, count_wire_bytes(SIZE) * count, count, rate, delay)
    return nb.Plan(
        name="step", stages={"a": make_stage("a"), "b": make_stage("b", 6)}, boundaries=(boundary,),
        links={"a->b": line, "b->a": line}, once=(), tied=(), micro_batch=count, rows=(8,) * count,
        schedule=schedule, in_flight=None, versions={}, threads={}, notes=(), lines=(),
    )  # fmt: skip


def test_free_links_assume_equal_stages() -> None:
    found = predict_times(make_plan(None))
    assert describe_assumptions(found.timed) == "assuming equal stages: forward 1, backward 2, transfers 0"
    assert found.seconds == (4 + 1) * 3


def test_slow_link_assumes_a_compute_speed() -> None:
    rate, delay = 8e6, 0.01
    taken = 8 * count_wire_bytes(SIZE) / rate
    found = predict_times(make_plan(rate, delay))
    assert (
        found.timed
        and describe_assumptions(True) == "assuming that stages compute at 1 TFLOP/s, plus 500 µs for each call"
    )
    works = 4 * CALL  # of both stages, forward and backward, where a few FLOPs are nothing
    assert found.seconds == pytest.approx(4 * taken + taken + 2 * delay + works, rel=1e-6), (
        "the step waits for the link"
    )


def test_times_of_large_stages_follow_their_flops() -> None:
    plan = make_plan(8e6)
    large = {
        name: replace(make_stage(name), forward_flops=4 * 10**12, backward_flops=8 * 10**12) for name in plan.stages
    }
    (phase,) = predict_times(replace(plan, stages=large)).phases
    assert phase.timeline.busy(0) == pytest.approx(4 * (1.0 + 2.0 + 2 * CALL))


def test_stage_of_two_phases_computes_half_in_each() -> None:
    plan = make_plan(8e6)
    both = {name: replace(make_stage(name), forward_flops=8 * 10**12, runs=("F", "F")) for name in plan.stages}
    first, second = predict_times(replace(plan, stages=both)).phases
    assert first.timeline.busy(0) == pytest.approx(second.timeline.busy(0)) == pytest.approx(4 * (1.0 + CALL))


def test_link_with_only_a_delay_is_timed() -> None:
    assert takes_time(make_plan(None, 0.02)) and not takes_time(make_plan(None))


def test_step_text_includes_the_exchange_of_clusters() -> None:
    plan = make_plan(None, 0.05)
    drawn = predict_times(plan).seconds
    assert step_text(plan) == f"estimated step time: {duration(drawn)}, plus updates"
    text = step_text(replace(plan, exchange_seconds=0.05))
    assert text.startswith(f"estimated step time: {duration(drawn + 0.05)} ({duration(drawn)} as drawn, 50 ms for ")


def test_count_held_follows_the_schedule() -> None:
    assert count_held(make_plan(None, schedule="gpipe")) == {"a": 4, "b": 1}
    assert count_held(make_plan(None, schedule="1f1b")) == {"a": 2, "b": 1}
    assert count_held(make_plan(8e6, 0.01)) == {"a": 4, "b": 1}
    forward = {name: replace(each, runs=("F",)) for name, each in make_plan(None).stages.items()}
    assert count_held(replace(make_plan(None), stages=forward)) == {"a": 0, "b": 0}


def test_count_held_respects_in_flight() -> None:
    assert count_held(replace(make_plan(8e6, 0.01), in_flight=2)) == {"a": 2, "b": 1}


def test_boundary_for_two_stages_of_a_cluster_crosses_once() -> None:
    plan = make_plan(8e6)
    both = replace(plan.boundaries[0], destinations=("b", "c"))
    stages = {**plan.stages, "c": replace(make_stage("c"), cluster="b")}
    found = predict_times(replace(plan, stages=stages, boundaries=(both,)))
    (phase,) = found.phases
    assert len([span for span in phase.timeline.spans_of("a->b") if span.seconds]) == 4


# -------------------- The stages of a plan to which codec times are charged
CODEC_SECONDS = {
    "codec_seconds": 0.8,
    "encode_seconds": 0.6,
    "backward_codec_seconds": 0.4,
    "backward_encode_seconds": 0.1,
}


def add_codec_seconds(plan: nb.Plan, **more: object) -> nb.Plan:
    return replace(plan, boundaries=(replace(plan.boundaries[0], **CODEC_SECONDS, **more),))


def approximate(found: Coding) -> object:
    return pytest.approx(tuple(found))


def test_encoding_is_charged_to_senders_and_decoding_to_readers() -> None:
    found = list_codec_seconds(add_codec_seconds(make_plan(8e6)), ["a", "b"])
    assert found["a"] == approximate(Coding(0.15, 0.075))
    assert found["b"] == approximate(Coding(0.05, 0.025))


def test_decoding_is_charged_once_per_cluster() -> None:
    plan = add_codec_seconds(make_plan(8e6), destinations=("b", "c", "d"))
    stages = {**plan.stages, "c": make_stage("c"), "d": replace(make_stage("d"), cluster="b")}
    found = list_codec_seconds(replace(plan, stages=stages), list(stages))
    assert found["b"] == approximate(Coding(0.025, 0.025 / 3)) and found["c"] == approximate(found["b"])
    assert found["d"] == approximate(Coding(0.0, 0.025 / 3))
    assert sum(each.forward for each in found.values()) == pytest.approx(0.2)
    assert sum(each.backward for each in found.values()) == pytest.approx(0.1)


def test_coding_is_free_within_a_cluster_or_without_a_reader() -> None:
    plan = add_codec_seconds(make_plan(8e6))
    same = replace(plan, stages={"a": make_stage("a"), "b": replace(make_stage("b"), cluster="a")})
    assert not any(map(any, list_codec_seconds(same, ["a", "b"]).values()))
    assert list_codec_seconds(plan, ["a"]) == {"a": Coding()}
    assert not any(map(any, list_codec_seconds(make_plan(8e6), ["a", "b"]).values()))


def test_codec_seconds_are_part_of_drawing_and_step() -> None:
    slow, free = make_plan(8e6), make_plan(None)
    (before,), (after,) = predict_times(slow).phases, predict_times(add_codec_seconds(slow)).phases
    assert after.timeline.busy(0) == pytest.approx(before.timeline.busy(0) + 4 * (0.15 + 0.075))
    assert after.timeline.busy(1) == pytest.approx(before.timeline.busy(1) + 4 * (0.05 + 0.025))
    assert predict_times(add_codec_seconds(slow)).seconds > predict_times(slow).seconds
    assert " with codecs, " in step_text(add_codec_seconds(slow)) and "codecs" not in step_text(slow)
    assert predict_times(add_codec_seconds(free)).seconds == predict_times(free).seconds and not takes_time(free)
    assert " with codecs, " in step_text(replace(add_codec_seconds(slow), exchange_seconds=0.1))

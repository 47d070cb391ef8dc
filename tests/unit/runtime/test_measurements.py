"""Measured speeds of replicas, and the resulting orders, the same in all processes."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.config import Links, parse_links
from whale_nebula.ir.cut import Boundary, Cut, VirtualDevice, Worker
from whale_nebula.ir.graph import Graph
from whale_nebula.ir.program import Pipeline, Program, Stage
from whale_nebula.ir.routing import Routing, Seat, compute_shares, count_turns, order_by_shares
from whale_nebula.ir.text import from_text
from whale_nebula.report.records import LinkReport, RemoteMeasurements, Span, StageReport, WorkerReport
from whale_nebula.runtime.step.clock import Clocks, LineClock, StageClock
from whale_nebula.runtime.step.distributed import pack_report, parse_reports
from whale_nebula.runtime.step.measurements import (
    MAX_PAUSE,
    MIN_GAIN,
    MIN_MEASURED_BYTES,
    SAMPLE_EVERY,
    LineRates,
    SpeedSampler,
    StageMeasurements,
    compute_paces,
    compute_slowness,
    count_busiest_turns,
    describe_order_changes,
    find_slowest_seconds,
    improve_orders,
    is_sampled,
    parse_speeds,
    report_replicas,
)
from whale_nebula.schedule.lines import Work, make_uniform_hops
from whale_nebula.schedule.schedules import Pace, limits
from whale_nebula.schedule.simulate import simulate
from whale_nebula.spec import Value


def plan(micro_batch: int = 6, *hosts: str, speeds: tuple[float, ...] = (), turns: tuple[int, ...] = ()) -> Cut:
    """A generator on one worker, and a second stage in replicas on these."""
    hosts = hosts or ("npu/0", "npu/1")
    stages = Stage("gpu", "gpu"), Stage("npu", "npu", replicas=len(hosts), speeds=speeds)
    program = Program(Graph(()), stages=stages, pipeline=Pipeline(micro_batch=micro_batch))
    found = [VirtualDevice(0, worker="gpu/0"), *(VirtualDevice(1, r, worker=host) for r, host in enumerate(hosts))]
    return Cut(program, (), tuple(found), (), (), {}, {}, {}, orders=((), turns) if turns else ())


def sheets(**seconds: Any) -> dict[str, Any]:
    """The sheets of workers npu/0, npu/1 ... with their speeds of stage 1."""
    return {f"npu/{name[1:]}": {"speeds": {"1": each}} for name, each in seconds.items()}


def step(*seconds: float, kind: str = "fused") -> Clocks:
    """The clocks of a step in which stage 1 took so long for its micro-batches."""
    spans = [Span("npu.0", f"{kind} {m}", 0.0, took, m) for m, took in enumerate(seconds)]
    coded = Span("npu.0", "encode backward 0", 0.0, 9.0, 0)
    clock = StageClock("npu.0", 0.0, spans=[*spans, coded])
    return Clocks({Seat(1): clock}, StageClock("once", 0.0), LineClock(0, 0, 0.0))


def test_speed_sample_is_the_median_without_the_warm_up_step() -> None:
    look = SpeedSampler()
    for steps, seconds in enumerate([(9.0, 9.0), (0.2, 0.1), (0.2, 0.2), (5.0, 0.2)]):
        assert not look.seconds
        look.add(steps, step(*seconds))
    assert look.seconds == {"1": 0.2}


def test_speed_sample_adds_directions_and_phases() -> None:
    look = SpeedSampler()
    for steps in range(4):
        both = step(0.25, 0.25, kind="forward")
        both.stages[Seat(1)].spans.append(Span("npu.0", "backward 0", 0.0, 0.5, 0))
        both.stages[Seat(1)].spans.append(Span("npu.0", "forward 0", 0.0, 0.125, 0, phase=1))
        look.add(steps, both)
    assert look.seconds == {"1": 0.875}


def test_speed_sample_stays_until_the_next_one_is_complete() -> None:
    look = SpeedSampler()
    for steps in range(2 * SAMPLE_EVERY):
        look.add(steps, step(0.5 if steps < SAMPLE_EVERY else 0.25))
        assert look.seconds == ({} if steps < 3 else {"1": 0.5} if steps < SAMPLE_EVERY + 3 else {"1": 0.25})


@pytest.mark.parametrize("seconds", [None, "0.1", float("nan"), float("inf"), -1.0, 0.0, True, [0.1], {}])
def test_invalid_seconds_are_ignored(seconds: Any) -> None:
    assert parse_speeds(plan(), sheets(_0=0.1, _1=0.2)) == {1: {"npu/0": 0.1, "npu/1": 0.2}}
    assert parse_speeds(plan(), sheets(_0=0.1, _1=seconds)) == {}


def test_speeds_of_a_stage_need_all_replicas() -> None:
    assert parse_speeds(plan(), sheets(_0=0.1)) == {}
    assert parse_speeds(plan(), {**sheets(_0=0.1), "npu/1": {}}) == {}
    assert parse_speeds(plan(), {**sheets(_0=0.1), "npu/1": {"speeds": [0.1]}}) == {}


def test_faster_replica_takes_more_micro_batches() -> None:
    cut = plan()
    assert improve_orders(cut, {1: {"npu/0": 0.2, "npu/1": 0.1}}) == ((), (1, 0, 1))
    assert improve_orders(cut, {1: {"npu/0": 0.1, "npu/1": 0.2}}) == ((), (0, 1, 0))


def test_small_speed_differences_change_no_order() -> None:
    assert improve_orders(plan(6), {1: {"npu/0": 0.2, "npu/1": 0.15}}) == ()
    assert improve_orders(plan(2), {1: {"npu/0": 0.4, "npu/1": 0.1}}) == ()


def test_order_becomes_equal_again_when_speeds_become_equal() -> None:
    cut = plan(turns=(1, 0, 1))
    assert improve_orders(cut, {1: {"npu/0": 0.1, "npu/1": 0.1}}) == ()
    assert list(describe_order_changes(cut, plan())) == [
        "the replicas of npu now take 3 : 3 micro-batches instead of 2 : 4"
    ]


def test_configured_speeds_are_not_overridden() -> None:
    assert improve_orders(plan(speeds=(1.0, 1.0)), {1: {"npu/0": 0.4, "npu/1": 0.1}}) == ()


def test_replicas_on_one_worker_share_its_micro_batches() -> None:
    cut = plan(9, "npu/0", "npu/1", "npu/0")
    assert count_turns(improve_orders(cut, {1: {"npu/0": 0.1, "npu/1": 0.1}})[1], 3, 9)[1] in (4, 5)


@given(
    seconds=st.lists(st.floats(0.001, 1.0), min_size=2, max_size=5),
    noise=st.lists(st.floats(0.97, 1.03), min_size=5, max_size=5),
    micro_batch=st.integers(2, 24),
)
def test_order_is_stable_under_small_changes(seconds: list[float], noise: list[float], micro_batch: int) -> None:
    hosts = [f"npu/{number}" for number in range(len(seconds))]
    count = max(micro_batch, len(hosts))
    best = order_by_shares(compute_shares([1.0 / each for each in seconds], count))
    cut = plan(count, *hosts, turns=best)
    shaken = [each * much for each, much in zip(seconds, noise, strict=False)]
    assert 1.0 / (1.0 - MIN_GAIN) > 1.03 / 0.97
    assert improve_orders(cut, {1: dict(zip(hosts, shaken, strict=True))}) == cut.orders


def test_replica_reports_follow_from_the_measured_speeds() -> None:
    cut, heard = plan(turns=(1, 0, 1)), {1: {"npu/0": 0.2, "npu/1": 0.1}}
    assert compute_slowness(heard, cut) == {1: (1.0, 0.5)}
    found = report_replicas(cut, heard, 6)["npu"]
    assert [each.compute_seconds for each in found.replicas] == pytest.approx([0.4, 0.4])


def test_speed_samples_are_rare() -> None:
    assert sum(map(is_sampled, range(1000))) <= 50


@pytest.mark.parametrize(
    ("codec", "moves"), [("none", True), ("int8", True), ("rank(4)", False), ("int8, delta id", False)]
)
def test_order_is_not_changed_with_stateful_codecs(codec: str, moves: bool) -> None:
    graph = from_text("%0 = input x float32[?,64]")
    cut = plan()
    workers = Worker("gpu/0", "gpu", (0,)), Worker("npu/0", "npu", (1,)), Worker("npu/1", "npu", (1,))
    boundary = Boundary(0, Value(0), 0, 0, (1,), True, codec=codec)
    cut = replace(cut, program=replace(cut.program, graph=graph), workers=workers, boundaries=(boundary,))
    assert bool(improve_orders(cut, {1: {"npu/0": 0.2, "npu/1": 0.1}})) is moves


# -------------------- Estimates for lines and stages before a step
LINK, LARGE_MESSAGE = "gpu->npu", 16 * MIN_MEASURED_BYTES


def make_span(size: int, seconds: float, link: str = LINK) -> Span:
    return Span(link, "forward 0", 1.0, 1.0 + seconds, 0, 0, size)


def rate(seen: LineRates) -> float | None:
    return seen.make_estimate([1], {}, []).rates.get(LINK)


def test_rate_before_the_first_step_is_the_configured_one() -> None:
    assert rate(LineRates((LINK,), parse_links("80mbit"))) == 1e7
    assert rate(LineRates((LINK,), parse_links("20ms"))) is None


@pytest.mark.parametrize(("exact", "expected"), [(True, LARGE_MESSAGE / 0.1), (False, 1e7)])
def test_measured_rate_replaces_the_configured_one_if_exact_or_slower(exact: bool, expected: float) -> None:
    seen = LineRates((LINK,), parse_links("80mbit"), exact=exact)
    seen.add([make_span(LARGE_MESSAGE, 0.1)])
    assert rate(seen) == pytest.approx(expected)
    seen.add([make_span(LARGE_MESSAGE, 9.9)])
    assert rate(seen) == pytest.approx(2 * LARGE_MESSAGE / 10)


def test_small_messages_do_not_change_the_rate_of_a_real_link() -> None:
    seen = LineRates((LINK,), parse_links(None))
    seen.add([make_span(MIN_MEASURED_BYTES - 1, 1e-6)])
    assert rate(seen) is None
    seen.add([*make_spans(1, MIN_MEASURED_BYTES - 1, 1e-6), *make_spans(1, LARGE_MESSAGE, 1.0, start=9.0)])
    for _ in range(30):
        seen.add([make_span(MIN_MEASURED_BYTES - 1, 1e-6)])
    assert rate(seen) == pytest.approx(LARGE_MESSAGE)


def test_link_without_transfer_time_has_no_rate() -> None:
    seen = LineRates((LINK,), parse_links(None), exact=True)
    seen.add([make_span(LARGE_MESSAGE, 0.0)])
    assert rate(seen) is None


def test_rate_follows_a_change_within_ten_steps() -> None:
    seen = LineRates((LINK,), parse_links(None), exact=True)
    for _ in range(30):
        seen.add([make_span(1000, 1.0)])
    for _ in range(10):
        seen.add([make_span(1000, 0.001)])
    assert rate(seen) == pytest.approx(1e6)


def test_outlook_counts_outgoing_links_and_the_last_step() -> None:
    seen = LineRates((LINK,), parse_links(None), exact=True)
    seen.add([make_span(1000, 1.0)])
    seen.add([make_span(1000, 1.0), make_span(2000, 1.0), make_span(7, 1.0, "npu->gpu")])
    found = seen.make_estimate([4, 4, 3], {"0.0.fused": 0.5, "0.1.fused": 0.25}, [3, 3])
    assert (found.rows, found.compute_seconds, found.carried_bytes) == ([4, 4, 3], 1.5, {LINK: 3000})


def test_slowest_stage_adds_phases_and_directions() -> None:
    assert find_slowest_seconds({}, [4]) is None
    assert find_slowest_seconds({"once": 3.0}, [4]) is None
    medians = {"0.0.forward": 1.0, "1.0.backward": 2.0, "0.1.fused": 2.5}
    assert find_slowest_seconds(medians, [2, 2]) == 6.0
    assert find_slowest_seconds(medians, [1, 2]) == 5.0


def test_busiest_replica_runs_only_its_share_of_the_micro_batches() -> None:
    processes = Routing((("gpu/0",), ("npu/0", "npu/1")), ((), (1, 0, 1)))
    assert count_busiest_turns(processes, 6) == [6, 4]
    assert count_busiest_turns(processes, 6, {1: (1.0, 0.25)}) == [6, 2]
    assert count_busiest_turns(Routing((("gpu",), ("npu", "npu"))), 6) == [6, 3]


# ---------------------------------------------------------------------- real lines and small messages
def make_spans(count: int, size: int, seconds: float, gap: float = 1e-5, start: float = 1.0) -> list[Span]:
    """Messages of one line, with a pause between each two."""
    starts = (start + number * (seconds + gap) for number in range(count))
    return [Span(LINK, "forward 0", at, at + seconds, 0, 0, size) for at in starts]


def test_adjacent_small_messages_count_as_one_large_message() -> None:
    seen = LineRates((LINK,), parse_links(None))
    seen.add(make_spans(8, MIN_MEASURED_BYTES // 4, 0.1))
    assert rate(seen) == pytest.approx(MIN_MEASURED_BYTES / 4 / 0.1, rel=1e-3)
    seen.add(list(reversed(make_spans(8, MIN_MEASURED_BYTES // 4, 0.3))))
    assert rate(seen) == pytest.approx(MIN_MEASURED_BYTES / 4 / 0.2, rel=1e-3), "in whatever order they are told"


@pytest.mark.parametrize(("count", "gap"), [(8, 10 * MAX_PAUSE), (3, 0.0)], ids=["with pauses", "too few"])
def test_messages_that_do_not_fill_the_link_give_no_rate(count: int, gap: float) -> None:
    seen = LineRates((LINK,), parse_links("80mbit"))
    seen.add(make_spans(count, MIN_MEASURED_BYTES // 4, 1e-5, gap))
    assert rate(seen) == 1e7 and seen.make_estimate([1], {}, []).unmeasured == {LINK}


def test_pause_between_messages_does_not_count_as_transfer_time() -> None:
    seen = LineRates((LINK,), parse_links(None))
    seen.add(
        [
            *make_spans(4, MIN_MEASURED_BYTES // 4, 0.1, 0.0),
            *make_spans(8, MIN_MEASURED_BYTES // 4, 0.1, 0.0, start=9.0),
            *make_spans(1, 8, 0.1, start=20.0),
        ]
    )
    assert rate(seen) == pytest.approx(MIN_MEASURED_BYTES / 4 / 0.1)


def test_overlapping_messages_to_two_workers_share_the_rate_of_the_line() -> None:
    seen = LineRates((LINK,), parse_links(None))
    seen.add([*make_spans(1, LARGE_MESSAGE, 8.0), *make_spans(1, LARGE_MESSAGE, 1.0, start=3.0)])
    assert rate(seen) == pytest.approx(2 * LARGE_MESSAGE / 8.0)


def test_unseen_links_carried_bytes_without_a_measured_rate() -> None:
    seen = LineRates((LINK, "npu->gpu"), parse_links(None))
    assert not seen.make_estimate([1], {}, []).unmeasured
    seen.add([make_span(10, 1e-6)])
    assert seen.make_estimate([1], {}, []).unmeasured == {LINK}
    seen.add([make_span(LARGE_MESSAGE, 1.0)])
    seen.add([make_span(10, 1e-6)])
    assert not seen.make_estimate([1], {}, []).unmeasured
    exact = LineRates((LINK,), parse_links(None), exact=True)
    exact.add([make_span(10, 0.0)])
    assert not exact.make_estimate([1], {}, []).unmeasured


# -------------------- Timings of the first micro-batch in stages of several processes, and the resulting in-flig
STAGES = 2
CUT: Any = SimpleNamespace(phases=[SimpleNamespace(index=0)], program=SimpleNamespace(stages=[None] * STAGES))


def make_clocks(stage: int, spans: list[Span], line_spans: list[Span]) -> Clocks:
    clock = StageClock("s", 0.0, spans=spans)
    return Clocks({Seat(stage): clock}, StageClock("once", 0.0), LineClock(0, 0, 0.0, line_spans))


def simulate_medians(compute: float, hold: float, delay: float, count: int = 8, steps: int = 3) -> dict[str, float]:
    """What both processes say after steps as the simulator times them, with three micro-batches in flight."""
    works = [Work(compute / 3, 2 * compute / 3)] * STAGES
    timeline = simulate(works, make_uniform_hops(STAGES, seconds=hold, delay=delay), count, in_flight=3)
    medians = {"0.0.forward": compute / 3, "0.0.backward": 2 * compute / 3, "0.1.forward": compute / 3}
    medians["0.1.backward"] = 2 * compute / 3
    for stage in range(STAGES):
        places = (stage, _LINES[stage])
        spans, lines = ([convert_span(each) for each in timeline.spans if each.place == place] for place in places)
        measured = StageMeasurements(CUT, [], Links())
        for _ in range(steps):
            measured.add(make_clocks(stage, spans, lines))
        medians |= measured.medians()
    return medians


_LINES = ("0->1", "1->0")


def convert_span(span: Any) -> Span:
    what = {"F": "forward", "B": "backward"}[span.what]
    return Span(str(span.place), f"{what} {span.micro_batch}", span.start, span.end, span.micro_batch)


def find_limit(seen: dict[str, float]) -> int:
    (pace,) = compute_paces(CUT, seen)
    return limits("eager-1f1b", STAGES, 8, pace=pace)[0]


def test_pace_is_computed_from_round_trips() -> None:
    (pace,) = compute_paces(CUT, simulate_medians(0.15, hold=0.07, delay=0.02))
    assert pace == Pace(pytest.approx(0.15), (pytest.approx(0.18),), pytest.approx(0.07))


def test_long_link_delay_raises_the_in_flight_limit() -> None:
    """What three in flight lose on that line, four do not."""
    assert limits("eager-1f1b", STAGES, 8)[0] == 3
    assert find_limit(simulate_medians(0.15, hold=0.07, delay=0.02)) == 4


def test_queue_before_the_next_stage_does_not_raise_the_limit() -> None:
    """With more in flight, the later micro-batches wait there; the limit stays what it is."""
    few, many = (find_limit(simulate_medians(0.15, hold=0.07, delay=0.02, count=count)) for count in (4, 8))
    assert few == many == 4


def test_short_link_delay_keeps_the_default_limit() -> None:
    assert find_limit(simulate_medians(0.15, hold=0.001, delay=0.0)) == 3


def test_slow_link_limits_in_flight_micro_batches() -> None:
    assert find_limit(simulate_medians(0.05, hold=0.2, delay=0.02)) == 4


def test_pace_needs_medians_of_all_stages() -> None:
    assert compute_paces(CUT, simulate_medians(0.15, hold=0.07, delay=0.02, steps=1) | {}) == [Pace(0.15, (0.15,), 0.0)]
    assert compute_paces(CUT, {}) == []


# -------------------- Exchanged measurements of a step: round trips, and invalid ones are ignored
STAGE_REPORTS = {"npu": StageReport(0.25, 0.125, "npu", 2), "cpu": StageReport(0.5, 0.0, "npu")}
LINKS = {"npu->gpu": LinkReport(100, 120, 200, 3, 0.0625)}
WORKERS = {"npu/0": WorkerReport(4096, 1 << 30)}


def test_packed_report_round_trip() -> None:
    sheet = json.loads(json.dumps({"step": 3, "seen": pack_report(STAGE_REPORTS, LINKS, WORKERS)}))
    assert parse_reports([sheet]) == RemoteMeasurements(STAGE_REPORTS, LINKS, WORKERS)


def test_reports_of_several_workers_are_merged() -> None:
    other = pack_report({"tpu": StageReport(1.0, 2.0, "tpu", 1)}, LINKS, {"tpu/0": WorkerReport(1, 2)})
    found = parse_reports([{"seen": pack_report(STAGE_REPORTS, {}, WORKERS)}, {"seen": other}])
    assert (list(found.stages), list(found.links)) == (["npu", "cpu", "tpu"], ["npu->gpu"])
    assert list(found.workers) == ["npu/0", "tpu/0"]


def test_report_of_a_stage_in_several_processes_is_that_of_the_busiest() -> None:
    sheets = [{"seen": pack_report({"npu": StageReport(each, 0.0, "npu")}, {}, {})} for each in (0.2, 0.3, 0.1)]
    assert parse_reports(sheets).stages["npu"].compute_seconds == 0.3


@pytest.mark.parametrize(
    "seen",
    [
        None,
        [],
        "stages",
        {"stages": []},
        {"stages": {"npu": None}},
        {"stages": {"npu": [1]}},
        {"links": {"a->b": 3}},
        {"workers": {"npu/0": [1, 2, 3]}},
    ],
    ids=str,
)
def test_malformed_reports_are_ignored(seen: Any) -> None:
    assert parse_reports([{"seen": seen}]) == RemoteMeasurements()


def test_text_in_place_of_numbers_is_read_as_none() -> None:
    found = parse_reports([{"seen": {"stages": {"npu": ["fast", None, "many", 7]}, "links": {"a->b": ["x"] * 5}}}])
    assert found == RemoteMeasurements({"npu": StageReport(None, None, "7", None)}, {"a->b": LinkReport()})


def test_link_reports_of_several_workers_are_added() -> None:
    sheets = [{"seen": pack_report({}, {"gpu->npu": LinkReport(size, size, size, 1, 0.5)}, {})} for size in (8, 2)]
    assert parse_reports(sheets).links == {"gpu->npu": LinkReport(10, 10, 10, 2, 1.0)}

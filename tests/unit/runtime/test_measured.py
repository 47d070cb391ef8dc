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
from whale_nebula.ir.routing import Seat, order, shares, take_counts
from whale_nebula.ir.text import from_text
from whale_nebula.report.records import LinkReport, RemoteMeasurements, Span, StageReport, WorkerReport
from whale_nebula.runtime.step.clock import Clocks, LineClock, StageClock
from whale_nebula.runtime.step.distributed import pack_report, parse_reports
from whale_nebula.runtime.step.measured import (
    CLOSE,
    EVERY,
    LARGE,
    WORTH,
    LineRates,
    Look,
    Measured,
    better_orders,
    changes,
    looked_at,
    paces_of_trips,
    parse_speeds,
    replicas,
    slowest,
    slowness,
)
from whale_nebula.schedule.lines import Work, uniform
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
        assert not look.seconds
        look.add(steps, step(*seconds))
    assert look.seconds == {"1": 0.2}


def test_what_a_stage_does_forward_and_backward_and_in_each_phase_counts_together() -> None:
    look = Look()
    for steps in range(4):
        both = step(0.25, 0.25, kind="forward")
        both.stages[Seat(1)].spans.append(Span("npu.0", "backward 0", 0.0, 0.5, 0))
        both.stages[Seat(1)].spans.append(Span("npu.0", "forward 0", 0.0, 0.125, 0, phase=1))
        look.add(steps, both)
    assert look.seconds == {"1": 0.875}


def test_what_was_seen_stays_until_the_next_look_is_complete() -> None:
    look = Look()
    for steps in range(2 * EVERY):
        look.add(steps, step(0.5 if steps < EVERY else 0.25))
        assert look.seconds == ({} if steps < 3 else {"1": 0.5} if steps < EVERY + 3 else {"1": 0.25})


@pytest.mark.parametrize("said", [None, "0.1", float("nan"), float("inf"), -1.0, 0.0, True, [0.1], {}])
def test_what_is_no_number_of_seconds_is_not_heard(said: Any) -> None:
    assert parse_speeds(plan(), sheets(_0=0.1, _1=0.2)) == {1: {"npu/0": 0.1, "npu/1": 0.2}}
    assert parse_speeds(plan(), sheets(_0=0.1, _1=said)) == {}


def test_a_stage_is_known_once_all_of_its_replicas_are() -> None:
    assert parse_speeds(plan(), sheets(_0=0.1)) == {}
    assert parse_speeds(plan(), {**sheets(_0=0.1), "npu/1": {}}) == {}
    assert parse_speeds(plan(), {**sheets(_0=0.1), "npu/1": {"speeds": [0.1]}}) == {}


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
    assert list(changes(cut, plan())) == ["the replicas of npu now take 3 : 3 micro-batches instead of 2 : 4"]


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


# -------------------- Estimates for lines and stages before a step
LINK, MUCH = "gpu->npu", 16 * LARGE


def sent(size: int, seconds: float, link: str = LINK) -> Span:
    return Span(link, "forward 0", 1.0, 1.0 + seconds, 0, 0, size)


def rate(seen: LineRates) -> float | None:
    return seen.outlook([1], {}).rates.get(LINK)


def test_before_a_step_has_run_the_config_says_it() -> None:
    assert rate(LineRates((LINK,), parse_links("80mbit"))) == 1e7
    assert rate(LineRates((LINK,), parse_links("20ms"))) is None


@pytest.mark.parametrize(("exact", "expected"), [(True, MUCH / 0.1), (False, 1e7)])
def test_what_was_written_is_believed_on_emulated_lines_and_elsewhere_if_it_is_slower(
    exact: bool, expected: float
) -> None:
    seen = LineRates((LINK,), parse_links("80mbit"), exact=exact)
    seen.add([sent(MUCH, 0.1)])
    assert rate(seen) == pytest.approx(expected)
    seen.add([sent(MUCH, 9.9)])
    assert rate(seen) == pytest.approx(2 * MUCH / 10)


def test_small_messages_say_nothing_of_a_real_line_and_what_was_known_stays() -> None:
    seen = LineRates((LINK,), parse_links(None))
    seen.add([sent(LARGE - 1, 1e-6)])
    assert rate(seen) is None
    seen.add([*row(1, LARGE - 1, 1e-6), *row(1, MUCH, 1.0, start=9.0)])
    for _ in range(30):
        seen.add([sent(LARGE - 1, 1e-6)])
    assert rate(seen) == pytest.approx(MUCH)


def test_a_line_as_fast_as_memory_has_no_rate() -> None:
    seen = LineRates((LINK,), parse_links(None), exact=True)
    seen.add([sent(MUCH, 0.0)])
    assert rate(seen) is None


def test_it_follows_the_line_within_ten_steps() -> None:
    seen = LineRates((LINK,), parse_links(None), exact=True)
    for _ in range(30):
        seen.add([sent(1000, 1.0)])
    for _ in range(10):
        seen.add([sent(1000, 0.001)])
    assert rate(seen) == pytest.approx(1e6)


def test_only_links_from_here_count_and_the_bytes_of_the_last_step() -> None:
    seen = LineRates((LINK,), parse_links(None), exact=True)
    seen.add([sent(1000, 1.0)])
    seen.add([sent(1000, 1.0), sent(2000, 1.0), sent(7, 1.0, "npu->gpu")])
    found = seen.outlook([4, 4, 3], {"0.0.fused": 0.5, "0.1.fused": 0.25})
    assert (found.rows, found.compute, found.carried) == ([4, 4, 3], 1.5, {LINK: 3000})


def test_the_slowest_stage_is_found_over_phases_and_directions() -> None:
    assert slowest({}, 4) is None
    assert slowest({"once": 3.0}, 4) is None
    medians = {"0.0.forward": 1.0, "1.0.backward": 2.0, "0.1.fused": 2.5}
    assert slowest(medians, 2) == 6.0


# ---------------------------------------------------------------------- real lines and small messages
def row(count: int, size: int, seconds: float, gap: float = 1e-5, start: float = 1.0) -> list[Span]:
    """Messages of one line, with a pause between each two."""
    starts = (start + number * (seconds + gap) for number in range(count))
    return [Span(LINK, "forward 0", at, at + seconds, 0, 0, size) for at in starts]


def test_small_messages_that_wait_for_each_other_are_one_large_one() -> None:
    seen = LineRates((LINK,), parse_links(None))
    seen.add(row(8, LARGE // 4, 0.1))
    assert rate(seen) == pytest.approx(LARGE / 4 / 0.1, rel=1e-3)
    seen.add(list(reversed(row(8, LARGE // 4, 0.3))))
    assert rate(seen) == pytest.approx(LARGE / 4 / 0.2, rel=1e-3), "in whatever order they are told"


@pytest.mark.parametrize(("count", "gap"), [(8, 10 * CLOSE), (3, 0.0)], ids=["with pauses", "too few"])
def test_what_does_not_fill_the_line_says_nothing_of_it(count: int, gap: float) -> None:
    seen = LineRates((LINK,), parse_links("80mbit"))
    seen.add(row(count, LARGE // 4, 1e-5, gap))
    assert rate(seen) == 1e7 and seen.outlook([1], {}).unseen == {LINK}


def test_a_pause_parts_two_runs_and_is_no_time_of_the_line() -> None:
    seen = LineRates((LINK,), parse_links(None))
    seen.add([*row(4, LARGE // 4, 0.1, 0.0), *row(8, LARGE // 4, 0.1, 0.0, start=9.0), *row(1, 8, 0.1, start=20.0)])
    assert rate(seen) == pytest.approx(LARGE / 4 / 0.1)


def test_a_link_of_which_a_rate_was_seen_or_that_carried_nothing_is_not_unseen() -> None:
    seen = LineRates((LINK, "npu->gpu"), parse_links(None))
    assert not seen.outlook([1], {}).unseen
    seen.add([sent(10, 1e-6)])
    assert seen.outlook([1], {}).unseen == {LINK}
    seen.add([sent(MUCH, 1.0)])
    seen.add([sent(10, 1e-6)])
    assert not seen.outlook([1], {}).unseen
    exact = LineRates((LINK,), parse_links(None), exact=True)
    exact.add([sent(10, 0.0)])
    assert not exact.outlook([1], {}).unseen


# -------------------- Timings of the first micro-batch in stages of several processes, and the resulting in-flig
STAGES = 2
CUT: Any = SimpleNamespace(phases=[SimpleNamespace(index=0)], program=SimpleNamespace(stages=[None] * STAGES))


def clocks(stage: int, spans: list[Span], told: list[Span]) -> Clocks:
    clock = StageClock("s", 0.0, spans=spans)
    return Clocks({Seat(stage): clock}, StageClock("once", 0.0), LineClock(0, 0, 0.0, told))


def seen_of(compute: float, hold: float, delay: float, count: int = 8, steps: int = 3) -> dict[str, float]:
    """What both processes say after steps as the simulator times them, with three micro-batches in flight."""
    works = [Work(compute / 3, 2 * compute / 3)] * STAGES
    timeline = simulate(works, uniform(STAGES, seconds=hold, delay=delay), count, in_flight=3)
    told = {"0.0.forward": compute / 3, "0.0.backward": 2 * compute / 3, "0.1.forward": compute / 3}
    told["0.1.backward"] = 2 * compute / 3
    for stage in range(STAGES):
        places = (stage, _LINES[stage])
        spans, lines = ([_span(each) for each in timeline.spans if each.place == place] for place in places)
        measured = Measured(CUT, [], Links())
        for _ in range(steps):
            measured.add(clocks(stage, spans, lines))
        told |= measured.medians()
    return told


_LINES = ("0->1", "1->0")


def _span(span: Any) -> Span:
    what = {"F": "forward", "B": "backward"}[span.what]
    return Span(str(span.place), f"{what} {span.micro_batch}", span.start, span.end, span.micro_batch)


def limit(seen: dict[str, float]) -> int:
    (pace,) = paces_of_trips(CUT, seen)
    return limits("eager-1f1b", STAGES, 8, pace=pace)[0]


def test_a_trip_is_the_way_there_and_back() -> None:
    (pace,) = paces_of_trips(CUT, seen_of(0.15, hold=0.07, delay=0.02))
    assert pace == Pace(pytest.approx(0.15), (pytest.approx(0.18),), pytest.approx(0.07))


def test_a_long_way_takes_more_in_flight_than_without_a_measurement() -> None:
    """What three in flight lose on that line, four do not."""
    assert limits("eager-1f1b", STAGES, 8)[0] == 3
    assert limit(seen_of(0.15, hold=0.07, delay=0.02)) == 4


def test_a_queue_before_the_next_stage_counts_as_no_way() -> None:
    """With more in flight, the later micro-batches wait there; the limit stays what it is."""
    few, many = (limit(seen_of(0.15, hold=0.07, delay=0.02, count=count)) for count in (4, 8))
    assert few == many == 4


def test_a_short_way_takes_as_many_as_without_one() -> None:
    assert limit(seen_of(0.15, hold=0.001, delay=0.0)) == 3


def test_a_line_that_is_slower_than_the_stages_is_kept_busy_and_no_more() -> None:
    assert limit(seen_of(0.05, hold=0.2, delay=0.02)) == 4


def test_before_all_have_said_something_there_is_no_pace() -> None:
    assert paces_of_trips(CUT, seen_of(0.15, hold=0.07, delay=0.02, steps=1) | {}) == [Pace(0.15, (0.15,), 0.0)]
    assert paces_of_trips(CUT, {}) == []


# -------------------- Exchanged measurements of a step: round trips, and invalid ones are ignored
SEEN = {"npu": StageReport(0.25, 0.125, "npu", 2), "cpu": StageReport(0.5, 0.0, "npu")}
LINKS = {"npu->gpu": LinkReport(100, 120, 200, 3, 0.0625)}
WORKERS = {"npu/0": WorkerReport(4096, 1 << 30)}


def test_it_arrives_as_it_was_told() -> None:
    sheet = json.loads(json.dumps({"step": 3, "seen": pack_report(SEEN, LINKS, WORKERS)}))
    assert parse_reports([sheet]) == RemoteMeasurements(SEEN, LINKS, WORKERS)


def test_several_tell_of_their_own() -> None:
    other = pack_report({"tpu": StageReport(1.0, 2.0, "tpu", 1)}, LINKS, {"tpu/0": WorkerReport(1, 2)})
    found = parse_reports([{"seen": pack_report(SEEN, {}, WORKERS)}, {"seen": other}])
    assert (list(found.stages), list(found.links)) == (["npu", "cpu", "tpu"], ["npu->gpu"])
    assert list(found.workers) == ["npu/0", "tpu/0"]


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
def test_what_is_no_such_thing_is_left_out(seen: Any) -> None:
    assert parse_reports([{"seen": seen}]) == RemoteMeasurements()


def test_words_in_the_place_of_numbers_are_no_numbers() -> None:
    found = parse_reports([{"seen": {"stages": {"npu": ["fast", None, "many", 7]}, "links": {"a->b": ["x"] * 5}}}])
    assert found == RemoteMeasurements({"npu": StageReport(None, None, "7", None)}, {"a->b": LinkReport()})


def test_what_several_workers_of_a_cluster_send_is_added_up() -> None:
    sheets = [{"seen": pack_report({}, {"gpu->npu": LinkReport(size, size, size, 1, 0.5)}, {})} for size in (8, 2)]
    assert parse_reports(sheets).links == {"gpu->npu": LinkReport(10, 10, 10, 2, 1.0)}

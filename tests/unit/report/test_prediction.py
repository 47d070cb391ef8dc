"""The simulation of a measured step: its input, its result, and its result with one change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.report.sample_reports import BACK, THERE, make_basis
from whale_nebula.report.prediction import (
    Basis,
    ExchangeTransfer,
    Numbers,
    PhaseBasis,
    free_line,
    lift_rate_limit,
    predict,
    predict_seconds,
)
from whale_nebula.schedule.lines import Hop, Line, Work, make_uniform_hops
from whale_nebula.schedule.simulate import simulate


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
@pytest.mark.parametrize("transfer", [0.0, 0.5, 3.0])
def test_prediction_equals_the_simulator(schedule: str, transfer: float) -> None:
    works, hops = (Work(1.0, 2.0), Work(1.0, 2.0), Work(0.0, 3.0)), make_uniform_hops(3, seconds=transfer)
    given = Basis(("a", "b", "c"), (PhaseBasis(works, (False, False, True), hops),), 8, 1, schedule)
    assert predict(given).seconds == predict_seconds(given) == simulate(works, hops, 8, name=schedule).seconds


def test_prediction_sums_phases_and_adds_the_update() -> None:
    one = make_basis(rate=1e5)
    two = Basis(one.stages, one.phases * 2, one.micro_batches, one.rows, one.schedule, once=0.5)
    assert predict(two).seconds == pytest.approx(2 * predict(one).seconds + 0.5)
    assert predict(two).stages["gpu"].compute_seconds == pytest.approx(2 * predict(one).stages["gpu"].compute_seconds)


def test_stage_absent_from_a_phase_has_zero_seconds() -> None:
    phase = PhaseBasis((Work(0.0), Work(0.0, 2.0)), (False, True), {})
    found = predict(Basis(("a", "b"), (phase,), 3, 1, "1f1b"))
    assert (found.seconds, found.stages["a"].compute_seconds, found.stages["a"].wait_seconds) == (6.0, 0.0, 0.0)


def test_predicted_stages_and_links_add_up_to_the_step() -> None:
    found = predict(make_basis(rate=1e5))
    assert found.stages["gpu"].compute_seconds == pytest.approx(4 * 0.03)
    assert found.stages["npu"].compute_seconds == pytest.approx(4 * 0.03)
    # gpu's last backward ends the step: it computes or waits until then
    assert found.stages["gpu"].compute_seconds + found.stages["gpu"].wait_seconds == pytest.approx(found.seconds)
    assert {name: link.bytes for name, link in found.links.items()} == {THERE: 4000, BACK: 4000}
    assert found.links[THERE].seconds == pytest.approx(4 * 1000 / 1e5)


def test_narrower_numbers_shrink_payloads_but_not_headers() -> None:
    numbers = Numbers(bytes=4000, count=1000)
    hop = Hop(Line("a->b"), Line("b->a"), 4128, 4128)
    given = Basis(
        ("a", "b"), (PhaseBasis((Work(1.0),), (False,), {(0, 1): hop}, {(0, 1): (numbers, numbers)}),), 1, 1, ""
    )
    (halved,) = given.narrow_numbers(2).phases
    assert (halved.hops[0, 1].forward, halved.hops[0, 1].backward) == (2128, 2128)
    (quarter,) = given.narrow_numbers(1).phases
    assert quarter.hops[0, 1].forward == 1128


def test_narrow_or_integer_tensors_keep_their_size() -> None:
    half = Numbers(bytes=2000, count=1000)
    hop = Hop(Line("a->b"), Line("b->a"), 2128, None)
    phase = PhaseBasis((Work(1.0),), (False,), {(0, 1): hop}, {(0, 1): (half, Numbers())})
    (found,) = Basis(("a", "b"), (phase,), 1, 1, "").narrow_numbers(2).phases
    assert found.hops == phase.hops


def test_prediction_over_free_and_wide_lines() -> None:
    given = make_basis(rate=1e5, delay=0.02)
    (line,) = {hop.forward_line for hop in given.change_lines(free_line).phases[0].hops.values()}
    assert line == Line(THERE)
    (line,) = {hop.backward_line for hop in given.change_lines(lift_rate_limit).phases[0].hops.values()}
    assert line == Line(BACK, delay=0.02)


def test_divided_basis_has_more_and_smaller_micro_batches() -> None:
    given = make_basis(rate=1e5, micro_batches=2, rows=8)
    found = given.divide(4)
    assert (found.micro_batches, found.rows) == (8, 2)
    assert found.phases[0].works[0].forward * 4 == pytest.approx(given.phases[0].works[0].forward)
    assert found.phases[0].hops[0, 1].forward * 4 == given.phases[0].hops[0, 1].forward
    assert found.phases[0].numbers[0, 1][0].count * 4 == given.phases[0].numbers[0, 1][0].count


def test_update_exchange_adds_line_seconds() -> None:
    plain = make_basis(rate=1e5, delay=0.25)
    lines = [Line(name, 1e5, 0.25) for name in (THERE, BACK)]
    rounds = (
        (ExchangeTransfer(lines[0], 5000.0), ExchangeTransfer(lines[1], 10_000.0)),
        (ExchangeTransfer(lines[0], 0.0),),
    )
    given = replace(plain, exchange=rounds)
    # a round takes as long as the slower of its lines, and rounds follow one another
    assert given.exchange_seconds == pytest.approx(0.1 + 0.25 + 0.25)
    assert predict(given).seconds == pytest.approx(predict(plain).seconds + 0.6)
    assert predict(given).links[BACK].seconds == pytest.approx(predict(plain).links[BACK].seconds + 0.1)
    assert given.change_lines(free_line).exchange_seconds == 0.0
    assert given.narrow_numbers(1).exchange == given.divide(2).exchange == rounds


def test_codec_seconds_are_separate_from_compute_seconds() -> None:
    plain, taken = make_basis(rate=1e6), 0.005
    (phase,) = plain.phases
    works = tuple(replace(work, coding=taken, coding_back=2 * taken) for work in phase.works)
    coded = replace(plain, phases=(replace(phase, works=works),))
    found, before = predict(coded), predict(plain)
    for name in plain.stages:
        assert found.stages[name].compute_seconds == pytest.approx(before.stages[name].compute_seconds)
        assert found.stages[name].codec_seconds == pytest.approx(plain.micro_batches * 3 * taken)
        assert before.stages[name].codec_seconds == 0.0
    assert found.seconds >= before.seconds + plain.micro_batches * 3 * taken
    assert predict(coded.change_lines(free_line)).stages["gpu"].codec_seconds == found.stages["gpu"].codec_seconds


def test_work_without_backward_has_no_backward_codec_seconds() -> None:
    assert Work(1.0, coding=0.5, coding_back=9.0).seconds == 1.5
    assert Work(1.0, 0.0, coding_back=9.0).codecs == 9.0

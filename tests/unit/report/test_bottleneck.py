"""The sentence: every number in it is measured, or what the simulator says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.unit.report.making import basis, measured
from whale_nebula.report.bottleneck import describe_bottleneck as sentence
from whale_nebula.report.prediction import Basis, Carried, PhaseBasis, free, predict
from whale_nebula.report.records import LinkReport, StageReport, duration
from whale_nebula.report.report import Report
from whale_nebula.schedule.lines import Hop, Line, Work


def instead(given: Basis, changed: Basis) -> str:
    return f"{duration(predict(changed).seconds)} a step instead of {duration(predict(given).seconds)}"


def test_the_step_is_compared_with_one_over_free_lines() -> None:
    given = basis(gpu=(0.1, 0.2), npu=0.3, size=40_000, rate=1e5, micro_batches=64)
    found = sentence(measured(given))
    assert re.match(r"stage gpu waits \d+ % of the step for the lines gpu->npu and npu->gpu; ", found)
    assert found.endswith(f"; {instead(given, given.over(free))} over free lines")


def test_the_share_is_what_was_measured() -> None:
    given = basis(size=100_000, rate=1e5)
    report = measured(given)
    waits = report.stages["gpu"].wait_seconds / report.step_seconds
    assert sentence(report).startswith(f"stage gpu waits {100 * waits:.0f} % of the step for the lines")


def test_waiting_for_stages_is_told_from_waiting_for_lines() -> None:
    given = basis(npu=0.2, size=4000, rate=1e5, micro_batches=2)
    report = measured(given)
    lost = predict(given).stages["gpu"].wait_seconds - predict(given.over(free)).stages["gpu"].wait_seconds
    part = f"waits for the lines gpu->npu and npu->gpu: {100 * lost / predict(given).seconds:.0f} % of the step"
    assert part in sentence(report)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ((), "what clusters exchange once a step holds the step for {} %"),
        (("gradients of tied variables",), "gradients of tied variables, sent once a step, hold the step for {} %"),
    ],
)
def test_updates_may_exchange_more_than_stages_do(what: tuple[str, ...], said: str) -> None:
    given = replace(basis(), exchange=((Carried(Line("gpu->npu", 1e5), 1e5, what),),))
    share = f"{100 / predict(given).seconds:.0f}"
    assert sentence(measured(given)) == f"{said.format(share)}, and no codec touches that"


def forward_only(delay: float = 0.01) -> Basis:
    """Three stages in a chain of which none goes backward; the last one tells the others what came of it."""
    lines = {pair: Line("->".join(pair), 1e6, delay) for pair in ("ab", "ba", "bc", "cb", "ca")}
    hops = {(0, 1): Hop(lines["ab"], lines["ba"], 4000, None), (1, 2): Hop(lines["bc"], lines["cb"], 8000, None)}
    results = (Carried(lines["cb"], 100, ("results",)), Carried(lines["ca"], 100, ("results",)))
    phase = PhaseBasis((Work(0.001),) * 3, (False,) * 3, hops)
    carried = {"a->b": 4000, "b->c": 8000, "c->b": 100, "c->a": 100}
    return Basis(("a", "b", "c"), (phase,), 1, 8, "eager-1f1b", exchange=(results,), bytes=carried)


def test_a_step_that_only_goes_forward_waits_for_no_gradients() -> None:
    found = sentence(measured(forward_only()))
    share = forward_only().exchange_seconds / predict(forward_only()).seconds
    assert re.match(r"stage c waits \d+ % of the step for the line b->c, and results, sent once a step, ", found)
    assert f"hold it for {100 * share:.0f} %; " in found


def test_the_sentence_does_not_turn_over_where_two_waits_are_alike() -> None:
    """Half a step for the lines, half for the results: a little noise must not change what is named."""
    told = [sentence(measured(forward_only(delay))) for delay in (0.004, 0.01, 0.02, 0.03)]
    assert len({re.sub(r"\d+ %|; .*", "", each) for each in told}) == 1


def test_a_stage_that_computes_all_the_time_is_named() -> None:
    assert re.fullmatch(r"computing, not the line: stage \w+ computes [^;]* foretold", sentence(measured(basis())))


def test_the_update_may_be_what_takes_long() -> None:
    found = sentence(measured(basis(once=5.0)))
    assert re.fullmatch(r"what runs once a step \(updates, metrics, results\) takes 9\d % of it", found)


def test_a_step_that_took_much_longer_says_so() -> None:
    report = measured(basis(), slower=2.0)
    apart = f"this step took {duration(report.step_seconds)}, the simulator says {duration(report.predicted_seconds)}"
    assert sentence(report).endswith(f" ({apart}: something else takes time too)")


def test_a_step_that_was_much_faster_claims_nothing() -> None:
    assert re.fullmatch(
        r"not known: this step took \S+ \w+, the simulator says \S+ \w+", sentence(measured(basis(), slower=0.1))
    )


@pytest.mark.parametrize(
    ("stages", "links", "said"),
    [
        ({"a": StageReport()}, {}, "there is one stage, and nothing crosses a link"),
        ({"a": StageReport(), "b": StageReport()}, {"a->b": LinkReport()}, "over free links a step is one local"),
        ({"a": StageReport(0.1, 0.4), "b": StageReport(0.1, 0.2)}, {}, "stage a waits 80 % of the step; what for"),
    ],
)
def test_without_a_prediction_only_what_was_measured_is_said(
    stages: dict[str, StageReport], links: dict[str, LinkReport], said: str
) -> None:
    assert sentence(Report("fit", 1, 0.5, 2, stages, links)).startswith(said)


def test_a_stage_of_another_process_is_told_by_the_simulator() -> None:
    given = basis(size=100_000, rate=1e5, paced=False)
    report = measured(given)
    here = Report("fit", 3, report.step_seconds, 4, {"npu": report.stages["npu"]}, report.links, basis=given)
    said = r"stage gpu waits for the lines gpu->npu and npu->gpu: \d+ % of the step, by the simulator; "
    assert re.match(said, sentence(here))


def test_stages_of_one_cluster_need_no_line() -> None:
    stages = {name: StageReport(cluster="gpu") for name in ("front", "back")}
    told = sentence(Report("fit", 3, 0.1, 2, stages, {}))
    assert told == "both stages are in cluster gpu: nothing crosses a link"
    stages["head"] = StageReport(cluster="gpu")
    assert sentence(Report("fit", 3, 0.1, 2, stages, {})).startswith("all 3 stages are in cluster gpu")
    stages["head"] = StageReport(cluster="npu")
    assert "emulates a line" in sentence(Report("fit", 3, 0.1, 2, stages, {}))


def inside() -> Basis:
    """Two stages of one cluster in several processes, which exchange something once a step."""
    given = basis(paced=False)
    (phase,) = given.phases
    hops = {pair: replace(hop, there=None, back=None) for pair, hop in phase.hops.items()}
    exchange = ((Carried(Line("gpu->gpu"), 100.0, ("results",)),),)
    return replace(given, phases=(replace(phase, hops=hops),), exchange=exchange, bytes={})


@pytest.mark.parametrize("slower", [0.2, 5.0])
def test_no_line_is_blamed_where_there_is_none(slower: float) -> None:
    assert " line " not in sentence(measured(inside(), slower)).replace("not the line", "")

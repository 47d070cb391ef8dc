"""The bottleneck sentence: golden for every kind of step; its advice is simulated, valid, and stable."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

import whale_nebula as nb
from tests.golden.files import check_golden
from tests.unit.report.sample_reports import make_basis, make_measured_report
from whale_nebula.report.bottleneck import ADVISED_CODECS, NEGLIGIBLE_SHARE, list_advisable_codecs
from whale_nebula.report.bottleneck import describe_bottleneck as sentence
from whale_nebula.report.prediction import (
    Basis,
    ExchangeTransfer,
    Numbers,
    PhaseBasis,
    lift_rate_limit,
    predict_seconds,
)
from whale_nebula.report.records import LinkReport, StageReport, duration
from whale_nebula.report.report import Report
from whale_nebula.schedule.lines import Hop, Line, Work


def make_narrow_or_one_way_basis(**numbers: Numbers | None) -> Basis:
    """A step that waits for its line, of other numbers in what crosses, or without a way back."""
    given = make_basis(size=100_000, rate=1e5)
    (phase,) = given.phases
    if small := numbers.get("numbers"):
        return replace(given, phases=(replace(phase, numbers={(0, 1): (small, small)}),))
    hops = {pair: replace(hop, backward=None) for pair, hop in phase.hops.items()}
    return replace(given, phases=(replace(phase, hops=hops),))


def make_forward_only_basis(delay: float = 0.01) -> Basis:
    """Three stages in a chain of which none goes backward; the last one tells the others what came of it."""
    lines = {pair: Line("->".join(pair), 1e6, delay) for pair in ("ab", "ba", "bc", "cb", "ca")}
    hops = {(0, 1): Hop(lines["ab"], lines["ba"], 4000, None), (1, 2): Hop(lines["bc"], lines["cb"], 8000, None)}
    results = (ExchangeTransfer(lines["cb"], 100, ("results",)), ExchangeTransfer(lines["ca"], 100, ("results",)))
    phase = PhaseBasis((Work(0.001),) * 3, (False,) * 3, hops)
    carried = {"a->b": 4000, "b->c": 8000, "c->b": 100, "c->a": 100}
    return Basis(("a", "b", "c"), (phase,), 1, 8, "eager-1f1b", exchange=(results,), bytes=carried)


def make_exchanging_basis(*what: str) -> Basis:
    return replace(make_basis(), exchange=((ExchangeTransfer(Line("gpu->npu", 1e5), 1e5, what),),))


def make_one_cluster_basis() -> Basis:
    """Two stages of one cluster in several processes, which exchange something once a step."""
    given = make_basis(npu=0.031, paced=False)
    (phase,) = given.phases
    hops = {pair: replace(hop, forward_line=None, backward_line=None) for pair, hop in phase.hops.items()}
    exchange = ((ExchangeTransfer(Line("gpu->gpu"), 100.0, ("results",)),),)
    return replace(given, phases=(replace(phase, hops=hops),), exchange=exchange, bytes={})


def make_partial_report() -> Report:
    """A step of which another process has measured the first stage."""
    given = make_basis(size=100_000, rate=1e5, paced=False)
    report = make_measured_report(given)
    return Report("fit", 3, report.step_seconds, 4, {"npu": report.stages["npu"]}, report.links, basis=given)


def make_unpredicted_report(links: dict[str, LinkReport] | None = None, **stages: StageReport) -> Report:
    return Report("fit", 1, 0.5, 2, stages, links or {})


def make_placed_report(**clusters: str) -> Report:
    return make_unpredicted_report(**{name: StageReport(cluster=cluster) for name, cluster in clusters.items()})


STEPS: dict[str, Report | Basis] = {
    "a line that fp16 hides": make_basis(gpu=(0.1, 0.2), npu=0.3, size=40_000, rate=1e5, micro_batches=64),
    "a line that int8 hides": make_basis(gpu=(0.1, 0.2), npu=0.3, size=110_000, rate=1e5, micro_batches=64),
    "a line that no codec hides": make_basis(size=100_000, rate=1e5),
    "codecs would compute longer than the line takes": make_basis(
        gpu=(1e-5, 2e-5), npu=3e-5, size=4000, rate=1e7, micro_batches=16
    ),
    "what crosses is not a number": make_narrow_or_one_way_basis(numbers=Numbers(1000, 250)),
    "what crosses is small already": make_narrow_or_one_way_basis(numbers=Numbers(100_000, 200_000)),
    "nothing comes back": make_narrow_or_one_way_basis(),
    "a delay stays": make_basis(size=40_000, rate=1e5, delay=0.5, micro_batches=8, rows=1),
    "a delay alone": make_basis(delay=0.5, micro_batches=1, rows=1),
    "stages are waited for as well": make_basis(npu=0.2, size=4000, rate=1e5, micro_batches=2),
    "clusters exchange something once": make_exchanging_basis(),
    "clusters exchange gradients once": make_exchanging_basis("gradients of tied variables"),
    "forward only": make_forward_only_basis(),
    "more micro-batches overlap more": make_basis(micro_batches=1, rows=64),
    "rows depend on each other": replace(make_basis(micro_batches=1, rows=64), divides=False),
    "rows run out": make_basis(micro_batches=1, rows=1),
    "the update takes long": make_basis(once=5.0),
    "twice as slow as foretold": make_measured_report(make_basis(), slower=2.0),
    "ten times as fast as foretold": make_measured_report(make_basis(), slower=0.1),
    "one stage, not predicted": make_unpredicted_report(a=StageReport()),
    "free links": make_unpredicted_report({"a->b": LinkReport()}, a=StageReport(), b=StageReport()),
    "only measured": make_unpredicted_report(a=StageReport(0.1, 0.4), b=StageReport(0.1, 0.2)),
    "another process measured it": make_partial_report(),
    "two stages of one cluster": make_placed_report(front="gpu", back="gpu"),
    "three stages of one cluster": make_placed_report(front="gpu", back="gpu", head="gpu"),
    "stages of two clusters without a line": make_placed_report(front="gpu", back="gpu", head="npu"),
    "processes of one cluster, too fast": make_measured_report(make_one_cluster_basis(), 0.2),
    "processes of one cluster, too slow": make_measured_report(make_one_cluster_basis(), 5.0),
}


def describe_step(step: Report | Basis) -> str:
    return sentence(make_measured_report(step) if isinstance(step, Basis) else step)


def test_bottleneck_sentences_match_the_golden_file(request: pytest.FixtureRequest) -> None:
    check_golden(
        request, "sentences.txt", "\n".join(f"{name}:\n  {describe_step(step)}" for name, step in STEPS.items())
    )


@pytest.mark.parametrize(
    ("size", "which", "widths"),
    [(40_000, 0, (2, 2)), (110_000, 2, (1.03125, 1.03125))],
)
def test_bottleneck_advises_the_mildest_codec_that_hides_the_line(
    size: float, which: int, widths: tuple[float, float]
) -> None:
    given = make_basis(gpu=(0.1, 0.2), npu=0.3, size=size, rate=1e5, micro_batches=64)
    assert predict_seconds(given.narrow_numbers(*widths)) <= (1 + NEGLIGIBLE_SHARE) * predict_seconds(
        given.change_lines(lift_rate_limit)
    )
    line, changed = ADVISED_CODECS[which].line, ADVISED_CODECS[which].apply_to(given)
    assert describe_step(given).endswith(f"; {line} would hide the transfers: {seconds_instead(given, changed)}")
    assert predict_seconds(changed) > predict_seconds(given.narrow_numbers(*widths)), "a codec computes, too"


def seconds_instead(given: Basis, changed: Basis) -> str:
    return f"{duration(predict_seconds(changed))} per step instead of {duration(predict_seconds(given))}"


CHANGED: dict[str, Callable[[Basis], Basis]] = {
    "a line that no codec hides": ADVISED_CODECS[3].apply_to,
    "nothing comes back": ADVISED_CODECS[3].apply_to,
    "more micro-batches overlap more": lambda given: given.divide(
        int(re.search(r"; (\d+) micro-batches would help", describe_step(given))[1])
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_advised_seconds_are_those_of_the_changed_step(name: str) -> None:
    given = STEPS[name]
    assert isinstance(given, Basis) and seconds_instead(given, CHANGED[name](given)) in describe_step(given)


def test_advised_codec_lines_are_valid_code() -> None:
    for advised in ADVISED_CODECS:
        with eval(advised.line, {"nb": nb}):
            pass
    lines = [f"nb.compress({name}=True)" for name in ("fp16", "int8", "int4")]
    assert [each.line for each in list_advisable_codecs(make_narrow_or_one_way_basis())] == lines


def test_bottleneck_is_stable_when_two_waits_are_equal() -> None:
    """Half a step for the lines, half for the results: a little noise must not change what is named."""
    found = [describe_step(make_forward_only_basis(delay)) for delay in (0.004, 0.01, 0.02, 0.03)]
    assert len({re.sub(r"\d+ %|; .*", "", each) for each in found}) == 1

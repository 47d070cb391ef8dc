"""Reports for tests: a step of two stages over a line, with numbers that can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

from whale_nebula.report.prediction import Basis, ExchangeTransfer, Numbers, PhaseBasis, PlannedReport, predict
from whale_nebula.report.records import ONCE, BoundaryReport, LinkReport, PredictionGap, Scalars, Span, StageReport
from whale_nebula.report.report import Report
from whale_nebula.schedule.lines import Hop, Line, Work

THERE, BACK = "gpu->npu", "npu->gpu"


def make_basis(
    *,
    gpu: tuple[float, float] = (0.01, 0.02),
    npu: float = 0.03,
    size: float = 1000.0,
    rate: float = float("inf"),
    delay: float = 0.0,
    micro_batches: int = 4,
    rows: int = 8,
    once: float = 0.0,
    paced: bool = True,
) -> Basis:
    """Two stages; each micro-batch sends `size` bytes of float32 there and its gradient back."""
    hop = Hop(Line(THERE, rate, delay), Line(BACK, rate, delay), size, size)
    numbers = Numbers(size, size / 4)
    works = (Work(*gpu), Work(0.0, npu))
    phase = PhaseBasis(works, (False, True), {(0, 1): hop}, {(0, 1): (numbers, numbers)})
    carried = int(size) * micro_batches
    return Basis(
        ("gpu", "npu"),
        (phase,),
        micro_batches,
        rows,
        "eager-1f1b",
        paced=paced,
        once=once,
        bytes={THERE: carried, BACK: carried},
    )


def make_measured_report(basis: Basis, slower: float = 1.0, **more: object) -> Report:
    """The report of a step that went as predicted, or so many times slower."""
    prediction = predict(basis)
    stages = {
        name: StageReport(stage.compute_seconds, slower * stage.wait_seconds, name, 1)
        for name, stage in prediction.stages.items()
    }
    links = {
        name: LinkReport(link.bytes, link.bytes, link.bytes, 1, link.seconds) for name, link in prediction.links.items()
    }
    return Report("fit", 3, slower * prediction.seconds, basis.micro_batches, stages, links, basis=basis, **more)


def make_full_report() -> Report:
    """A report with something in every field."""
    exchange = ((ExchangeTransfer(Line(THERE, 1e5), 500.0), ExchangeTransfer(Line(BACK), 500.0)),)
    return make_measured_report(
        replace(make_basis(rate=1e5, delay=0.01, once=0.005), exchange=exchange),
        spans=(
            Span("gpu", "forward 0", 0.0, 0.01, 0),
            Span(THERE, "forward 0", 0.01, 0.02, 0, 0, 1000),
            Span(ONCE, "update", 0.1, 0.105, None, 1),
        ),
        boundaries={
            "b0 gpu->npu": BoundaryReport("int8", 4096, 1088, 1216, 1, 0.002, 0.001, 0.0093, 0, ("fp16 -> int8",)),
            "b0 npu->gpu": BoundaryReport("none", 4096, 4096, 4224, 1),
        },
        notes=("a note",),
        scalars=Scalars(("loss", "accuracy"), (0.25, 0.5)),
        worker="gpu/0",
        time=1000.5,
        planned=PlannedReport(
            8, PredictionGap(0.4, 0.3), {"gpu": PredictionGap(0.3, 0.2)}, {THERE: PredictionGap(0.02, 0.01)},
            {"gpu/0": PredictionGap(2.0**29, 2.0**24)}, "npu, undivided batch would take 0.100 s instead of 0.400 s",
        ),
    )  # fmt: skip

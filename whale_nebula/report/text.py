"""A report as lines for a terminal or a log: what was measured, and beside it what was predicted."""

from __future__ import annotations

from whale_nebula.report.prediction import LinkPrediction, StagePrediction
from whale_nebula.report.report import ALONE, EXCHANGE, ONCE, LinkReport, Report, StageReport
from whale_nebula.report.whose import of_link, of_stage

_FAR_ABOVE = 1.1
_UPDATES = "updates, metrics, results"


def report_text(report: Report, *, bottleneck: bool = True) -> str:
    """The report, a line for each stage and link, and the bottleneck in a sentence.

    >>> links = {"gpu->npu": LinkReport(payload_bytes=2048, bytes=2150, raw_bytes=4096, frames=1)}
    >>> print(report_text(Report("fit", 2, 0.5, 2, {"gpu": StageReport(0.2, 0.3)}, links)))
    step 2 of fit: 0.500 s, 2 micro-batches
      stage gpu: computes 0.200 s, waits 0.300 s
      link gpu->npu: 2.1 KiB (52 % of the tensors)
      bottleneck: stage gpu waits 60 % of the step; what for, the simulator says once two steps have been measured
    """
    whose = report.program if report.worker == ALONE else f"{report.program} in {report.worker}"
    lines = [f"step {report.step} of {whose}: {duration(report.step_seconds)}, {_many(report.micro_batches)}"]
    if report.scalars:
        lines.append(f"  returned: {scalars_text(report)}")
    prediction = report.prediction
    if prediction is not None:
        lines.append(f"  predicted: {duration(prediction.seconds)}, by the simulator from the pace of the steps before")
    stages = prediction.stages if prediction is not None else {}
    links = prediction.links if prediction is not None else {}
    lines += [
        f"  stage {name}: {_stage(stage, stages.get(name), of_stage(report, name))}"
        for name, stage in report.stages.items()
    ]
    lines += [
        f"  link {name}: {_link(link, links.get(name), of_link(report, name))}" for name, link in report.links.items()
    ]
    lines += _boundaries(report)
    if report.meetings is not None:
        lines.append(f"  meetings {report.meetings}")
    if (once := _once(report)) is not None:
        lines.append(f"  {ONCE} ({_UPDATES}): {once}")
    if bottleneck:
        lines.append(f"  bottleneck: {report.bottleneck}")
    if report.straggler:
        lines.append(f"  straggler: {report.straggler}")
    return "\n".join([*lines, *(f"  note: {note}" for note in report.notes)])


def _boundaries(report: Report) -> list[str]:
    from whale_nebula.report.crossings import boundary_lines

    return [f"  {line}" for line in boundary_lines(report.boundaries)]


def _many(count: int) -> str:
    return f"{count} micro-batch{'es' * (count != 1)}"


def scalars_text(report: Report) -> str:
    """What the step returned: "loss 0.3124, accuracy 0.91"."""
    return ", ".join(f"{name} {value:.4g}" for name, value in report.scalars.items())


def _stage(stage: StageReport, predicted: StagePrediction | None, whose: str) -> str:
    if stage.compute_seconds is None or stage.wait_seconds is None:
        return f"part of one local function, not timed apart{_copies(stage)}"
    computes = _predicted(None if predicted is None else predicted.compute_seconds, whose)
    waits = _predicted(None if predicted is None else predicted.wait_seconds, whose)
    said = f"computes {duration(stage.compute_seconds)}{computes}, waits {duration(stage.wait_seconds)}{waits}"
    codecs = _predicted(None if predicted is None else predicted.codec_seconds, whose)
    said += f", encodes and decodes {duration(stage.codec_seconds)}{codecs}" if stage.codec_seconds else ""
    return said + _copies(stage)


def _copies(stage: StageReport) -> str:
    """How many there are of a stage, and what they stand idle, where that is known.

    >>> from whale_nebula.report.report import busiest
    >>> _copies(busiest([StageReport(3.0), StageReport(1.0)])), _copies(StageReport(replicas=None, copies=2))
    ('; 2 replicas, which stand idle 2.000 s in all for the slowest', '; 2 replicas')
    """
    if stage.copies < 2:
        return ""
    idle = stage.idle_seconds
    said = "" if idle is None else f", which stand idle {duration(idle)} in all for the slowest"
    return f"; {stage.copies} replicas{said}"


def _link(link: LinkReport, predicted: LinkPrediction | None, whose: str) -> str:
    parts = [f"{size(link.bytes)} ({100 * link.ratio:.0f} % of the tensors{_why(link)})"]
    if link.seconds:
        parts.append(f"holds the line {duration(link.seconds)}")
    if predicted is not None:
        most = "at most " if predicted.at_most else ""
        parts.append(f"predicted {most}{size(predicted.bytes)}, {duration(predicted.seconds)}{whose}")
    return ", ".join(parts)


def _why(link: LinkReport) -> str:
    """Clearly more bytes than the tensors had: frames have headers, and control messages are counted too.

    >>> _why(LinkReport(payload_bytes=8, bytes=144, raw_bytes=8, frames=1))
    ': the header of 1 frame, 136 B with control messages, outweighs them'
    >>> _why(LinkReport(payload_bytes=1024, bytes=1160, raw_bytes=1024, frames=1))
    ': the header of 1 frame adds 136 B, with control messages'
    """
    extra = link.bytes - link.payload_bytes
    if link.ratio < _FAR_ABOVE or not link.frames:
        return ""
    one = link.frames == 1
    headers = "the header of 1 frame" if one else f"the headers of {link.frames} frames"
    if extra > link.payload_bytes:
        return f": {headers}, {size(extra)} with control messages, outweigh{'s' * one} them"
    return f": {headers} add{'s' * one} {size(extra)}, with control messages"


def _once(report: Report) -> str | None:
    """What ran once a step, where that was timed."""
    own = [span for span in report.spans if span.lane == ONCE]
    took = sum(span.end - span.start for span in own if span.what != EXCHANGE)
    waited = sum(span.end - span.start for span in own if span.what == EXCHANGE)
    if not own:
        return None
    told = report.basis
    said = f"computes {duration(took - waited)}{_predicted(None if told is None else told.once)}"
    return f"{said}, waits {duration(waited)}{_predicted(None if told is None else told.exchange_seconds)}"


def _predicted(seconds: float | None, whose: str = "") -> str:
    return "" if seconds is None else f" (predicted {duration(seconds)}{whose})"


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(1.5), duration(0.0123), duration(0.000456)
    ('1.500 s', '12.3 ms', '0.456 ms')
    """
    if seconds >= 0.1:
        return f"{seconds:.3f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e3 * seconds:.3g} ms"


def size(count: float) -> str:
    """Bytes for people.

    >>> size(512), size(2048), size(5 * 2**20)
    ('512 B', '2.0 KiB', '5.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""

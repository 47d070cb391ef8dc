"""A report as lines for a terminal or a log."""

from __future__ import annotations

from whale_nebula.report.report import LinkReport, Report


def report_text(report: Report) -> str:
    """The report, a line for each stage and link.

    >>> from whale_nebula.report.report import StageReport
    >>> links = {"gpu->npu": LinkReport(payload_bytes=2048, bytes=2150, raw_bytes=4096, frames=1)}
    >>> print(report_text(Report("fit", 3, 0.5, 2, {"gpu": StageReport(0.2, 0.3)}, links)))
    step 3 of fit: 0.500 s, 2 micro-batches
      stage gpu: computes 0.200 s, waits 0.300 s
      link gpu->npu: 2.1 KiB (52 % of the tensors)
    """
    head = f"step {report.step} of {report.program}: {report.step_seconds:.3f} s"
    lines = [f"{head}, {report.micro_batches} micro-batches"]
    if report.predicted_seconds is not None:
        lines.append(f"  predicted: {report.predicted_seconds:.3f} s")
    for name, stage in report.stages.items():
        if stage.compute_seconds is not None and stage.wait_seconds is not None:
            lines.append(f"  stage {name}: computes {stage.compute_seconds:.3f} s, waits {stage.wait_seconds:.3f} s")
        else:
            lines.append(f"  stage {name}: part of one local function, not timed apart")
    lines += [f"  link {name}: {_link(link)}" for name, link in report.links.items()]
    return "\n".join([*lines, *(f"  note: {note}" for note in report.notes)])


def _link(link: LinkReport) -> str:
    return f"{size(link.bytes)} ({100 * link.ratio:.0f} % of the tensors)"


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

"""A step as tables of rich: of stages, of links, of boundaries that a codec makes small, and what they wait for."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from whale_nebula.report.boundaries import BoundaryReport
from whale_nebula.report.crossings import encoded
from whale_nebula.report.rate import per_second
from whale_nebula.report.report import LinkReport, Report, StageReport
from whale_nebula.report.text import duration, scalars_text, size

_BAR_COLUMNS = 14
_HEADERS = 3.0  # where frames are so many times what they carry, their headers are all there is to say of them
_WIDTHS = (12, 9, 9, 9, _BAR_COLUMNS, 9)


def step_table(report: Report, rate: float | None, doing: Mapping[str, str], bottleneck: str = "") -> RenderableType:
    """Everything about a step, as wide as the terminal.

    `rate` is steps a second (None: not known yet), `doing` what each stage does at this moment.
    """
    title = Text(f"{report.program}, step {report.step}", style="bold")
    parts: list[RenderableType] = [Rule(title, style="dim", align="left"), _head(report, rate), _stages(report, doing)]
    if report.links or report.elsewhere.links:
        parts.append(_links(report))
    if boundaries := encoded(report.boundaries):
        parts.append(_boundaries(boundaries))
    if bottleneck:
        parts.append(Text(bottleneck, style="italic"))
    return Group(*parts)


def _head(report: Report, rate: float | None) -> Text:
    head = Text(f"{scalars_text(report)} · " if report.scalars else "", style="green")
    head.append(f"{duration(report.step_seconds)} a step", style="default")
    if report.prediction is not None:
        head.append(f", predicted {duration(report.prediction.seconds)}", style="default dim")
    if rate is not None:
        head.append(f" · {per_second(rate)}", style="default")
    return head


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for number, (column, width) in enumerate(zip(columns, _WIDTHS, strict=True)):
        table.add_column(column, no_wrap=True, min_width=width, justify="right" if 0 < number < 4 else "left")
    return table


def _stages(report: Report, doing: Mapping[str, str]) -> Table:
    table = _table("stage", "computes", "waits", "in flight", "of the step", "now")
    for name, stage in report.stages.items():
        table.add_row(_name(name, stage), *_stage(report, stage), doing.get(name, ""))
    for name, stage in report.elsewhere.stages.items():
        table.add_row(_name(name, stage), *_stage(report, stage), Text("the step before", style="dim"))
    return table


def _name(name: str, stage: StageReport) -> Text:
    """A stage's name, and its cluster where that is another word."""
    return Text(name if stage.cluster in ("", name) else f"{name} ({stage.cluster})")


def _stage(report: Report, stage: StageReport) -> list[RenderableType]:
    if stage.compute_seconds is None or stage.wait_seconds is None:
        return ["", "", "", Text("one local function, not timed apart", style="dim")]
    whole = max(report.step_seconds, 1e-9)
    bar = _bar([(stage.compute_seconds / whole, "green"), (stage.wait_seconds / whole, "yellow")])
    return [duration(stage.compute_seconds), duration(stage.wait_seconds), str(stage.in_flight or ""), bar]


def _bar(parts: list[tuple[float, str]]) -> Text:
    """Shares of the step as a line: green for computing, yellow for waiting, and the rest of it."""
    bar = Text()
    for share, colour in parts:
        bar.append("━" * round(_BAR_COLUMNS * min(share, 1.0)), style=colour)
    return bar + Text("─" * max(_BAR_COLUMNS - len(bar), 0), style="dim")


def _links(report: Report) -> Table:
    table = _table("link", "a step", "of raw", "in all", "of the step", "line held")
    for name, link in {**report.links, **report.elsewhere.links}.items():
        table.add_row(Text(name), *_link(report, name, link))
    return table


def _link(report: Report, name: str, link: LinkReport) -> list[RenderableType]:
    whole = max(report.step_seconds, 1e-9)
    total = report.run.links.get(name)  # who sends over it knows; of others a step alone is told
    share = f"{100 * link.ratio:.0f} %" if link.ratio < _HEADERS else "headers"
    sent = [size(link.bytes), share, "" if total is None else size(total.bytes)]
    held = [_bar([(link.seconds / whole, "blue")]), duration(link.seconds)] if link.seconds else ["", "free"]
    return [*sent, *held]


def _boundaries(boundaries: Mapping[str, BoundaryReport]) -> Table:
    """What crosses, direction by direction; an error that was not measured here is left out."""
    table = _table("boundary", "a step", "of raw", "error", "as", "codec takes")
    for name, each in boundaries.items():
        error = "" if each.error is None else f"{each.error:.2g}"
        took = each.encode_seconds + each.decode_seconds
        sent = [size(each.wire_bytes), f"{100 * each.ratio:.3g} %", error]
        table.add_row(Text(name), *sent, Text(each.codec), duration(took) if took else "")
    return table

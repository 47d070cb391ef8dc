"""A step as Chrome's trace events: a process for each cluster, in it a lane for each stage and each link.

The format is Google's "Trace Event Format": complete events ("X") with microseconds, and names of processes and
threads as metadata ("M"). A link's lane lies in the cluster that sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from whale_nebula.report.report import ONCE, Report, Span

_STEP = "step"


def chrome_trace(report: Report) -> dict[str, Any]:
    """The trace as JSON has it; the step itself is an event too, so that nothing is ever empty."""
    lanes = _lanes(report)
    processes = list(dict.fromkeys(process for process, _ in lanes.values()))
    events = [_process(number, name) for number, name in enumerate(processes, 1)]
    events += [
        _thread(processes.index(process) + 1, number, name)
        for number, (lane, (process, name)) in enumerate(lanes.items(), 1)
    ]
    threads = {lane: (processes.index(p) + 1, number) for number, (lane, (p, _)) in enumerate(lanes.items(), 1)}
    whole = Span(ONCE, f"step {report.step} of {report.program}", 0.0, report.step_seconds)
    events += [_event(span, *threads[span.lane]) for span in _ordered([whole, *report.spans])]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": _about(report)}


def _lanes(report: Report) -> dict[str, tuple[str, str]]:
    """Lane to (process, thread): the step first, then each cluster's stages and what it sends."""
    lanes = {ONCE: (_STEP, ONCE)}
    lanes |= {name: (stage.cluster or name, f"stage {name}") for name, stage in report.stages.items()}
    links = dict.fromkeys([*report.links, *(span.lane for span in report.spans if span.lane not in lanes)])
    clusters = {process for process, _ in lanes.values()}
    for name in links:
        source = name.split("->")[0]
        lanes[name] = (source if source in clusters else name, f"link {name}")
    return lanes


def _process(number: int, name: str) -> dict[str, Any]:
    shown = name if name == _STEP else f"cluster {name}"
    return {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": shown}}


def _thread(process: int, number: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": name}}


def _ordered(spans: Iterable[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: (span.start, -span.end))


def _event(span: Span, process: int, thread: int) -> dict[str, Any]:
    about = {"micro_batch": span.micro_batch, "phase": span.phase, "bytes": span.bytes}
    return {
        "ph": "X",
        "name": span.what,
        "cat": span.what.split()[0],
        "pid": process,
        "tid": thread,
        "ts": round(1e6 * span.start, 3),
        "dur": round(1e6 * max(span.end - span.start, 0.0), 3),
        "args": {name: value for name, value in about.items() if value is not None},
    }


def _about(report: Report) -> dict[str, Any]:
    return {"program": report.program, "step": report.step, "worker": report.worker, "time": report.time}

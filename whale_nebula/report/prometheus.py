"""Metrics of a run in the text format of Prometheus, for one process or all workers of a launcher."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseServer
from typing import Any, NamedTuple

from whale_nebula.config.place import split_address
from whale_nebula.errors import ConfigError
from whale_nebula.plain import write_json
from whale_nebula.report.report import Report
from whale_nebula.report.saved import report_document
from whale_nebula.site import script_site

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_WRITE_SECONDS = 1.0
Document = Mapping[str, Any]
"""A report as a JSON object."""


class Sample(NamedTuple):
    """A number with its labels."""

    value: float | None
    labels: Mapping[str, str]


class Metric(NamedTuple):
    """A metric: name, kind, description, and the function that reads its samples from a worker's last report."""

    name: str
    kind: str
    text: str
    read: Callable[[Document], Iterable[Sample]]


def _read_time(report: Document) -> Iterator[Sample]:
    goodput = report.get("goodput") or {}
    spent = {name: goodput[name] for name in ("steps", "saving", "lost", "recovery") if name in goodput}
    for name, seconds in spent.items():
        yield Sample(seconds, {"spent": name})
    if spent:
        yield Sample(max(0.0, goodput["total"] - sum(spent.values())), {"spent": "other"})


def _read_scalars(report: Document) -> Iterator[Sample]:
    for name, value in (report.get("scalars") or {}).items():
        yield Sample(value, {"program": report["program"], "name": name})


def _read_links(report: Document) -> Iterator[Sample]:
    for name, totals in report["run"]["links"].items():
        yield Sample(totals["bytes"], {"link": name})


def _read_missed(report: Document) -> Iterator[Sample]:
    for cluster, count in ((report.get("meetings") or {}).get("missed") or {}).items():
        yield Sample(count, {"cluster": cluster})


def _read_stages(report: Document) -> Iterator[Sample]:
    for name, stage in report["stages"].items():
        for kind in ("compute", "wait", "codec"):
            yield Sample(stage.get(f"{kind}_seconds"), {"stage": name, "kind": kind})


def _name_program(report: Document) -> Mapping[str, str]:
    return {"program": report["program"]}


def _read_worker(key: str) -> Callable[[Document], Iterator[Sample]]:
    def read(report: Document) -> Iterator[Sample]:
        worker = (report.get("workers") or {}).get(report["worker"], {})
        yield Sample(worker.get(key), {})

    return read


METRICS = (
    Metric("steps_total", "counter", "Steps since the process was started.", lambda r: [Sample(r["run"]["steps"], {})]),
    Metric(
        "step_seconds", "gauge", "Duration of the last step.", lambda r: [Sample(r["step_seconds"], _name_program(r))]
    ),
    Metric(
        "step_number",
        "gauge",
        "Number of the last step in its program.",
        lambda r: [Sample(r["step"], _name_program(r))],
    ),
    Metric(
        "report_timestamp_seconds",
        "gauge",
        "Unix time at which the last step ended.",
        lambda r: [Sample(r["time"], {})],
    ),
    Metric("time_seconds_total", "counter", "Time of the run by purpose, over all starts.", _read_time),
    Metric("stage_seconds", "gauge", "Time of a stage in the last step by activity.", _read_stages),
    Metric("link_bytes_total", "counter", "Bytes sent since the process was started.", _read_links),
    Metric("meetings_missed_total", "counter", "Meetings of local SGD that a cluster has missed.", _read_missed),
    Metric("scalar", "gauge", "Loss and metrics of the last step.", _read_scalars),
    Metric("variable_bytes", "gauge", "Bytes of the variables that the worker holds.", _read_worker("variable_bytes")),
    Metric("peak_bytes", "gauge", "Peak memory of the process.", _read_worker("peak_bytes")),
)


def render_metrics(reports: Iterable[Document], others: Iterable[tuple[Metric, Iterable[Sample]]] = ()) -> str:
    """The metrics of workers' last reports, and further metrics with their samples, in the format of Prometheus.

    >>> metric = Metric("workers", "gauge", "Workers that run.", lambda report: ())
    >>> print(render_metrics([], [(metric, [Sample(2, {"cluster": "gpu"})])]), end="")
    # HELP nebula_workers Workers that run.
    # TYPE nebula_workers gauge
    nebula_workers{cluster="gpu"} 2.0
    """
    known = list(reports)
    found = [
        (
            metric,
            [each._replace(labels={"worker": r["worker"], **each.labels}) for r in known for each in metric.read(r)],
        )
        for metric in METRICS
    ]
    return "".join(_render(metric, samples) for metric, samples in [*others, *found])


def _render(metric: Metric, samples: Iterable[Sample]) -> str:
    name = f"nebula_{metric.name}"
    lines = [f"{name}{_render_labels(each.labels)} {float(each.value)!r}" for each in samples if each.value is not None]
    return "\n".join([f"# HELP {name} {metric.text}", f"# TYPE {name} {metric.kind}", *lines, ""]) if lines else ""


def _render_labels(labels: Mapping[str, str]) -> str:
    pairs = [f"{name}={json.dumps(str(value), ensure_ascii=False)}" for name, value in labels.items()]
    return f"{{{','.join(pairs)}}}" if pairs else ""


# ------------------------------------------------------------------ served
class Handler(BaseHTTPRequestHandler):
    """The common part of a run's HTTP handlers: sending a response. They log nothing."""

    server_version, sys_version = "whale-nebula", ""

    def send(self, code: int, content_type: str, content: str) -> None:
        """Send a response."""
        data = content.encode()
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the base class
        """Log nothing: the client gets the response."""


@contextlib.contextmanager
def serve_in_thread(server: BaseServer, name: str) -> Iterator[None]:
    """Serve requests in a thread of that name while this context is open; then close the server."""
    thread = threading.Thread(target=server.serve_forever, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def serve_metrics(address: str, render: Callable[[], str]) -> Iterator[int]:
    """Serve GET /metrics at an address while this context is open; yields the port."""

    class MetricsHandler(Handler):
        def do_GET(self) -> None:
            is_served = self.path.partition("?")[0] in ("/metrics", "/")
            text = render() if is_served else "only GET /metrics is served\n"
            self.send(200 if is_served else 404, CONTENT_TYPE, text)

    place = split_address(address)
    if place[1] < 0:
        raise ConfigError(
            f"{address!r} is not a valid address for metrics",
            where=str(script_site()),
            why="the address consists of a host and a port",
            mend="127.0.0.1:9464",
        )
    try:
        server = ThreadingHTTPServer(place, MetricsHandler)
    except OSError as error:
        raise ConfigError(
            "metrics cannot be served",
            where=address,
            why=error.strerror or str(error),
            mend="use a free port; a launcher serves all its workers: whale-nebula run --metrics 127.0.0.1:9464",
        ) from None
    server.daemon_threads = True
    with serve_in_thread(server, "nebula-metrics"):
        yield server.server_port


class Prometheus:
    """Serves the last report of this process: `nb.init(outputs={"prometheus": "127.0.0.1:9464"})`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._last: Report | None = None
        self._open = contextlib.ExitStack()
        self.port = self._open.enter_context(serve_metrics(address, self._render))

    def _render(self) -> str:
        last = self._last
        return render_metrics([] if last is None else [report_document(last)])

    def step(self, report: Report) -> None:
        """Serve this report from now on."""
        self._last = report

    def tick(self) -> None:
        """Do nothing: nothing is deferred."""

    def close(self) -> None:
        """Stop serving."""
        self._open.close()

    def __str__(self) -> str:
        return f"the metrics at {self.address}"


# ------------------------------------------------------------------ from workers to their launcher
class LastReport:
    """Writes the last report of a worker to a file for its launcher, at most once a second."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._due: Report | None = None
        self._written = 0.0

    def step(self, report: Report) -> None:
        """Write the report, or keep it until a second has passed since the last one was written."""
        self._due = report
        self.tick()

    def tick(self) -> None:
        """Write the kept report if it is due."""
        if self._due is not None and time.monotonic() >= self._written + _WRITE_SECONDS:
            self.close()

    def close(self) -> None:
        """Write the kept report, if any."""
        if self._due is not None:
            write_json(
                self._folder / f"{self._due.worker.replace('/', '-')}.json", report_document(self._due), indent=None
            )
            self._due, self._written = None, time.monotonic()

    def __str__(self) -> str:
        return f"the launcher's folder {self._folder}"


def read_reports(folder: str | os.PathLike[str]) -> list[Document]:
    """The last reports of the workers of a launcher; files that cannot be read are skipped."""
    reports = []
    for path in sorted(Path(folder).glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            reports.append(json.loads(path.read_text("utf-8")))
    return reports

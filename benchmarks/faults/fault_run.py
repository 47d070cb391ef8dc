"""One run of two clusters with faults, and its result."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.processes.sites import ROOT, Line, Site, Sites, insert_line, prepare_sites
from tests.processes.worker_reports import REPORT_PREFIX, parse_reports
from whale_nebula.faults import VARIABLE

WORKER = ROOT / "benchmarks" / "faults" / "worker.py"
SCRIPT = os.path.relpath(WORKER.with_suffix(""), ROOT / "tests" / "processes" / "workers")
WAN = ROOT / "tools" / "wan.py"
CLUSTERS = ("gpu", "npu")
DEADLINE, GRACE = 150.0, 3.0


@dataclass(slots=True)
class RunResult:
    """How a run ended: exit codes by cluster, the workers' output, when a death was noticed, remaining processes."""

    codes: dict[str, int | None] = field(default_factory=dict)
    told: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0
    notice: float | None = None  # from a death to the other's error
    orphans: list[str] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)

    @property
    def hangs(self) -> bool:
        """Whether a worker did not end."""
        return None in self.codes.values()

    @property
    def completed(self) -> bool:
        """Whether all workers finished."""
        return all(code == 0 for code in self.codes.values())

    @property
    def errors(self) -> dict[str, str]:
        """The error of each stopped worker."""
        return {cluster: str(about["error"]) for cluster, about in self.told.items() if "error" in about}


class ResettableLine(Line):
    """A line whose connections can be reset."""

    def reset(self) -> None:
        """Reset all connections of the line."""
        broken, self._sockets = self._sockets, []
        for each in broken:
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                each.shutdown(socket.SHUT_RDWR)


Meanwhile = Callable[["RunningTrial"], None]


class RunningTrial:
    """A run in progress, as cases control it."""

    def __init__(self, found: Sites, line: ResettableLine | None, mark: str) -> None:
        self.found = found
        self.line = line
        self.mark = mark

    def await_step(self, step: int, cluster: str = "npu") -> None:
        """Wait until a worker has taken this number of steps."""
        self.found[cluster].await_line(f'"step {step}"', DEADLINE)

    @property
    def over(self) -> bool:
        """Whether a worker has ended."""
        return any(site.process.poll() is not None for site in self.found.sites.values())


def run_on_this_host(
    *arguments: object,
    faults: str = "",
    meanwhile: Meanwhile | None = None,
    line: bool = False,
    patience: str = "60s",
    deadline: float = DEADLINE,
) -> RunResult:
    """Run over loopback; `line` adds a line between the clusters that can be interrupted."""
    mark, ended = f"mark-{uuid.uuid4().hex}", RunResult()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        with contextlib.redirect_stdout(None):
            found = stack.enter_context(prepare_sites(folder, CLUSTERS, patience=patience))
        ways, configs = stack.enter_context(insert_line(found, "gpu")) if line else (None, None)
        if ways is not None:
            ways.__class__ = ResettableLine  # the line of the tests, with `reset`
        begin = time.monotonic()
        with _set_faults(faults):
            found.start(SCRIPT, *arguments, "--mark", mark, configs=configs)
        deaths = DeathRecorder(found)
        if meanwhile is not None:
            meanwhile(RunningTrial(found, ways, mark))
        ended.codes = {cluster: _await_exit_code(site, begin + deadline) for cluster, site in found.sites.items()}
        ended.seconds = round(time.monotonic() - begin, 1)
        ended.notice = deaths.notice()
        ended.orphans = _find_leftover_processes(mark)
        ended.told = {cluster: dict(site.reports) for cluster, site in found.sites.items()}
        ended.said = {cluster: site.last_output for cluster, site in found.sites.items()}
    return ended


def _await_exit_code(site: Site, until: float) -> int | None:
    try:
        return site.process.wait(max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


@contextlib.contextmanager
def _set_faults(faults: str) -> Iterator[None]:
    if faults:
        os.environ[VARIABLE] = faults
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)


class DeathRecorder:
    """Records the time when a worker's process ended, and when the other one reported an error."""

    def __init__(self, found: Sites) -> None:
        self._died: dict[str, float] = {}
        self._said: dict[str, float] = {}
        for cluster, site in found.sites.items():
            threading.Thread(target=self._watch, args=(cluster, site), daemon=True).start()
            threading.Thread(target=self._listen, args=(cluster, site), daemon=True).start()

    def _watch(self, cluster: str, site: Site) -> None:
        worker = None
        while site.process.poll() is None:
            with contextlib.suppress(AssertionError, psutil.Error):
                worker = worker or psutil.Process(site.worker_pid)
            with contextlib.suppress(psutil.Error):
                if worker is not None and (not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE):
                    self._died.setdefault(cluster, time.monotonic())
                    return
            time.sleep(0.02)
        self._died.setdefault(cluster, time.monotonic())

    def _listen(self, cluster: str, site: Site) -> None:
        with contextlib.suppress(AssertionError):
            self._said[cluster] = site.await_line('"error"', 2 * DEADLINE)

    def notice(self) -> float | None:
        """Seconds from the first death to the other's error."""
        if not self._died:
            return None
        first = min(self._died, key=self._died.__getitem__)
        said = [when for cluster, when in self._said.items() if cluster != first]
        return round(max(0.0, said[0] - self._died[first]), 2) if said else None


def _find_leftover_processes(mark: str) -> list[str]:
    """The processes of a run that remain after it."""
    deadline = time.monotonic() + GRACE
    while (found := list(_processes(mark))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [" ".join(process.info["cmdline"] or ())[-200:] for process in found]


def _processes(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter(["cmdline", "status"]):
        if mark in (process.info["cmdline"] or ()) and process.info["status"] != psutil.STATUS_ZOMBIE:
            yield process


def run_over_emulated_line(*arguments: object, wan: str, after: int | None = None, patience: str = "60s") -> RunResult:
    """Run over tools/wan.py; with `after`, cuts and changes count from that step on."""
    mark, ended = f"mark-{uuid.uuid4().hex}", RunResult()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        addresses = {name: {"workers": [f"10.77.0.{n}:7101"]} for n, name in enumerate(CLUSTERS, start=1)}
        with contextlib.redirect_stdout(None):
            found = stack.enter_context(prepare_sites(folder, CLUSTERS, patience=patience))
        found.config["clusters"] = addresses  # certificates have names
        go = folder / "go"
        commands = [_build_site_command(found, cluster, [*map(str, arguments), "--mark", mark]) for cluster in CLUSTERS]
        words = [*shlex.split(wan), *(["--go", str(go)] if after is not None else [])]
        begin = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, str(WAN), *words, "--timeout", f"{DEADLINE:g}s", "--", *commands[0], "---", *commands[1]],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        try:
            if after is not None:
                _await_output(folder / "npu.out", f'"step {after}"', process)
                go.touch()
            process.communicate(timeout=DEADLINE + 10.0)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        ended.seconds = round(time.monotonic() - begin, 1)
        for cluster in CLUSTERS:
            text = (folder / f"{cluster}.out").read_text()
            *_, code = ["", *(line for line in text.splitlines() if line.startswith("code: "))]
            ended.codes[cluster] = int(code.removeprefix("code: ")) if code else None
            ended.told[cluster], ended.said[cluster] = parse_reports(text), text[-3000:]
        ended.orphans = _find_leftover_processes(mark)
    return ended


def _build_site_command(found: Sites, cluster: str, arguments: list[str]) -> list[str]:
    config, out = found.write_config(cluster), found.folder / f"{cluster}.out"
    command = [sys.executable, "-m", "whale_nebula.cli.main", "run", "--config", config, "--cluster", cluster]
    text = shlex.join([*command, str(WORKER), *arguments])
    environment = f"PYTHONPATH={shlex.quote(str(ROOT))} TF_CPP_MIN_LOG_LEVEL=2"
    file = shlex.quote(str(out))
    return ["sh", "-c", f"{environment} {text} > {file} 2>&1; code=$?; echo code: $code >> {file}; exit $code"]


def _await_output(path: Path, part: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and part in path.read_text():
            return
        time.sleep(0.1)


def steps(out: list[str]) -> list[float]:
    """The time of each step of a worker."""
    lines = [json.loads(line.removeprefix(REPORT_PREFIX)) for line in list(out) if line.startswith(REPORT_PREFIX)]
    return [when for name, when in lines if str(name).startswith("step ")]

"""Runs as users start them: `whale-nebula run` once for each cluster, over mutual TLS, on ports of this host.

The worker whose name sorts later connects, so `gpu` only accepts. A line that can be interrupted is therefore placed in
front of the first cluster.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.processes import zygote
from tests.processes.worker_reports import parse_reports
from whale_nebula.cli import certs
from whale_nebula.launch import worker_processes
from whale_nebula.launch.placement import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RUN, SEED, DEADLINE = "sites", 5, 240.0
MAX_LINES = 200_000


@dataclass
class Site:
    """One cluster's `whale-nebula run`, and its output."""

    cluster: str
    process: subprocess.Popen[str]
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        for stream, kept in ((self.process.stdout, self.out), (self.process.stderr, self.err)):
            threading.Thread(target=self._read, args=(stream, kept), daemon=True).start()

    def _read(self, stream: Any, kept: list[str]) -> None:
        with stream:
            for line in stream:
                with self.changed:
                    kept.append(line)
                    self.changed.notify_all()
                if len(kept) > MAX_LINES:  # it repeats itself, and would fill the memory
                    self.process.kill()
                    return

    def await_line(self, part: str, deadline: float = DEADLINE) -> float:
        """Wait for a line with this text on either stream; returns the time when it was seen."""
        limit, found = time.monotonic() + deadline, False
        while not found and time.monotonic() < limit:
            over = self.process.poll() is not None  # checked first, so that all earlier output is read
            with self.changed:
                found = self.changed.wait_for(lambda: any(part in line for line in (*self.out, *self.err)), 1.0)
            if over:
                break
        assert found, f"{self.cluster} has not printed {part!r}:\n{self.last_output}"
        return time.monotonic()

    def await_more_lines(self, part: str, count: int, deadline: float = DEADLINE) -> None:
        """Wait for `count` more lines with this text."""

        def number() -> int:
            return sum(part in line for line in self.out)

        with self.changed:
            expected = number() + count
            found = self.changed.wait_for(lambda: number() >= expected, deadline)
        assert found, f"{self.cluster} has not printed {part!r} {count} times more:\n{self.last_output}"

    @property
    def last_output(self) -> str:
        return "".join([*self.out, *self.err][-60:])

    @property
    def reports(self) -> Mapping[str, Any]:
        return parse_reports("".join(self.out))

    @property
    def workers(self) -> list[psutil.Process]:
        """The processes of its workers, in the order in which they were started."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "whale_nebula.launch.child" in " ".join(child.cmdline()):
                    found.append(child)
        return found

    @property
    def worker_pid(self) -> int:
        """The process id of its first worker."""
        assert self.workers, f"{self.cluster} has no worker:\n{self.last_output}"
        return int(self.workers[0].pid)

    def wait(self, deadline: float = DEADLINE) -> int:
        """Its exit code."""
        try:
            return self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.cluster} does not end:\n{self.last_output}") from None


@dataclass
class Sites:
    """A run of several clusters on this host; each may work in its own folder, as on a host of its own."""

    folder: Path
    clusters: Sequence[str]
    config: dict[str, Any]
    sites: dict[str, Site] = field(default_factory=dict)
    gateways: dict[str, Site] = field(default_factory=dict)
    commands: dict[str, list[str]] = field(default_factory=dict)
    has_separate_folders: bool = False

    def start_gateway(self, cluster: str) -> None:
        """Start the gateway of a cluster, or start it again."""
        command = [
            "-m",
            "whale_nebula.cli.main",
            "gateway",
            "--config",
            self.write_config("gateways"),
            "--cluster",
            cluster,
        ]
        self.gateways[cluster] = Site(cluster, _start_python(command))
        self.gateways[cluster].await_line("listens on")

    def start(
        self,
        script: str,
        *arguments: object,
        configs: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        """Start every cluster; `configs` are those that differ from the common one."""
        for cluster in self.clusters:
            path = self.write_config(cluster, (configs or {}).get(cluster, {}))
            command = ["-m", "whale_nebula.cli.main", "run", "--config", path, "--cluster", cluster]
            worker = str(HERE / "workers" / f"{script}.py")
            self.commands[cluster] = [*command, worker, *map(str, arguments)]
            self.restart(cluster)

    def restart(self, cluster: str) -> None:
        """Start a cluster again, with the same command."""
        own = self.folder / f"host-{cluster}"
        own.mkdir(exist_ok=True)
        self.sites[cluster] = Site(
            cluster, _start_python(self.commands[cluster], own if self.has_separate_folders else ROOT)
        )

    def write_config(self, name: str, other: Mapping[str, Any] | None = None) -> str:
        """Write a config: the common one, with these changes; returns its path."""
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**self.config, **(other or {})}, sort_keys=False))
        return str(path)

    def certs(self, *words: str) -> None:
        """Run `whale-nebula certs` on the folder that the configs use."""
        assert certs.main([*words, "--folder", str(self.folder / "certs")]) == 0

    def __getitem__(self, cluster: str) -> Site:
        return self.sites[cluster]

    def wait_for_exit_codes(self) -> dict[str, int]:
        """The exit codes, once all have ended."""
        return {cluster: site.wait() for cluster, site in self.sites.items()}

    def get_common(self, name: str) -> Any:
        """The value that all sites have reported under this name."""
        first, *rest = (site.reports[name] for site in self.sites.values())
        assert all(other == first for other in rest), (name, first, rest)
        return first


def _start_python(words: Sequence[str], folder: Path = ROOT) -> subprocess.Popen[Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    if worker_processes.start is zygote.start:  # no grid: this one and its workers are forks
        process: subprocess.Popen[Any] = zygote.start(words, env=environment, cwd=folder)
        process.stdout, process.stderr = map(io.TextIOWrapper, (process.stdout, process.stderr))
        return process
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=environment, text=True, process_group=0,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@contextlib.contextmanager
def prepare_sites(folder: Path, names: Sequence[str] = ("gpu", "npu"), **options: Any) -> Iterator[Sites]:
    """Create certificates and a config for these clusters; kill their processes at the end."""
    config = {
        "run": RUN,
        "seed": SEED,
        "clusters": {cluster: {"workers": [f"127.0.0.1:{free_port()}"]} for cluster in names},
        **options,
    }
    found = Sites(folder, names, config)
    found.certs("init", "--config", found.write_config("all"))
    found.certs("issue", "--config", found.write_config("all"), "--all")
    try:
        yield found
    finally:
        for site in (*found.sites.values(), *found.gateways.values()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(site.process.pid, signal.SIGKILL)
            site.process.wait(10.0)


class Line:
    """A line between two sites that can be cut: it listens on a port and forwards to another."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server = _create_server(target)
        self.port = int(self._server.getsockname()[1])
        self._is_open = threading.Event()
        self._is_open.set()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Forward nothing from now on. Sent data is kept, as by a network that retransmits."""
        self._is_open.clear()

    def restore(self) -> None:
        """Forward data again."""
        self._is_open.set()

    def close(self) -> None:
        """Close the line and all its connections."""
        self._is_open.set()
        for each in (self._server, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                self._is_open.wait()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            near.close()
            return
        if far.getsockname() == far.getpeername():  # connected to itself: nobody listens there
            near.close()
            far.close()
            return
        self._sockets += [near, far]
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._is_open.wait()
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def _create_server(port: int) -> socket.socket:
    """Create a server at another port than this one, so that a line never connects to itself."""
    server = socket.create_server(("127.0.0.1", 0))
    if server.getsockname()[1] != port:
        return server
    with server:
        return _create_server(port)


@contextlib.contextmanager
def insert_line(found: Sites, cluster: str) -> Iterator[tuple[Line, dict[str, dict[str, Any]]]]:
    """Insert a line in front of a cluster; yields the line, and the configs with which the others use it."""
    port = int(found.config["clusters"][cluster]["workers"][0].rpartition(":")[2])
    line = Line(port)
    moved = json.loads(json.dumps(found.config["clusters"]))
    moved[cluster]["workers"] = [f"127.0.0.1:{line.port}"]
    try:
        yield line, {other: {"clusters": moved} for other in found.clusters if other != cluster}
    finally:
        line.close()

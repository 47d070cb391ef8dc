"""Strangers' connections to a worker's port during training: the slowdown of steps, and the cost of a refusal."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import statistics
import threading
import time
from typing import Any

import psutil
from fault_run import RunningTrial, steps

from whale_nebula.transport.grpc.limits import LIMITS

RATE, SECONDS, QUIET = 50, 10.0, 8.0
SLOWER_BAR, REFUSAL_BAR, HANDSHAKES_BAR = 0.10, 0.002, LIMITS.address


def flood(course: RunningTrial, seen: dict[str, Any]) -> None:
    """Measure steps for a while, then again during the flood."""
    course.await_step(30, "gpu")
    site = course.found["gpu"]
    worker = psutil.Process(site.worker_pid)
    port = int(course.found.config["clusters"]["gpu"]["workers"][0].rpartition(":")[2])
    friends = _list_connections(worker, port)
    quiet = _measure_steps(worker, site.out, QUIET)
    strangers = UnauthenticatedClients(port)
    threading.Thread(target=strangers.connect_repeatedly, daemon=True).start()
    most = OpenHandshakeCounter(worker, port, friends)
    threading.Thread(target=most.look, daemon=True).start()
    busy = _measure_steps(worker, site.out, SECONDS)
    strangers.over.set()
    most.over.set()
    seen |= {
        "step_ms": round(1e3 * quiet["step"], 2),
        "step_ms_flooded": round(1e3 * busy["step"], 2),
        "slower": round(busy["step"] / quiet["step"] - 1.0, 3),
        "came": strangers.came,
        "cpu_share": round(quiet["cpu"], 3),
        "cpu_share_flooded": round(busy["cpu"], 3),
        "cpu_s_a_refusal": round(max(0.0, busy["cpu"] - quiet["cpu"]) * SECONDS / max(1, strangers.came), 5),
        "handshakes_open": most.found,
    }


def _measure_steps(worker: psutil.Process, out: list[str], seconds: float) -> dict[str, float]:
    """The median step, and the CPU use, over a while."""
    begin, used = time.monotonic(), sum(worker.cpu_times()[:2])
    time.sleep(seconds)
    end, after = time.monotonic(), sum(worker.cpu_times()[:2])
    taken = [when for when in steps(out) if begin <= when <= end]
    between = [b - a for a, b in itertools.pairwise(taken)]
    return {"step": statistics.median(between), "cpu": (after - used) / (end - begin)}


def _list_connections(worker: psutil.Process, port: int) -> set[int]:
    """The connections accepted by a worker's port, by the ports of the other ends."""
    found = worker.net_connections(kind="tcp")
    return {each.raddr.port for each in found if each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED}


class OpenHandshakeCounter:
    """The maximum number of open handshakes: connections beyond the peers', seen twice in a row, as those above the
    limit are accepted too and closed at once.
    """

    def __init__(self, worker: psutil.Process, port: int, friends: set[int]) -> None:
        self.found = 0
        self.over = threading.Event()
        self._about = worker, port, friends

    def look(self) -> None:
        """Sample until the end."""
        worker, port, friends = self._about
        before: set[int] = set()
        while not self.over.wait(0.1):
            with contextlib.suppress(psutil.Error):
                now = _list_connections(worker, port) - friends
                self.found, before = max(self.found, len(now & before)), now


class UnauthenticatedClients:
    """Fifty connections a second of three kinds: silent, without TLS, and with TLS but without a certificate."""

    def __init__(self, port: int) -> None:
        self.came = 0
        self.over = threading.Event()
        self._port = port
        self._kept: list[socket.socket] = []
        self._context = ssl.create_default_context()
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE
        self._context.set_alpn_protocols(["h2"])

    def connect_repeatedly(self) -> None:
        """Connect until the end."""
        begin = time.monotonic()
        while not self.over.wait(max(0.0, begin + self.came / RATE - time.monotonic())):
            self.came += 1
            threading.Thread(target=self._connect, args=(self.came,), daemon=True).start()
        for each in self._kept:
            each.close()

    def _connect(self, number: int) -> None:
        with contextlib.suppress(OSError):
            sock = socket.create_connection(("127.0.0.1", self._port), timeout=5.0)
            if number % 3 == 0:
                self._kept.append(sock)
                return
            with sock:
                if number % 3 == 1:
                    sock.sendall(b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n")
                    sock.recv(1 << 12)
                    return
                with self._context.wrap_socket(sock) as safe:
                    safe.recv(1 << 12)

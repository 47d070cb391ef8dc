"""The attacks, each a separate process: `python benchmarks/attack/attacks.py NAME`, configured by JSON on standard
input.

All are directed at addresses of this host on which the benchmark's own gateways and links listen, and end at a given
time.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from whale_nebula.errors import NebulaError
from whale_nebula.security import Credentials, Files, Identity
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.grpc.links import GrpcLinks, Place
from whale_nebula.transport.grpc.listener import METHOD, StreamRequest
from whale_nebula.transport.grpc.options import make_channel_credentials
from whale_nebula.transport.protocol import Key
from whale_nebula.wire.message import build_message

RUN = "bench"
STEP = build_message("SESSION", "STEP", program=1, step=0, rows=1, inputs={})
STEPS_STARTED = "takes steps"  # printed by the attacked program
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SETTINGS_ACK = bytes([0, 0, 0, 4, 1, 0, 0, 0, 0])
MAX_SOCKETS, SOCKETS_A_SECOND, STREAMS_A_SECOND, WATCHES = 700, 200, 200, 600
TIMEOUT_SECONDS, FLOOD_BYTES = 15.0, 96 << 20


class AttackSchedule:
    """The times of attacks: `on` seconds out of each `on + off`, from `start` to `end`, beginning with a calm."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.start, self.end, self.on, self.off = (float(settings[key]) for key in ("start", "end", "on", "off"))

    @property
    def is_over(self) -> bool:
        return time.time() >= self.end

    def is_attacked(self, at: float) -> bool:
        """Whether there are attacks at a time."""
        return self.start <= at < self.end and (at - self.start) % (self.on + self.off) >= self.off

    def wait_for_attacks(self) -> Iterator[None]:
        """Yields at the begin of each period of attacks."""
        while not self.is_over:
            if self.is_attacked(time.time()):
                yield
            time.sleep(0.1)

    @property
    def is_attacking(self) -> bool:
        return self.is_attacked(time.time())


def load_credentials(settings: dict[str, Any], worker: str) -> Credentials:
    """The credentials of a worker; an attacker ignores the deny list."""
    files = Files.in_folder(settings["certs"], Identity.of_worker(RUN, worker))
    return Credentials.load(files._replace(revoked=None) if worker == settings["revoked"] else files)


def open_channel(settings: dict[str, Any], worker: str) -> grpc.Channel:
    """A connection to the first gateway, with a worker's certificate."""
    name = Identity.of_worker(RUN, "gpu/gateway").dns
    channel_options = [("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.secure_channel(
        settings["gateway"], make_channel_credentials(load_credentials(settings, worker)), channel_options
    )


def fill_sockets(
    settings: dict[str, Any], schedule: AttackSchedule, connect: Callable[[], socket.socket]
) -> dict[str, Any]:
    """Hold the maximum number of connections, and reopen each that is dropped."""
    opened = most = 0
    for _ in schedule.wait_for_attacks():
        open_sockets: set[socket.socket] = set()
        while schedule.is_attacking:
            ready, _, _ = select.select([each for each in open_sockets if each.fileno() < 1024], [], [], 0)
            for each in ready:
                with contextlib.suppress(OSError):
                    if each.recv(1000):
                        continue
                each.close()
                open_sockets.discard(each)
            for _ in range(SOCKETS_A_SECOND // 20):
                with contextlib.suppress(OSError):
                    if len(open_sockets) < MAX_SOCKETS:
                        open_sockets.add(connect())
                        opened += 1
            most = max(most, len(open_sockets))
            time.sleep(0.05)
        for each in open_sockets:
            each.close()
    return {"connections opened": opened, "held at most": most}


def hold_idle(settings: dict[str, Any], schedule: AttackSchedule) -> dict[str, Any]:
    """Attack by connections with a revoked certificate that complete TLS and then are silent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    files = Files.in_folder(settings["certs"], Identity.of_worker(RUN, settings["revoked"]))
    context.load_cert_chain(files.cert, files.key)

    def connect() -> socket.socket:
        connection = context.wrap_socket(_connect(settings), do_handshake_on_connect=True)
        connection.sendall(PREFACE + SETTINGS_ACK)
        return connection

    return fill_sockets(settings, schedule, connect)


def hold_half_open(settings: dict[str, Any], schedule: AttackSchedule) -> dict[str, Any]:
    """Attack by connections without a certificate that never begin TLS."""
    return fill_sockets(settings, schedule, lambda: _connect(settings))


def _connect(settings: dict[str, Any]) -> socket.socket:
    host, _, port = settings["gateway"].rpartition(":")
    return socket.create_connection((host, int(port)), 1.0)


def knock(settings: dict[str, Any], schedule: AttackSchedule) -> dict[str, Any]:
    """Attack by streams with a revoked certificate, each for another worker with a long name; each is refused."""
    knocks, log = 0, Path(settings["audit"])
    before = log.stat().st_size
    for _ in schedule.wait_for_attacks():
        line = open_channel(settings, settings["revoked"])
        open_stream = line.stream_stream(METHOD)
        while schedule.is_attacking:
            started_at, calls = time.monotonic(), []
            for _ in range(STREAMS_A_SECOND // 10):
                request = StreamRequest(RUN, settings["revoked"], f"npu/{knocks}" + "x" * 180, secrets.token_hex(8))
                calls.append(open_stream(iter(()), metadata=request.metadata(), timeout=5.0))
                knocks += 1
            for call in calls:
                with contextlib.suppress(grpc.RpcError, StopIteration):
                    next(call)
            time.sleep(max(0.0, 0.1 - (time.monotonic() - started_at)))
        line.close()
    return {"knocks": knocks, "audit log grew by, bytes": log.stat().st_size - before}


def watch(settings: dict[str, Any], schedule: AttackSchedule) -> dict[str, Any]:
    """Attack by unlimited status streams with a valid certificate, over as many connections as it takes."""
    requested = most = 0
    for _ in schedule.wait_for_attacks():
        lines: list[grpc.Channel] = []
        calls: list[Any] = []
        while schedule.is_attacking:
            while len(calls) < WATCHES:
                if len(calls) % 4 == 0:
                    lines.append(open_channel(settings, settings["watcher"]))
                stub = health_pb2_grpc.HealthStub(lines[-1])
                calls.append(stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=60.0))
                requested += 1
            time.sleep(0.5)
            calls = [each for each in calls if each.is_active()]
            most = max(most, len(calls))
        for line in lines:
            line.close()
    return {"watches asked for": requested, "standing at most": most}


def flood(settings: dict[str, Any], schedule: AttackSchedule) -> dict[str, Any]:
    """Attack by a peer with a valid certificate that sends unrequested tensors; its own limits are lifted."""
    rounds = refused = 0
    sent = 0
    row = np.zeros(1 << 18, np.float32)
    for _ in schedule.wait_for_attacks():
        while schedule.is_attacking:
            with _open_links(
                settings, "npu/8", "gpu/8", settings["flooder"], settings["victim"], budget=1 << 40
            ) as links:
                link = links.links["gpu/8"]
                link.post(STEP)
                rounds += 1
                try:
                    link.take("SESSION", TIMEOUT_SECONDS)
                    for slot in range(FLOOD_BYTES // row.nbytes):
                        link.send(Key("control", 1, 0, 0, -1, slot, "npu/8", "gpu/8"), row)
                        sent += row.nbytes
                    time.sleep(1.0)
                    link.take("SESSION", 2.0)
                except NebulaError:
                    refused += 1
    return {"rounds": rounds, "ended by the peer": refused, "MiB handed over": sent >> 20}


def be_flooded(settings: dict[str, Any], schedule: AttackSchedule) -> dict[str, Any]:
    """Run the victim of `flood`, which waits for a step that does not come; returns its memory over time."""
    rounds = 0
    for _ in schedule.wait_for_attacks():
        while schedule.is_attacking:
            with _open_links(settings, "gpu/8", "npu/8", settings["victim"], settings["flooder"]) as links:
                rounds += 1
                with contextlib.suppress(NebulaError):
                    links.links["npu/8"].post(STEP)
                    links.links["npu/8"].take("SESSION", TIMEOUT_SECONDS)
                    links.links["npu/8"].take("SESSION", 5.0)
    return {"rounds": rounds}


@contextlib.contextmanager
def _open_links(
    settings: dict[str, Any], here: str, there: str, own: str, other: str, **options: Any
) -> Iterator[GrpcLinks]:
    place = Place(RUN, here, {there: other}, own, credentials=load_credentials(settings, here))
    deadlines = Deadlines(patience=TIMEOUT_SECONDS, silence=TIMEOUT_SECONDS, grace=1.0, connect=5.0)
    links = GrpcLinks(place, deadlines=deadlines, announce=lambda *_: None, **options)
    try:
        yield links
    finally:
        links.close()


def join(settings: dict[str, Any], schedule: AttackSchedule) -> dict[str, Any]:
    """Measure, without an attack, how long two new honest workers take to connect through both gateways."""
    durations: dict[bool, list[float]] = {True: [], False: []}
    troubles: list[str] = []
    ends = {"gpu/9": settings["gateway"], "npu/9": settings["other_gateway"]}
    deadlines = Deadlines(patience=TIMEOUT_SECONDS, silence=TIMEOUT_SECONDS, grace=2.0, connect=5.0)
    while time.time() < schedule.end - TIMEOUT_SECONDS:
        started_at, attacked = time.time(), schedule.is_attacking
        links = {
            here: GrpcLinks(
                Place(RUN, here, {there: None}, None, gateway, load_credentials(settings, here)),
                deadlines=deadlines, announce=lambda *_: None,
            )
            for (here, gateway), there in zip(ends.items(), reversed(ends), strict=True)
        }  # fmt: skip
        try:
            for here, there in zip(ends, reversed(ends), strict=True):
                links[here].links[there].post(STEP)
            for here, there in zip(ends, reversed(ends), strict=True):
                links[here].links[there].take("SESSION", TIMEOUT_SECONDS)
            durations[attacked].append(round(time.time() - started_at, 3))
        except NebulaError as error:
            troubles.append(f"{'attacked' if attacked else 'calm'}: {error.what}: {error.why}")
        closing = [threading.Thread(target=each.close) for each in links.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        time.sleep(2.0)
    return {"attacked": durations[True], "calm": durations[False], "troubles": troubles}


ATTACKS = {each.__name__: each for each in (hold_idle, hold_half_open, knock, watch, flood, be_flooded)}


def main() -> None:
    """Run the requested attack, then print what was done."""
    settings = json.loads(sys.stdin.readline())
    schedule = AttackSchedule(settings)
    if sys.argv[1] in ATTACKS and sys.argv[1] != "be_flooded":
        os.nice(19)  # an attacker uses another machine's cores
    print(json.dumps({**ATTACKS, "join": join}[sys.argv[1]](settings, schedule)), flush=True)


if __name__ == "__main__":
    main()

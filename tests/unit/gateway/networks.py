"""Helpers of gateway tests: two clusters in this process with a gateway each, and workers that connect through them."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.unit.transport.grpc_workers import find_free_address
from tests.unit.transport.link_pairs import GPU, NPU, TIMEOUT_SECONDS, build_step_message, close_all
from whale_nebula.config.schema import cluster_of
from whale_nebula.gateway.gateway import Gateway
from whale_nebula.gateway.route import SharedLines
from whale_nebula.gateway.settings import GatewaySettings
from whale_nebula.security import Credentials, Files, issue_ephemeral
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.grpc.links import GrpcLinks, Place
from whale_nebula.transport.peer import PeerLink
from whale_nebula.transport.protocol import Key

RUN = "mt"
CLUSTERS = ("gpu", "npu")
SHORT_DEADLINES = Deadlines(
    patience=TIMEOUT_SECONDS, silence=TIMEOUT_SECONDS, grace=2.0, connect=5.0, check_interval=0.05
)


def wait_until(condition: Callable[[], object], seconds: float = TIMEOUT_SECONDS) -> None:
    """Wait for a condition; an AssertionError if it does not hold in time."""
    done = threading.Event()
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        done.wait(0.005)
    raise AssertionError("the condition did not hold in time")


def make_key(slot: int, source: str = GPU, destination: str = NPU) -> Key:
    return Key("forward", 1, 0, 0, -1, slot, source, destination)


def read_records(settings: GatewaySettings) -> list[dict[str, Any]]:
    """The records of a gateway's audit log."""
    return read_log(settings.audit)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


class GatewayNetwork:
    """Addresses and certificates of two clusters. `dials`: the clusters whose gateways have the other's address."""

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, Files] | None,
        *,
        dials: tuple[str, ...] = CLUSTERS,
        workers: tuple[str, ...] = (GPU, NPU),
        rate: float | None = None,
        deadlines: Deadlines = SHORT_DEADLINES,
        lines: SharedLines | None = None,
    ) -> None:
        self.files, self.deadlines, self.lines = files, deadlines, lines
        *ends, one, other = (find_free_address() for _ in (*workers, *CLUSTERS))
        self.workers = dict(zip(workers, ends, strict=True))
        at = dict(zip(CLUSTERS, (one, other), strict=True))
        self.settings_by_cluster = {
            one: GatewaySettings(
                RUN,
                one,
                at[one],
                self.workers,
                {other: at[other] if one in dials else None},
                {other: rate},
                files[f"{one}/gateway"] if files else None,
                folder / f"{one}.jsonl",
            )
            for one, other in (CLUSTERS, CLUSTERS[::-1])
        }
        self.gateways: dict[str, Gateway] = {}
        self.links: dict[str, GrpcLinks] = {}

    def start_gateways(self, *clusters: str, **settings: Any) -> None:
        """Start the gateways of these clusters, by default of all."""
        for cluster in clusters or CLUSTERS:
            self.settings_by_cluster[cluster] = replace(self.settings_by_cluster[cluster], **settings)
            gateway = Gateway(self.settings_by_cluster[cluster], deadlines=self.deadlines, lines=self.lines)
            gateway.start()
            self.gateways[cluster] = gateway

    def start_workers(self, *workers: str) -> None:
        """Start these workers, by default all."""
        for worker in workers or self.workers:
            place = Place(
                RUN,
                worker,
                {other: address for other, address in self.workers.items() if other != worker},
                self.workers[worker],
                self.settings_by_cluster[cluster_of(worker)].listen,
                Credentials.load(self.files[worker]) if self.files else None,
            )
            self.links[worker] = GrpcLinks(place, deadlines=self.deadlines)

    def link(self, here: str = GPU, there: str = NPU) -> PeerLink:
        return self.links[here].links[there]

    def exchange_steps(self, here: str = GPU, there: str = NPU) -> None:
        """Let both workers announce a step and receive the other's announcement."""
        for link in (self.link(here, there), self.link(there, here)):
            link.post(build_step_message())
        for link in (self.link(here, there), self.link(there, here)):
            link.take("SESSION", TIMEOUT_SECONDS)

    def exchange_tensors(self, slots: range, size: int = 1000, here: str = GPU, there: str = NPU) -> None:
        """Send tensors in both directions, and compare what arrives."""
        for slot in slots:
            for one, other in ((here, there), (there, here)):
                self.link(one, other).send(make_key(slot, one, other), np.full(size, slot, np.int32))
        for slot in slots:
            for one, other in ((here, there), (there, here)):
                found = self.link(one, other).receive(make_key(slot, other, one), TIMEOUT_SECONDS)
                np.testing.assert_array_equal(found, np.full(size, slot, np.int32))

    def kill_worker(self, worker: str) -> None:
        """Simulate a killed worker: its port closes, and its streams break without a farewell."""
        links = self.links.pop(worker)
        links._listener.stop()
        for link in links.links.values():
            link._carrier._closed = True  # it does not reconnect
            link._carrier.drop("the process was killed")

    def close_workers(self) -> None:
        """Close all workers gracefully."""
        close_all(*self.links.values())
        self.links.clear()

    def close(self) -> None:
        self.close_workers()
        for gateway in self.gateways.values():
            gateway.stop("the test is over")


@contextlib.contextmanager
def open_network(folder: Path, files: Mapping[str, Files] | None, **options: Any) -> Iterator[GatewayNetwork]:
    """Two clusters, closed at the end."""
    network = GatewayNetwork(folder, files, **options)
    try:
        yield network
    finally:
        network.close()


@contextlib.contextmanager
def issue_certificates(*workers: str) -> Iterator[dict[str, Files]]:
    """Files of a new authority for these workers and both gateways."""
    files = issue_ephemeral(RUN, [*workers, *(f"{cluster}/gateway" for cluster in CLUSTERS)])
    try:
        yield files
    finally:
        shutil.rmtree(next(iter(files.values())).cert.parent)

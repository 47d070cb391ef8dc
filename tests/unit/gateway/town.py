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

from tests.unit.transport.cable import GPU, NPU, SOON, close_all, step
from tests.unit.transport.crossing import free_address
from whale_nebula.config.schema import cluster_of
from whale_nebula.gateway.gateway import Gateway
from whale_nebula.gateway.route import Lines
from whale_nebula.gateway.site import Site
from whale_nebula.security import Credentials, Files, issue_ephemeral
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.grpc.links import GrpcLinks, Place
from whale_nebula.transport.peer import PeerLink
from whale_nebula.transport.protocol import Key

RUN = "mt"
CLUSTERS = ("gpu", "npu")
QUICK = Deadlines(patience=SOON, silence=SOON, grace=2.0, connect=5.0, look=0.05)


def until(condition: Callable[[], object], seconds: float = SOON) -> None:
    """Wait for a condition, and fail if it does not come."""
    done = threading.Event()
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        done.wait(0.005)
    raise AssertionError("it did not come about")


def key(slot: int, source: str = GPU, destination: str = NPU) -> Key:
    return Key("forward", 1, 0, 0, -1, slot, source, destination)


def records(site: Site) -> list[dict[str, Any]]:
    """What stands in a gateway's audit log."""
    return written(site.audit)


def written(path: Path) -> list[dict[str, Any]]:
    """The records of a log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


class Town:
    """Addresses and certificates of two clusters. `dials`: whose gateway has the other one's address."""

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, Files] | None,
        *,
        dials: tuple[str, ...] = CLUSTERS,
        workers: tuple[str, ...] = (GPU, NPU),
        rate: float | None = None,
        deadlines: Deadlines = QUICK,
        lines: Lines | None = None,
    ) -> None:
        self.files, self.deadlines, self.lines = files, deadlines, lines
        *ends, one, other = (free_address() for _ in (*workers, *CLUSTERS))
        self.workers = dict(zip(workers, ends, strict=True))
        at = dict(zip(CLUSTERS, (one, other), strict=True))
        self.sites = {
            one: Site(
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

    def start(self, *clusters: str, **changed: Any) -> None:
        """Start gateways, all unless some are named."""
        for cluster in clusters or CLUSTERS:
            self.sites[cluster] = replace(self.sites[cluster], **changed)
            gateway = Gateway(self.sites[cluster], deadlines=self.deadlines, lines=self.lines)
            gateway.start()
            self.gateways[cluster] = gateway

    def join(self, *workers: str) -> None:
        """Start workers, all unless some are named."""
        for worker in workers or self.workers:
            place = Place(
                RUN,
                worker,
                {other: address for other, address in self.workers.items() if other != worker},
                self.workers[worker],
                self.sites[cluster_of(worker)].listen,
                Credentials.load(self.files[worker]) if self.files else None,
            )
            self.links[worker] = GrpcLinks(place, deadlines=self.deadlines)

    def link(self, here: str = GPU, there: str = NPU) -> PeerLink:
        return self.links[here].links[there]

    def meet(self, here: str = GPU, there: str = NPU) -> None:
        """Both announce a step, and hear of it."""
        for link in (self.link(here, there), self.link(there, here)):
            link.post(step())
        for link in (self.link(here, there), self.link(there, here)):
            link.take("SESSION", SOON)

    def cross(self, slots: range, size: int = 1000, here: str = GPU, there: str = NPU) -> None:
        """Tensors go both ways, and arrive as they were."""
        for slot in slots:
            for one, other in ((here, there), (there, here)):
                self.link(one, other).send(key(slot, one, other), np.full(size, slot, np.int32))
        for slot in slots:
            for one, other in ((here, there), (there, here)):
                found = self.link(one, other).receive(key(slot, other, one), SOON)
                np.testing.assert_array_equal(found, np.full(size, slot, np.int32))

    def kill(self, worker: str) -> None:
        """A worker dies: its port is gone, and its streams break without a word."""
        links = self.links.pop(worker)
        links._listener.stop()
        for link in links.links.values():
            link._carrier._closed = True  # it dials no more
            link._carrier.drop("the process was killed")

    def leave(self) -> None:
        """All workers end in order."""
        close_all(*self.links.values())
        self.links.clear()

    def close(self) -> None:
        self.leave()
        for gateway in self.gateways.values():
            gateway.stop("the test is over")


@contextlib.contextmanager
def town(folder: Path, files: Mapping[str, Files] | None, **options: Any) -> Iterator[Town]:
    """Two clusters, ended when it is over."""
    made = Town(folder, files, **options)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def certificates(*workers: str) -> Iterator[dict[str, Files]]:
    """Files of an authority that nobody else has, for these workers and both gateways."""
    made = issue_ephemeral(RUN, [*workers, *(f"{cluster}/gateway" for cluster in CLUSTERS)])
    try:
        yield made
    finally:
        shutil.rmtree(next(iter(made.values())).cert.parent)

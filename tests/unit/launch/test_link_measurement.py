"""Both ends of a measurement over emulated lines, and over real gRPC with mutual TLS on loopback."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.unit.transport.grpc_workers import find_free_address
from whale_nebula.config.schema import Line
from whale_nebula.errors import DeadlineError, IdentityError, NebulaError, RemoteProtocolError, RunError
from whale_nebula.launch import link_measurement
from whale_nebula.launch.link_advice import LinkMeasurement
from whale_nebula.launch.link_measurement import SIZES, MeasurementEnd, expect_tensor, list_far_ends, measure_links
from whale_nebula.security import Credentials, issue_ephemeral
from whale_nebula.transport.grpc.links import Place
from whale_nebula.transport.memory import MemoryNetwork
from whale_nebula.transport.protocol import Key

GPU, NPU, TPU = "gpu/0", "npu/0", "tpu/0"
BURST_SECONDS = 0.05  # seconds of each burst
TIMEOUT_SECONDS = 20.0
SHEET = {"connections": 1, "whale_nebula": "1.0"}


def ignore_report(text: str) -> None:
    """Nobody listens."""


def measure_both_ends(
    network: MemoryNetwork, tell: Callable[[str], None] = ignore_report, *, quick: bool = False
) -> tuple[LinkMeasurement, LinkMeasurement]:
    """What the two ends have found over a memory link, or what a run finds at its start."""
    links = network.link(GPU, NPU, "gpu", "npu"), network.link(NPU, GPU, "npu", "gpu")
    pair = [
        MeasurementEnd(
            link,
            leads=link.here == GPU,
            seconds=BURST_SECONDS,
            patience=TIMEOUT_SECONDS,
            report=tell if link.here == GPU else ignore_report,
        )
        for link in links
    ]
    with ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(end.probe, "direct", 7.0)
            if quick
            else pool.submit(end.measure, {**SHEET, "here": n}, "direct", 7.0)
            for n, end in enumerate(pair)
        ]
        first, second = (each.result(TIMEOUT_SECONDS) for each in waiting)
    return first, second


def test_both_ends_return_the_same_measurement() -> None:
    found, second = measure_both_ends(MemoryNetwork({("gpu", "npu"): Line(400e6, 0.003)}))
    assert found == second
    assert (found.first, found.second, found.clusters) == (GPU, NPU, ("gpu", "npu"))
    rates = [rate for each in found.crossings for rate in (each.there, each.back, each.both_there, each.both_back)]
    assert len(rates) == 4 * len(SIZES)
    assert all(rate > 0 for rate in rates)  # what is above the line's is a busy machine's doing
    assert 0.006 <= found.least_round_trip <= found.round_trip and found.delay >= 0.003
    assert abs(found.clock) < found.least_round_trip, "one clock is not ahead of itself"
    assert [sheet["here"] for sheet in found.sheets.values()] == [0, 1]


@pytest.mark.parametrize("rate", [400e6, None])
def test_quick_probe_measures_rates_and_delay(rate: float | None) -> None:
    found, second = measure_both_ends(MemoryNetwork({("gpu", "npu"): Line(rate, 0.003)}), quick=True)
    [line] = found.crossings
    assert found == second and found.delay >= 0.003 and min(line.there, line.back) > 0


def test_each_measurement_is_reported() -> None:
    reports: list[str] = []
    measure_both_ends(MemoryNetwork(), reports.append)
    assert reports[0].startswith("npu/0: round trip")
    ways = ["gpu/0 -> npu/0", "npu/0 -> gpu/0", "both ways at once"]
    assert [line.partition(":")[0] for line in reports[1:]] == [
        f"{way}, tensors of {size >> 10} KiB" for size in SIZES for way in ways
    ]


def test_worker_that_runs_a_script_is_refused() -> None:
    network = MemoryNetwork()
    end = MeasurementEnd(
        network.link(GPU, NPU, "gpu", "npu"),
        leads=True,
        seconds=BURST_SECONDS,
        patience=TIMEOUT_SECONDS,
        report=ignore_report,
    )
    script = network.link(NPU, GPU, "npu", "gpu")
    script.post({"kind": "SESSION", "about": "HELLO", "whale_nebula": "1.0"})
    with pytest.raises(RunError, match="'npu/0' runs a script"):
        end.measure(SHEET, "direct", 0.0)
    assert script.take("SESSION", TIMEOUT_SECONDS)["results"] == "bench link"  # which no script agrees to


def test_wait_for_a_busy_peer_is_reported() -> None:
    reports: list[str] = []
    link = MemoryNetwork().link(GPU, NPU, "gpu", "npu")
    end = MeasurementEnd(link, leads=True, seconds=0.01, patience=0.05, report=reports.append)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(DeadlineError, match="waited"):
        patch.setattr(link_measurement, "_AGAIN_SECONDS", 0.05)
        end.measure(SHEET, "direct", 0.0)
    assert "waiting for worker 'npu/0'" in reports[0] and "still busy" in reports[0]


BURST = {"program": 1, "step": 1, "count": 4, "size": SIZES[0], "last": False}


@pytest.mark.parametrize(
    ("leads", "messages", "why"),
    [
        (False, [{"kind": "PING", "last": False}] * 30, "requests more than 20 round trips"),
        (False, [{"kind": "PING", "last": True, "found": [1.0]}], "it sent 1 numbers for a round trip"),
        (False, [{"kind": "PING", "last": True}], "it sent 0 numbers"),
        (True, [{"kind": "BURST", **BURST, "count": 1 << 40}], "tensors of 65536 bytes"),
        (True, [{"kind": "BURST", **BURST, "count": 0}], "0 tensors of"),
        (True, [{"kind": "BURST", **BURST, "size": 1 << 30}], "tensors of 1073741824 bytes"),
        (True, [{"kind": "BURST", **BURST, "step": step} for step in range(30)], "more than 16 bursts of one size"),
    ],
)
def test_peer_that_violates_the_measurement_protocol_is_refused(
    leads: bool, messages: list[dict[str, object]], why: str
) -> None:
    """One that has greeted, and goes on for ever, or announces more than there may be."""
    network = MemoryNetwork()
    there = network.link(NPU, GPU, "npu", "gpu")
    end = MeasurementEnd(
        network.link(GPU, NPU, "gpu", "npu"), leads=leads, seconds=0.001, patience=TIMEOUT_SECONDS, report=ignore_report
    )
    there.post({"kind": "SESSION", "about": "HELLO", "bench": "bench link", "connections": "many"})
    for _ in range(20 if leads else 0):
        there.post({"kind": "PONG", "clock": 0.0})
        there.post({"kind": "ARRIVED", "rate": 1.0, "seconds": 1.0})
    for each in messages:
        there.post(each)
        for slot in range(4 if each["kind"] == "BURST" else 0):
            key = Key("forward", 1, int(each.get("step", 0)), 0, -1, slot, NPU, GPU)
            there.send(key, np.zeros(SIZES[0], np.uint8))
    with pytest.raises(RemoteProtocolError, match="does not follow the measurement protocol") as refused:
        end.measure(SHEET, "direct", 0.0)
    assert why in refused.value.why


def test_burst_has_an_overall_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though each of its tensors comes in time."""
    now, waits = [0.0], list[float]()

    def receive(key: Key, deadline: float) -> None:
        waits.append(deadline)
        if not deadline:
            raise DeadlineError("waited")
        now[0] += 0.9 * deadline

    burst = {**BURST, "count": 1 << 14}
    link = SimpleNamespace(here=GPU, there=NPU, take=lambda kind, seconds: burst, receive=receive)
    end = MeasurementEnd(link, leads=True, seconds=0.0, patience=10.0, report=ignore_report)
    monkeypatch.setattr(link_measurement, "time", SimpleNamespace(monotonic=lambda: round(now[0], 3)))
    with pytest.raises(DeadlineError):
        end._receive_burst(SIZES[0])
    assert waits[:4] == [10.0, 10.0, 10.0, 10.0] and now[0] <= 40.0 and len(waits) < 20


def test_only_tensors_of_the_measurement_are_expected() -> None:
    one = Key("forward", 1, 3, 0, -1, 7, NPU, GPU)
    assert expect_tensor(one).admits("uint8", (SIZES[-1],)) and expect_tensor(one).due == 0
    for change in ({"slot": 1 << 20}, {"kind": "control"}, {"program": 2}, {"micro_batch": 0}, {"phase": 1}):
        assert expect_tensor(replace(one, **change)) is None


def test_far_ends_are_the_first_workers_of_other_clusters() -> None:
    everyone = ["gpu/0", "gpu/1", "npu/0", "npu/1", "tpu/0"]
    assert list_far_ends(everyone, "npu") == [GPU, TPU]
    assert list_far_ends(everyone, "npu", "tpu") == [TPU]
    assert list_far_ends(everyone, "npu", "abc") == []


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, Place]]:
    """Three clusters on loopback."""
    addresses = {worker: find_free_address() for worker in (GPU, NPU, TPU)}
    files = issue_ephemeral("mt", addresses)
    yield {
        worker: Place(
            "mt",
            worker,
            {there: address for there, address in addresses.items() if there != worker},
            addresses[worker],
            credentials=Credentials.load(files[worker]),
        )
        for worker in addresses
    }
    shutil.rmtree(files[GPU].cert.parent)


class TestMeasurementOverMutualTLS:
    def test_all_pairs_of_workers_are_measured(self, places: dict[str, Place]) -> None:
        with ThreadPoolExecutor(len(places)) as pool:
            waiting = {
                worker: pool.submit(
                    lambda place=place: list(
                        measure_links(place, seconds=BURST_SECONDS, patience=TIMEOUT_SECONDS, report=ignore_report)
                    )
                )
                for worker, place in places.items()
            }
            found = {worker: each.result(3 * TIMEOUT_SECONDS) for worker, each in waiting.items()}
        pairs = {worker: [(each.first, each.second) for each in lines] for worker, lines in found.items()}
        assert pairs == {GPU: [(GPU, NPU), (GPU, TPU)], NPU: [(GPU, NPU), (NPU, TPU)], TPU: [(GPU, TPU), (NPU, TPU)]}
        line = found[GPU][0]
        assert line.crossings == found[NPU][0].crossings
        assert (line.path, line.broken) == ("direct", 0)

    def test_missing_peer_is_reported_with_the_command_to_start_it(self, places: dict[str, Place]) -> None:
        place = replace(places[NPU], peers={GPU: places[GPU].listen})
        reports: list[str] = []
        with pytest.raises(DeadlineError) as caught:
            list(measure_links(place, seconds=BURST_SECONDS, patience=1.5, report=reports.append))
        assert "'gpu/0' did not connect within 1.5 s" in caught.value.what
        assert caught.value.where == place.peers[GPU]
        assert "--cluster gpu" in caught.value.mend
        assert not any("is there" in line for line in reports)

    def test_peer_of_another_authority_is_refused(self, places: dict[str, Place]) -> None:
        files = issue_ephemeral("mt", [NPU])
        impostor = replace(places[NPU], peers={GPU: places[GPU].listen}, credentials=Credentials.load(files[NPU]))
        host = replace(places[GPU], peers={NPU: impostor.listen})

        def run(place: Place) -> NebulaError | None:
            try:
                list(measure_links(place, seconds=BURST_SECONDS, patience=4.0, report=ignore_report))
            except NebulaError as error:
                return error
            return None

        with ThreadPoolExecutor(2) as pool:
            refused, waited = pool.submit(run, impostor), pool.submit(run, host)
            assert isinstance(refused.result(TIMEOUT_SECONDS), IdentityError)
            assert isinstance(waited.result(TIMEOUT_SECONDS), DeadlineError)
        shutil.rmtree(files[NPU].cert.parent)

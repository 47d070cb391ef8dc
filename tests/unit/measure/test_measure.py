"""`whale-nebula measure` and `nb.clusters`: one real run of tiny sizes, its file, and its use."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import whale_nebula as nb
from tests.unit.security.authorities import Home
from tests.unit.transport.grpc_workers import find_free_address
from whale_nebula.cli import arguments, measure
from whale_nebula.config import load
from whale_nebula.errors import NebulaWarning
from whale_nebula.hardware import (
    ClusterInfo,
    Clusters,
    Collective,
    Device,
    LinkRate,
    Provenance,
    WorkerInfo,
    measurements,
)
from whale_nebula.hardware.measurements import (
    Measurement,
    cache_path,
    fingerprint,
    read_measurement,
    read_slowness,
    save_measurement,
    save_slowness,
    slowness_path,
)
from whale_nebula.launch import link_advice
from whale_nebula.launch.link_advice import LinkMeasurement, LinkThroughput, find_measurement_path
from whale_nebula.measure import device
from whale_nebula.runtime.clusters import add_stored_measurements
from whale_nebula.runtime.replicas.collective_costs import fit_collectives
from whale_nebula.security import Identity

Capture = pytest.CaptureFixture[str]
SOURCE = Provenance("2026-01-02T03:04:05+00:00", 0.05, "a machine")
DEVICE = Device("cpu", 2, 1e11, 2**34, 2e10, {"matmul": 1e11, "conv": 2e11}, 1e-4)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and no open run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    nb.shutdown()
    return tmp_path


def create_measurement() -> Measurement:
    names = ["device.rates.matmul", "device.call_seconds", "codecs.int8", "collectives.all-reduce"]
    sums = (Collective("all-reduce", 1e-3, 1e-9),)
    return Measurement(fingerprint(), DEVICE, {"int8": 1e-9}, sums, dict.fromkeys(names, SOURCE))


@pytest.mark.grid
def test_measure_fills_in_values_missing_from_the_config(cache_folder: Path, capsys: Capture) -> None:
    (cache_folder / "clusters.yaml").write_text(
        'clusters: {gpu: {memory: 4GiB, workers: ["127.0.0.1:7101", "127.0.0.1:7102"]}, npu: {flops: 5T}}\n'
    )
    words = [
        "--quick",
        "--config",
        str(cache_folder / "clusters.yaml"),
        "--save",
        str(cache_folder / "clusters.json"),
        "--json",
    ]
    assert measure.main(words) == arguments.DONE
    out, err = capsys.readouterr()
    found = Clusters.from_json(out)
    assert found == Clusters.load(cache_folder / "clusters.json") == nb.clusters(str(cache_folder / "clusters.json"))
    first, _, last = (worker.device for worker in found.workers)
    assert (first.memory_bytes, first.kind, first.flops_per_s) == (2**32, "cpu", first.rates["matmul"])
    assert set(first.rates) == {"matmul", "conv", "elementwise"} and all(rate > 0 for rate in first.rates.values())
    assert (last.flops_per_s, last.rates, last.memory_bytes) == (5e12, {}, device.read_total_memory())
    assert [(each.kind, each.workers) for each in found.cluster("gpu").collectives] == [
        ("all-reduce", 2), ("all-gather", 2), ("all-to-all", 2),
    ]  # fmt: skip
    assert {"fp16", "int8", "svd(0.6)", "topk(0.1)"} <= set(found.codecs) and min(found.codecs.values()) > 0
    assert found.measured["gpu/0.rates.matmul"].machine == fingerprint()
    assert {"npu/0.call_seconds", "codecs.int8", "gpu.collectives.all-reduce"} <= set(found.measured)
    assert "gpu/0.memory_bytes" not in found.measured and "npu/0.flops_per_s" not in found.measured
    assert "matmul: " in err and not cache_path().exists()  # what is quick is not kept


def test_known_measurement_is_repeated_only_with_again(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "FULL", device.QUICK)
    assert measure.main([]) == arguments.DONE
    assert f"saved in {cache_path()}" in capsys.readouterr().err
    kept, why = read_measurement()
    assert kept is not None and not why
    assert measure.main([]) == arguments.DONE
    assert "--again measures it again" in capsys.readouterr().err
    assert read_measurement() == (kept, "")
    assert nb.clusters().codecs == kept.codecs
    noisy = {name: replace(each, spread=0.1 if name != "codecs.int8" else 1.4) for name, each in kept.sources.items()}
    save_measurement(replace(kept, codecs={"none": 1.0}, sources=noisy))
    assert measure.main([]) == arguments.DONE
    assert "numbers differed by more than 30% between runs, most codecs.int8 (140%)" in capsys.readouterr().err
    assert measure.main(["--again"]) == arguments.DONE
    assert set(nb.clusters().codecs) == set(kept.codecs)


def test_measurement_of_another_machine_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    save_measurement(create_measurement())
    assert nb.clusters().workers[0].device == DEVICE
    monkeypatch.setattr(measurements, "fingerprint", lambda: "another one")
    with pytest.warns(NebulaWarning, match="measured on a different machine"):
        assert nb.clusters().workers[0].device == Device()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "whale_nebula measured 1"}', '{"format": "2"}'])
def test_invalid_measurement_file_is_not_used(text: str) -> None:
    cache_path().parent.mkdir()
    cache_path().write_text(text)
    found, why = read_measurement()
    assert found is None and "contains no valid measurement" in why


def test_saved_measurement_is_read() -> None:
    save_measurement(create_measurement())
    assert read_measurement() == (create_measurement(), "")


CONFIGURED_DEVICES = [
    (Device(), DEVICE),
    (Device("cpu"), DEVICE),
    (Device("gpu"), Device("gpu")),
    (Device(memory_bytes=1), replace(DEVICE, memory_bytes=1)),
    (Device(flops_per_s=5e12), replace(DEVICE, flops_per_s=5e12, rates={})),
]


@pytest.mark.parametrize(("configured", "expected"), CONFIGURED_DEVICES)
def test_configured_device_values_override_measurements(configured: Device, expected: Device) -> None:
    clusters = Clusters(
        (ClusterInfo("a", (WorkerInfo("a/0", device=configured), WorkerInfo("a/1", "far", configured))),)
    )
    found = create_measurement().complete(clusters, lambda machine: machine == "localhost")
    assert [worker.device for worker in found.workers] == [expected, configured]
    assert not found.cluster("a").collectives  # its workers are on two machines
    assert (found.measured.get("a/0.call_seconds") is None) == (expected.call_seconds is None)


def test_measurements_of_two_sites_are_merged() -> None:
    """Each knows its own workers; together they know all, whichever comes first."""
    far = ("10.0.0.1", "10.0.0.2")
    configured = Clusters(
        tuple(ClusterInfo(name, (WorkerInfo(f"{name}/0", far[n]),)) for n, name in enumerate("ab")),
        {("a", "b"): LinkRate(1e6, cost_per_gb=1.0), ("b", "a"): LinkRate()},
    )
    slow = replace(
        create_measurement(), device=replace(DEVICE, flops_per_s=1e9, rates={"matmul": 1e9}), codecs={"int4": 2e-9}
    )
    one, two = (
        create_measurement().complete(configured, far[:1].__contains__),
        slow.complete(configured, far[1:].__contains__),
    )
    line = replace(two, links={("a", "b"): LinkRate(9.0), ("b", "a"): LinkRate(2e6, 0.1)}, measured={"b>a": SOURCE})
    found = one.complete_from(line)
    assert [worker.device.rate_of("matmul") for worker in found.workers] == [1e11, 1e9]
    assert (found.links, found.codecs) == (
        {("a", "b"): LinkRate(1e6, cost_per_gb=1.0), ("b", "a"): LinkRate(2e6, 0.1)}, {"int8": 1e-9, "int4": 2e-9},
    )  # fmt: skip
    assert {"a/0.call_seconds", "codecs.int8", "b>a"} <= set(found.measured) and "a>b" not in found.measured
    assert one.complete_from(two).workers == two.complete_from(one).workers
    assert found.complete_from(found) == found


def test_collectives_are_scaled_to_more_workers_as_a_ring() -> None:
    clusters = Clusters((ClusterInfo("a", tuple(WorkerInfo(f"a/{number}") for number in range(4))),))
    (found,) = create_measurement().complete(clusters, lambda machine: True).cluster("a").collectives
    assert (found.workers, found.alpha_s, found.beta_s_per_byte) == (4, 3e-3, pytest.approx(1.5e-9))


def test_clusters_of_an_open_run() -> None:
    with nb.init({"clusters": {"gpu": {"flops": "5T"}, "npu": {}}}, links={("gpu", "npu"): "60mbit,20ms"}):
        found = nb.clusters()
        assert found.names == ("gpu", "npu") and found.between("npu", "gpu") == LinkRate(7.5e6, 0.02)
        assert [worker.device.flops_per_s for worker in found.workers] == [5e12, None]
    assert nb.clusters().names == ("local",)
    assert nb.clusters(json.loads(found.to_json())) == found == nb.clusters(found)
    assert nb.clusters({"clusters": {"a": {}}}).names == ("a",)


def test_link_measurements_next_to_the_config_are_used(cache_folder: Path) -> None:
    config = cache_folder / "clusters.yaml"
    config.write_text("clusters: {a: {}, b: {}, c: {}}\nlinks: [{between: [b, c], rate: 8mbit, cost: 2}]\n")
    one = (LinkThroughput(1 << 16, 1.0, 1.0, 1.0, 1.0), LinkThroughput(1 << 20, 5e6, 7e6, 1.0, 1.0))
    for b, c in (("a", "b"), ("b", "c"), ("a", "a")):
        link_advice.save_measurement(
            LinkMeasurement(f"{b}/0", f"{c}/0", "direct", 0.05, 0.04, 0.0, one, {}, 1, 0, 0.0),
            find_measurement_path(config, b, c),
        )
    found = nb.clusters(config)
    assert found == add_stored_measurements(Clusters.of(load(config)), config)
    assert (found.between("a", "b"), found.between("b", "a")) == (LinkRate(5e6, 0.02), LinkRate(7e6, 0.02))
    assert found.between("b", "c") == LinkRate(1e6, cost_per_gb=2.0)
    assert found.cluster("a").inside == LinkRate(5e6, 0.02) == found.cluster("a").ring
    assert set(found.measured) == {"a>b", "b>a", "a>a"} and found.measured["a>b"].date.startswith("1970-01-01")


def measure_both(cache_folder: Path, clusters: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two clusters on loopback, of which these measure their lines."""
    save_measurement(create_measurement())
    home = Home.at(cache_folder / "certs")
    for cluster in ("gpu", "npu"):
        home.files(Identity("mt", cluster))
    path = cache_folder / "clusters.yaml"
    named = ", ".join(f'{name}: {{workers: ["{find_free_address()}"]}}' for name in ("gpu", "npu"))
    path.write_text(f"run: mt\nclusters: {{{named}}}\npatience: 20s\n")
    monkeypatch.setattr(measure, "_LINE_SECONDS", 0.02)
    monkeypatch.setattr(measure, "_LINE_PATIENCE", 20.0 if len(clusters) > 1 else 0.5)
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(measure.main, ["--config", str(path), "--cluster", cluster]) for cluster in clusters]
        assert [each.result(60) for each in made] == [arguments.DONE] * len(clusters)
    return path


def test_measure_measures_links_from_both_ends(
    cache_folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = measure_both(cache_folder, ["gpu", "npu"], monkeypatch)
    assert "measuring the link to npu" in capsys.readouterr().err
    assert (nb.clusters(path).between("gpu", "npu").rate_bytes_per_s or 0) > 1e5
    assert measure.main(["--config", str(path), "--cluster", "gpu"]) == arguments.DONE
    assert "the rate of the link to npu is already known" in capsys.readouterr().err


def test_link_without_its_other_end_is_skipped(
    cache_folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_both(cache_folder, ["gpu"], monkeypatch)
    assert "the link to npu is not measured" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--cluster", "gpu"], 2, "--config clusters.yaml --cluster gpu"),
        (["--agian"], 2, "did you mean '--again'"),
        (["--config", "none.yaml"], arguments.CONFIG, "cannot be read"),
    ],
)
def test_invalid_command_line_is_refused(words: list[str], code: int, message: str, capsys: Capture) -> None:
    def run() -> Any:
        try:
            return measure.main(words)
        except SystemExit as end:
            return end.code

    assert run() == code
    assert message in capsys.readouterr().err


def test_unknown_cluster_is_refused(cache_folder: Path, capsys: Capture) -> None:
    (cache_folder / "clusters.yaml").write_text("clusters: {gpu: {}}\n")
    assert measure.main(["--config", str(cache_folder / "clusters.yaml"), "--cluster", "gpuu"]) == arguments.CONFIG
    assert "did you mean 'gpu'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("points", "alpha", "beta"),
    [
        ([(1e3, 1e-4 + 1e-6), (1e6, 1e-4 + 1e-3), (1e7, 1e-4 + 1e-2)], 1e-4, 1e-9),
        ([(1.0, 2.0), (2.0, 1.0)], 1.2, 0.0),
        ([(1.0, 1.0), (2.0, 4.0)], 0.0, 1.2),
        ([(2.0, 1.0)], 0.0, 0.5),
    ],
)
def test_fit_line_has_non_negative_coefficients(points: list[tuple[float, float]], alpha: float, beta: float) -> None:
    assert measurements.fit_line(points) == (pytest.approx(alpha), pytest.approx(beta))


def test_time_calls_returns_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def ticking(seconds: list[float]) -> Callable[[], None]:
        left = iter(seconds)
        return lambda: clock.__setitem__(0, clock[0] + next(left))

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert measurements.time_calls(ticking([9.0, 0.1, *[0.1] * 9, 5.0])).seconds == pytest.approx(0.1)
    assert measurements.time_calls(ticking([9.0, 1.0, 1.0, 3.0, 1.0])).seconds == pytest.approx(1.0)  # they take long


def test_slowness_applies_to_the_same_machine_and_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = Clusters((ClusterInfo("gpu", (WorkerInfo("gpu/0"),)), ClusterInfo("npu", (WorkerInfo("npu/0"),))))
    other = Clusters((ClusterInfo("gpu", (WorkerInfo("gpu/0", device=Device(flops_per_s=1e9)),)),))
    assert read_slowness(clusters, True, ()) == {}
    save_slowness({"gpu": 2.5}, clusters, True, ())
    save_slowness({"gpu": 3.0, "npu": 0.5}, clusters, True, ())
    save_slowness({"gpu": 9.0}, clusters, False, ())
    save_slowness({"gpu": 1.5}, clusters, True, {"gpu"})
    assert read_slowness(clusters, True, ()) == {"gpu": 3.0, "npu": 0.5}
    assert read_slowness(clusters, True, {"gpu", "npu"}) == {"gpu": 1.5}
    assert read_slowness(clusters, False, ()) == {"gpu": 9.0} and read_slowness(other, True, ()) == {}
    with monkeypatch.context() as moved:
        moved.setattr(measurements, "fingerprint", lambda: "another machine")
        assert read_slowness(clusters, True, ()) == {}
        save_slowness({"gpu": 7.0}, clusters, True, ())
    assert read_slowness(clusters, True, ()) == {"gpu": 3.0, "npu": 0.5}
    slowness_path().write_text("{")
    assert read_slowness(clusters, True, ()) == {}


def test_fitted_collective_cost_is_bounded_by_the_largest_tensor() -> None:
    (found,) = fit_collectives({"all-reduce": [[3e-3] * 3, [2e-3] * 3]}, (1 << 12, 1 << 16), 2).collectives
    assert found.beta_s_per_byte == pytest.approx(2e-3 / (1 << 16))

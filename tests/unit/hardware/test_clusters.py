"""The cluster object: its values from a config, its JSON, and its pictures."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.config import load, parse_links
from whale_nebula.errors import ConfigError
from whale_nebula.hardware import ClusterInfo, Clusters, Collective, Device, LinkRate, Provenance, WorkerInfo

OWN = {"kind": "cpu", "cores": 1, "memory_rate": "9 GB/s"}
CONFIG = {
    "clusters": {
        "gpu": {
            "memory": "16GiB",
            "flops": "5T",
            "price": 2.5,
            "cores": 8,
            "memory_rate": "20GB/s",
            "inside": {"rate": "10gbit", "delay": "50us"},
            "workers": [
                "10.0.0.1:7101",
                {"address": "10.0.0.1:7102", "device": "GPU:0", "speed": 2},
                {"address": "127.0.0.1:7103", "memory": "1GB", "flops": "9 GFLOP/s", "speed": 3, "price": 0, **OWN},
            ],
        },
        "npu": {"kind": "gpu"},
    },
    "links": [{"between": ["gpu", "npu"], "rate": "60mbit", "delay": "20ms", "loss": "1%", "cost": 0.08}],
}
CONFIGURED: dict[str, Any] = {"price_per_hour": 2.5, "cores_said": True}
FREE = {"price_per_hour": 0.0}
CLUSTERS = Clusters(
    (
        ClusterInfo(
            "gpu",
            (
                WorkerInfo("gpu/0", "10.0.0.1", Device("any", 8, 5e12, 2**34, 2e10, **CONFIGURED)),
                WorkerInfo("gpu/1", "10.0.0.1", Device("gpu", 8, 1e13, 2**34, 4e10, **CONFIGURED), 2.0),
                WorkerInfo("gpu/2", "localhost", Device("cpu", 1, 9e9, 10**9, 9e9, **CONFIGURED | FREE), 3.0),
            ),
            LinkRate(1.25e9, 50e-6),
        ),
        ClusterInfo("npu", (WorkerInfo("npu/0", device=Device("gpu")),)),
    ),
    dict.fromkeys([("gpu", "npu"), ("npu", "gpu")], LinkRate(7.5e6, 0.02, 0.01, 0.08)),
)


def test_clusters_of_a_config_are_in_bytes_and_seconds() -> None:
    assert Clusters.of(load(CONFIG)) == CLUSTERS
    running = Clusters.of(load(CONFIG), sizes={"gpu": 2, "npu": 1})  # of an elastic run that has lost one
    assert running == CLUSTERS.resize({"gpu": 2, "npu": 1}) and len(running.workers) == 3
    assert CLUSTERS.between("gpu", "gpu") == LinkRate(1.25e9, 50e-6)


def test_configured_device_values_are_kept() -> None:
    found = Device("cpu", 16, 1e12, 2**33, 5e10, call_seconds=1e-5)
    config = load({"clusters": {"gpu": {"cores": 1, "memory_rate": "9GB/s"}, "npu": {"kind": "gpu"}, "tpu": {}}})
    known = Clusters(tuple(ClusterInfo(name, (WorkerInfo(f"{name}/0", device=found),)) for name in config.clusters))
    gpu, npu, tpu = (worker.device for worker in Clusters.of(config).complete_from(known).workers)
    assert gpu == Device("cpu", 1, 1e12, 2**33, 9e9, call_seconds=1e-5, cores_said=True)
    assert (npu, tpu) == (Device("gpu"), found)  # of another kind than the one that was measured
    assert Device("cpu", 16).complete_from(gpu)[0].cores == 1  # as configured in another process


def test_clusters_without_a_config_are_created_by_name() -> None:
    links = parse_links({("a", "b"): "8mbit", ("b", "a"): "16mbit"})
    found = Clusters.of(load(None), links, {"a": 1, "b": 2})
    assert [worker.name for worker in found.workers] == ["a/0", "b/0", "b/1"]
    assert (found.between("a", "b").seconds(1e6), found.between("b", "a").seconds(1e6)) == (1.0, 0.5)
    assert Clusters.of(load(None), links) == Clusters.of(load(None), links, {"a": 1, "b": 1})


NAMES = st.text("abcXYZ0_-/.é ", min_size=1, max_size=6)
AMOUNTS = st.floats(0, 1e18)
MAYBE = st.none() | AMOUNTS
LINKS = st.builds(LinkRate, MAYBE, AMOUNTS, AMOUNTS, AMOUNTS)
DEVICES = st.builds(
    Device, NAMES, st.integers(1, 512), MAYBE, st.none() | st.integers(0, 2**60), MAYBE,
    st.dictionaries(NAMES, AMOUNTS, max_size=3), MAYBE,
)  # fmt: skip


@st.composite
def draw_clusters(draw: st.DrawFn) -> Clusters:
    names = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    found = tuple(
        ClusterInfo(
            name,
            tuple(WorkerInfo(f"{name}#{n}", draw(NAMES), draw(DEVICES), draw(AMOUNTS)) for n in range(draw(COUNTS))),
            draw(LINKS),
            tuple(draw(st.lists(st.builds(Collective, NAMES, AMOUNTS, AMOUNTS, st.integers(2, 9)), max_size=2))),
        )
        for name in names
    )
    pairs = draw(st.sets(st.tuples(st.sampled_from(names), st.sampled_from(names)), max_size=4))
    sources = st.dictionaries(NAMES, st.builds(Provenance, NAMES, MAYBE, NAMES), max_size=2)
    return Clusters(found, {pair: draw(LINKS) for pair in pairs}, draw(st.dictionaries(NAMES, AMOUNTS)), draw(sources))


COUNTS = st.integers(1, 3)


@given(draw_clusters())
def test_clusters_round_trip_through_json(clusters: Clusters) -> None:
    assert Clusters.from_json(clusters.to_json()) == clusters
    assert Clusters.from_json(json.loads(clusters.to_json())) == clusters


def test_clusters_round_trip_through_a_file(tmp_path: Path) -> None:
    CLUSTERS.save(tmp_path / "clusters.json")
    assert Clusters.load(tmp_path / "clusters.json") == CLUSTERS
    with pytest.raises(ConfigError, match="cannot write"):
        CLUSTERS.save(tmp_path / "none" / "clusters.json")
    with pytest.raises(ConfigError, match="cannot read"):
        Clusters.load(tmp_path / "none.json")


WORKER = {"name": "a/0", "device": {"flops_per_s": "fast"}}
ALONE = {"kind": "all-reduce", "alpha_s": 1e-4, "beta_s_per_byte": 0.0, "workers": 1}
INVALID_DOCUMENTS: list[tuple[Any, str]] = [
    ("{", "Expecting property name"),
    ([], "no attribute"),
    ({"format": "plan 1"}, "its format is 'plan 1'"),
    ({"clusters": [{"name": "a"}]}, "'workers'"),
    ({"clusters": [{"name": "a", "workers": [WORKER]}]}, "clusters.0.workers.0.device.flops_per_s is 'fast'"),
    ({"clusters": [], "codecs": {"int8": -1}}, "codecs.int8 is -1"),
    ({"clusters": [], "links": {"a>b": {}}}, "a link ends at 'a'"),
    ({"clusters": [{"name": "a", "workers": []}] * 2}, "'a' occurs twice"),
    ({"clusters": [{"name": "a", "workers": [], "collectives": [ALONE]}]}, "all-reduce of 'a' has fewer"),
]


@pytest.mark.parametrize(("document", "why"), INVALID_DOCUMENTS)
def test_invalid_cluster_object_is_refused(document: Any, why: str) -> None:
    with pytest.raises(ConfigError, match="not a cluster object") as caught:
        Clusters.from_json(document)
    assert why in str(caught.value)


def test_unknown_cluster_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gpu'"):
        CLUSTERS.cluster("gpuu")


def test_table_and_diagram_show_workers_and_links() -> None:
    assert [line.split()[0] for line in str(CLUSTERS).splitlines()[:5]] == [
        "worker",
        "gpu/0",
        "gpu/1",
        "gpu/2",
        "npu/0",
    ]
    assert "cpu, 1 core   954 MiB, 9 GB/s" in str(CLUSTERS)
    assert "gpu -> npu: 60mbit, 20ms, 1%, 0.08 per GB" in str(CLUSTERS)
    unknown = Clusters((ClusterInfo("local", (WorkerInfo("local/0", "localhost", Device()),)),))
    assert str(unknown).splitlines()[1].split() == ["local/0", "localhost", "?", "?", "?", "?"]
    assert 'c0 <-->|"60mbit, 20ms, 1%, 0.08 per GB"| c1' in CLUSTERS.to_mermaid()
    assert 'w0_1["gpu/1<br>gpu<br>10 TFLOP/s<br>16 GiB"]' in CLUSTERS.to_mermaid()

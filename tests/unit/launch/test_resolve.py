"""Resolvers of workers' addresses: each in the environment of its platform, and their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from whale_nebula.config import Config, load
from whale_nebula.errors import ConfigError
from whale_nebula.launch.placement import ANY, Placement, PlacementRequest, place_all_workers
from whale_nebula.launch.resolve import CHAIN, expand_node_list, parse_task_counts, resolve

CASES: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "placements.yaml").read_text())


def create_request(case: dict[str, Any]) -> PlacementRequest:
    return PlacementRequest(**case.get("asked", {}), is_local=lambda host: host in case.get("local", ()))


@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_resolver_finds_the_placement(case: dict[str, Any]) -> None:
    config = load(case.get("config"))
    if "error" in case:
        with pytest.raises(ConfigError) as refused:
            resolve(config, case.get("environ", {}), create_request(case))
        assert case["error"] in refused.value.what
        assert case.get("mend", "") in refused.value.mend
        assert case.get("where", "") in refused.value.where
        return
    found = resolve(config, case.get("environ", {}), create_request(case))
    assert found.source == case["expect"]["source"]
    assert list(found.placement.here) == case["expect"]["here"]
    assert found.placement.addresses == case["expect"]["addresses"]


def test_golden_cases_cover_all_resolvers() -> None:
    assert {case["expect"]["source"] for case in CASES if "expect" in case} == set(CHAIN)


def test_declined_resolvers_give_their_reasons() -> None:
    environ = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1"}
    found = resolve(load({"clusters": {"gpu": {}}}), environ, PlacementRequest())
    assert dict(found.declined) == {
        "config": "the config lists no workers",
        "TF_CONFIG": "TF_CONFIG is not set",
    }
    assert found.explain().splitlines()[-1] == "Slurm: yes, it provides the addresses of the workers"


def test_unresolved_placement_lists_all_reasons() -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(load({"clusters": {"gpu": {}, "npu": {}}}), {}, PlacementRequest("gpu"))
    assert [line.partition(":")[0] for line in refused.value.why.splitlines()] == list(CHAIN)


NODES = {
    "n1": ["n1"],
    "n1,n2": ["n1", "n2"],
    "gpu[01-04,07]": ["gpu01", "gpu02", "gpu03", "gpu04", "gpu07"],
    "gpu[098-101]": ["gpu098", "gpu099", "gpu100", "gpu101"],
    "gpu[1-2]-ib0,cpu3": ["gpu1-ib0", "gpu2-ib0", "cpu3"],
    "r[0-1]n[1-2]": ["r0n1", "r0n2", "r1n1", "r1n2"],
    "a.b-c[8,9-10].site": ["a.b-c8.site", "a.b-c9.site", "a.b-c10.site"],
}
INVALID_NODES = [
    "",
    ",",
    "n1,",
    ",n1",
    "n[",
    "n]",
    "n[]",
    "n[1-]",
    "n[3-1]",
    "n[a]",
    "n[[1]]",
    "n[0-99999999]",
    "n[0-999][0-999]",
]
INVALID_TASKS = ["", "2(3)", "x2", "2,,1", "2(x9999999)"]


def test_node_lists_and_task_counts_are_parsed() -> None:
    assert {text: expand_node_list(text) for text in NODES} == NODES
    assert (parse_task_counts("2"), parse_task_counts("2(x3),1,4(x2)")) == ([2], [2, 2, 2, 1, 4, 4])


@pytest.mark.parametrize(
    ("read", "text"),
    [(expand_node_list, each) for each in INVALID_NODES] + [(parse_task_counts, each) for each in INVALID_TASKS],
)
def test_invalid_slurm_text_is_refused(read: Any, text: str) -> None:
    with pytest.raises(ConfigError, match="cannot parse"):
        read(text)


class TestAllWorkers:
    """`--all`."""

    CONFIG = load({"clusters": {"gpu": {"workers": ["127.0.0.1:7101", "10.77.0.9:7101"]}, "npu": {}}})

    def test_all_workers_are_local_and_foreign_addresses_replaced(self) -> None:
        placement = place_all_workers(self.CONFIG, [], lambda host: host == "127.0.0.1")
        assert placement == Placement(
            ("gpu/0", "gpu/1", "npu/0"), {"gpu/0": "127.0.0.1:7101", "gpu/1": ANY, "npu/0": ANY}
        )
        assert placement.clusters == ("gpu", "npu")

    def test_no_config_and_no_cluster_names_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="no clusters are specified") as refused:
            place_all_workers(Config(), [], lambda host: True)
        assert "--clusters gpu,npu" in refused.value.mend

"""Processes joined by sockets have, bit for bit, the results of one process with actors over memory links."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

import whale_nebula as nb
from tests.parity.zoo import ZOO
from tests.processes.worker_reports import count_sent_bytes, encode_outcome
from tests.processes.worker_runs import FinishedRun, list_workers, run_workers_and_reference
from tests.processes.workers.train import read_case

# Sixteen programs and more, traced in each process, beside the reference: on two busy cores that takes its time.
DEADLINE = 900.0
pytestmark = pytest.mark.timeout(DEADLINE)
WORKERS: Mapping[str, int | Mapping[str, str]] = {
    "pair": 2, "trio": 3, "replicas": {"c0/0": "c0", "c0/1": "c0", "c1/0": "c1"},
    "parted": {"c0/0": "c0", "c1/0": "c1", "c1/1": "c1"},
}  # fmt: skip
SAMPLE = {"pair": ["gan,2,3,zero-bubble", "scaled_in_turns,2,1", "accumulated,2,1", "adversarial,2,1"]}
"""Models of the zoo, their stages and micro-batches, and the replicas of each stage: what `make test` runs."""
GRID = {
    "pair": [f"{name},2,{many}" for many in (1, 2, 3) for name in ZOO if many in ZOO[name].micro],
    "trio": [f"{name},3,{many}" for many in (1, 2, 3) for name in ZOO if many in ZOO[name].micro],
    "replicas": [f"{name},2,{many},2+1" for many in (1, 4, 6) for name in ZOO if 2 in ZOO[name].micro],
    "parted": [f"{name},2,4,1+2,zero-bubble" for name in ZOO if 2 in ZOO[name].micro],
}


def list_cases(config: pytest.Config) -> Mapping[str, list[str]]:
    """The sample, or the grid."""
    return GRID if config.getoption("--grid", default=False) else SAMPLE


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        pairs = [(run, case) for run, chosen in list_cases(metafunc.config).items() for case in chosen]
        metafunc.parametrize(
            ("run_and_reference", "case"),
            pairs,
            ids=[case for _, case in pairs],
            indirect=["run_and_reference"],
            scope="module",
        )


@pytest.fixture(scope="module")
def run_and_reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[FinishedRun, Mapping[str, Any]]:
    """The models of a run in several processes, and in this process meanwhile."""
    chosen, workers = list_cases(request.config)[request.param], WORKERS[request.param]
    config = tmp_path_factory.mktemp(request.param) / "run.yaml"
    config.write_text(json.dumps(make_config(workers)))
    return run_workers_and_reference(
        "train", workers, "train_zoo", config, *chosen, deadline=DEADLINE, alone=lambda: run_reference(chosen)
    )


def make_config(workers: int | Mapping[str, str]) -> dict[str, Any]:
    """A config with speeds, so that the shares of replicas, and with them the order of sums, do not change."""
    clusters: dict[str, Any] = {}
    for number, cluster in enumerate(list_workers(workers).values()):
        spec = {"address": f"127.0.0.1:{7000 + number}", "speed": 1}
        clusters.setdefault(cluster, {"workers": []})["workers"].append(spec)
    return {"clusters": clusters}


def run_reference(cases: list[str]) -> dict[str, Any]:
    """The outcomes of models of the zoo in this process, with actors."""
    found: dict[str, Any] = {}
    for case in cases:
        name, cut = read_case(case)
        nb.shutdown()
        with nb.init(links="10gbit,0ms"):
            found |= {case: encode_outcome(ZOO[name].run(cut)), f"{case} sent": count_sent_bytes()}
    return found


def test_processes_train_as_one_process(run_and_reference: tuple[FinishedRun, Mapping[str, Any]], case: str) -> None:
    """Each process reports on its own stages and sent bytes; together these are those of the emulated run."""
    found, expected = run_and_reference
    parts: list[Mapping[str, Any]] = found.get_all(case)
    for part in parts:
        assert {**part, "stages": None} == {**expected[case], "stages": None}
    assert list(dict.fromkeys(stage for part in parts for stage in part["stages"])) == expected[case]["stages"]
    links = {link: count for part in found.get_all(f"{case} sent") for link, count in part.items() if count[0]}
    if "+" in case:
        assert links.keys() <= {"c0->c1", "c1->c0"}
    else:
        assert links == expected[f"{case} sent"]

"""Two sites over mutual TLS: their results, and their behaviour when one is killed, frozen, or cut off."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.processes.sites import insert_line, prepare_sites
from tests.processes.worker_runs import run_in_this_process, run_workers
from tests.processes.workers import train
from whale_nebula.launch.placement import free_port

STEPS, PAUSE = 160, 0.02


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """The results of one process."""
    return run_in_this_process(train.train_steps, STEPS, links="10gbit,0ms")


@pytest.mark.grid
def test_outage_and_renewed_certificate_do_not_change_the_result(tmp_path: Path, reference: dict[str, Any]) -> None:
    with prepare_sites(tmp_path) as found, insert_line(found, "gpu") as (line, configs):
        found.start("train", "train_steps", STEPS, PAUSE, configs=configs)
        found["npu"].await_line('"steps", 15')
        line.cut()
        time.sleep(5.0)  # the outage itself
        line.restore()
        found["npu"].await_line('"steps", 35')
        found.certs("renew")
        assert found.wait_for_exit_codes() == {"gpu": 0, "npu": 0}, found["npu"].last_output
        weights, loss = found.get_common("weights"), found.get_common("loss")
        assert found["npu"].reports["connections"]["gpu/0"] > 1, "the new certificate was not taken up"
    assert (weights, loss) == (reference["weights"], reference["loss"])


@pytest.mark.grid
def test_gateway_restart_does_not_change_the_result(tmp_path: Path, reference: dict[str, Any]) -> None:
    names = ("gpu", "npu")
    clusters = {
        name: {"workers": [f"127.0.0.1:{free_port()}"], "gateway": f"127.0.0.1:{free_port()}"} for name in names
    }
    with prepare_sites(tmp_path, clusters=clusters) as found:
        for name in names:
            found.start_gateway(name)
        found.start("train", "train_steps", STEPS, PAUSE)
        found["npu"].await_line('"steps", 15')
        found.gateways["npu"].process.kill()
        found.gateways["npu"].process.wait(10)
        found.start_gateway("npu")
        assert found.wait_for_exit_codes() == {"gpu": 0, "npu": 0}, found["npu"].last_output
        assert found.get_common("weights") == reference["weights"]


@pytest.mark.grid
@pytest.mark.parametrize(("number", "within"), [(signal.SIGKILL, 2.0), (signal.SIGSTOP, 8.0)], ids=["dead", "frozen"])
def test_lost_worker_ends_the_other_site_with_its_name(tmp_path: Path, number: int, within: float) -> None:
    with prepare_sites(tmp_path) as found:
        found.start("train", "train_steps", 10**4)
        for site in found.sites.values():
            site.await_line('"steps", 15')
        os.kill(found["gpu"].worker_pid, number)
        start = time.monotonic()
        assert found["npu"].await_line('"error"') - start < within
        assert "worker 'gpu/0' is gone" in found["npu"].reports["error"]
        codes = found.wait_for_exit_codes()
    assert codes["gpu"] == 137 and codes["npu"] not in (0, 137), codes


@pytest.mark.grid
def test_outage_beyond_patience_ends_both_sites(tmp_path: Path) -> None:
    with prepare_sites(tmp_path, patience="12s") as found, insert_line(found, "gpu") as (line, configs):
        found.start("train", "train_steps", 10**4, configs=configs)
        found["npu"].await_line('"steps", 15')
        line.cut()
        start = time.monotonic()
        heard = {cluster: site.await_line('"error"') - start for cluster, site in found.sites.items()}
        assert all(10.0 < seconds < 30.0 for seconds in heard.values()), heard
        assert "gpu/0" in found["npu"].reports["error"] and "npu/0" in found["gpu"].reports["error"]
        assert all(found.wait_for_exit_codes().values())


@pytest.mark.parametrize(
    ("shared", "claims", "writers"),
    [
        pytest.param(True, "nobody", ["gpu/0"], marks=pytest.mark.grid, id="one folder"),
        pytest.param(False, "gpu/0", ["gpu/0", "npu/0"], id="two folders and a claim of the other"),
    ],
)
def test_weights_file_is_written_once_per_folder(tmp_path: Path, shared: bool, claims: str, writers: list[str]) -> None:
    folders = [tmp_path / ("both" if shared else name) for name in ("gpu", "npu")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    found = run_workers("save_weights", {"gpu/0": "gpu", "npu/0": "npu"}, claims, *folders)
    found.result.check()
    assert [worker for worker, report in found.reports.items() if report["writes"]] == writers
    assert found.get_common("there") is True

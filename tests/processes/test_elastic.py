"""Workers and clusters that leave and join during a run: no step is lost, and the results are those of one process."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import yaml

from tests.processes.sites import HERE, Sites, prepare_sites
from tests.processes.worker_reports import parse_reports
from tests.processes.worker_runs import run_in_this_process
from tests.processes.workers.elastic import train_model
from tests.processes.workers.elastic_planned import train_model as train_planned_model
from whale_nebula.cli.main import main
from whale_nebula.launch.placement import free_port
from whale_nebula.launch.worker_exit import EXIT_TEMPFAIL


def write_config(folder: Path, **elastic: Mapping[str, int]) -> Path:
    """The config of a run of one worker of gpu and two of npu."""
    gpu, *npu = (f"127.0.0.1:{free_port()}" for _ in range(3))
    config = {"clusters": {"gpu": {"workers": [gpu]}, "npu": {"workers": npu}}, "seed": 5, "elastic": elastic}
    path = folder / "clusters.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextlib.contextmanager
def start_two_sites(
    folder: Path,
    saved: Mapping[str, str],
    requests: Mapping[str, Any],
    patience: str = "60s",
    *,
    gateways: bool = False,
    elastic: Mapping[str, Any] = MappingProxyType({"npu": {"min": 0}}),
    npu: int = 2,
) -> Iterator[Sites]:
    """A launcher for each name in `saved`, a cluster or one of its workers, in its own folder, as on separate hosts,
    with a control socket. One worker of gpu, and so many of `npu`, are listed.
    """
    own = [{"gateway": f"127.0.0.1:{free_port()}"} if gateways else {} for _ in range(2)]
    workers = {name: [f"127.0.0.1:{free_port()}" for _ in range(count)] for name, count in (("gpu", 1), ("npu", npu))}
    clusters = {name: {"workers": workers[name], **more} for name, more in zip(workers, own, strict=True)}
    options = {"clusters": clusters, "elastic": dict(elastic), "restarts": 5, "patience": patience}
    with prepare_sites(folder, **options) as found:
        found.has_separate_folders = True
        for name in clusters if gateways else ():
            found.start_gateway(name)
        for name in saved:
            cluster, _, number = name.partition("-")
            control = str(folder / f"{name}.sock")
            command = ["-m", "whale_nebula.cli.main", "run", "--config", found.write_config(name), "--cluster", cluster]
            script = [str(HERE / "workers" / "elastic.py"), str(folder / saved[name]), control, json.dumps(requests)]
            found.commands[name] = [*command, *(["--worker", number] if number else []), "--control", control, *script]
            found.restart(name)
        yield found


def check_history(found: Sites) -> list[Any]:
    """Compare histories with those of one process; returns by epoch gpu's first step, and npu's workers."""
    expected = run_in_this_process(train_model)["history"]
    for site in found.sites.values():
        for name, values in expected.items():
            np.testing.assert_allclose(site.reports["history"][name], values, 1e-5)
    seen = found["gpu"].reports
    return [seen[name] for name in sorted(seen) if name.startswith("epoch ")]


@pytest.mark.parametrize(
    "intermediate_count",
    [pytest.param(None, id="at once"), pytest.param(1, id="by and by, by gateways", marks=pytest.mark.grid)],
)
def test_site_leaves_and_returns(tmp_path: Path, intermediate_count: int | None) -> None:
    """The other site requests it. The leaving site hands its checkpoint over, and gets the newest when it returns."""
    requests = {"0": [6, 0]} if intermediate_count is None else {"0": [6, intermediate_count], "1": [9, 0]}
    with start_two_sites(
        tmp_path,
        {"gpu": "one", "npu": "two"},
        {**requests, "by": "gpu/0", "waits": 12},
        gateways=bool(intermediate_count),
    ) as found:
        assert found["npu"].wait() == EXIT_TEMPFAIL and "continues with 1 in gpu, 0 in npu" in found["npu"].last_output
        found.restart("npu")
        assert found.wait_for_exit_codes() == {"gpu": 0, "npu": 0}, [site.last_output for site in found.sites.values()]
        starts = check_history(found)
    assert [count for _, count in starts] == [2, *([] if intermediate_count is None else [intermediate_count]), 0, 2]
    resumed = [step[0] if step else 0 for step, _ in starts]
    assert resumed[0] == 0 and 6 <= resumed[1] <= 8 and resumed[1:] == sorted(resumed[1:]), starts


@pytest.mark.grid
@pytest.mark.parametrize("shared", [True, False], ids=["one folder", "folders of their own"])
def test_run_continues_without_a_killed_site_if_its_checkpoint_is_readable(tmp_path: Path, shared: bool) -> None:
    """Otherwise the run waits for the site. In both cases the site takes part again when it is restarted."""
    saved = {"gpu": "one", "npu": "one" if shared else "two"}
    with start_two_sites(tmp_path, saved, {"dies": {"0": ["npu/0", 9]}, "waits": 14}, "15s") as found:
        found["gpu"].await_line("npu/0, npu/1 did not recover: the run continues without npu")
        if shared:
            found["gpu"].await_line('report: ["homes 2"')
        else:
            found["gpu"].await_line("the run continues with 1 in gpu, 2 in npu")
            assert "the run cannot resume without 'npu'" in found["gpu"].last_output
        assert found["npu"].wait() == -signal.SIGKILL
        found.restart("npu")
        assert found.wait_for_exit_codes() == {"gpu": 0, "npu": 0}, [site.last_output for site in found.sites.values()]
        starts = check_history(found)
    assert [count for _, count in starts] == ([2, 0, 2] if shared else [2, 2])
    assert all(step for step, _ in starts[1:]), (starts, found["gpu"].last_output)


HOSTS = {"gpu": "one", "npu-0": "two", "npu-1": "three"}
"""Hosts with a launcher each, and their folders: those of npu have one worker each."""
ONE_OF_TWO = {"npu": {"min": 1}}


def test_host_of_a_cluster_leaves_on_request_and_returns(tmp_path: Path) -> None:
    """It hands its part of the checkpoint over."""
    requests = {"0": [6, 1], "by": "gpu/0", "waits": 12}
    with start_two_sites(tmp_path, HOSTS, requests, elastic=ONE_OF_TWO) as found:
        assert found["npu-1"].wait() == EXIT_TEMPFAIL, found["npu-1"].last_output
        assert "continues with 1 in gpu, 1 in npu" in found["npu-1"].last_output
        found.restart("npu-1")
        assert set(found.wait_for_exit_codes().values()) == {0}, [site.last_output for site in found.sites.values()]
        starts = check_history(found)
    assert starts[0][1] == 2 and [count for _, count in starts][-2:] == [1, 2], starts
    assert 6 <= starts[1][0][0] <= 8 and starts[-1][0][0] >= starts[1][0][0], starts


@pytest.mark.grid
def test_cluster_continues_without_its_killed_first_host_from_copies_in_memory(tmp_path: Path) -> None:
    requests = {"dies": {"0": ["npu/0", 9]}, "waits": 14}
    with start_two_sites(tmp_path, HOSTS, requests, "30s", elastic=ONE_OF_TWO) as found:
        assert found["npu-0"].wait() == -signal.SIGKILL
        found["npu-1"].await_line("the run continues with 1 in gpu, 1 in npu, without npu/0")
        found.restart("npu-0")
        assert set(found.wait_for_exit_codes().values()) == {0}, [site.last_output for site in found.sites.values()]
        starts = check_history(found)
    assert starts[0][1] == 2 and [count for _, count in starts][-2:] == [1, 2], starts
    assert starts[-2][0][0] > 0, "no checkpoint on a disk has the part of npu/0"


@pytest.mark.grid
def test_spare_host_replaces_a_killed_one(tmp_path: Path) -> None:
    """It waits for longer than the patience, without a restart."""
    requests = {"dies": {"0": ["npu/1", 9]}, "waits": 14}
    hosts, elastic = {**HOSTS, "npu-2": "four"}, {"npu": {"min": 1, "max": 2}}
    with start_two_sites(tmp_path, hosts, requests, "30s", elastic=elastic, npu=3) as found:
        assert found.sites.pop("npu-1").wait() == -signal.SIGKILL
        assert set(found.wait_for_exit_codes().values()) == {0}, [site.last_output for site in found.sites.values()]
        starts = check_history(found)
        assert not any("begins after" in line for line in found["npu-2"].err), found["npu-2"].last_output
    assert starts[0][1] == 2 and [count for _, count in starts][-2:] == [1, 2] and starts[-2][0][0] > 0, starts


@pytest.mark.grid
@pytest.mark.parametrize("elastic", [{}, ONE_OF_TWO], ids=["fixed number", "elastic"])
def test_each_host_in_turn_is_killed_and_started_again(tmp_path: Path, elastic: Mapping[str, Any]) -> None:
    turns = {"npu-1": ["npu/1", 4], "npu-0": ["npu/0", 8], "gpu": ["gpu/0", 12]}
    requests = {"dies": dict(enumerate(turns.values()))}
    with start_two_sites(tmp_path, HOSTS, requests, elastic=elastic) as found:
        for killed in turns:
            assert found[killed].wait() == -signal.SIGKILL
            found.restart(killed)
        assert set(found.wait_for_exit_codes().values()) == {0}, [site.last_output for site in found.sites.values()]
        check_history(found)


@pytest.mark.grid
def test_cluster_shrinks_leaves_and_returns(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path, npu={"min": 0})
    control = str(tmp_path / "run.sock")
    validates = {"validates": True}
    requests = json.dumps({"0": [6, 1], "1": [9, 0], "2": [13, 2], **validates})  # the first as an epoch is evaluated
    script = [str(HERE / "workers" / "elastic.py"), str(tmp_path / "saved"), control, requests]
    assert main(["run", "--all", "--config", str(path), "--standby", "--control", control, *script]) == 0
    out, err = capfd.readouterr()
    found = parse_reports(out)
    starts = [found[f"epoch {number}"] for number in range(4)]
    assert [count for _, count in starts] == [2, 1, 0, 2] and "continues with 1 in gpu, 1 in npu, as epoch 1" in err
    steps = [step[0] if step else 0 for step, _ in starts]  # no completed step is lost
    assert steps[0] == 0 and 6 <= steps[1] <= 8 and 9 <= steps[2] <= 11 and 13 <= steps[3] <= 15
    assert found["homes 2"] == {"gpu": "gpu", "npu": "gpu"}
    expected = run_in_this_process(train_model, "", json.dumps(validates))["history"]
    for name, values in expected.items():
        np.testing.assert_allclose(found["history"][name], values, 1e-5)
    assert "nebula_starts_total 4.0" in found["metrics"] and 'nebula_workers{cluster="npu"} 2.0' in found["metrics"]
    assert 'nebula_time_seconds_total{worker="npu/0",spent="recovery"}' in found["metrics"]


@pytest.mark.grid
def test_planned_run_has_its_plans_in_advance(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one worker fewer: the same plan in all processes, which is the one that a search finds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    control, requests = str(tmp_path / "run.sock"), json.dumps({"0": [6, 1], "by": "gpu/0"})
    script = [str(HERE / "workers" / "elastic_planned.py"), str(tmp_path / "saved"), "850KiB", control, requests]
    path = write_config(tmp_path, npu={"min": 0})
    assert main(["run", "--all", "--config", str(path), "--control", control, *script]) == 0
    out, err = capfd.readouterr()
    found = parse_reports(out)
    starts = [[found[name] for name in sorted(found) if name.startswith(f"start {number} ")] for number in range(2)]
    assert [len(reports) for reports in starts] == [3, 2] and all(each == own[0] for own in starts for each in own)
    assert [own[0][:3] for own in starts] == [[[1, 2], False, True], [[1, 1], True, True]], (starts, err)
    assert "without npu: no plan fits" in err and "elastic: {npu: {min: 1}}" in err
    for name, values in run_in_this_process(train_planned_model)["history"].items():
        np.testing.assert_allclose(found["history"][name], values, 1e-5)

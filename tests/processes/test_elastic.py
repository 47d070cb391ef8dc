"""Workers and clusters that leave and join during a run: nothing is lost, and the numbers are those of one process."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.processes.running import told_alone
from tests.processes.sites import HERE, Sites, sites
from tests.processes.telling import told
from tests.processes.workers.elastic import lesson
from whale_nebula.cli.main import main
from whale_nebula.launch.placement import free_port
from whale_nebula.launch.worker_exit import EXIT_TEMPFAIL


@contextlib.contextmanager
def two_sites(
    folder: Path, saved: Mapping[str, str], asked: Mapping[str, Any], patience: str = "60s", *, gateways: bool = False
) -> Iterator[Sites]:
    """A launcher for each cluster, each in a folder of its own, as if it were a host; gpu answers at a socket."""
    own = [{"gateway": f"127.0.0.1:{free_port()}"} if gateways else {} for _ in range(2)]
    workers = {name: [f"127.0.0.1:{free_port()}" for _ in range(count)] for name, count in (("gpu", 1), ("npu", 2))}
    clusters = {name: {"workers": workers[name], **more} for name, more in zip(workers, own, strict=True)}
    with sites(folder, clusters=clusters, elastic={"npu": {"min": 0}}, restarts=5, patience=patience) as found:
        found.apart = True
        for name in clusters:
            if gateways:
                found.start_gateway(name)
            control = str(folder / f"{name}.sock")
            command = ["-m", "whale_nebula.cli.main", "run", "--config", found.written(name), "--cluster", name]
            script = [str(HERE / "workers" / "elastic.py"), str(folder / saved[name]), control, json.dumps(asked)]
            found.commands[name] = [*command, "--control", control, *script]
            found.start_again(name)
        yield found


def check_history(found: Sites) -> list[Any]:
    """Both have trained as one process does; gives by epoch where gpu went on, and with how many of npu."""
    expected = told_alone(lesson)["history"]
    for site in found.started.values():
        for name, values in expected.items():
            np.testing.assert_allclose(site.told["history"][name], values, 1e-5)
    seen = found["gpu"].told
    return [seen[name] for name in sorted(seen) if name.startswith("epoch ")]


@pytest.mark.parametrize(
    "fewer", [pytest.param(None, id="at once"), pytest.param(1, id="by and by, by gateways", marks=pytest.mark.grid)]
)
def test_a_site_leaves_and_comes_back(tmp_path: Path, fewer: int | None) -> None:
    """It is asked at the other site. What the site has saved it hands over, and is sent the newest as it comes back."""
    asked = {"0": [6, 0]} if fewer is None else {"0": [6, fewer], "1": [9, 0]}
    with two_sites(
        tmp_path, {"gpu": "one", "npu": "two"}, {**asked, "by": "gpu/0", "waits": 12}, gateways=bool(fewer)
    ) as found:
        assert found["npu"].wait() == EXIT_TEMPFAIL and "continues with 1 in gpu, 0 in npu" in found["npu"].said
        found.start_again("npu")
        assert found.ended() == {"gpu": 0, "npu": 0}, [site.said for site in found.started.values()]
        began = check_history(found)
    assert [count for _, count in began] == [2, *([] if fewer is None else [fewer]), 0, 2]
    resumed = [step[0] if step else 0 for step, _ in began]
    assert resumed[0] == 0 and 6 <= resumed[1] <= 8 and resumed[1:] == sorted(resumed[1:]), began


@pytest.mark.grid
@pytest.mark.parametrize("shared", [True, False], ids=["one folder", "folders of their own"])
def test_a_site_that_dies_is_gone_on_without_where_what_it_saved_can_be_read(tmp_path: Path, shared: bool) -> None:
    """Else it is waited for; in any case it goes on when it is started by the same command. The newest step that both
    have then is on the disk, though the other site has newer ones in its memory.
    """
    saved = {"gpu": "one", "npu": "one" if shared else "two"}
    with two_sites(tmp_path, saved, {"dies": {"0": 9}, "waits": 14}, "15s") as found:
        found["gpu"].await_line("npu/0 did not recover: the run continues without npu")
        if shared:
            found["gpu"].await_line('told: ["homes 2"')
        else:
            found["gpu"].await_line("the run continues with 1 in gpu, 2 in npu")
            assert "the run cannot resume without 'npu'" in found["gpu"].said
        assert found["npu"].wait() == -signal.SIGKILL
        found.start_again("npu")
        assert found.ended() == {"gpu": 0, "npu": 0}, [site.said for site in found.started.values()]
        began = check_history(found)
    assert [count for _, count in began] == ([2, 0, 2] if shared else [2, 2])
    assert all(step for step, _ in began[1:]), (began, found["gpu"].said)


@pytest.mark.grid
def test_a_cluster_goes_on_with_one_worker_less_then_the_run_without_it_and_then_with_both_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu, *npu = (f"127.0.0.1:{free_port()}" for _ in range(3))
    config = {"clusters": {"gpu": {"workers": [gpu]}, "npu": {"workers": npu}}, "seed": 5}
    config["elastic"] = {"npu": {"min": 0}}
    path = tmp_path / "clusters.yaml"
    path.write_text(yaml.safe_dump(config))
    control = str(tmp_path / "run.sock")
    asked = json.dumps({"0": [6, 1], "1": [9, 0], "2": [13, 2]})  # the first as an epoch is evaluated
    script = [str(HERE / "workers" / "elastic.py"), str(tmp_path / "saved"), control, asked]
    assert main(["run", "--all", "--config", str(path), "--control", control, *script]) == 0
    out, err = capfd.readouterr()
    found = told(out)
    began = [found[f"epoch {number}"] for number in range(4)]
    assert [count for _, count in began] == [2, 1, 0, 2] and "continues with 1 in gpu, 1 in npu, as epoch 1" in err
    steps = [step[0] if step else 0 for step, _ in began]  # every step that was taken was kept
    assert steps[0] == 0 and 6 <= steps[1] <= 8 and 9 <= steps[2] <= 11 and 13 <= steps[3] <= 15
    assert found["homes 2"] == {"gpu": "gpu", "npu": "gpu"}
    expected = told_alone(lesson)["history"]
    for name, values in expected.items():
        np.testing.assert_allclose(found["history"][name], values, 1e-5)
    assert "nebula_starts_total 4.0" in found["metrics"] and 'nebula_workers{cluster="npu"} 2.0' in found["metrics"]
    assert 'nebula_time_seconds_total{worker="npu/0",spent="recovery"}' in found["metrics"]

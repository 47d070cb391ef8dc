"""Workers and clusters that go and come in mid-run: nothing is lost, and the numbers are those of one process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.processes.running import told_alone
from tests.processes.sites import HERE, free_port
from tests.processes.telling import told
from tests.processes.workers.elastic import lesson
from whale_nebula.cli.main import main


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
    assert [count for _, count in began] == [2, 1, 0, 2] and "goes on with 1 in gpu, 1 in npu, as epoch 1" in err
    steps = [step[0] if step else 0 for step, _ in began]  # every step that was taken was kept
    assert steps[0] == 0 and 6 <= steps[1] <= 8 and 9 <= steps[2] <= 11 and 13 <= steps[3] <= 15
    assert found["homes 2"] == {"gpu": "gpu", "npu": "gpu"}
    expected = told_alone(lesson)["history"]
    for name, values in expected.items():
        np.testing.assert_allclose(found["history"][name], values, 1e-5)
    assert "nebula_starts_total 4.0" in found["metrics"] and 'nebula_workers{cluster="npu"} 2.0' in found["metrics"]
    assert 'nebula_time_seconds_total{worker="npu/0",spent="recovery"}' in found["metrics"]

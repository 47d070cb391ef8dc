"""`whale-nebula run --restarts`: real processes, whose scripts need no TensorFlow, from start to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from whale_nebula.cli import arguments
from whale_nebula.cli.main import main

Capture = pytest.CaptureFixture[str]
SOON = 60.0
BOTH = ["--all", "--clusters", "gpu,npu"]
START = """
import os, signal, sys, time
from whale_nebula.launch import attach
from whale_nebula.launch.worker_exit import exit_agreement
me = attach()
print(me.worker, "begins epoch", me.epoch, flush=True)
def train():
    for step in range(3):
        exit_agreement.begin_step()
        exit_agreement.conclude_step({})
def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """A function that writes a script with its identity in `me`; returns the path."""

    def write(code: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(START + code)
        return str(path)

    return write


@pytest.fixture
def config(tmp_path: Path) -> str:
    """The path of a config of two clusters with two immediate restarts."""
    path = tmp_path / "clusters.yaml"
    path.write_text("clusters: {gpu: {}, npu: {}}\nrestarts: {most: 2, wait: 0s}\n")
    return str(path)


def test_workers_restart_with_next_epoch_after_a_kill(
    script: Callable[[str], str], config: str, capfd: Capture
) -> None:
    path = script("train()\nif me.cluster == 'npu' and me.epoch < 1: die()\ntime.sleep(0.3)")
    assert main(["run", "--json", "--all", "--config", config, path]) == arguments.DONE
    out, err = capfd.readouterr()
    *starts, ended = out.splitlines()
    assert sorted(starts) == sorted(
        f"{cluster}/0 begins epoch {epoch}" for cluster in ("gpu", "npu") for epoch in (0, 1)
    )
    assert (json.loads(ended)["code"], json.loads(ended)["epoch"]) == (0, 1)
    assert err.splitlines() == [
        "whale-nebula: worker npu/0 failed first: ended by SIGKILL; restart 1 of 2 begins after 0 s, as epoch 1"
    ]


def test_used_up_restarts_give_exit_code_and_report_first_failure(
    script: Callable[[str], str], config: str, capfd: Capture
) -> None:
    path = script("train()\nif me.cluster == 'npu': sys.exit(7) if me.epoch else die()\ntime.sleep(0.3)")
    assert main(["run", "--all", "--config", config, "--restarts", "1", path]) == arguments.USED_UP
    assert capfd.readouterr().err.splitlines()[-2:] == [
        "whale-nebula: no restarts left: 1 of 1 were used; in epoch 0 worker npu/0 failed first: ended by SIGKILL",
        "whale-nebula: worker npu/0 failed first: exit code 7",
    ]


def test_recurring_error_is_not_restarted(script: Callable[[str], str], config: str, capfd: Capture) -> None:
    """Other causes are tested in tests/unit/launch/test_restarts.py."""
    path = script("import whale_nebula as nb\nraise nb.errors.ConfigError('not so')")
    assert main(["run", "--all", "--config", config, path]) == 1
    assert "NB-500 would recur" in capfd.readouterr().err


def test_restarts_option_overrides_the_config(script: Callable[[str], str], config: str, capfd: Capture) -> None:
    assert main(["run", "--all", "--config", config, "--restarts", "0", script("train()\ndie()")]) == 137
    assert "restart" not in capfd.readouterr().err


def test_signal_during_restart_delay_ends_the_command(script: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "clusters.yaml"
    path.write_text("clusters: {gpu: {}}\nrestarts: {most: 2, wait: 50s}\n")
    words = ["-m", "whale_nebula.cli.main", "run", "--all", "--config", str(path), script("train()\ndie()")]
    process = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert process.stderr is not None and "restart 1 of 2 begins after 50 s" in process.stderr.readline()
        assert not psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=SOON)
    finally:
        process.kill()
        process.communicate(timeout=SOON)
    assert process.returncode == arguments.LEFT
    assert err.splitlines() == [
        "whale-nebula: SIGTERM: no restart",
        "whale-nebula: no worker was running, and none is restarted; the run can be started again",
    ]


@pytest.mark.parametrize("words", [["--restarts", "two"], ["--restarts", "-1"]], ids=str)
def test_invalid_restarts_option_is_refused(words: list[str], script: Callable[[str], str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *BOTH, *words, script("")])
    assert ended.value.code == arguments.USAGE


def test_killed_gateway_is_restarted(script: Callable[[str], str], tmp_path: Path, capfd: Capture) -> None:
    path = tmp_path / "clusters.yaml"
    gateways = 'clusters: {gpu: {gateway: "10.77.0.1:7100"}, npu: {gateway: "10.77.0.2:7100"}}'
    path.write_text(gateways + "\nrestarts: {most: 1, wait: 0s}\n")
    code = f"""
import psutil
def find_gateways():
    return [each for each in psutil.Process({os.getpid()}).children() if "gateway" in words(each)]
def words(process):
    try:
        return process.cmdline()
    except psutil.Error:  # it has just ended
        return []
if me.cluster == "gpu":
    gone = find_gateways()[0]
    gone.kill()
    limit = time.monotonic() + 30
    while gone in find_gateways() or len(find_gateways()) < 2:
        assert time.monotonic() < limit
        time.sleep(0.05)
"""
    assert main(["run", "--all", "--config", str(path), script(code)]) == arguments.DONE
    err = capfd.readouterr().err
    assert "gpu/gateway and npu/gateway run here, too; their audit logs are deleted after the run" in err
    assert "/gateway has exited; restart 1 of 1 begins, and its workers wait for it" in err

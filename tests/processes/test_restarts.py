"""Restarted workers resume from their checkpoint, reconnect, and refuse workers of an earlier epoch."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.processes.launchers import SCRIPT, Launchers, prepare_launchers
from tests.processes.sites import prepare_sites
from tests.processes.worker_reports import parse_reports
from tests.processes.worker_runs import run_in_this_process
from tests.processes.workers import restart
from tests.unit.transport.grpc_workers import TcpProxy
from whale_nebula.cli.main import main
from whale_nebula.errors import LinkClosedError, PeerRestartedError
from whale_nebula.launch.placement import free_port


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """The results of one undisturbed process."""
    return run_in_this_process(lambda: restart.train(tmp_path_factory.mktemp("alone")), links="free")


@pytest.mark.parametrize("options", [(), pytest.param(("--standby",), marks=pytest.mark.grid)], ids=" ".join)
def test_clusters_resume_after_a_kill(
    tmp_path: Path, reference: Mapping[str, Any], capfd: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    script = [SCRIPT, str(tmp_path), "npu/0@0@2", "1" if options else "0"]
    assert main(["run", "--all", "--clusters", "gpu,npu", "--restarts", "2", *options, *script]) == 0
    out, err = capfd.readouterr()
    found = parse_reports(out)
    assert "worker npu/0 failed first: ended by SIGKILL; restart 1 of 2 begins after 1 s, as epoch 1" in err
    assert [name for name in found if "step" in name] == [
        f"epoch {int(step > 2)} step {step}" for step in range(restart.STEPS)
    ]
    assert (found["weights"], found["loss"]) == (reference["weights"], reference["loss"])
    assert (found["start of gpu/0 in epoch 1"] < found["dies"]) is bool(options)


# ---------------------------------------------------------------------- launchers, a cluster each
@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Launchers]:
    """Of two clusters of a worker each."""
    with prepare_launchers(tmp_path, {"gpu": 1, "npu": 1}) as found:
        yield found


def test_separate_launchers_restart_and_reconnect(launchers: Launchers, reference: Mapping[str, Any]) -> None:
    """The other launcher's worker detects the closed link, or the greeting of the restarted worker."""
    for worker in launchers.addresses:
        launchers.start(worker, "gpu/0@0@3")
    found = launchers.wait_for_all()
    assert {worker: (ended.epoch, ended.result.culprit) for worker, ended in found.items()} == {
        "gpu/0": (1, None),
        "npu/0": (1, None),
    }
    for worker, ended in found.items():
        assert parse_reports(ended.result.outcomes[worker].out)["weights"] == reference["weights"]
    assert "gpu/0" in launchers.await_line("worker npu/0 failed first: exit code 1: NB-4")


@pytest.mark.grid
def test_frozen_worker_of_an_earlier_epoch_is_refused(
    launchers: Launchers, reference: Mapping[str, Any], tmp_path: Path
) -> None:
    """Its host was frozen with its launcher, and another host has taken its place."""
    hasty = tmp_path / "clusters.yaml"
    hasty.write_text("patience: 4s\n")
    proxy = TcpProxy(launchers.addresses["gpu/0"])
    launchers.start("npu/0", "", 0.2, max_restarts=0, addresses={"gpu/0": proxy.address})
    launchers.start("gpu/0", "", 0.2, config=str(hasty))
    launchers.await_line("[npu/0]", "epoch 0 step 1")
    launchers.jobs["npu/0"].signal("npu/0", signal.SIGSTOP)
    proxy.is_forwarding = False
    launchers.await_line("worker gpu/0 failed first: exit code 1: NB-402", "npu/0")
    launchers.start("npu/0", "", 0.3, name="another host", listen=f"127.0.0.1:{free_port()}")
    launchers.await_line("[npu/0]", "epoch 1 step")
    proxy.is_forwarding = True
    proxy.disconnect()
    launchers.jobs["npu/0"].signal("npu/0", signal.SIGCONT)
    found = launchers.wait_for_all()
    old = found["npu/0"].result.outcomes["npu/0"]
    assert "NB-415 this worker, 'npu/0', is in epoch 0, but the run is in epoch 1" in old.err
    assert (old.code, old.status.error, found["npu/0"].epoch) == (1, "NB-415", 0)
    for name in ("gpu/0", "another host"):
        assert (found[name].epoch, found[name].result.culprit) == (1, None)
        (outcome,) = found[name].result.outcomes.values()
        assert parse_reports(outcome.out)["weights"] == reference["weights"]
    proxy.close()


DETECTION_ERRORS = (LinkClosedError, PeerRestartedError)
"""How a worker detects that another one was killed: its connection is closed, or a new process answers. A deadline
error would mean that only its silence was detected.
"""


@pytest.mark.grid
def test_sites_restart_after_a_kill(tmp_path: Path, reference: Mapping[str, Any]) -> None:
    with prepare_sites(tmp_path, restarts={"most": 2, "wait": "0s"}) as found:
        (tmp_path / "saved").mkdir()
        found.start("restart", tmp_path / "saved", "", 0.3)
        found["gpu"].await_line("epoch 0 step 1")
        os.kill(found["gpu"].worker_pid, signal.SIGKILL)
        for site in found.sites.values():
            site.await_line("restart 1 of 2 begins")
        assert found.wait_for_exit_codes() == {"gpu": 0, "npu": 0}, found["npu"].last_output
        assert found.get_common("weights") == reference["weights"]
        messages = [line for line in found["npu"].err if "begins after" in line]
        assert len(messages) == 1 and any(f"exit code 1: {kind.code} " in messages[0] for kind in DETECTION_ERRORS), (
            messages
        )

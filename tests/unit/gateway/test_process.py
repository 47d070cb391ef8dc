"""Gateways as separate processes: killed under traffic and restarted, asked to end, controlled by a launcher."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.gateway.networks import (
    CLUSTERS,
    GPU,
    NPU,
    TIMEOUT_SECONDS,
    GatewayNetwork,
    issue_certificates,
    make_key,
    open_network,
    read_log,
    wait_until,
)
from tests.unit.transport.grpc_workers import find_free_address
from whale_nebula.cli import arguments
from whale_nebula.cli.gateway import start_gateways
from whale_nebula.cli.main import main
from whale_nebula.config import load
from whale_nebula.errors import ConfigError
from whale_nebula.gateway.settings import GatewaySettings
from whale_nebula.launch import spawn
from whale_nebula.launch.gateways import create_gateway_settings, place_gateways, run_gateways, start_gateway
from whale_nebula.launch.placement import Placement
from whale_nebula.security import Files
from whale_nebula.security.audit import read_heads
from whale_nebula.security.verdict import verify

Process = subprocess.Popen[bytes]
COMMAND = (sys.executable, "-m", "whale_nebula.cli.main")


@pytest.fixture(scope="module")
def files() -> Iterator[dict[str, Files]]:
    with issue_certificates(GPU, NPU) as network:
        yield network


@contextlib.contextmanager
def kill_at_exit(*processes: subprocess.Popen[Any]) -> Iterator[None]:
    """Kill the processes at the end."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait(TIMEOUT_SECONDS)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


def read_listening_line(process: Process) -> str:
    """The line that a gateway prints once it listens."""
    assert process.stdout is not None
    return process.stdout.readline().decode()


class TestRestart:
    COUNT = 24

    def send(self, network: GatewayNetwork, here: str, there: str) -> None:
        for slot in range(self.COUNT):
            network.link(here, there).send(make_key(slot, here, there), np.full(1 << 18, slot, np.int32))

    def test_killed_gateway_loses_and_repeats_no_tensors(self, tmp_path: Path, files: dict[str, Files]) -> None:
        with open_network(tmp_path, files) as network, contextlib.ExitStack() as processes:
            started: dict[str, Process] = {}

            def begin(cluster: str) -> None:
                started[cluster] = start_gateway(network.settings_by_cluster[cluster])
                processes.enter_context(kill_at_exit(started[cluster]))
                assert f"gateway of cluster {cluster}" in read_listening_line(started[cluster])

            for cluster in CLUSTERS:
                begin(cluster)
            network.start_workers()
            network.exchange_steps()
            ways = [(GPU, NPU), (NPU, GPU)]
            sending = [threading.Thread(target=self.send, args=(network, *way)) for way in ways]
            for thread in sending:
                thread.start()
            for slot in range(self.COUNT):
                if slot == 6:
                    started["gpu"].kill()
                    started["gpu"].wait(TIMEOUT_SECONDS)
                    begin("gpu")
                for here, there in ways:
                    found = network.link(there, here).receive(make_key(slot, here, there), TIMEOUT_SECONDS)
                    np.testing.assert_array_equal(found, np.full(1 << 18, slot, np.int32))
            for thread in sending:
                thread.join(TIMEOUT_SECONDS)
            network.close_workers()
            for process in started.values():
                process.send_signal(signal.SIGTERM)
            assert [process.wait(TIMEOUT_SECONDS) for process in started.values()] == [arguments.DONE] * 2
            heads = list(read_heads(network.settings_by_cluster["gpu"].heads_path))
            assert verify(network.settings_by_cluster["npu"].audit, heads).bad is None
            log = verify(network.settings_by_cluster["gpu"].audit)
            assert (log.bad, log.closed) == (None, True)
            assert [each["action"] for each in read_log(network.settings_by_cluster["gpu"].audit)].count("listen") == 2


class TestGatewayCommand:
    CONFIG = 'run: mt\nclusters: {gpu: {gateway: "127.0.0.1:1"}, npu: {}}\nsecurity: {insecure: true}\n'

    def test_start_prints_a_description_and_an_insecure_warning(self, tmp_path: Path) -> None:
        config = tmp_path / "clusters.yaml"
        config.write_text(self.CONFIG)
        words = ["gateway", "--config", str(config), "--cluster", "gpu", "--listen", "127.0.0.1:0"]
        process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with kill_at_exit(process):
            line = read_listening_line(process)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=TIMEOUT_SECONDS)
        assert process.returncode == arguments.DONE
        assert line.startswith("whale-nebula: gateway of cluster gpu, run mt, listens on 127.0.0.1:")
        assert "to npu (it connects to us); trusts every process" in line
        assert err.decode().splitlines()[0].startswith("whale-nebula: INSECURE: TRUE.")
        log = read_log(tmp_path / "audit/gpu-gateway.jsonl")
        assert [each["action"] for each in log] == ["genesis", "listen", "end"]

    def test_one_process_serves_several_runs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        paths = [tmp_path / run / "clusters.yaml" for run in ("a", "b")]
        for path in paths:
            path.parent.mkdir()
            path.write_text(self.CONFIG.replace("run: mt", f"run: {path.parent.name}"))
        sites = [replace(GatewaySettings.from_config(load(path), "gpu", path), listen="127.0.0.1:0") for path in paths]
        found = start_gateways(sites)
        try:
            assert {each.settings.run for each in found} == {"a", "b"} and found[0].address != found[1].address
            assert found[0]._routes["npu"].pacer is found[1]._routes["npu"].pacer
        finally:
            for each in found:
                each.stop("a test")
        with pytest.raises(ConfigError, match="different rates of the link from gpu to npu: no rate and 8mbit"):
            start_gateways([sites[0], replace(sites[1], rates={"npu": 1e6})])
        with pytest.raises(ConfigError, match="would write the same audit log"):
            start_gateways([sites[0], replace(sites[1], audit=sites[0].audit)])
        assert [each["action"] for each in read_log(sites[0].audit)][-1] == "end"  # the first gateway was stopped

    def test_also_option_starts_the_gateways_of_further_runs(self, tmp_path: Path) -> None:
        paths = [tmp_path / run / "clusters.yaml" for run in ("a", "b")]
        for path in paths:
            path.parent.mkdir()
            text = self.CONFIG.replace("run: mt", f"run: {path.parent.name}")
            path.write_text(text.replace("127.0.0.1:1", find_free_address()))
        words = ["gateway", "--config", str(paths[0]), "--also", str(paths[1]), "--cluster", "gpu"]
        process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with kill_at_exit(process):
            lines = [read_listening_line(process) for _ in paths]
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=TIMEOUT_SECONDS)
        assert process.returncode == arguments.DONE
        assert [line.partition(", listens")[0] for line in lines] == [
            f"whale-nebula: gateway of cluster gpu, run {run}" for run in ("a", "b")
        ]

    def test_private_keys_of_others_cause_a_warning(self, tmp_path: Path) -> None:
        (tmp_path / "clusters.yaml").write_text(self.CONFIG.replace("true", "false"))
        folder = ["--folder", str(tmp_path / "certs")]
        assert main(["certs", "init", "--run", "mt", *folder]) == arguments.DONE
        assert main(["certs", "issue", "--cluster", "gpu", *folder]) == arguments.DONE
        assert main(["certs", "issue", "--cluster", "gpu", "--role", "gateway", *folder]) == arguments.DONE
        words = ["gateway", "--config", str(tmp_path / "clusters.yaml"), "--cluster", "gpu", "--listen", "127.0.0.1:0"]
        process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with kill_at_exit(process):
            read_listening_line(process)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=TIMEOUT_SECONDS)
        first = err.decode().splitlines()[0]
        assert "contains private keys of others" in first and "(ca.key, gpu-worker-0.key)" in first

    def test_keys_that_a_launcher_issued_for_its_run_cause_none(self, capfd: pytest.CaptureFixture[str]) -> None:
        with spawn(["-c", "print('ran')"], {"gpu/0": "gpu", "npu/0": "npu"}, gateways=True) as job:
            result = job.wait(TIMEOUT_SECONDS)
        assert [outcome.out for outcome in result.outcomes.values()] == ["ran\n", "ran\n"]
        assert "private keys" not in capfd.readouterr().err

    @pytest.mark.parametrize(
        ("words", "text", "code", "why"),
        [
            (["--cluster", "tpu"], CONFIG, arguments.CONFIG, "no cluster 'tpu'"),
            (["--cluster", "npu"], CONFIG, arguments.CONFIG, "has no gateway"),
            (["--cluster", "gpu", "--listen", "7100"], CONFIG, arguments.CONFIG, "'7100' is not an address"),
            (["--cluster", "gpu"], CONFIG.replace("true", "false"), arguments.CONFIG, "cannot read the key"),
            (["--cluster", "gpu", "--listen", "192.0.2.1:7100"], CONFIG, arguments.FAILED, "cannot listen on"),
        ],
    )
    def test_invalid_settings_are_reported_before_serving(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str, code: int, why: str
    ) -> None:
        config = tmp_path / "clusters.yaml"
        config.write_text(text)
        assert main(["gateway", "--config", str(config), *words]) == code
        assert why in capsys.readouterr().err

    def test_missing_config_option_is_reported(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["gateway", "--cluster", "gpu"])
        assert caught.value.code == arguments.USAGE
        assert "--config clusters.yaml --cluster gpu" in capsys.readouterr().err


class TestLauncher:
    def test_gateway_stops_with_its_launcher(self, tmp_path: Path) -> None:
        process = start_gateway(
            GatewaySettings("mt", "gpu", "127.0.0.1:0", {}, {"npu": None}, audit=tmp_path / "audit.jsonl")
        )
        with kill_at_exit(process):
            assert "listens on 127.0.0.1:" in read_listening_line(process)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(TIMEOUT_SECONDS) == arguments.DONE
        assert read_log(tmp_path / "audit.jsonl")[-1]["reason"] == "stopped by its launcher"

    def test_local_addresses_replace_remote_gateways(self, tmp_path: Path) -> None:
        config = load(
            {
                "run": "mt",
                "clusters": {"gpu": {"gateway": "10.77.0.1:7100"}, "npu": {"gateway": "127.0.0.1:7100"}},
                "links": [{"between": ["gpu", "npu"], "rate": "60mbit"}],
            }
        )
        found = place_gateways(config, lambda host: host.startswith("127."))
        assert found.clusters["npu"].gateway == "127.0.0.1:7100"
        where = Placement(("gpu/0", "npu/0"), {"gpu/0": "127.0.0.1:1", "npu/0": "127.0.0.1:2"})
        network = create_gateway_settings(
            found, where, {"gpu/gateway": Files(Path("/ca"), Path("/cert"), Path("/key"))}, tmp_path
        )
        gpu, npu = network["gpu/gateway"], network["npu/gateway"]
        assert gpu.listen.startswith("127.0.0.1:") and npu.listen == "127.0.0.1:7100"
        assert (gpu.gateways, gpu.rates, gpu.roster) == ({"npu": npu.listen}, {"npu": 7.5e6}, ("gpu/0", "npu/0"))
        assert (gpu.files, npu.files) == (Files(Path("/ca"), Path("/cert"), Path("/key")), None)

    def test_exit_of_a_gateway_that_is_not_restarted_is_reported(self) -> None:
        config = load({"run": "mt", "clusters": {"gpu": {"gateway": "10.77.0.1:7100"}}, "security": {"insecure": True}})
        config, lines = place_gateways(config, lambda host: False), list[str]()
        with run_gateways(config, Placement((), {}), {}, report=lines.append) as processes:
            processes["gpu/gateway"].kill()
            wait_until(lambda: lines != [])
        assert lines == ["gateway gpu/gateway has exited, and is not restarted"]

    def test_no_gateways_are_placed_where_a_cluster_has_none(self) -> None:
        config = load({"clusters": {"gpu": {"gateway": "10.77.0.1:7100"}, "npu": {}}})
        assert all(cluster.gateway is None for cluster in place_gateways(config, lambda host: True).clusters.values())

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

from tests.unit.gateway.town import CLUSTERS, GPU, NPU, SOON, Town, certificates, key, town, written
from whale_nebula.cli import arguments
from whale_nebula.cli.gateway import start_gateways
from whale_nebula.cli.main import main
from whale_nebula.config import load
from whale_nebula.errors import ConfigError
from whale_nebula.gateway.site import Site
from whale_nebula.launch.gateways import create_sites, place_gateways, start_gateway
from whale_nebula.launch.placement import Placement
from whale_nebula.security import Files
from whale_nebula.security.audit import read_heads
from whale_nebula.security.verdict import verify

Process = subprocess.Popen[bytes]
COMMAND = (sys.executable, "-m", "whale_nebula.cli.main")


@pytest.fixture(scope="module")
def files() -> Iterator[dict[str, Files]]:
    with certificates(GPU, NPU) as made:
        yield made


@contextlib.contextmanager
def ended(*processes: subprocess.Popen[Any]) -> Iterator[None]:
    """None of them is left behind."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait(SOON)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


def listens(process: Process) -> str:
    """The line that a gateway prints once it listens."""
    assert process.stdout is not None
    return process.stdout.readline().decode()


class TestKilledAndStartedAgain:
    COUNT = 24

    def send(self, made: Town, here: str, there: str) -> None:
        for slot in range(self.COUNT):
            made.link(here, there).send(key(slot, here, there), np.full(1 << 18, slot, np.int32))

    def test_nothing_is_lost_and_nothing_comes_twice(self, tmp_path: Path, files: dict[str, Files]) -> None:
        with town(tmp_path, files) as made, contextlib.ExitStack() as processes:
            started: dict[str, Process] = {}

            def begin(cluster: str) -> None:
                started[cluster] = start_gateway(made.sites[cluster])
                processes.enter_context(ended(started[cluster]))
                assert f"gateway of cluster {cluster}" in listens(started[cluster])

            for cluster in CLUSTERS:
                begin(cluster)
            made.join()
            made.meet()
            ways = [(GPU, NPU), (NPU, GPU)]
            sending = [threading.Thread(target=self.send, args=(made, *way)) for way in ways]
            for thread in sending:
                thread.start()
            for slot in range(self.COUNT):
                if slot == 6:
                    started["gpu"].kill()
                    started["gpu"].wait(SOON)
                    begin("gpu")
                for here, there in ways:
                    found = made.link(there, here).receive(key(slot, here, there), SOON)
                    np.testing.assert_array_equal(found, np.full(1 << 18, slot, np.int32))
            for thread in sending:
                thread.join(SOON)
            made.leave()
            for process in started.values():
                process.send_signal(signal.SIGTERM)
            assert [process.wait(SOON) for process in started.values()] == [arguments.DONE] * 2
            heads = list(read_heads(made.sites["gpu"].heads))
            assert verify(made.sites["npu"].audit, heads).bad is None
            log = verify(made.sites["gpu"].audit)
            assert (log.bad, log.closed) == (None, True)
            assert [each["action"] for each in written(made.sites["gpu"].audit)].count("listen") == 2


class TestTheCommand:
    CONFIG = 'run: mt\nclusters: {gpu: {gateway: "127.0.0.1:1"}, npu: {}}\nsecurity: {insecure: true}\n'

    def test_a_start_says_in_a_line_what_it_is_and_loudly_that_it_is_insecure(self, tmp_path: Path) -> None:
        config = tmp_path / "clusters.yaml"
        config.write_text(self.CONFIG)
        words = ["gateway", "--config", str(config), "--cluster", "gpu", "--listen", "127.0.0.1:0"]
        process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with ended(process):
            line = listens(process)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=SOON)
        assert process.returncode == arguments.DONE
        assert line.startswith("whale-nebula: gateway of cluster gpu, run mt, listens on 127.0.0.1:")
        assert "to npu (it connects to us); trusts every process" in line
        assert err.decode().splitlines()[0].startswith("whale-nebula: INSECURE: TRUE.")
        log = written(tmp_path / "audit/gpu-gateway.jsonl")
        assert [each["action"] for each in log] == ["genesis", "listen", "end"]

    def test_several_runs_have_one(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        paths = [tmp_path / run / "clusters.yaml" for run in ("a", "b")]
        for path in paths:
            path.parent.mkdir()
            path.write_text(self.CONFIG.replace("run: mt", f"run: {path.parent.name}"))
        sites = [replace(Site.of(load(path), "gpu", path), listen="127.0.0.1:0") for path in paths]
        found = start_gateways(sites)
        try:
            assert {each.site.run for each in found} == {"a", "b"} and found[0].address != found[1].address
            assert found[0]._routes["npu"].pacer is found[1]._routes["npu"].pacer
        finally:
            for each in found:
                each.stop("a test")
        with pytest.raises(ConfigError, match="different rates of the link from gpu to npu: no rate and 8mbit"):
            start_gateways([sites[0], replace(sites[1], rates={"npu": 1e6})])
        with pytest.raises(ConfigError, match="would write the same audit log"):
            start_gateways([sites[0], replace(sites[1], audit=sites[0].audit)])
        assert [each["action"] for each in written(sites[0].audit)][-1] == "end"  # which was not left behind

    def test_keys_of_others_beside_its_own_are_warned_of(self, tmp_path: Path) -> None:
        (tmp_path / "clusters.yaml").write_text(self.CONFIG.replace("true", "false"))
        folder = ["--folder", str(tmp_path / "certs")]
        assert main(["certs", "init", "--run", "mt", *folder]) == arguments.DONE
        assert main(["certs", "issue", "--cluster", "gpu", *folder]) == arguments.DONE
        assert main(["certs", "issue", "--cluster", "gpu", "--role", "gateway", *folder]) == arguments.DONE
        words = ["gateway", "--config", str(tmp_path / "clusters.yaml"), "--cluster", "gpu", "--listen", "127.0.0.1:0"]
        process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with ended(process):
            listens(process)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=SOON)
        first = err.decode().splitlines()[0]
        assert "contains private keys of others" in first and "(ca.key, gpu-worker-0.key)" in first

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
    def test_what_is_wrong_is_said_before_anything_is_served(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str, code: int, why: str
    ) -> None:
        config = tmp_path / "clusters.yaml"
        config.write_text(text)
        assert main(["gateway", "--config", str(config), *words]) == code
        assert why in capsys.readouterr().err

    def test_without_a_config_it_asks_for_one(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as left:
            main(["gateway", "--cluster", "gpu"])
        assert left.value.code == arguments.USAGE
        assert "--config clusters.yaml --cluster gpu" in capsys.readouterr().err


class TestALauncher:
    def test_its_end_is_the_gateway_s(self, tmp_path: Path) -> None:
        process = start_gateway(Site("mt", "gpu", "127.0.0.1:0", {}, {"npu": None}, audit=tmp_path / "audit.jsonl"))
        with ended(process):
            assert "listens on 127.0.0.1:" in listens(process)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(SOON) == arguments.DONE
        assert written(tmp_path / "audit.jsonl")[-1]["reason"] == "stopped by its launcher"

    def test_brings_all_gateways_of_a_config_to_this_machine(self, tmp_path: Path) -> None:
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
        made = create_sites(found, where, {"gpu/gateway": Files(Path("/ca"), Path("/cert"), Path("/key"))}, tmp_path)
        gpu, npu = made["gpu/gateway"], made["npu/gateway"]
        assert gpu.listen.startswith("127.0.0.1:") and npu.listen == "127.0.0.1:7100"
        assert (gpu.gateways, gpu.rates, gpu.roster) == ({"npu": npu.listen}, {"npu": 7.5e6}, ("gpu/0", "npu/0"))
        assert (gpu.files, npu.files) == (Files(Path("/ca"), Path("/cert"), Path("/key")), None)

    def test_but_not_where_a_cluster_has_none(self) -> None:
        config = load({"clusters": {"gpu": {"gateway": "10.77.0.1:7100"}, "npu": {}}})
        assert all(cluster.gateway is None for cluster in place_gateways(config, lambda host: True).clusters.values())

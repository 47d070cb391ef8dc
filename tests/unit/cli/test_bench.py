"""`whale-nebula bench link`: both sites with their own config, and both ends on one machine."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.unit.security.authorities import Home
from tests.unit.transport.grpc_workers import find_free_address
from whale_nebula.cli import arguments, bench
from whale_nebula.cli import bench as bench_ends
from whale_nebula.config import load
from whale_nebula.errors import ConfigError, CredentialsError
from whale_nebula.launch.link_advice import find_measurement_path, load_measurement
from whale_nebula.security import Identity

Capture = pytest.CaptureFixture[str]

QUICK = ["--seconds", "0.05"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The config of two clusters on loopback, with certificates of both."""
    home = Home.at(tmp_path / "certs")
    for cluster in ("gpu", "npu"):
        home.files(Identity("mt", cluster))
    path = tmp_path / "clusters.yaml"
    clusters = ", ".join(f'{name}: {{workers: ["{find_free_address()}"]}}' for name in ("gpu", "npu"))
    path.write_text(
        f"run: mt\nclusters: {{{clusters}}}\nlinks: [{{between: [gpu, npu], rate: 1mbit, delay: 1s}}]\npatience: 20s\n"
    )
    return path


def test_two_sites_measure_the_same_link_and_suggest_config(config: Path, capsys: Capture) -> None:
    with ThreadPoolExecutor(2) as pool:
        call = ["link", "--config", str(config), "--json", *QUICK]
        codes = [pool.submit(bench.main, [*call, "--cluster", cluster]) for cluster in ("gpu", "npu")]
        assert [code.result(60) for code in codes] == [arguments.DONE, arguments.DONE]
    out, err = capsys.readouterr()
    one, end = json.JSONDecoder().raw_decode(out)
    (first,), (second,) = one["lines"], json.loads(out[end:])["lines"]
    assert first["crossings"] == second["crossings"] and (first["first"], first["second"]) == ("gpu/0", "npu/0")
    assert first["config"]["agrees"] is False
    assert first["config"]["write"].startswith("links: [{between: [gpu, npu], rate: ")
    assert "npu/0 measures the link to gpu/0" in err and "gpu/0 -> npu/0, tensors of 64 KiB" in err
    saved = load_measurement(find_measurement_path(config, "gpu", "npu"))
    assert saved is not None and saved.first == "gpu/0"


def test_missing_peer_is_reported(config: Path, capsys: Capture) -> None:
    config.write_text(config.read_text().replace("patience: 20s", "patience: 1s"))
    assert bench.main(["link", "--config", str(config), "--cluster", "npu", "--json"]) == arguments.FAILED
    document = json.loads(capsys.readouterr().out)
    assert document["code"] == "NB-402" and "'gpu/0' did not connect within 1 s" in document["what"]
    assert document["where"] and "bench link --config clusters.yaml --cluster gpu" in document["mend"]


def test_link_between_local_clusters_is_measured(capsys: Capture) -> None:
    assert bench.main(["link", "--all", "--clusters", "b,a", "--json", *QUICK]) == arguments.DONE
    (line,) = json.loads(capsys.readouterr().out)["lines"]
    assert (line["first"], line["second"], line["config"]) == ("a/0", "b/0", None)
    assert all(each["there"] > 0 for each in line["crossings"])


class TestOrigin:
    CLUSTERS = """\
run: mt
clusters:
  gpu: {workers: ["127.0.0.1:27101", "127.0.0.1:27103"], gateway: "127.0.0.1:27100"}
  npu: {workers: ["127.0.0.1:27102"], gateway: "127.0.0.1:27200"}
  tpu: {workers: ["192.0.2.3:27104"], gateway: "192.0.2.4:27300"}
"""

    @pytest.fixture
    def path(self, tmp_path: Path) -> str:
        (tmp_path / "c.yaml").write_text(self.CLUSTERS + "security: {insecure: true}\n")
        return str(tmp_path / "c.yaml")

    def test_origin_uses_the_gateway(self, path: str) -> None:
        place = bench_ends.find_place(load(path), path, "gpu", None)
        assert (place.here, place.gateway, place.listen) == ("gpu/0", "127.0.0.1:27100", None)
        assert list(place.peers) == ["npu/0", "tpu/0"]
        # Gateways use these positions.
        assert place.workers == (
            "gpu/0",
            "gpu/1",
            "npu/0",
            "tpu/0",
        )

    def test_origin_is_limited_to_the_chosen_peer(self, path: str) -> None:
        assert list(bench_ends.find_place(load(path), path, "gpu", "tpu").peers) == ["tpu/0"]
        with pytest.raises(ConfigError, match="the link has no other end") as caught:
            bench_ends.find_place(load(path), path, "gpu", "npuu")
        assert "did you mean 'npu'" in caught.value.mend

    def test_insecure_listener_needs_an_address_of_this_host(self, path: str) -> None:
        Path(path).write_text(re.sub(r', gateway: "[^"]*"', "", Path(path).read_text()))
        with pytest.raises(ConfigError, match="is not an address of this host"):
            bench_ends.find_place(load(path), path, "tpu", None)

    def test_cluster_without_gateway_among_gateways_is_refused(self, path: str) -> None:
        Path(path).write_text(Path(path).read_text().replace(', gateway: "192.0.2.4:27300"', ""))
        with pytest.raises(ConfigError, match="cluster 'tpu' has no gateway, but 'gpu' and 'npu' have one"):
            bench_ends.find_place(load(path), path, "tpu", None)

    def test_missing_certificates_are_reported(self, path: str) -> None:
        Path(path).write_text(self.CLUSTERS)
        with pytest.raises(CredentialsError):
            bench_ends.find_place(load(path), path, "gpu", None)
        assert bench.main(["link", "--config", path, "--cluster", "gpu"]) == arguments.CONFIG


WRONG = ("", "--json", "lnik", "link", "link --config c.yaml", "link --all --cluster gpu", "link --clusters a,b")


@pytest.mark.parametrize("line", [*WRONG, *(f"link --all --clusters a,b --seconds {text}" for text in ("soon", "0"))])
def test_incomplete_command_line_is_refused(line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(line.split())
    assert ended.value.code == arguments.USAGE


def test_single_cluster_is_refused(capsys: Capture) -> None:
    assert bench.main(["link", "--all", "--clusters", "gpu"]) == arguments.CONFIG
    assert "a link connects two clusters" in capsys.readouterr().err

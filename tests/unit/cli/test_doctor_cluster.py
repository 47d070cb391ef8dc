"""The doctor's checks of a host's part in a run: against real certificates, ports and TLS on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from tests.unit.security.authorities import Home, write_self_signed
from tests.unit.transport.grpc_workers import SHORT_DEADLINES, find_free_address
from whale_nebula.cli import doctor
from whale_nebula.cli import doctor_cluster as network
from whale_nebula.cli.doctor import Check
from whale_nebula.cli.doctor_cluster import Host, Target, check_host_names, find_host
from whale_nebula.config import load
from whale_nebula.errors import ConfigError
from whale_nebula.launch.link_advice import LinkMeasurement, LinkThroughput, find_measurement_path, save_measurement
from whale_nebula.launch.link_measurement import describe_end
from whale_nebula.security import Credentials, Files, Identity, files
from whale_nebula.transport.grpc.links import GrpcLinks, Place

Capture = pytest.CaptureFixture[str]

GPU, NPU = Identity("mt", "gpu"), Identity("mt", "npu")
STATES = ("ok", "note", "warning", "bad")


class Site:
    """A folder with a config, certificates of both clusters, and the doctor of cluster npu."""

    def __init__(self, folder: Path, capsys: Capture) -> None:
        self.folder, self._capsys = folder, capsys
        self.home = Home.at(folder / "certs", at=files.now() - timedelta(days=10))
        (folder / "certs" / "ca.key").rename(folder / "ca.key")
        self.addresses = {"gpu": find_free_address(), "npu": find_free_address()}
        self.write(links="links: [{between: [gpu, npu], rate: 60mbit, delay: 20ms}]")

    @property
    def config(self) -> Path:
        return self.folder / "clusters.yaml"

    def write(self, more: str = "", **parts: str) -> None:
        gateway = "" if "gateway" not in parts else f', gateway: "{parts.pop("gateway")}"'
        text = [
            "run: mt",
            "clusters:",
            f'  gpu: {{workers: ["{self.addresses["gpu"]}"]}}',
            f'  npu: {{workers: ["{self.addresses["npu"]}"]{gateway}}}',
            *parts.values(),
            more,
        ]
        self.config.write_text("\n".join(text))

    def issue(self, *identities: Identity, days: float = 7) -> None:
        for each in identities:
            self.home.files(each, days)

    def doctor(self, cluster: str = "npu", *more: str) -> tuple[int, dict[str, dict[str, str]]]:
        code = doctor.main(["--config", str(self.config), "--cluster", cluster, "--json", *more])
        document = json.loads(self._capsys.readouterr().out)
        assert document["ok"] is (code == 0)
        assert all(check["state"] in STATES for check in document["checks"])
        return code, {check["name"]: check for check in document["checks"]}


@pytest.fixture
def site(tmp_path: Path, capsys: Capture) -> Site:
    return Site(tmp_path, capsys)


@pytest.fixture
def gpu(site: Site) -> Iterator[GrpcLinks]:
    """The links of the other cluster's running worker."""
    site.issue(GPU, NPU)
    credentials = Credentials.load(Files.in_folder(site.home.folder, GPU))
    place = Place("mt", "gpu/0", {"npu/0": None}, site.addresses["gpu"], credentials=credentials)
    joined = GrpcLinks(place, deadlines=replace(SHORT_DEADLINES, patience=300.0, grace=0.1), announce=lambda wait: None)
    yield joined
    joined.close()


@contextlib.contextmanager
def serve_ssh(address: str) -> Iterator[None]:
    """An SSH server at an address."""
    name, _, port = address.rpartition(":")
    server = socket.create_server((name, int(port)))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                with contextlib.closing(server.accept()[0]) as line, contextlib.suppress(ConnectionError):
                    line.settimeout(10.0)
                    line.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")
                    while line.recv(4096):  # closing with unread data would discard the banner
                        pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(10.0)


class TestRunningPeer:
    def test_peer_is_reached_over_tls(self, site: Site, gpu: GrpcLinks) -> None:
        code, found = site.doctor()
        assert code == 0
        assert found["npu/0 to gpu/0"]["why"].startswith("mutual TLS works; ")
        assert found["port of npu/0"]["why"] == "free"
        assert found["certificate of npu/0"]["state"] == found["authority"]["state"] == "ok"
        assert found["key of npu/0"]["found"] == "0600"
        assert "authority's key" not in found

    def test_keys_of_other_processes_give_a_warning(self, site: Site, gpu: GrpcLinks) -> None:
        code, found = site.doctor()
        assert (code, found["keys next to npu/0"]["state"]) == (0, "warning")
        assert found["keys next to npu/0"]["why"].startswith("gpu-worker-0.key in ")
        (site.home.folder / "gpu-worker-0.key").unlink()
        assert "keys next to npu/0" not in site.doctor()[1]

    def test_port_of_running_worker_is_recognized(self, site: Site, gpu: GrpcLinks) -> None:
        code, found = site.doctor("gpu")
        assert (code, found["port of gpu/0"]["why"]) == (0, "gpu/0 is running and listens there")

    def test_port_used_by_another_worker_is_bad(self, site: Site, gpu: GrpcLinks) -> None:
        site.addresses["gpu"], site.addresses["npu"] = site.addresses["npu"], site.addresses["gpu"]
        site.write()
        code, found = site.doctor()
        assert code == 1
        assert found["port of npu/0"]["state"] == "bad"
        assert "is not available" in found["port of npu/0"]["found"]

    def test_unknown_authority_at_the_peer_is_reported(self, site: Site, gpu: GrpcLinks, tmp_path: Path) -> None:
        other = Home.at(tmp_path / "other").files(NPU)
        site.write(f"security: {{ca: {other.ca}, cert: {other.cert}, key: {other.key}}}")
        code, found = site.doctor()
        assert code == 1
        refused = found["npu/0 to gpu/0"]
        assert refused["state"] == "bad" and "wrong authority, at the other end" in refused["found"]
        assert refused["why"] and refused["mend"]

    def test_tls_peer_with_insecure_config_is_reported(self, site: Site, gpu: GrpcLinks) -> None:
        site.write("security: {insecure: true}")
        code, found = site.doctor()
        assert code == 1
        assert "plaintext, at this end" in found["npu/0 to gpu/0"]["found"]


class TestMissingPeer:
    def test_missing_peer_is_a_note_and_other_service_is_bad(self, site: Site) -> None:
        site.issue(NPU)
        code, found = site.doctor()
        assert (code, found["npu/0 to gpu/0"]["state"]) == (0, "note") and "refuses" in found["npu/0 to gpu/0"]["found"]
        with serve_ssh(site.addresses["gpu"]):
            code, found = site.doctor()
        assert (code, found["npu/0 to gpu/0"]["state"]) == (1, "bad")
        assert "does not use TLS" in found["npu/0 to gpu/0"]["why"]


class TestConfig:
    def test_gateway_in_only_one_cluster_is_bad(self, site: Site) -> None:
        site.issue(GPU, NPU)
        site.write(gateway=find_free_address())
        code, found = site.doctor("gpu")
        assert (code, found["gateways"]["state"]) == (1, "bad")
        assert found["gateways"]["found"] == "cluster 'gpu' has no gateway, but 'npu' has one"
        assert site.doctor("npu")[1]["gateways"]["state"] == "note"

    def test_unresolvable_host_is_bad(self, site: Site) -> None:
        site.issue(NPU)
        site.addresses["npu"] = "no-such-host.invalid:7101"
        site.write()
        code, found = site.doctor()
        assert (code, found["host name"]["state"], found["port of npu/0"]["state"]) == (1, "bad", "bad")

    def test_invalid_run_name_is_refused(self, site: Site, capsys: Capture) -> None:
        site.config.write_text(site.config.read_text().replace("run: mt", "run: lo op"))
        assert doctor.main(["--config", str(site.config)]) == 78
        assert "'lo op' is not a valid run name" in capsys.readouterr().err


class TestCertificates:
    def test_missing_certificate_is_bad(self, site: Site) -> None:
        code, found = site.doctor()
        assert code == 1
        assert found["certificate of npu/0"]["state"] == "bad"
        assert "certs issue" in found["certificate of npu/0"]["mend"]

    def test_missing_deny_list_is_bad_unless_configured_as_none(self, site: Site) -> None:
        site.issue(NPU)
        found = site.doctor()[1]["deny list"]
        assert (found["state"], found["found"]) == ("ok", "number 1")
        (site.folder / "certs" / "revoked.json").unlink()
        code, checks = site.doctor()
        found = checks["certificate of npu/0"]
        assert (code, found["state"], found["found"]) == (1, "bad", "the deny list is missing")
        assert "revoked: none" in found["mend"]
        site.write("security: {revoked: none}")
        code, checks = site.doctor()
        assert (code, checks["deny list"]["state"]) == (0, "note")

    def test_certificate_that_expires_soon_gives_a_warning(self, site: Site) -> None:
        site.issue(NPU, days=1.5)
        code, found = site.doctor()
        soon = found["certificate of npu/0"]
        assert (code, soon["state"]) == (0, "warning") and soon["found"] in ("35 hours left", "36 hours left")
        assert "certs renew --cluster npu --role worker --index 0" in soon["mend"]

    @pytest.mark.parametrize(
        ("make", "found"),
        [
            (lambda home: home.one_day_files(NPU, files.now() - timedelta(days=3)), "expired"),
            (lambda home: home.one_day_files(NPU, files.now() + timedelta(hours=2)), "not valid"),
            (lambda home: write_self_signed(home.folder / "own", NPU), "self-signed"),
            (lambda home: home.files(GPU), "this process is npu/0, but its certificate is for gpu/0"),
        ],
        ids=["expired", "clock of this host is behind", "self-signed", "certificate of another worker"],
    )
    def test_invalid_certificate_is_bad(self, site: Site, make: Callable[[Home], Files], found: str) -> None:
        files = make(site.home)
        site.write(f"security: {{ca: {site.home.folder / 'ca.pem'}, cert: {files.cert}, key: {files.key}}}")
        code, checks = site.doctor()
        assert (code, checks["certificate of npu/0"]["state"]) == (1, "bad")
        assert found in checks["certificate of npu/0"]["found"]

    def test_key_readable_by_others_is_bad(self, site: Site) -> None:
        site.issue(NPU)
        key = Files.in_folder(site.home.folder, NPU).key
        os.chmod(key, 0o644)
        code, found = site.doctor()
        assert code == 1 and f"chmod 600 {key}" in found["certificate of npu/0"]["mend"]

    def test_authority_key_on_this_host_is_noted(self, site: Site) -> None:
        site.issue(NPU)
        (site.folder / "ca.key").rename(site.home.folder / "ca.key")
        code, found = site.doctor()
        assert (code, found["authority's key"]["state"]) == (0, "note")


CLUSTERS = {
    "run": "mt",
    "clusters": {
        "gpu": {"workers": ["192.0.2.1:7101", "127.0.0.1:7102"], "gateway": "127.0.0.1:7100"},
        "npu": {"workers": ["192.0.2.9:7101", "192.0.2.10:7101"], "gateway": "192.0.2.9:7100"},
        "tpu": {"workers": ["192.0.2.20:7101"]},
    },
}


class TestHost:
    def make_host(self, cluster: str, **more: object) -> Host:
        return find_host(load(CLUSTERS), "clusters.yaml", cluster, **more)  # type: ignore[arg-type]

    def test_host_has_processes_at_its_addresses(self) -> None:
        assert self.make_host("gpu").here == ("gpu/1", "gpu/gateway")
        assert self.make_host("gpu", worker=0).here == ("gpu/0",)
        assert self.make_host("gpu", gateway=True).here == ("gpu/gateway",)

    def test_host_without_processes_must_be_specified(self) -> None:
        with pytest.raises(ConfigError, match="which worker of 'npu'"):
            self.make_host("npu")
        with pytest.raises(ConfigError, match="no cluster 'gpuu'"):
            self.make_host("gpuu")
        with pytest.raises(ConfigError, match="'tpu' has no gateway"):
            self.make_host("tpu", gateway=True)

    def test_targets_are_reached_through_the_gateway(self) -> None:
        assert [(each.here, each.there) for each in self.make_host("gpu").targets()] == [
            ("gpu/1", "gpu/gateway"),
            ("gpu/1", "gpu/0"),
            ("gpu/gateway", "npu/gateway"),
        ]

    def test_targets_without_gateway_are_all_workers(self) -> None:
        found = list(self.make_host("tpu").targets())
        assert found[0] == Target("tpu/0", "gpu/0", "192.0.2.1:7101", dials=True)
        assert [each.there for each in found] == ["gpu/0", "gpu/1", "npu/0", "npu/1"]

    def test_gateway_host_does_not_train(self) -> None:
        assert not self.make_host("gpu", gateway=True).trains
        assert self.make_host("gpu").trains

    def test_unresolvable_worker_name_is_bad(self) -> None:
        config = load({"clusters": {"gpu": {"workers": ["gpu.invalid:7101"]}, "npu": {"workers": ["localhost:7101"]}}})
        checks = list(check_host_names(find_host(config, "clusters.yaml", "npu")))
        assert [(each.state, each.found) for each in checks] == [("bad", "gpu.invalid does not resolve")]


class TestCongestionControl:
    def test_congestion_check_recommends_bbr(self) -> None:
        cubic = network.check_congestion_control("cubic")
        assert cubic.state == "warning" and "4 connections" in cubic.why
        assert "net.ipv4.tcp_congestion_control=bbr" in cubic.mend
        assert [network.check_congestion_control(control).state for control in ("bbr", "")] == ["ok", "note"]


class TestLink:
    LARGE = LinkThroughput(1 << 20, 7.2e6, 7.2e6, 7e6, 7e6)

    def save_measurement(self, site: Site, **parts: object) -> None:
        sheets = {"gpu/0": describe_end(), "npu/0": describe_end()}
        measurement = LinkMeasurement(
            "gpu/0", "npu/0", "direct", 0.041, 0.04, 0.0, (self.LARGE,), sheets, 1, 0, time.time()
        )
        save_measurement(replace(measurement, **parts), find_measurement_path(site.config, "gpu", "npu"))  # type: ignore[arg-type]

    def read_checks(self, site: Site) -> dict[str, Check]:
        this_host = find_host(load(site.config), str(site.config), "npu")
        return {check.name: check for check in network.check_links(this_host)}

    def test_measured_link_is_compared_with_the_config(self, site: Site) -> None:
        check = self.read_checks(site)["link to gpu"]
        assert check.state == "note" and "bench link --config" in check.mend and "--cluster npu" in check.mend
        self.save_measurement(site)
        checks = self.read_checks(site)
        assert list(checks) == ["versions here", "link to gpu", "clock of gpu", "versions at gpu"]
        assert {check.state for check in checks.values()} == {"ok"}
        self.save_measurement(site, least_round_trip=0.2)
        check = self.read_checks(site)["link to gpu"]
        assert check.state == "warning"
        assert check.mend == "links: [{between: [gpu, npu], rate: 60mbit, delay: 100ms}]"
        self.save_measurement(site, when=time.time() - 30 * 86400)
        check = self.read_checks(site)["link to gpu"]
        assert check.state == "note" and "measured 30 days ago" in check.why

    @pytest.mark.parametrize(("ahead", "state", "text"), [(5.0, "warning", "5.0 s behind"), (-400.0, "bad", "ahead")])
    def test_clock_difference_of_peer_is_reported(self, site: Site, ahead: float, state: str, text: str) -> None:
        """`clock` is the clock of npu relative to gpu; the doctor runs at npu."""
        self.save_measurement(site, clock=ahead)
        check = self.read_checks(site)["clock of gpu"]
        assert check.state == state and text in check.found

    @pytest.mark.parametrize(("part", "state"), [("tensorflow", "warning"), ("code", "note")])
    def test_different_versions_at_peer_are_reported(self, site: Site, part: str, state: str) -> None:
        self.save_measurement(site, sheets={"gpu/0": {**describe_end(), part: "0"}, "npu/0": describe_end()})
        check = self.read_checks(site)["versions at gpu"]
        assert check.state == state and f"{part} 0, here" in check.found


def test_text_lists_checks_and_ends_with_a_summary(site: Site, capsys: Capture) -> None:
    assert doctor.main(["--config", str(site.config), "--cluster", "npu"]) == 1
    out = capsys.readouterr().out
    assert "BAD   certificate of npu/0" in out and "then whale-nebula certs issue --all --config clusters.yaml" in out
    assert out.splitlines()[-1].startswith("1 of")

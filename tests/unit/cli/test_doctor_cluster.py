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

from tests.unit.security.made import Home, self_signed
from tests.unit.transport.crossing import QUICK, free_address
from whale_nebula.cli import doctor
from whale_nebula.cli import doctor_cluster as network
from whale_nebula.cli.doctor import Check
from whale_nebula.cli.doctor_cluster import Host, Target, check_host_names, find_host
from whale_nebula.config import load
from whale_nebula.errors import ConfigError
from whale_nebula.launch.link_advice import LinkMeasurement, LinkThroughput, path_of, save
from whale_nebula.launch.link_measurement import sheet
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
        self.addresses = {"gpu": free_address(), "npu": free_address()}
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

    def issue(self, *who: Identity, life: float = 7) -> None:
        for each in who:
            self.home.files(each, life)

    def doctor(self, cluster: str = "npu", *more: str) -> tuple[int, dict[str, dict[str, str]]]:
        code = doctor.main(["--config", str(self.config), "--cluster", cluster, "--json", *more])
        found = json.loads(self._capsys.readouterr().out)
        assert found["ok"] is (code == 0)
        assert all(check["state"] in STATES for check in found["checks"])
        return code, {check["name"]: check for check in found["checks"]}


@pytest.fixture
def site(tmp_path: Path, capsys: Capture) -> Site:
    return Site(tmp_path, capsys)


@pytest.fixture
def gpu(site: Site) -> Iterator[GrpcLinks]:
    """The other cluster's worker, which runs."""
    site.issue(GPU, NPU)
    credentials = Credentials.of(Files.under(site.home.folder, GPU))
    place = Place("mt", "gpu/0", {"npu/0": None}, site.addresses["gpu"], credentials=credentials)
    joined = GrpcLinks(place, deadlines=replace(QUICK, patience=300.0, grace=0.1), announce=lambda wait: None)
    yield joined
    joined.close()


@contextlib.contextmanager
def speaks_ssh(address: str) -> Iterator[None]:
    """Something at an address that is none of ours."""
    name, _, port = address.rpartition(":")
    server = socket.create_server((name, int(port)))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                with contextlib.closing(server.accept()[0]) as line, contextlib.suppress(ConnectionError):
                    line.settimeout(10.0)
                    line.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")
                    while line.recv(4096):  # to the end: what is closed before it was read takes back what was sent
                        pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(10.0)


class TestAPeerThatRuns:
    def test_is_reached_over_tls(self, site: Site, gpu: GrpcLinks) -> None:
        code, found = site.doctor()
        assert code == 0
        assert found["npu/0 to gpu/0"]["why"].startswith("mutual TLS works; ")
        assert found["port of npu/0"]["why"] == "free"
        assert found["certificate of npu/0"]["state"] == found["authority"]["state"] == "ok"
        assert found["key of npu/0"]["found"] == "0600"
        assert "authority's key" not in found

    def test_keys_of_nobody_here_are_warned_of(self, site: Site, gpu: GrpcLinks) -> None:
        code, found = site.doctor()
        assert (code, found["keys next to npu/0"]["state"]) == (0, "warning")
        assert found["keys next to npu/0"]["why"].startswith("gpu-worker-0.key in ")
        (site.home.folder / "gpu-worker-0.key").unlink()
        assert "keys next to npu/0" not in site.doctor()[1]

    def test_has_its_own_port(self, site: Site, gpu: GrpcLinks) -> None:
        code, found = site.doctor("gpu")
        assert (code, found["port of gpu/0"]["why"]) == (0, "gpu/0 is running and listens there")

    def test_is_another_than_the_config_says(self, site: Site, gpu: GrpcLinks) -> None:
        site.addresses["gpu"], site.addresses["npu"] = site.addresses["npu"], site.addresses["gpu"]
        site.write()
        code, found = site.doctor()
        assert code == 1
        assert found["port of npu/0"]["state"] == "bad"
        assert "is not available" in found["port of npu/0"]["found"]

    def test_does_not_know_the_authority_of_this_one(self, site: Site, gpu: GrpcLinks, tmp_path: Path) -> None:
        other = Home.at(tmp_path / "other").files(NPU)
        site.write(f"security: {{ca: {other.ca}, cert: {other.cert}, key: {other.key}}}")
        code, found = site.doctor()
        assert code == 1
        refused = found["npu/0 to gpu/0"]
        assert refused["state"] == "bad" and "wrong authority, at the other end" in refused["found"]
        assert refused["why"] and refused["mend"]

    def test_wants_tls_where_the_config_says_insecure(self, site: Site, gpu: GrpcLinks) -> None:
        site.write("security: {insecure: true}")
        code, found = site.doctor()
        assert code == 1
        assert "plaintext, at this end" in found["npu/0 to gpu/0"]["found"]


class TestAPeerThatDoesNot:
    def test_may_come_later_and_something_else_at_its_address_is_told_apart(self, site: Site) -> None:
        site.issue(NPU)
        code, found = site.doctor()
        assert (code, found["npu/0 to gpu/0"]["state"]) == (0, "note") and "refuses" in found["npu/0 to gpu/0"]["found"]
        with speaks_ssh(site.addresses["gpu"]):
            code, found = site.doctor()
        assert (code, found["npu/0 to gpu/0"]["state"]) == (1, "bad")
        assert "does not use TLS" in found["npu/0 to gpu/0"]["why"]


class TestTheConfig:
    def test_a_gateway_of_one_cluster_alone(self, site: Site) -> None:
        site.issue(GPU, NPU)
        site.write(gateway=free_address())
        code, found = site.doctor("gpu")
        assert (code, found["gateways"]["state"]) == (1, "bad")
        assert found["gateways"]["found"] == "cluster 'gpu' has no gateway, but 'npu' has one"
        assert site.doctor("npu")[1]["gateways"]["state"] == "note"

    def test_a_host_that_nobody_knows_has_no_free_port(self, site: Site) -> None:
        site.issue(NPU)
        site.addresses["npu"] = "no-such-host.invalid:7101"
        site.write()
        code, found = site.doctor()
        assert (code, found["host name"]["state"], found["port of npu/0"]["state"]) == (1, "bad", "bad")

    def test_a_name_that_no_certificate_can_hold(self, site: Site, capsys: Capture) -> None:
        site.config.write_text(site.config.read_text().replace("run: mt", "run: lo op"))
        assert doctor.main(["--config", str(site.config)]) == 78
        assert "'lo op' is not a valid run name" in capsys.readouterr().err


class TestCertificates:
    def test_that_are_missing(self, site: Site) -> None:
        code, found = site.doctor()
        assert code == 1
        assert found["certificate of npu/0"]["state"] == "bad"
        assert "certs issue" in found["certificate of npu/0"]["mend"]

    def test_without_a_deny_list_nobody_starts(self, site: Site) -> None:
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

    def test_that_end_soon(self, site: Site) -> None:
        site.issue(NPU, life=1.5)
        code, found = site.doctor()
        soon = found["certificate of npu/0"]
        assert (code, soon["state"]) == (0, "warning") and soon["found"] in ("35 hours left", "36 hours left")
        assert "certs renew --cluster npu --role worker --index 0" in soon["mend"]

    @pytest.mark.parametrize(
        ("make", "found"),
        [
            (lambda home: home.outside_its_dates(NPU, files.now() - timedelta(days=3)), "expired"),
            (lambda home: home.outside_its_dates(NPU, files.now() + timedelta(hours=2)), "not valid"),
            (lambda home: self_signed(home.folder / "own", NPU), "self-signed"),
            (lambda home: home.files(GPU), "this process is npu/0, but its certificate is for gpu/0"),
        ],
        ids=["expired", "this host's clock is behind", "self-signed", "somebody else's"],
    )
    def test_that_are_not_as_they_must_be(self, site: Site, make: Callable[[Home], Files], found: str) -> None:
        files = make(site.home)
        site.write(f"security: {{ca: {site.home.folder / 'ca.pem'}, cert: {files.cert}, key: {files.key}}}")
        code, checks = site.doctor()
        assert (code, checks["certificate of npu/0"]["state"]) == (1, "bad")
        assert found in checks["certificate of npu/0"]["found"]

    def test_whose_key_others_can_read(self, site: Site) -> None:
        site.issue(NPU)
        key = Files.under(site.home.folder, NPU).key
        os.chmod(key, 0o644)
        code, found = site.doctor()
        assert code == 1 and f"chmod 600 {key}" in found["certificate of npu/0"]["mend"]

    def test_beside_the_key_of_the_authority(self, site: Site) -> None:
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


class TestTheHost:
    def of(self, cluster: str, **more: object) -> Host:
        return find_host(load(CLUSTERS), "clusters.yaml", cluster, **more)  # type: ignore[arg-type]

    def test_has_those_whose_addresses_it_has(self) -> None:
        assert self.of("gpu").here == ("gpu/1", "gpu/gateway")
        assert self.of("gpu", worker=0).here == ("gpu/0",)
        assert self.of("gpu", gateway=True).here == ("gpu/gateway",)

    def test_that_has_none_must_be_told(self) -> None:
        with pytest.raises(ConfigError, match="which worker of 'npu'"):
            self.of("npu")
        with pytest.raises(ConfigError, match="no cluster 'gpuu'"):
            self.of("gpuu")
        with pytest.raises(ConfigError, match="'tpu' has no gateway"):
            self.of("tpu", gateway=True)

    def test_reaches_others_through_its_gateway(self) -> None:
        assert [(each.here, each.there) for each in self.of("gpu").targets()] == [
            ("gpu/1", "gpu/gateway"),
            ("gpu/1", "gpu/0"),
            ("gpu/gateway", "npu/gateway"),
        ]

    def test_reaches_all_workers_without_one(self) -> None:
        found = list(self.of("tpu").targets())
        assert found[0] == Target("tpu/0", "gpu/0", "192.0.2.1:7101", dials=True)
        assert [each.there for each in found] == ["gpu/0", "gpu/1", "npu/0", "npu/1"]

    def test_of_a_gateway_alone_does_not_train(self) -> None:
        assert not self.of("gpu", gateway=True).trains
        assert self.of("gpu").trains

    def test_a_name_that_means_nothing(self) -> None:
        config = load({"clusters": {"gpu": {"workers": ["gpu.invalid:7101"]}, "npu": {"workers": ["localhost:7101"]}}})
        checks = list(check_host_names(find_host(config, "clusters.yaml", "npu")))
        assert [(each.state, each.found) for each in checks] == [("bad", "gpu.invalid does not resolve")]


class TestTheNetwork:
    def test_bbr_needs_one_connection_and_others_several(self) -> None:
        cubic = network.check_congestion_control("cubic")
        assert cubic.state == "warning" and "4 connections" in cubic.why
        assert "net.ipv4.tcp_congestion_control=bbr" in cubic.mend
        assert [network.check_congestion_control(control).state for control in ("bbr", "")] == ["ok", "note"]


class TestTheLine:
    LARGE = LinkThroughput(1 << 20, 7.2e6, 7.2e6, 7e6, 7e6)

    def keep(self, site: Site, **parts: object) -> None:
        sheets = {"gpu/0": sheet(), "npu/0": sheet()}
        found = LinkMeasurement("gpu/0", "npu/0", "direct", 0.041, 0.04, 0.0, (self.LARGE,), sheets, 1, 0, time.time())
        save(replace(found, **parts), path_of(site.config, "gpu", "npu"))  # type: ignore[arg-type]

    def said(self, site: Site) -> dict[str, Check]:
        found = find_host(load(site.config), str(site.config), "npu")
        return {check.name: check for check in network.check_links(found)}

    def test_is_as_the_config_says_or_not(self, site: Site) -> None:
        said = self.said(site)["link to gpu"]
        assert said.state == "note" and "bench link --config" in said.mend and "--cluster npu" in said.mend
        self.keep(site)
        found = self.said(site)
        assert list(found) == ["versions here", "link to gpu", "clock of gpu", "versions at gpu"]
        assert {check.state for check in found.values()} == {"ok"}
        self.keep(site, least_round_trip=0.2)
        said = self.said(site)["link to gpu"]
        assert said.state == "warning"
        assert said.mend == "links: [{between: [gpu, npu], rate: 60mbit, delay: 100ms}]"
        self.keep(site, when=time.time() - 30 * 86400)
        said = self.said(site)["link to gpu"]
        assert said.state == "note" and "measured 30 days ago" in said.why

    @pytest.mark.parametrize(("ahead", "state", "text"), [(5.0, "warning", "5.0 s behind"), (-400.0, "bad", "ahead")])
    def test_has_a_clock_at_its_other_end(self, site: Site, ahead: float, state: str, text: str) -> None:
        """`clock` is that of npu against gpu, and the doctor is at npu."""
        self.keep(site, clock=ahead)
        said = self.said(site)["clock of gpu"]
        assert said.state == state and text in said.found

    @pytest.mark.parametrize(("part", "state"), [("tensorflow", "warning"), ("code", "note")])
    def test_has_other_versions_at_its_other_end(self, site: Site, part: str, state: str) -> None:
        self.keep(site, sheets={"gpu/0": {**sheet(), part: "0"}, "npu/0": sheet()})
        said = self.said(site)["versions at gpu"]
        assert said.state == state and f"{part} 0, here" in said.found


def test_the_text_has_a_line_for_each_and_ends_with_a_sum(site: Site, capsys: Capture) -> None:
    assert doctor.main(["--config", str(site.config), "--cluster", "npu"]) == 1
    told = capsys.readouterr().out
    assert (
        "BAD   certificate of npu/0" in told
        and "whale-nebula certs init, if there is no authority, and certs issue" in told
    )
    assert told.splitlines()[-1].startswith("1 of")

"""Two gateways between two clusters, with real TLS on loopback: relaying, refusals, liveness and logs."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.unit.gateway.networks import (
    CLUSTERS,
    GPU,
    NPU,
    RUN,
    SHORT_DEADLINES,
    TIMEOUT_SECONDS,
    GatewayNetwork,
    issue_certificates,
    make_key,
    open_network,
    read_records,
    wait_until,
)
from tests.unit.transport.grpc_workers import Certificates
from whale_nebula.errors import (
    DeadlineError,
    IdentityError,
    LinkClosedError,
    TransportError,
    WrongNameError,
)
from whale_nebula.gateway import control
from whale_nebula.gateway.gateway import Gateway
from whale_nebula.gateway.relay import Side
from whale_nebula.gateway.route import Route
from whale_nebula.gateway.settings import GatewaySettings
from whale_nebula.security import Credentials, CurrentCredentials, Files
from whale_nebula.security import files as security_files
from whale_nebula.security.audit import Head, read_heads
from whale_nebula.security.issue import renew, revoke
from whale_nebula.transport.grpc import options
from whale_nebula.transport.grpc.connection import Connection, Lane
from whale_nebula.transport.grpc.dialling import Target, dial
from whale_nebula.transport.grpc.limits import Buckets
from whale_nebula.transport.grpc.listener import StreamRequest
from whale_nebula.transport.grpc.options import make_channel_credentials
from whale_nebula.transport.protocol import Packed
from whale_nebula.wire.frame import Flag, Header, Kind, pack_header

OTHER = "npu/1"
ALL = (GPU, NPU, "gpu/gateway", "npu/gateway")
SHORT_PATIENCE = replace(SHORT_DEADLINES, patience=3.0)
PAIRS = {"gpu": (GPU, NPU), "npu": (NPU, GPU)}


@pytest.fixture(scope="module")
def files() -> Iterator[dict[str, Files]]:
    with issue_certificates(GPU, NPU, OTHER, "npu/7", "gpu/operator-0", "tpu/gateway") as network:
        yield network


@pytest.fixture
def start_network(tmp_path: Path, files: dict[str, Files]) -> Iterator[Callable[..., GatewayNetwork]]:
    """Starts a network with running gateways; `with_workers`: and with connected workers."""
    with contextlib.ExitStack() as stack:

        def start_one(**options: Any) -> GatewayNetwork:
            with_workers = options.pop("with_workers", False)
            network = stack.enter_context(open_network(tmp_path, options.pop("files", files), **options))
            network.start_gateways()
            if with_workers:
                network.start_workers()
                network.exchange_steps()
            return network

        yield start_one


def open_stream(
    network: GatewayNetwork,
    credentials: Credentials,
    request: StreamRequest,
    lane: Lane | None = None,
    *,
    gateway: bool = True,
) -> Lane:
    """Open a stream to gpu's gateway."""
    lane = lane or Lane()
    target = Target.for_peer(
        RUN, "gpu/gateway", network.settings_by_cluster["gpu"].listen, CurrentCredentials(credentials), gateway=gateway
    )
    dial(target, request, lane, lambda frame: None, deadlines=SHORT_DEADLINES)
    return lane


def list_actions(settings: GatewaySettings, *names: str) -> list[dict[str, Any]]:
    """The records of these actions."""
    return [each for each in read_records(settings) if each["action"] in names]


class TestRelaying:
    @pytest.mark.parametrize("dials", [CLUSTERS, ("gpu",), pytest.param(("npu",), marks=pytest.mark.grid)])
    def test_either_gateway_may_dial(
        self, start_network: Callable[..., GatewayNetwork], dials: tuple[str, ...]
    ) -> None:
        network = start_network(dials=dials, with_workers=True)
        network.exchange_tensors(range(3), size=1 << 19)
        fars = [network.gateways[one]._find_or_create_pair(*pair).find_half(Side.FAR) for one, pair in PAIRS.items()]
        assert sorted(half.dialled for half in fars if half is not None) == [False, True]

    def test_unanswered_gateway_address_does_not_delay_workers(self, tmp_path: Path, files: dict[str, Files]) -> None:
        """Its own attempts have precedence and each lasts `connect` seconds; meanwhile the other gateway dials."""
        unanswered = socket.create_server(("127.0.0.1", 0))  # accepts connections and never answers
        unanswered_address = f"127.0.0.1:{unanswered.getsockname()[1]}"
        with (
            unanswered,
            open_network(tmp_path, files, deadlines=replace(SHORT_DEADLINES, connect=TIMEOUT_SECONDS)) as network,
        ):
            network.start_gateways("gpu")
            network.start_gateways("npu", gateways={"gpu": unanswered_address})
            network.start_workers()
            began = time.monotonic()
            network.exchange_steps()
            assert time.monotonic() - began < TIMEOUT_SECONDS / 2
            network.exchange_tensors(range(3))

    def test_encoded_payload_arrives_unchanged(self, start_network: Callable[..., GatewayNetwork]) -> None:
        network = start_network(with_workers=True)
        packed = Packed(np.arange(200, dtype=np.uint8), codec=3, state=9, dtype="float32", dims=(10, 64))
        network.link(GPU, NPU).send(make_key(0), packed)
        received = network.link(NPU, GPU).receive(make_key(0), TIMEOUT_SECONDS)
        assert (
            isinstance(received, Packed)
            and received[1:] == packed[1:]
            and received.data.tolist() == packed.data.tolist()
        )

    def test_several_lanes_are_used_without_bbr(
        self, start_network: Callable[..., GatewayNetwork], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(options, "count_lanes", lambda: 4)
        network = start_network(with_workers=True)
        halves = [
            network.gateways[one]._find_or_create_pair(*pair).find_half(side)
            for one, pair in PAIRS.items()
            for side in Side
        ]
        wait_until(lambda: all(half is not None and len(half.connection._lanes) == 4 for half in halves))
        network.exchange_tensors(range(5), size=1 << 20)

    def test_first_worker_waits_at_its_own_gateway(self, start_network: Callable[..., GatewayNetwork]) -> None:
        network = start_network()
        network.start_workers(GPU)
        wait_until(lambda: network.gateways["gpu"]._find_or_create_pair(GPU, NPU).find_half(Side.NEAR))
        assert not network.gateways["npu"]._list_pairs()
        network.start_workers(NPU)
        network.exchange_steps()

    def test_paced_line_is_not_faster_than_its_rate(self, start_network: Callable[..., GatewayNetwork]) -> None:
        network = start_network(rate=4e6, with_workers=True)
        network.exchange_tensors(range(1))
        wait_seconds: list[float] = []

        def wait(wakes: threading.Condition, seconds: float | None) -> None:
            wait_seconds.append(seconds or 0.0)
            wakes.wait(seconds)

        network.gateways["gpu"]._routes["npu"].pacer._wait = wait
        began = time.monotonic()
        network.exchange_tensors(range(1, 4), size=1 << 17)
        assert sum(wait_seconds) > 0  # how long depends on what else this machine has to do
        assert time.monotonic() - began > 0.2


class TestDisconnection:
    def test_reconnecting_worker_ends_its_old_streams(self, start_network: Callable[..., GatewayNetwork]) -> None:
        network = start_network(with_workers=True)
        network.link()._carrier.drop("a test")
        network.exchange_tensors(range(2))
        assert {each["side"] for each in list_actions(network.settings_by_cluster["gpu"], "end")} == {"near", "far"}

    def test_killed_worker_is_reported_to_its_peer(self, start_network: Callable[..., GatewayNetwork]) -> None:
        network = start_network(with_workers=True)
        wait_until(lambda: NPU in network.gateways["npu"]._liveness._reachable)
        network.kill_worker(NPU)
        with pytest.raises(LinkClosedError, match="worker 'npu/0' is gone: its gateway reports") as caught:
            network.link().receive(make_key(0, NPU, GPU), TIMEOUT_SECONDS)
        assert "refused twice" in str(caught.value)
        [lost_record] = list_actions(network.settings_by_cluster["npu"], "gone")
        assert (lost_record["object"], lost_record["state"]) == (NPU, "dead")

    def test_restarted_workers_connect_without_stored_errors(
        self, start_network: Callable[..., GatewayNetwork]
    ) -> None:
        network = start_network(with_workers=True)
        wait_until(lambda: all(worker in network.gateways[worker[:3]]._liveness._reachable for worker in (GPU, NPU)))
        network.kill_worker(NPU)
        network.kill_worker(GPU)
        wait_until(
            lambda: all(worker in network.gateways[worker[:3]]._pair_errors._lost_workers for worker in (GPU, NPU))
        )
        network.start_workers()
        network.exchange_steps()


class TestReports:
    def test_unreachable_gateway_is_logged_and_reported_to_waiting_workers(
        self, tmp_path: Path, files: dict[str, Files], caplog: pytest.LogCaptureFixture
    ) -> None:
        """A worker that connected before this was known requests again, and receives the reason."""
        with open_network(tmp_path, files) as network:
            network.start_gateways("gpu")
            network.start_workers(GPU)
            known = "it is reached through the gateway: gateway 'gpu/gateway' cannot reach gateway 'npu/gateway': "
            wait_until(lambda: network.link()._carrier.state().trouble.startswith(known))
            assert network.link()._carrier.state().connected
            # The log has it when the gateway looks at its routes next: a worker that asks may know it before.
            waits = f"waiting for gateway 'npu/gateway' at {network.settings_by_cluster['npu'].listen}, "
            wait_until(lambda: any(each.startswith(waits) for each in caplog.messages))
            assert not any(" of " in each for each in caplog.messages if each.startswith(waits))
            with pytest.raises(DeadlineError, match="worker 'npu/0' did not connect within 0 s") as caught:
                network.link().take("SESSION", 0.0)
            assert caught.value.why.startswith(known)
            assert "whale-nebula gateway --config clusters.yaml --cluster npu" in (caught.value.mend or "")
            network.start_gateways("npu")
            network.start_workers(NPU)
            network.exchange_steps()
            assert network.link()._carrier.state().trouble == ""
            wait_until(
                lambda: any(each.startswith("gateway 'npu/gateway' is connected, after") for each in caplog.messages)
            )

    def test_workers_that_exit_gracefully_are_recorded_as_left(
        self, start_network: Callable[..., GatewayNetwork]
    ) -> None:
        network = start_network(with_workers=True)
        wait_until(lambda: all(worker in network.gateways[worker[:3]]._liveness._reachable for worker in (GPU, NPU)))
        network.exchange_tensors(range(2))
        network.close_workers()

        wait_until(
            lambda: all(
                any(e["side"] == "near" for e in list_actions(network.settings_by_cluster[one], "end"))
                for one in CLUSTERS
            )
        )
        wait_until(lambda: not any(thread.name.startswith("nebula-liveness") for thread in threading.enumerate()))
        recorded_actions = [
            each["action"]
            for one in CLUSTERS
            for each in list_actions(network.settings_by_cluster[one], "gone", "final", "left")
        ]
        assert recorded_actions == ["left"] * 2


class TestRefusals:
    def test_certificate_of_another_gateway_is_refused_at_start(self, tmp_path: Path, files: dict[str, Files]) -> None:
        theirs, audit = files["npu/gateway"], tmp_path / "a.jsonl"
        settings = GatewaySettings(RUN, "gpu", "127.0.0.1:0", {}, {"npu": None}, files=theirs, audit=audit)
        with pytest.raises(WrongNameError, match="this process is gpu/gateway, but its certificate is for npu/gateway"):
            Gateway(settings)

    @pytest.mark.parametrize(
        ("caller", "source", "destination", "why"),
        [
            (NPU, NPU, GPU, "expected npu/gateway"),  # a worker of another cluster
            (GPU, "gpu/1", NPU, "expected gpu/1"),  # claims to be another worker
            (GPU, GPU, "gpu/0", "this gateway does not relay frames of"),
            (GPU, GPU, "tpu/0", "this gateway does not relay frames of"),
            (GPU, GPU, "npu/1", "this gateway does not relay frames of"),
            (GPU, GPU, "npu/gateway", "this gateway does not relay frames of"),
            ("npu/gateway", "npu/0", "npu/0", "this gateway does not relay frames of"),
            ("npu/gateway", GPU, NPU, "expected gpu/0"),
            ("gpu/operator-0", "gpu/operator-0", NPU, "is not allowed to call: relay"),
            (NPU, "npu/gateway", "gpu/gateway", "expected npu/gateway"),
            ("tpu/gateway", "tpu/gateway", "gpu/gateway", "this gateway has no route to cluster 'tpu'"),
        ],
    )
    def test_stream_is_refused_by_identity_and_policy(
        self,
        start_network: Callable[..., GatewayNetwork],
        files: dict[str, Files],
        caller: str,
        source: str,
        destination: str,
        why: str,
    ) -> None:
        network = start_network(dials=())
        with pytest.raises(IdentityError) as caught:
            open_stream(
                network, Credentials.load(files[caller]), StreamRequest(RUN, source, destination, "00112233aabbccdd")
            )
        assert why in caught.value.what
        [refused] = list_actions(network.settings_by_cluster["gpu"], "refuse")
        assert (refused["decision"], refused["times"]) == ("deny", 1)
        assert why in refused["reason"]

    def test_many_refusals_are_few_records_with_counts(
        self, tmp_path: Path, start_network: Callable[..., GatewayNetwork]
    ) -> None:
        home = Certificates(tmp_path / "home")
        home.issue(GPU, "gpu/7", "gpu/gateway", "npu/gateway")
        names = (GPU, "gpu/7", *ALL[2:])
        network = start_network(
            files={name: Files.in_folder(home.folder, home.identity(name)) for name in names}, dials=()
        )
        revoked_credentials = home.of("gpu/7")
        revoke(home.folder, home.authority, [revoked_credentials.serial], "a test")
        for number in range(30):
            # Another text each time.
            request = StreamRequest(RUN, "gpu/7", f"npu/{number}" + "x" * 150, f"{number:016x}")
            with pytest.raises(IdentityError, match="was revoked"):
                open_stream(network, revoked_credentials, request)
        network.gateways["gpu"].stop("a test")
        refused = list_actions(network.settings_by_cluster["gpu"], "refuse")
        assert len(refused) < 15 and sum(each["times"] for each in refused) == 30
        assert all(len(each["object"]) <= 200 and len(each["reason"]) <= 200 for each in refused)

    def test_unknown_workers_of_a_gateway_are_not_stored(
        self, start_network: Callable[..., GatewayNetwork], files: dict[str, Files]
    ) -> None:
        """A cluster that does not list its workers may have any."""
        network = start_network(workers=(GPU,), dials=())
        gateway, theirs = network.gateways["gpu"], Credentials.load(files["npu/gateway"])
        for number in range(20):
            request = StreamRequest(RUN, f"npu/{number}", GPU, f"{number:016x}")
            with pytest.raises(TransportError, match="has not connected to its gateway yet"):
                open_stream(network, theirs, request, gateway=False)
            gateway._handle_lost_remote_worker(request.source, "it says")
        assert not gateway._list_pairs()
        assert not gateway._pair_errors._lost_workers

    def test_streams_of_a_gateway_are_limited_by_its_quota(
        self, start_network: Callable[..., GatewayNetwork], files: dict[str, Files], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """For any workers of this cluster that it names, where the cluster does not list them."""
        monkeypatch.setattr("whale_nebula.gateway.admission.find_max_streams", lambda pairs: 3)
        # As if all these were joined recently.
        monkeypatch.setattr(Gateway, "_is_awaited", lambda gateway, here, there: True)
        network = start_network(workers=(NPU,), dials=())
        theirs, lanes = Credentials.load(files["npu/gateway"]), [Lane() for _ in range(4)]
        for number, lane in enumerate(lanes):
            request = StreamRequest(RUN, NPU, f"gpu/{number}", f"{number:016x}")
            with contextlib.nullcontext() if number < 3 else pytest.raises(TransportError) as caught:
                open_stream(network, theirs, request, lane, gateway=False)
        assert "3 streams here" in caught.value.why
        assert len(network.gateways["gpu"]._pairs) == 3
        for lane in lanes:
            lane.end("a test")

    def test_monitor_thread_survives_a_failed_check(self, start_network: Callable[..., GatewayNetwork]) -> None:
        gateway = start_network(dials=()).gateways["gpu"]
        failed_checks, next_checks = threading.Semaphore(0), threading.Semaphore(0)

        def fail() -> None:
            failed_checks.release()
            raise RuntimeError("can't start new thread")

        gateway._check_workers = fail  # type: ignore[method-assign]
        gateway._remove_pairs = next_checks.release  # type: ignore[method-assign]
        for _ in range(3):
            assert failed_checks.acquire(timeout=5.0)
            assert next_checks.acquire(timeout=5.0)

    def test_frame_of_another_pair_ends_the_stream(
        self, start_network: Callable[..., GatewayNetwork], files: dict[str, Files]
    ) -> None:
        network = start_network(workers=(GPU, NPU, OTHER))
        lane = open_stream(network, Credentials.load(files[GPU]), StreamRequest(RUN, GPU, NPU, "00112233aabbccdd"))
        header = Header(Kind.BEAT, Flag.LAST, conversation=1, source=0, destination=2)
        assert lane.send(pack_header(header, 0))
        wait_until(lambda: list_actions(network.settings_by_cluster["gpu"], "end"))
        [end] = list_actions(network.settings_by_cluster["gpu"], "end")
        wait_until(lambda: lane.is_over)
        assert end["decision"] == "deny"
        assert "a frame from worker 0 to worker 2" in end["reason"]

    @pytest.mark.parametrize("dials", CLUSTERS)
    def test_worker_ends_link_to_peer_revoked_only_at_its_own_site(
        self, tmp_path: Path, start_network: Callable[..., GatewayNetwork], dials: str
    ) -> None:
        """The other site has the old deny list; either gateway may have dialled."""
        home = Certificates(tmp_path / "home")
        home.issue(GPU, NPU, "gpu/gateway", "npu/gateway")
        shutil.copytree(home.folder, tmp_path / "npu")
        folders = {"gpu": home.folder, "npu": tmp_path / "npu"}
        network = start_network(
            files={name: Files.in_folder(folders[name[:3]], home.identity(name)) for name in ALL},
            dials=(dials,),
            with_workers=True,
        )
        revoke(folders["npu"], home.authority, [home.of(GPU).serial], "a test")
        with pytest.raises(IdentityError, match="the certificate of gpu/0 was revoked"):
            network.link(NPU, GPU).receive(make_key(0), TIMEOUT_SECONDS)


class TestRevocationAtOneSite:
    """The hosts of the other site have an older deny list, so they cannot be relied on."""

    def files(self, home: Certificates, *names: str) -> dict[str, Files]:
        """Files of all processes; those of `names` use another deny list, `npu.json`."""
        home.issue(GPU, NPU, "gpu/gateway", "npu/gateway")
        found = {name: Files.in_folder(home.folder, home.identity(name)) for name in ALL}
        for name, each in found.items():
            own = home.folder / ("npu.json" if name in names else "gpu.json")
            if each.revoked is not None and each.revoked.exists():
                shutil.copy(each.revoked, own)
            found[name] = each._replace(revoked=own)
        return found

    def revoke(self, home: Certificates, who: str) -> None:
        revoke(home.folder, home.authority, [home.of(who).serial], "a test")
        shutil.copy(home.folder / "revoked.json", home.folder / "npu.json")

    @pytest.mark.parametrize("dials", [("gpu",), pytest.param(("npu",), marks=pytest.mark.grid)])
    def test_all_streams_to_a_revoked_gateway_are_ended(
        self, tmp_path: Path, start_network: Callable[..., GatewayNetwork], dials: tuple[str, ...]
    ) -> None:
        home = Certificates(tmp_path / "home")
        network = start_network(
            files=self.files(home, NPU, "npu/gateway"), dials=dials, deadlines=SHORT_PATIENCE, with_workers=True
        )
        npu, far = network.gateways["npu"], network.gateways["npu"]._find_or_create_pair(NPU, GPU).find_half(Side.FAR)
        wait_until(lambda: npu._routes["gpu"].control.lanes)
        [trunk] = npu._routes["gpu"].control.lanes
        assert far is not None and trunk.certified_peer is not None
        assert {certified_peer.identity.worker for certified_peer in [*far.certified_peers, trunk.certified_peer]} == {
            "gpu/gateway"
        }
        self.revoke(home, "gpu/gateway")
        wait_until(lambda: far.connection.is_over and trunk.is_over)
        # The side that is dialled waits for another connection.
        caught = network.link(*((GPU, NPU) if dials == ("gpu",) else (NPU, GPU)))
        with pytest.raises(IdentityError, match="certificate of gpu/gateway was revoked"):
            caught.take("SESSION", TIMEOUT_SECONDS)
        assert (
            not npu._routes["gpu"].control.is_connected
            and npu._find_or_create_pair(NPU, GPU).find_half(Side.FAR) is None
        )
        for worker in (GPU, NPU):  # otherwise each waits for the other's farewell
            network.kill_worker(worker)

    def test_gateway_with_a_certificate_renewed_late_is_waited_for(
        self, tmp_path: Path, start_network: Callable[..., GatewayNetwork], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its workers and the other gateway disconnect from the expired certificate, and reconnect once it is renewed,
        although they were refused more than twice.
        """
        home, true_now, clock_offset = Certificates(tmp_path / "home"), security_files.now, [timedelta(0)]
        monkeypatch.setattr(security_files, "now", lambda: true_now() + clock_offset[0])
        home.issue(GPU, NPU, "gpu/gateway", days=7.0)
        home.issue("npu/gateway", days=1.0)
        network = start_network(
            files={name: Files.in_folder(home.folder, home.identity(name)) for name in ALL}, with_workers=True
        )
        route, attempts, call = network.gateways["gpu"]._routes["npu"], [0], Route._call

        def count(route: Route, *args: Any) -> int:
            attempts[0] += 1
            return call(route, *args)

        monkeypatch.setattr(Route, "_call", count)
        clock_offset[0] = timedelta(days=2)
        wait_until(lambda: attempts[0] > 4 and "has expired" in route._trouble)
        wait_until(lambda: network.link(NPU, GPU).state().refusal is not None)
        clock_offset[0] = timedelta(0)  # TLS uses the true clock, and accepts no certificate of tomorrow
        renew(home.folder, home.authority, [home.identity("npu/gateway")], days=7.0)
        clock_offset[0] = timedelta(days=2)
        network.exchange_tensors(range(3))

    def test_workers_disconnect_from_their_revoked_gateway(
        self, tmp_path: Path, start_network: Callable[..., GatewayNetwork]
    ) -> None:
        home = Certificates(tmp_path / "home")
        network = start_network(files=self.files(home, NPU), deadlines=SHORT_PATIENCE, with_workers=True)
        self.revoke(home, "npu/gateway")
        with pytest.raises(IdentityError, match="certificate of npu/gateway was revoked"):
            network.link(NPU, GPU).receive(make_key(0, GPU, NPU), TIMEOUT_SECONDS)


class TestShutdown:
    def test_end_of_a_new_stream_is_logged_before_the_log_is_closed(
        self, start_network: Callable[..., GatewayNetwork], caplog: pytest.LogCaptureFixture
    ) -> None:
        network = start_network(dials=("gpu",))
        gateway = network.gateways["gpu"]
        route, pair = gateway._routes["npu"], gateway._find_or_create_pair(GPU, NPU)
        half = route.make_far_half(pair, Connection("00112233aabbccdd"), dialled=True)
        gateway.journal.note_opened(pair, half)  # as a dialling thread does before it adds the half to the pair

        def give_up() -> None:
            gateway._stopping.wait(TIMEOUT_SECONDS)
            wait_until(lambda: gateway.journal._ending)
            gateway.journal.note_ended(pair, half, "the gateway ends")

        dials = threading.Thread(target=give_up)
        dials.start()
        gateway.stop("a test")
        dials.join(TIMEOUT_SECONDS)
        with pytest.raises(TransportError, match="is stopping"):
            gateway.journal.note_opened(pair, half)
        ends = [(each["action"], each.get("connection")) for each in read_records(network.settings_by_cluster["gpu"])]
        assert ends.index(("end", "00112233aabbccdd")) < ends.index(("end", None))
        assert not [each for each in caplog.messages if "the audit log is closed" in each]

    def test_every_opened_stream_has_an_end_record(self, start_network: Callable[..., GatewayNetwork]) -> None:
        network = start_network(with_workers=True)
        for gateway in network.gateways.values():
            gateway.stop("a test")
        for settings in network.settings_by_cluster.values():
            found = read_records(settings)
            opened = [each["connection"] for each in found if each["action"] == "open"]
            assert opened and sorted(opened) == sorted(each["connection"] for each in found if "frames" in each)
        for worker in (GPU, NPU):
            network.kill_worker(worker)


class TestAuditHeads:
    def test_head_signed_under_a_later_authority_is_stored(self, tmp_path: Path) -> None:
        old, new = Certificates(tmp_path / "old"), Certificates(tmp_path / "new")
        old.issue("gpu/gateway")
        new.issue("npu/gateway")
        files = Files.in_folder(old.folder, old.identity("gpu/gateway"))
        gateway = Gateway(
            GatewaySettings(RUN, "gpu", "127.0.0.1:0", {}, {"npu": None}, files=files, audit=tmp_path / "a.jsonl")
        )
        with files.ca.open("ab") as file:  # as ca.pem is copied to the host while the gateway runs
            file.write((new.folder / "ca.pem").read_bytes())
        head = Head.sign(new.of("npu/gateway"), 7, "ab" * 32)
        gateway._routes["npu"].control.receive(control.encode_control({"kind": "HEAD", "head": head._asdict()}))
        gateway.stop("a test")
        assert list(read_heads(gateway.settings.heads_path)) == [head]


class TestHealth:
    def request_status(self, network: GatewayNetwork, files: Files, service: str = "") -> Any:
        credentials = Credentials.load(files)
        name = network.gateways["gpu"].settings.identity.dns
        options = [("grpc.ssl_target_name_override", name)]
        with grpc.secure_channel(
            network.settings_by_cluster["gpu"].listen, make_channel_credentials(credentials), options
        ) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_SECONDS).status

    def test_any_certificate_may_request_health(
        self, start_network: Callable[..., GatewayNetwork], files: dict[str, Files]
    ) -> None:
        network = start_network()
        serving = health_pb2.HealthCheckResponse.SERVING
        assert [self.request_status(network, files[who]) for who in (GPU, NPU, "gpu/operator-0")] == [serving] * 3
        wait_until(lambda: self.request_status(network, files[GPU], "npu") == serving)

    def test_frequent_health_requests_of_one_caller_are_refused(
        self, start_network: Callable[..., GatewayNetwork], files: dict[str, Files]
    ) -> None:
        network = start_network(dials=())
        network.gateways["gpu"]._health._buckets = Buckets(3, 0.0)
        assert self.request_status(network, files["npu/7"]) == self.request_status(network, files["npu/7"])
        with pytest.raises(grpc.RpcError, match="too many requests"):
            [self.request_status(network, files["npu/7"]) for _ in range(2)]
        self.request_status(network, files[GPU])

    def test_health_watch_is_not_implemented(
        self, start_network: Callable[..., GatewayNetwork], files: dict[str, Files]
    ) -> None:
        """A watch stream would never end."""
        network = start_network()
        options = [("grpc.ssl_target_name_override", network.gateways["gpu"].settings.identity.dns)]
        credentials = make_channel_credentials(Credentials.load(files["npu/7"]))
        with grpc.secure_channel(network.settings_by_cluster["gpu"].listen, credentials, options) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for _ in range(60):
                assert stub.Watch(health_pb2.HealthCheckRequest()).code() == grpc.StatusCode.UNIMPLEMENTED

    def test_unconnected_route_is_reported_as_not_serving(
        self, start_network: Callable[..., GatewayNetwork], files: dict[str, Files]
    ) -> None:
        network = start_network(dials=())
        assert self.request_status(network, files[GPU], "npu") == health_pb2.HealthCheckResponse.NOT_SERVING

"""Links over real gRPC with real TLS, both ends in this process: transfer, interruption, recovery, and refusal."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.unit.gateway.networks import wait_until
from tests.unit.transport.grpc_workers import (
    RUN,
    SHORT_DEADLINES,
    Certificates,
    WorkerPair,
    find_free_address,
    open_workers,
)
from tests.unit.transport.link_pairs import (
    GPU,
    NPU,
    TIMEOUT_SECONDS,
    build_step_message,
    close_all,
    make_key,
    wait_for_threads,
)
from whale_nebula.errors import (
    ConfigError,
    IdentityError,
    LinkClosedError,
    NebulaError,
    PlaintextError,
    TransportError,
    WrongAuthorityError,
)
from whale_nebula.security import files
from whale_nebula.security.issue import renew, revoke
from whale_nebula.transport import Link
from whale_nebula.transport.deadlines import Deadlines, Wait
from whale_nebula.transport.grpc import options
from whale_nebula.transport.grpc.links import GrpcLinks, Place
from whale_nebula.transport.memory import MemoryNetwork
from whale_nebula.wire.frame import CHUNK_BYTES


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    certificates = Certificates(tmp_path_factory.mktemp("certs") / "home")
    certificates.issue(GPU, NPU, "tpu/0")
    return certificates


@pytest.fixture(autouse=True)
def no_remaining_threads() -> Iterator[None]:
    yield
    wait_for_threads()


def exchange(pair: WorkerPair, number: int, size: int = 3 * CHUNK_BYTES + 5) -> None:
    """One step with a tensor in each direction at the same time."""
    for link in (pair.gpu, pair.npu):
        link.post(build_step_message(number))
    sent = np.random.default_rng(number).integers(0, 255, size, np.uint8)
    pair.gpu.send(make_key(0, number), sent)
    pair.npu.send(make_key(0, number, NPU, GPU), sent[::-1])
    np.testing.assert_array_equal(pair.npu.receive(make_key(0, number), TIMEOUT_SECONDS), sent)
    np.testing.assert_array_equal(pair.gpu.receive(make_key(0, number, NPU, GPU), TIMEOUT_SECONDS), sent[::-1])


class TestTransfer:
    @pytest.mark.parametrize("with_tls", [True, False], ids=["tls", "insecure"])
    def test_totals_equal_those_of_a_memory_link(self, certificates: Certificates, with_tls: bool) -> None:
        def transfer_tensors(here: Link, there: Link) -> None:
            here.post({"kind": "SESSION", "about": "HELLO"})
            here.post(build_step_message())
            for slot, size in enumerate([0, 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 17]):
                here.send(make_key(slot), np.zeros(size, np.float16), raw_bytes=4 * size)
                there.receive(make_key(slot), TIMEOUT_SECONDS)
            here.close()

        network = MemoryNetwork()
        memory = network.link(GPU, NPU, "gpu", "npu"), network.link(NPU, GPU, "npu", "gpu")
        transfer_tensors(*memory)
        with open_workers(certificates if with_tls else None) as pair:
            transfer_tensors(pair.gpu, pair.npu)
        assert pair.gpu.totals() == memory[0].totals()

    def test_several_lanes_carry_one_conversation(
        self, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(options, "read_congestion_control", lambda: "reno")
        with open_workers(certificates, proxy=True) as pair:
            pair.exchange_steps()
            for number in range(1, 4):
                exchange(pair, number, 9 * CHUNK_BYTES)
            assert pair.proxy and pair.proxy.connection_count == options.LANES_WITHOUT_BBR
            pair.proxy.disconnect()
            for number in range(4, 7):
                exchange(pair, number)

    def test_graceful_close_over_several_lanes_loses_no_farewell(
        self, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(options, "read_congestion_control", lambda: "reno")
        for _ in range(8):
            with open_workers(certificates, proxy=True) as pair:
                pair.exchange_steps()
            for link in (pair.gpu, pair.npu):
                assert link._bye_received
                assert link._conversation.unacknowledged_bytes == 0

    def test_wait_for_an_absent_worker_is_announced(self, certificates: Certificates) -> None:
        waits: list[Wait] = []
        address = find_free_address()
        early = GrpcLinks(
            Place(RUN, NPU, {GPU: address}, credentials=certificates.of(NPU)),
            deadlines=SHORT_DEADLINES,
            announce=waits.append,
        )
        wait_until(lambda: waits)
        assert (waits[0].target, waits[0].address, waits[0].limit) == (f"worker '{GPU}'", address, TIMEOUT_SECONDS)
        assert "no process listens" in waits[0].reason
        late = GrpcLinks(
            Place(RUN, GPU, {NPU: None}, address, credentials=certificates.of(GPU)), deadlines=SHORT_DEADLINES
        )
        late.links[NPU].post({"kind": "SESSION", "about": "HELLO"})
        early.links[GPU].take("SESSION", TIMEOUT_SECONDS)
        wait_until(lambda: waits[-1].over)
        close_all(late, early)

    def test_missing_route_is_a_config_error(self) -> None:
        with pytest.raises(ConfigError, match="no route between 'gpu/0' and 'npu/0'"):
            GrpcLinks(Place(RUN, GPU, {NPU: None}))

    def test_port_in_use_is_reported(self) -> None:
        first = GrpcLinks(Place(RUN, GPU, {}, "127.0.0.1:0"))
        with pytest.raises(TransportError, match=f"cannot listen on {first.address}") as refused:
            GrpcLinks(Place(RUN, NPU, {}, first.address))
        assert refused.value.why == "Address already in use"  # found before gRPC writes its own line
        first.close()


class TestDisconnection:
    def test_blackholed_line_is_announced_and_recovers(self, certificates: Certificates) -> None:
        """Nothing passes and nothing is reset: only the keepalive detects it."""
        waits: list[Wait] = []
        deadlines = Deadlines(patience=TIMEOUT_SECONDS, silence=0.8, grace=2.0, connect=0.5, check_interval=0.05)
        with open_workers(certificates, proxy=True, deadlines=deadlines, announce=waits.append) as pair:
            pair.exchange_steps()
            assert pair.proxy
            pair.proxy.is_forwarding = False
            started = time.monotonic()
            wait_until(lambda: [wait for wait in waits if not wait.over])
            assert time.monotonic() - started < TIMEOUT_SECONDS / 2
            pair.proxy.is_forwarding = True
            pair.proxy.disconnect()
            exchange(pair, 1)

    def test_close_does_not_wait_for_an_unanswered_address(self) -> None:
        """As beyond a broken line: an attempt to connect that would last a minute is abandoned."""
        with open_unanswered_address() as address:
            slow = Deadlines(patience=60.0, grace=60.0, connect=60.0)
            links = GrpcLinks(Place(RUN, NPU, {GPU: address}), deadlines=slow, announce=lambda wait: None)
            wait_until(lambda: links.links[GPU]._carrier._opening is not None)
            link = links.links[GPU]
            link.lost(LinkClosedError("it was waited for long enough"))
            links.close()
            assert not link._writer.is_alive() and not link._watcher.is_alive()

    @pytest.mark.parametrize("dead_worker", [GPU, NPU], ids=["dialled", "dials"])
    def test_worker_whose_port_refuses_is_dead(self, certificates: Certificates, dead_worker: str) -> None:
        """As after kill -9: the connection is reset, and the port refuses."""
        with open_workers(certificates) as pair:
            pair.exchange_steps()
            dead_links, survivor = (pair.gpu_links, pair.npu) if dead_worker == GPU else (pair.npu_links, pair.gpu)
            wait_until(lambda: dead_worker == GPU or survivor._carrier._was_open)
            dead_links._listener.stop()
            link = next(iter(dead_links.links.values()))
            link.lost(LinkClosedError("it is killed"))  # it sends no farewell and does not reconnect
            with pytest.raises(LinkClosedError, match=f"worker '{dead_worker}' is gone") as caught:
                survivor.take("AGREE", TIMEOUT_SECONDS)
            assert "refused twice" in caught.value.why


@contextlib.contextmanager
def open_unanswered_address() -> Iterator[str]:
    """An address where connections are neither accepted nor refused, since its backlog is full."""
    with contextlib.ExitStack() as sockets:
        full = sockets.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            one = sockets.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        yield f"127.0.0.1:{full.getsockname()[1]}"


def find_refusal(links: GrpcLinks, there: str) -> NebulaError:
    """The error of a link that cannot be established."""
    with pytest.raises(NebulaError) as caught:
        links.links[there].take("SESSION", TIMEOUT_SECONDS)
    return caught.value


class TestIdentity:
    @pytest.fixture
    def gpu(self, certificates: Certificates) -> Iterator[GrpcLinks]:
        links = GrpcLinks(
            Place(RUN, GPU, {NPU: None}, "127.0.0.1:0", credentials=certificates.of(GPU)),
            deadlines=Deadlines(patience=TIMEOUT_SECONDS, grace=0.1, check_interval=0.02),
        )
        yield links
        links.close()

    def find_dial_refusal(self, gpu: GrpcLinks, place: Place) -> NebulaError:
        """The error with which this place is refused."""
        links = GrpcLinks(place, deadlines=Deadlines(patience=TIMEOUT_SECONDS, grace=0.1, check_interval=0.02))
        try:
            return find_refusal(links, next(iter(place.peers)))
        finally:
            links.close()

    def test_dialler_with_a_certificate_of_another_worker_is_refused(
        self, gpu: GrpcLinks, certificates: Certificates
    ) -> None:
        """`tpu/0` has a valid certificate and claims to be `npu/0`."""
        place = Place(RUN, NPU, {GPU: gpu.address}, credentials=certificates.of("tpu/0"))
        error = self.find_dial_refusal(gpu, place)
        assert isinstance(error, IdentityError)
        assert "expected npu/0, found tpu/0" in str(error)

    def test_dialled_server_with_another_identity_is_refused(self, gpu: GrpcLinks, certificates: Certificates) -> None:
        place = Place(RUN, NPU, {"tpu/0": gpu.address}, credentials=certificates.of(NPU))
        error = self.find_dial_refusal(gpu, place)
        assert isinstance(error, IdentityError)
        assert "expected tpu/0, found gpu/0" in str(error)

    def test_unexpected_worker_is_refused(self, gpu: GrpcLinks, certificates: Certificates) -> None:
        error = self.find_dial_refusal(
            gpu, Place(RUN, "tpu/0", {GPU: gpu.address}, credentials=certificates.of("tpu/0"))
        )
        assert "does not expect 'tpu/0'" in str(error)

    def test_unknown_authority_is_reported(self, gpu: GrpcLinks, tmp_path: Path) -> None:
        unknown_authority = Certificates(tmp_path / "strange")
        unknown_authority.issue(NPU)
        error = self.find_dial_refusal(gpu, Place(RUN, NPU, {GPU: gpu.address}, credentials=unknown_authority.of(NPU)))
        assert isinstance(error, WrongAuthorityError)
        assert error.__context__ is None  # earlier failed attempts are not part of it

    def test_plaintext_dialler_is_reported(self, gpu: GrpcLinks) -> None:
        error = self.find_dial_refusal(gpu, Place(RUN, NPU, {GPU: gpu.address}))
        assert isinstance(error, PlaintextError)

    def test_worker_of_another_run_is_refused(self, tmp_path: Path) -> None:
        gpu = GrpcLinks(Place(RUN, GPU, {NPU: None}, "127.0.0.1:0"), deadlines=Deadlines(grace=0.1))
        error = self.find_dial_refusal(gpu, Place("other", NPU, {GPU: gpu.address}))
        assert "this is worker 'gpu/0' of run 'mt'" in str(error)
        gpu.close()

    def test_renewed_certificates_are_used_without_losing_a_step(self, tmp_path: Path) -> None:
        certificates = Certificates(tmp_path / "home")
        certificates.issue(GPU, NPU)
        with open_workers(certificates) as pair:
            pair.exchange_steps()
            exchange(pair, 1)
            renew(certificates.folder, certificates.authority, [certificates.identity(NPU)])
            wait_until(lambda: pair.npu.state().connections == 2)
            exchange(pair, 2)
            renew(certificates.folder, certificates.authority, [certificates.identity(GPU)])
            pair.npu._carrier.drop("the test asks for a new handshake")
            wait_until(lambda: pair.npu.state().connections == 3)
            exchange(pair, 3)

    @pytest.mark.parametrize("owner", [GPU, NPU], ids=["dialled", "dials"])
    def test_expired_certificate_ends_its_connection(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str
    ) -> None:
        """TLS itself does not check an open connection again. The certificate may be renewed within the patience."""
        certificates, true_now = Certificates(tmp_path / "home"), files.now
        certificates.issue(*{GPU, NPU} - {owner}, days=7.0)
        certificates.issue(owner, days=1.0)
        with open_workers(certificates, deadlines=Deadlines(patience=3.0, grace=0.2, check_interval=0.02)) as pair:
            pair.exchange_steps()
            monkeypatch.setattr(files, "now", lambda: true_now() + timedelta(days=2))
            other = pair.npu if owner == GPU else pair.gpu
            with pytest.raises(IdentityError, match=f"the certificate of {owner} has expired"):
                other.take("SESSION", TIMEOUT_SECONDS)

    @pytest.mark.parametrize("owner", [GPU, NPU], ids=["dialled", "dials"])
    def test_certificate_renewed_late_is_accepted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str
    ) -> None:
        certificates, true_now, clock_offset = Certificates(tmp_path / "home"), files.now, [timedelta(0)]
        monkeypatch.setattr(files, "now", lambda: true_now() + clock_offset[0])
        certificates.issue(*{GPU, NPU} - {owner}, days=7.0)
        certificates.issue(owner, days=1.0)
        with open_workers(certificates, proxy=True) as pair:
            pair.exchange_steps()
            clock_offset[0] = timedelta(days=2)
            wait_until(lambda: pair.proxy.connection_count >= 6)  # the connection is retried
            assert not (pair.gpu._conversation.ready and pair.npu._conversation.ready)
            clock_offset[0] = timedelta(0)  # TLS uses the true clock
            renew(certificates.folder, certificates.authority, [certificates.identity(owner)], days=7.0)
            clock_offset[0] = timedelta(days=2)
            exchange(pair, 1)

    @pytest.mark.parametrize("owner", [GPU, NPU], ids=["dialled", "dials"])
    def test_revoked_certificate_ends_its_connection(self, tmp_path: Path, owner: str) -> None:
        """Whoever dialled."""
        certificates = Certificates(tmp_path / "home")
        certificates.issue(GPU, NPU)
        with open_workers(
            certificates, deadlines=Deadlines(patience=TIMEOUT_SECONDS, grace=0.2, check_interval=0.02)
        ) as pair:
            pair.exchange_steps()
            revoke(certificates.folder, certificates.authority, [certificates.of(owner).serial], "a test")
            other = pair.npu if owner == GPU else pair.gpu
            with pytest.raises(IdentityError, match=f"the certificate of {owner} was revoked"):
                other.take("SESSION", TIMEOUT_SECONDS)
            if owner == NPU:
                with pytest.raises(IdentityError, match="revoked"):
                    pair.npu.take("SESSION", TIMEOUT_SECONDS)

    @pytest.mark.parametrize("owner", [GPU, NPU], ids=["dialled", "dials"])
    def test_removed_authority_ends_its_connections(self, tmp_path: Path, owner: str) -> None:
        """Each worker has its own authority, and both trust both until one authority is removed."""
        homes = {worker: Certificates(tmp_path / worker[:3]) for worker in (GPU, NPU)}
        authorities = {worker: (home.folder / "ca.pem").read_bytes() for worker, home in homes.items()}
        for worker, home in homes.items():
            home.issue(worker)
            (home.folder / "ca.pem").write_bytes(authorities[GPU] + authorities[NPU])
        both_homes = SimpleNamespace(of=lambda worker: homes[worker].of(worker))
        with open_workers(
            both_homes, deadlines=Deadlines(patience=TIMEOUT_SECONDS, grace=0.2, check_interval=0.02)
        ) as pair:
            pair.exchange_steps()
            other, link = (NPU, pair.npu) if owner == GPU else (GPU, pair.gpu)
            (homes[other].folder / "ca.pem").write_bytes(authorities[other])
            with pytest.raises(WrongAuthorityError, match=owner):
                link.take("SESSION", TIMEOUT_SECONDS)

    def test_new_connection_replaces_one_that_is_ending(self, certificates: Certificates) -> None:
        """The dialled side has begun to end the old connection, and its link is not notified yet."""
        with open_workers(certificates, proxy=True) as pair:
            pair.exchange_steps()
            carrier, may_end = pair.gpu._carrier, threading.Event()
            old = carrier._connection
            lane = old._lanes[0]
            breaks = lane._abort
            lane._abort = lambda why: (may_end.wait(TIMEOUT_SECONDS), breaks(why))
            ending = threading.Thread(target=old.end, args=("the line broke",))
            ending.start()
            wait_until(lambda: old.is_over)
            pair.proxy.disconnect()
            try:
                exchange(pair, 1)
            finally:
                may_end.set()
                ending.join(TIMEOUT_SECONDS)
            exchange(pair, 2)
            assert (pair.gpu.state().connected, pair.npu.state().connected) == (True, True)

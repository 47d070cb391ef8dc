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

from tests.unit.gateway.town import until
from tests.unit.transport.cable import GPU, NPU, SOON, close_all, key, step, wait_for_threads
from tests.unit.transport.crossing import QUICK, RUN, Certificates, Workers, free_address, workers
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
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    certificates = Certificates(tmp_path_factory.mktemp("certs") / "home")
    certificates.issue(GPU, NPU, "tpu/0")
    return certificates


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    wait_for_threads()


def exchange(pair: Workers, number: int, size: int = 3 * CHUNK_BYTES + 5) -> None:
    """One step: a tensor each way, at once."""
    for link in (pair.gpu, pair.npu):
        link.post(step(number))
    sent = np.random.default_rng(number).integers(0, 255, size, np.uint8)
    pair.gpu.send(key(0, number), sent)
    pair.npu.send(key(0, number, NPU, GPU), sent[::-1])
    np.testing.assert_array_equal(pair.npu.receive(key(0, number), SOON), sent)
    np.testing.assert_array_equal(pair.gpu.receive(key(0, number, NPU, GPU), SOON), sent[::-1])


class TestCrossing:
    @pytest.mark.parametrize("secured", [True, False], ids=["tls", "insecure"])
    def test_tensors_cross_both_ways_and_are_counted_as_over_memory(self, trusted: Certificates, secured: bool) -> None:
        def speak(here: Link, there: Link) -> None:
            here.post({"kind": "SESSION", "about": "HELLO"})
            here.post(step())
            for slot, size in enumerate([0, 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 17]):
                here.send(key(slot), np.zeros(size, np.float16), raw_bytes=4 * size)
                there.receive(key(slot), SOON)
            here.close()

        network = MemoryNetwork()
        memory = network.link(GPU, NPU, "gpu", "npu"), network.link(NPU, GPU, "npu", "gpu")
        speak(*memory)
        with workers(trusted if secured else None) as pair:
            speak(pair.gpu, pair.npu)
        assert pair.gpu.totals() == memory[0].totals()

    def test_several_lanes_carry_one_conversation(self, trusted: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(options, "congestion_control", lambda: "reno")
        with workers(trusted, line=True) as pair:
            pair.meet()
            for number in range(1, 4):
                exchange(pair, number, 9 * CHUNK_BYTES)
            assert pair.line and pair.line.dialled == options.LANES_WITHOUT_BBR
            pair.line.cut()
            for number in range(4, 7):
                exchange(pair, number)

    def test_an_end_in_order_loses_no_last_word_on_several_lanes(
        self, trusted: Certificates, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(options, "congestion_control", lambda: "reno")
        for _ in range(8):
            with workers(trusted, line=True) as pair:
                pair.meet()
            for link in (pair.gpu, pair.npu):
                assert link._bye_received
                assert link._conversation.unacked == 0

    def test_who_is_not_up_yet_is_waited_for_and_announced(self, trusted: Certificates) -> None:
        said: list[Wait] = []
        address = free_address()
        early = GrpcLinks(
            Place(RUN, NPU, {GPU: address}, credentials=trusted.of(NPU)), deadlines=QUICK, announce=said.append
        )
        until(lambda: said)
        assert (said[0].who, said[0].where, said[0].limit) == (f"worker '{GPU}'", address, SOON)
        assert "no process listens" in said[0].why
        late = GrpcLinks(Place(RUN, GPU, {NPU: None}, address, credentials=trusted.of(GPU)), deadlines=QUICK)
        late.links[NPU].post({"kind": "SESSION", "about": "HELLO"})
        early.links[GPU].take("SESSION", SOON)
        until(lambda: said[-1].over)
        close_all(late, early)

    def test_no_way_at_all_is_the_configs_mistake(self) -> None:
        with pytest.raises(ConfigError, match="no route between 'gpu/0' and 'npu/0'"):
            GrpcLinks(Place(RUN, GPU, {NPU: None}))

    def test_a_port_that_is_taken_is_named(self) -> None:
        first = GrpcLinks(Place(RUN, GPU, {}, "127.0.0.1:0"))
        with pytest.raises(TransportError, match=f"cannot listen on {first.address}") as refused:
            GrpcLinks(Place(RUN, NPU, {}, first.address))
        assert refused.value.why == "Address already in use"  # asked before gRPC, which would write a line of its own
        first.close()


class TestBreaks:
    def test_a_hole_in_the_line_is_announced_and_healed(self, trusted: Certificates) -> None:
        """Nothing passes and nothing is reset: only the keepalive finds out."""
        said: list[Wait] = []
        deadlines = Deadlines(patience=SOON, silence=0.8, grace=2.0, connect=0.5, look=0.05)
        with workers(trusted, line=True, deadlines=deadlines, announce=said.append) as pair:
            pair.meet()
            assert pair.line
            pair.line.passes = False
            started = time.monotonic()
            until(lambda: [wait for wait in said if not wait.over])
            assert time.monotonic() - started < SOON / 2
            pair.line.passes = True
            pair.line.cut()
            exchange(pair, 1)

    def test_to_close_waits_for_no_address_that_does_not_answer(self) -> None:
        """As beyond a line that is cut: an attempt to connect that would take a minute is given up."""
        with does_not_answer() as address:
            slow = Deadlines(patience=60.0, grace=60.0, connect=60.0)
            links = GrpcLinks(Place(RUN, NPU, {GPU: address}), deadlines=slow, announce=lambda wait: None)
            until(lambda: links.links[GPU]._carrier._opening is not None)
            link = links.links[GPU]
            link.lost(LinkClosedError("it was waited for long enough"))
            links.close()
            assert not link._writer.is_alive() and not link._watcher.is_alive()

    @pytest.mark.parametrize("dead", [GPU, NPU], ids=["who was dialled", "who dialled"])
    def test_a_worker_whose_port_is_gone_is_dead(self, trusted: Certificates, dead: str) -> None:
        """As after kill -9: the connection is reset, and the port refuses."""
        with workers(trusted) as pair:
            pair.meet()
            gone, left = (pair.gpu_links, pair.npu) if dead == GPU else (pair.npu_links, pair.gpu)
            until(lambda: dead == GPU or left._carrier._was_open)
            gone._listener.stop()
            link = next(iter(gone.links.values()))
            link.lost(LinkClosedError("it is killed"))  # it does not say goodbye, and comes no more
            with pytest.raises(LinkClosedError, match=f"worker '{dead}' is gone") as caught:
                left.take("AGREE", SOON)
            assert "refused twice" in caught.value.why


@contextlib.contextmanager
def does_not_answer() -> Iterator[str]:
    """An address at which a connection neither comes about nor is refused: nobody takes those that wait already."""
    with contextlib.ExitStack() as held:
        full = held.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            one = held.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        yield f"127.0.0.1:{full.getsockname()[1]}"


def refusal(links: GrpcLinks, there: str) -> NebulaError:
    """Why a link does not come about."""
    with pytest.raises(NebulaError) as caught:
        links.links[there].take("SESSION", SOON)
    return caught.value


class TestIdentity:
    @pytest.fixture
    def gpu(self, trusted: Certificates) -> Iterator[GrpcLinks]:
        links = GrpcLinks(
            Place(RUN, GPU, {NPU: None}, "127.0.0.1:0", credentials=trusted.of(GPU)),
            deadlines=Deadlines(patience=SOON, grace=0.1, look=0.02),
        )
        yield links
        links.close()

    def dial(self, gpu: GrpcLinks, place: Place) -> NebulaError:
        """Why this place is refused."""
        links = GrpcLinks(place, deadlines=Deadlines(patience=SOON, grace=0.1, look=0.02))
        try:
            return refusal(links, next(iter(place.peers)))
        finally:
            links.close()

    def test_another_worker_is_not_taken_for_this_one(self, gpu: GrpcLinks, trusted: Certificates) -> None:
        """`tpu/0` has a good certificate and says that it is `npu/0`."""
        place = Place(RUN, NPU, {GPU: gpu.address}, credentials=trusted.of("tpu/0"))
        error = self.dial(gpu, place)
        assert isinstance(error, IdentityError)
        assert "expected npu/0, found tpu/0" in str(error)

    def test_a_server_that_is_somebody_else_is_refused(self, gpu: GrpcLinks, trusted: Certificates) -> None:
        place = Place(RUN, NPU, {"tpu/0": gpu.address}, credentials=trusted.of(NPU))
        error = self.dial(gpu, place)
        assert isinstance(error, IdentityError)
        assert "expected tpu/0, found gpu/0" in str(error)

    def test_a_worker_that_nobody_waits_for_is_refused(self, gpu: GrpcLinks, trusted: Certificates) -> None:
        error = self.dial(gpu, Place(RUN, "tpu/0", {GPU: gpu.address}, credentials=trusted.of("tpu/0")))
        assert "does not expect 'tpu/0'" in str(error)

    def test_a_strange_authority_is_named(self, gpu: GrpcLinks, tmp_path: Path) -> None:
        strange = Certificates(tmp_path / "strange")
        strange.issue(NPU)
        error = self.dial(gpu, Place(RUN, NPU, {GPU: gpu.address}, credentials=strange.of(NPU)))
        assert isinstance(error, WrongAuthorityError)
        assert error.__context__ is None  # what failed before it was found out says less

    def test_plaintext_is_named(self, gpu: GrpcLinks) -> None:
        error = self.dial(gpu, Place(RUN, NPU, {GPU: gpu.address}))
        assert isinstance(error, PlaintextError)

    def test_another_run_is_refused(self, tmp_path: Path) -> None:
        gpu = GrpcLinks(Place(RUN, GPU, {NPU: None}, "127.0.0.1:0"), deadlines=Deadlines(grace=0.1))
        error = self.dial(gpu, Place("other", NPU, {GPU: gpu.address}))
        assert "this is worker 'gpu/0' of run 'mt'" in str(error)
        gpu.close()

    def test_renewed_certificates_are_taken_up_without_losing_a_step(self, tmp_path: Path) -> None:
        certificates = Certificates(tmp_path / "home")
        certificates.issue(GPU, NPU)
        with workers(certificates) as pair:
            pair.meet()
            exchange(pair, 1)
            renew(certificates.folder, certificates.authority, [certificates.identity(NPU)])
            until(lambda: pair.npu.state().connections == 2)
            exchange(pair, 2)
            renew(certificates.folder, certificates.authority, [certificates.identity(GPU)])
            pair.npu._carrier.drop("the test asks for a new handshake")
            until(lambda: pair.npu.state().connections == 3)
            exchange(pair, 3)

    @pytest.mark.parametrize("whose", [GPU, NPU], ids=["dialled", "dials"])
    def test_a_certificate_that_ends_ends_its_connection(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
    ) -> None:
        """TLS itself does not look again at a connection that stands. It may be renewed as long as patience lasts."""
        certificates, present = Certificates(tmp_path / "home"), files.now
        certificates.issue(*{GPU, NPU} - {whose}, days=7.0)
        certificates.issue(whose, days=1.0)
        with workers(certificates, deadlines=Deadlines(patience=1.0, grace=0.2, look=0.02)) as pair:
            pair.meet()
            monkeypatch.setattr(files, "now", lambda: present() + timedelta(days=2))
            other = pair.npu if whose == GPU else pair.gpu
            with pytest.raises(IdentityError, match=f"the certificate of {whose} has expired"):
                other.take("SESSION", SOON)

    @pytest.mark.parametrize("whose", [GPU, NPU], ids=["dialled", "dials"])
    def test_a_certificate_that_is_renewed_late_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
    ) -> None:
        certificates, present, later = Certificates(tmp_path / "home"), files.now, [timedelta(0)]
        monkeypatch.setattr(files, "now", lambda: present() + later[0])
        certificates.issue(*{GPU, NPU} - {whose}, days=7.0)
        certificates.issue(whose, days=1.0)
        with workers(certificates, line=True) as pair:
            pair.meet()
            later[0] = timedelta(days=2)
            until(lambda: pair.line.dialled >= 6)  # it is tried again and again
            assert not (pair.gpu._conversation.ready and pair.npu._conversation.ready)
            later[0] = timedelta(0)  # what is renewed must be good for the clock that TLS reads
            renew(certificates.folder, certificates.authority, [certificates.identity(whose)], days=7.0)
            later[0] = timedelta(days=2)
            exchange(pair, 1)

    @pytest.mark.parametrize("whose", [GPU, NPU], ids=["dialled", "dials"])
    def test_a_revoked_certificate_ends_its_connection(self, tmp_path: Path, whose: str) -> None:
        """Whoever dialled."""
        certificates = Certificates(tmp_path / "home")
        certificates.issue(GPU, NPU)
        with workers(certificates, deadlines=Deadlines(patience=SOON, grace=0.2, look=0.02)) as pair:
            pair.meet()
            revoke(certificates.folder, certificates.authority, [certificates.of(whose).serial], "a test")
            other = pair.npu if whose == GPU else pair.gpu
            with pytest.raises(IdentityError, match=f"the certificate of {whose} was revoked"):
                other.take("SESSION", SOON)
            if whose == NPU:
                with pytest.raises(IdentityError, match="revoked"):
                    pair.npu.take("SESSION", SOON)

    @pytest.mark.parametrize("whose", [GPU, NPU], ids=["dialled", "dials"])
    def test_an_authority_that_is_taken_out_ends_its_connections(self, tmp_path: Path, whose: str) -> None:
        """Each worker has a certificate of an authority of its own, and both trust both, until one does not."""
        homes = {worker: Certificates(tmp_path / worker[:3]) for worker in (GPU, NPU)}
        shown = {worker: (home.folder / "ca.pem").read_bytes() for worker, home in homes.items()}
        for worker, home in homes.items():
            home.issue(worker)
            (home.folder / "ca.pem").write_bytes(shown[GPU] + shown[NPU])
        both = SimpleNamespace(of=lambda worker: homes[worker].of(worker))
        with workers(both, deadlines=Deadlines(patience=SOON, grace=0.2, look=0.02)) as pair:
            pair.meet()
            other, link = (NPU, pair.npu) if whose == GPU else (GPU, pair.gpu)
            (homes[other].folder / "ca.pem").write_bytes(shown[other])
            with pytest.raises(WrongAuthorityError, match=whose):
                link.take("SESSION", SOON)

    def test_a_connection_that_comes_while_the_last_one_is_ended_takes_its_place(self, trusted: Certificates) -> None:
        """The side that is dialled has begun to end the old one, and the link was not told yet."""
        with workers(trusted, line=True) as pair:
            pair.meet()
            carrier, may_end = pair.gpu._carrier, threading.Event()
            old = carrier._connection
            lane = old._lanes[0]
            breaks = lane._breaks
            lane._breaks = lambda why: (may_end.wait(SOON), breaks(why))
            ending = threading.Thread(target=old.end, args=("the line broke",))
            ending.start()
            until(lambda: old.over)
            pair.line.cut()
            try:
                exchange(pair, 1)
            finally:
                may_end.set()
                ending.join(SOON)
            exchange(pair, 2)
            assert (pair.gpu.state().connected, pair.npu.state().connected) == (True, True)

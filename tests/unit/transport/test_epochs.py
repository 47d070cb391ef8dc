"""Workers of different epochs of a run on one line: a frozen one returns, and meets a restarted one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.simulation.carrier import Cable
from tests.unit.gateway.networks import wait_until
from tests.unit.transport.grpc_workers import RUN, Certificates, TcpProxy, find_free_address
from tests.unit.transport.link_pairs import (
    GPU,
    NPU,
    TIMEOUT_SECONDS,
    WORKERS,
    build_step_message,
    close_all,
    make_key,
    wait_for_threads,
)
from whale_nebula.errors import (
    DeadlineError,
    EpochOverError,
    LinkClosedError,
    PeerRestartedError,
    RemoteFailureError,
    StaleWorkerError,
)
from whale_nebula.runtime.session.session import Session
from whale_nebula.transport.deadlines import Deadlines, Wait
from whale_nebula.transport.grpc.links import GrpcLinks, Place
from whale_nebula.transport.peer import PeerLink
from whale_nebula.wire.greeting import Greeting

_DEADLINES = Deadlines(patience=TIMEOUT_SECONDS, silence=4.0, grace=0.2, connect=2.0, check_interval=0.05)


@pytest.fixture(autouse=True)
def no_remaining_threads() -> Iterator[None]:
    yield
    wait_for_threads()


def make_link(cable: Cable, here: str, epoch: int, deadlines: Deadlines = _DEADLINES) -> PeerLink:
    """A link of a process of this epoch, which replaces the previous one of this end of the cable."""
    end = next(each for each in cable.ends if each.here == here)
    return PeerLink(end, Greeting("run-1", end.here, end.there, epoch=epoch), WORKERS, deadlines=deadlines)


def kill_link(cable: Cable, one: PeerLink) -> None:
    """End a link as if its process was killed, without a farewell."""
    one.lost(LinkClosedError("it is killed"))
    wait_until(lambda: one.here in cable._closed)


def begin_session(epoch: int, *links: PeerLink) -> None:
    """Begin a session: all exchange HELLO messages, and agree on the epoch."""
    for each in links:
        each.post({"kind": "SESSION", "about": "HELLO", "epoch": epoch})
    for each in links:
        each.take("SESSION", TIMEOUT_SECONDS)
        each.begin_session(epoch)


def send_tensor(number: int, here: PeerLink, there: PeerLink) -> None:
    """Announce a step and send one tensor of it."""
    for each in (here, there):
        each.post(build_step_message(number))
    here.send(make_key(0, number), np.arange(5))
    np.testing.assert_array_equal(there.receive(make_key(0, number), TIMEOUT_SECONDS), np.arange(5))


def test_process_of_an_earlier_epoch_ends_and_its_successor_is_accepted() -> None:
    cable = Cable(*WORKERS)
    old = make_link(cable, GPU, 0), make_link(cable, NPU, 0)
    begin_session(0, *old)
    send_tensor(0, *old)
    kill_link(cable, old[0])
    new = make_link(cable, GPU, 1)
    with pytest.raises(EpochOverError, match="'npu/0', is in epoch 0, but the run is in epoch 1") as caught:
        old[1].receive(make_key(1), TIMEOUT_SECONDS)
    assert "according to worker 'gpu/0'" in caught.value.why
    wait_until(lambda: NPU in cable._closed)
    successor = make_link(cable, NPU, 1)
    begin_session(1, new, successor)
    send_tensor(0, new, successor)
    close_all(new, successor, *old)


def test_wait_for_a_stale_peer_reports_its_epoch() -> None:
    """The stale process does not learn of the new one: AUTH messages to it are lost."""
    cable = Cable(*WORKERS)
    old = make_link(cable, GPU, 0), make_link(cable, NPU, 0)
    begin_session(0, *old)
    kill_link(cable, old[0])
    cable.frame_filter = lambda passage: (
        () if passage.source == GPU and b'"AUTH"' in passage.frame else (passage.frame,)
    )
    new = make_link(cable, GPU, 1, Deadlines(patience=2.5, silence=0.8, grace=0.2))
    with pytest.raises(StaleWorkerError, match="'npu/0' is still in a session of epoch 0, which does not include"):
        new.take("SESSION", TIMEOUT_SECONDS)
    kill_link(cable, old[1])
    close_all(new, *old)


def test_worker_of_a_new_launcher_is_accepted_after_silence() -> None:
    """A new process of an earlier epoch belongs to a new launcher if the process known before is silent."""
    cable = Cable(*WORKERS)
    earlier = make_link(cable, GPU, 1), make_link(cable, NPU, 1)
    begin_session(1, *earlier)
    send_tensor(0, *earlier)
    kill_link(cable, earlier[0])
    new = make_link(cable, GPU, 0)
    with pytest.raises(PeerRestartedError, match="'gpu/0' was restarted by a new launcher"):
        earlier[1].receive(make_key(1), TIMEOUT_SECONDS)
    wait_until(lambda: NPU in cable._closed)
    successor = make_link(cable, NPU, 2)
    begin_session(2, new, successor)
    send_tensor(0, new, successor)
    close_all(new, successor, *earlier)


def test_disconnected_worker_of_an_earlier_epoch_does_not_disturb_a_session(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "home")
    certificates.issue(GPU, NPU)
    address, waits = find_free_address(), list[Wait]()

    def make_links(here: str, there: str | None, epoch: int, listen: str | None = None) -> GrpcLinks:
        peers = {NPU if here == GPU else GPU: there}
        own_place = Place(RUN, here, peers, listen, credentials=certificates.of(here), epoch=epoch)
        return GrpcLinks(own_place, deadlines=_DEADLINES, announce=waits.append)

    proxy = TcpProxy(address)
    gpu, frozen = make_links(GPU, None, 0, address), make_links(NPU, proxy.address, 0)
    begin_session(0, gpu.links[NPU], frozen.links[GPU])
    proxy.is_forwarding = False
    gpu.links[NPU].lost(LinkClosedError("it is killed"))
    gpu.close()
    here, there = (
        (links := make_links(GPU, None, 1, address)).links[NPU],
        (new_peer := make_links(NPU, address, 1)).links[GPU],
    )
    begin_session(1, here, there)
    send_tensor(0, here, there)
    proxy.is_forwarding = True
    proxy.disconnect()
    with pytest.raises(EpochOverError, match="is in epoch 0, but the run is in epoch 1"):
        frozen.links[GPU].receive(make_key(1), TIMEOUT_SECONDS)
    for number in (1, 2):
        send_tensor(number, here, there)
    wait_until(lambda: here.state().connected and there.state().connected)
    close_all(links, new_peer, frozen)
    proxy.close()


@pytest.mark.parametrize(
    "knocks",
    [
        pytest.param(False, id="its old process is alive"),
        pytest.param(True, id="a new process of it has connected", marks=pytest.mark.grid),
    ],
)
def test_worker_that_is_left_out_ends_and_its_successor_arrives(tmp_path: Path, knocks: bool) -> None:
    certificates = Certificates(tmp_path / "home")
    certificates.issue(GPU, NPU)
    address, arrived = find_free_address(), list[dict[str, int]]()

    def make_place(here: str, there: str | None, listen: str | None = None, epoch: int = 0) -> Place:
        peers = {NPU if here == GPU else GPU: there}
        return Place(
            RUN, here, peers, listen, credentials=certificates.of(here), epoch=epoch, absent=(), launched=(here,),
            anchor=GPU,
        )  # fmt: skip

    def open_npu(epoch: int) -> GrpcLinks:
        return GrpcLinks(make_place(NPU, address, epoch=epoch), deadlines=_DEADLINES)

    gpu = GrpcLinks(
        make_place(GPU, None, address), deadlines=_DEADLINES, arrive=lambda error: arrived.append(error.counts)
    )
    old, link = open_npu(0), gpu.links[NPU]
    begin_session(0, link, old.links[GPU])
    send_tensor(0, link, old.links[GPU])
    new = open_npu(1) if knocks else None
    if knocks:
        with pytest.raises(EpochOverError):
            link.receive(make_key(1, 1, NPU, GPU), TIMEOUT_SECONDS)
    link.fail({"what": "the run went on without 'npu'"})
    gpu.await_return([NPU])
    if not knocks:
        with pytest.raises(RemoteFailureError, match="the run went on without 'npu'"):
            old.links[GPU].receive(make_key(1, 1), TIMEOUT_SECONDS)
    new = new or open_npu(1)
    wait_until(lambda: arrived)
    assert arrived[0] == {NPU: 1}
    close_all(gpu, old, new)


def test_absent_worker_waits_beyond_its_patience_while_the_others_run_without_it(tmp_path: Path) -> None:
    """Afterwards a new process of the other worker begins a session with it."""
    certificates = Certificates(tmp_path / "home")
    certificates.issue(GPU, NPU)
    address, waits, common = find_free_address(), list[Wait](), {"launched": (GPU,), "anchor": GPU}
    impatient = Deadlines(patience=6.0, silence=4.0, grace=0.2, connect=2.0, check_interval=0.05)

    def open_gpu(epoch: int, *, alone: bool) -> GrpcLinks:
        place = Place(RUN, GPU, {} if alone else {NPU: None}, address, credentials=certificates.of(GPU), epoch=epoch)
        absent = {"absent": (NPU,), "joining": {NPU: None}} if alone else {"absent": ()}
        return GrpcLinks(replace(place, all_workers=WORKERS, **absent, **common), deadlines=_DEADLINES)

    gpu = open_gpu(0, alone=True)
    place = Place(
        RUN, NPU, {GPU: address}, credentials=certificates.of(NPU), absent=(), **{**common, "launched": (NPU,)}
    )
    npu = GrpcLinks(place, deadlines=impatient, announce=waits.append)
    with pytest.raises(DeadlineError):
        npu.links[GPU].take("SESSION", 1.3 * impatient.patience)
    assert npu.is_absent() and "was started without npu/0" in waits[-1].reason and waits[-1].limit is None
    gpu.close()
    gpu = open_gpu(1, alone=False)
    begin_session(1, gpu.links[NPU], npu.links[GPU])
    send_tensor(0, gpu.links[NPU], npu.links[GPU])
    close_all(gpu, npu)


def test_worker_whose_patience_ended_is_not_missing(tmp_path: Path) -> None:
    """Only npu/0 has never connected: npu/1 waited for it, and ended before gpu/0 does."""
    other, address = "npu/1", find_free_address()
    everyone = (GPU, NPU, other)
    certificates = Certificates(tmp_path / "home")
    certificates.issue(GPU, other)

    def open_session(here: str, peers: dict[str, str | None], listen: str | None = None) -> Session:
        credentials = certificates.of(here)
        links = GrpcLinks(
            Place(RUN, here, peers, listen, credentials=credentials, all_workers=everyone), deadlines=_DEADLINES
        )
        return Session(here, dict(links.links), TIMEOUT_SECONDS, leave=links.close)

    gpu, npu = open_session(GPU, {NPU: None, other: None}, address), open_session(other, {GPU: address})
    wait_until(lambda: gpu.links[other].state().connected)
    npu.fail(DeadlineError("worker 'npu/0' did not connect within 30 s"))
    npu.close()
    with pytest.raises(RemoteFailureError, match="did not connect"):
        gpu.links[other].receive(make_key(1, 1, other, GPU), TIMEOUT_SECONDS)
    assert gpu.find_missing_peers() == (NPU,)
    gpu.close()

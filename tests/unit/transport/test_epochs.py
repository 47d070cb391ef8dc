"""Workers of different epochs of a run on one line: a frozen one returns, and meets a restarted one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.simulation.carrier import Cable
from tests.unit.gateway.town import until
from tests.unit.transport.cable import GPU, NPU, SOON, WORKERS, close_all, key, step, wait_for_threads
from tests.unit.transport.crossing import RUN, Certificates, Line, free_address
from whale_nebula.errors import EpochOverError, LinkClosedError, PeerRestartedError, StaleWorkerError
from whale_nebula.transport.deadlines import Deadlines, Wait
from whale_nebula.transport.grpc.links import GrpcLinks, Place
from whale_nebula.transport.peer import PeerLink
from whale_nebula.wire.greeting import Greeting

_DEADLINES = Deadlines(patience=SOON, silence=4.0, grace=0.2, connect=2.0, look=0.05)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    wait_for_threads()


def link(cable: Cable, here: str, epoch: int, deadlines: Deadlines = _DEADLINES) -> PeerLink:
    """A link of a process of this epoch, in place of the one that this end of the cable had before."""
    end = next(each for each in cable.ends if each.here == here)
    return PeerLink(end, Greeting("run-1", end.here, end.there, epoch=epoch), WORKERS, deadlines=deadlines)


def kill(cable: Cable, one: PeerLink) -> None:
    """A process is no more: its link says no farewell."""
    one.lost(LinkClosedError("it is killed"))
    until(lambda: one.here in cable._closed)


def begin(epoch: int, *links: PeerLink) -> None:
    """What the session of all workers does: each says who it is, and all agree on the epoch."""
    for each in links:
        each.post({"kind": "SESSION", "about": "HELLO", "epoch": epoch})
    for each in links:
        each.take("SESSION", SOON)
        each.begin_session(epoch)


def cross(number: int, here: PeerLink, there: PeerLink) -> None:
    """A tensor of one step."""
    for each in (here, there):
        each.post(step(number))
    here.send(key(0, number), np.arange(5))
    np.testing.assert_array_equal(there.receive(key(0, number), SOON), np.arange(5))


def test_a_process_of_an_earlier_epoch_ends_when_it_meets_one_of_a_later_and_that_one_waits_for_its_like() -> None:
    cable = Cable(*WORKERS)
    old = link(cable, GPU, 0), link(cable, NPU, 0)
    begin(0, *old)
    cross(0, *old)
    kill(cable, old[0])
    new = link(cable, GPU, 1)
    with pytest.raises(EpochOverError, match="'npu/0', is in epoch 0, but the run is in epoch 1") as over:
        old[1].receive(key(1), SOON)
    assert "according to worker 'gpu/0'" in over.value.why
    until(lambda: NPU in cable._closed)
    again = link(cable, NPU, 1)
    begin(1, new, again)
    cross(0, new, again)
    close_all(new, again, *old)


def test_who_waits_in_vain_for_another_process_than_an_old_one_says_so() -> None:
    """The old one hears nothing of it: its words are lost on the way."""
    cable = Cable(*WORKERS)
    old = link(cable, GPU, 0), link(cable, NPU, 0)
    begin(0, *old)
    kill(cable, old[0])
    cable.plan = lambda passage: () if passage.source == GPU and b'"AUTH"' in passage.frame else (passage.frame,)
    new = link(cable, GPU, 1, Deadlines(patience=2.5, silence=0.8, grace=0.2))
    with pytest.raises(StaleWorkerError, match="'npu/0' is still in a session of epoch 0, which does not include"):
        new.take("SESSION", SOON)
    kill(cable, old[1])
    close_all(new, *old)


def test_a_launcher_that_knows_of_no_epoch_is_not_kept_out_for_ever() -> None:
    """A fresh process of an earlier epoch is that of a new launcher, where the one that was met is silent."""
    cable = Cable(*WORKERS)
    met = link(cable, GPU, 1), link(cable, NPU, 1)
    begin(1, *met)
    cross(0, *met)
    kill(cable, met[0])
    new = link(cable, GPU, 0)
    with pytest.raises(PeerRestartedError, match="'gpu/0' was restarted by a new launcher"):
        met[1].receive(key(1), SOON)
    until(lambda: NPU in cable._closed)
    again = link(cable, NPU, 2)
    begin(2, new, again)
    cross(0, new, again)
    close_all(new, again, *met)


def test_over_grpc_who_was_cut_off_cannot_disturb_the_session_of_a_later_epoch(tmp_path: Path) -> None:
    trusted = Certificates(tmp_path / "home")
    trusted.issue(GPU, NPU)
    address, waits = free_address(), list[Wait]()

    def place(here: str, there: str | None, epoch: int, listen: str | None = None) -> GrpcLinks:
        known = {NPU if here == GPU else GPU: there}
        where = Place(RUN, here, known, listen, credentials=trusted.of(here), epoch=epoch)
        return GrpcLinks(where, deadlines=_DEADLINES, announce=waits.append)

    line = Line(address)
    gpu, frozen = place(GPU, None, 0, address), place(NPU, line.address, 0)
    begin(0, gpu.links[NPU], frozen.links[GPU])
    line.passes = False
    gpu.links[NPU].lost(LinkClosedError("it is killed"))
    gpu.close()
    here, there = (links := place(GPU, None, 1, address)).links[NPU], (present := place(NPU, address, 1)).links[GPU]
    begin(1, here, there)
    cross(0, here, there)
    line.passes = True
    line.cut()
    with pytest.raises(EpochOverError, match="is in epoch 0, but the run is in epoch 1"):
        frozen.links[GPU].receive(key(1), SOON)
    for number in (1, 2):
        cross(number, here, there)
    until(lambda: here.state().connected and there.state().connected)
    close_all(links, present, frozen)
    line.close()

"""The control stream of two gateways: heads that are kept or refused, notices of lost workers, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.gateway.town import certificates, until
from whale_nebula.errors import RemoteProtocolError, TransportError
from whale_nebula.gateway import control
from whale_nebula.gateway.control import ControlStreams
from whale_nebula.security import Credentials, Files, Identity
from whale_nebula.security.audit import Head, KeptHeads, read_heads
from whale_nebula.transport.grpc.connection import Lane
from whale_nebula.transport.grpc.limits import TokenBucket
from whale_nebula.wire.frame import HEADER_BYTES, Flag, Header, Kind, pack

GPU, NPU = (Identity("mt", cluster, "gateway") for cluster in ("gpu", "npu"))


@pytest.fixture(scope="module")
def files() -> Iterator[dict[str, Files]]:
    with certificates() as made:
        yield made


class Side:
    """The control streams of one gateway, and what it was told."""

    def __init__(self, there: Identity, kept: KeptHeads | None = None) -> None:
        self.gone: list[tuple[str, str]] = []
        self.noted: list[dict[str, Any]] = []
        self.control = ControlStreams(
            there, kept, lambda *told: self.gone.append(told), lambda action, **said: self.noted.append(said)
        )
        self.lane = self.joined()

    def joined(self) -> Lane:
        lane = Lane()
        self.control.adopt(lane)
        return lane

    def next(self, lane: Lane | None = None) -> bytes:
        return next((lane or self.lane).outgoing())


@pytest.fixture
def make() -> Iterator[Callable[..., Side]]:
    made: list[Side] = []

    def one(*given: Any) -> Side:
        made.append(Side(*given))
        return made[-1]

    yield one
    for side in made:
        side.control.close()


class TestHeads:
    def sides(self, make: Callable[..., Side], files: dict[str, Files], folder: Path) -> tuple[Side, Side, Credentials]:
        credentials = Credentials.load(files["gpu/gateway"])
        return make(NPU), make(GPU, KeptHeads(folder / "heads.jsonl", credentials.trust)), credentials

    def test_one_that_is_kept_is_confirmed(
        self, make: Callable[..., Side], files: dict[str, Files], tmp_path: Path
    ) -> None:
        gpu, npu, credentials = self.sides(make, files, tmp_path)
        head = Head.sign(credentials, 7, "ab" * 32)
        gpu.control.send_head(head)
        npu.control.receive(gpu.next())
        assert not gpu.control.wait_kept(0.0)
        gpu.control.receive(npu.next())
        assert gpu.control.wait_kept(10.0)
        assert list(read_heads(tmp_path / "heads.jsonl")) == [head]

    def test_one_that_goes_back_is_refused_and_both_sides_know(
        self, make: Callable[..., Side], files: dict[str, Files], tmp_path: Path
    ) -> None:
        gpu, npu, credentials = self.sides(make, files, tmp_path)
        for number, digest in ((7, "ab" * 32), (5, "cd" * 32)):
            gpu.control.send_head(Head.sign(credentials, number, digest))
            npu.control.receive(gpu.next())
            gpu.control.receive(npu.next())
        assert "was rewritten or rolled back" in npu.noted[-1]["reason"]
        assert "was rewritten or rolled back" in gpu.noted[-1]["reason"]

    def test_a_fresh_stream_begins_with_the_last_one(self, make: Callable[..., Side], files: dict[str, Files]) -> None:
        gpu = make(NPU)
        gpu.lane.end("a test")
        head = Head.sign(Credentials.load(files["gpu/gateway"]), 7, "ab" * 32)
        gpu.control.send_head(head)
        assert control.read(gpu.next(gpu.joined()))["head"] == head._asdict()


class TestWhoIsGone:
    def test_it_is_heard_once_though_it_is_said_over_every_stream(self, make: Callable[..., Side]) -> None:
        gpu, npu = make(NPU), make(GPU)
        second = gpu.joined()
        gpu.control.send_gone("gpu/0", "its port refuses")
        for lane in (gpu.lane, second):
            npu.control.receive(gpu.next(lane))
        assert npu.gone == [("gpu/0", "its port refuses")]

    def test_it_is_said_later_if_there_is_no_stream(self, make: Callable[..., Side]) -> None:
        gpu, npu = make(NPU), make(GPU)
        gpu.lane.end("the line is cut")
        gpu.control.send_gone("gpu/0", "its port refuses")
        npu.control.receive(gpu.next(gpu.joined()))
        assert npu.gone == [("gpu/0", "its port refuses")]

    def test_but_not_once_the_worker_is_back(self, make: Callable[..., Side]) -> None:
        gpu = make(NPU)
        gpu.lane.end("the line is cut")
        gpu.control.send_gone("gpu/0", "its port refuses")
        gpu.control.unsay("gpu/0")
        lane = gpu.joined()
        gpu.control.send_gone("gpu/1", "its port refuses")
        assert control.read(gpu.next(lane))["worker"] == "gpu/1"

    def test_a_gateway_speaks_of_its_own_workers_only(self, make: Callable[..., Side]) -> None:
        said = {"kind": "GONE", "id": "00", "worker": "npu/0", "why": "a lie"}
        with pytest.raises(RemoteProtocolError, match="which is not its worker"):
            make(GPU).control.receive(control.encode_control(said))


class TestHowMuch:
    def test_words_in_numbers_wait(self, make: Callable[..., Side]) -> None:
        side = make(NPU)
        side.control._words = TokenBucket(2, 0.0)
        heard: list[int] = []

        def hear() -> None:
            for number in range(3):
                side.control.receive(control.encode_control({"kind": "REFUSED", "seq": number, "why": "no"}))
                heard.append(number)

        thread = threading.Thread(target=hear)
        thread.start()
        until(lambda: len(heard) == 2)
        thread.join(0.05)
        assert len(side.noted) == 2
        side.control.close()  # nobody waits any longer
        thread.join(10.0)
        assert heard == [0, 1, 2]

    def test_streams_in_numbers_end_the_oldest_ones(self, make: Callable[..., Side]) -> None:
        side = make(NPU)
        lanes = [side.lane, *(side.joined() for _ in range(5))]
        assert [lane.over for lane in lanes] == [True, True, False, False, False, False]

    def test_streams_that_come_too_often_are_refused(self, make: Callable[..., Side]) -> None:
        side = make(NPU)
        side.control._adoptions = TokenBucket(1, 0.0)
        side.control.check_rate()
        with pytest.raises(TransportError, match="too many new streams"):
            side.control.check_rate()


class TestWhatIsNoWord:
    @pytest.mark.parametrize(
        "said", [{"kind": "STOP"}, {"kind": "GONE"}, {"kind": "HEAD", "head": 1}, {"kind": "KEPT", "seq": "1"}]
    )
    def test_messages(self, make: Callable[..., Side], said: dict[str, Any]) -> None:
        with pytest.raises(RemoteProtocolError, match="unknown message between gateways"):
            make(GPU).control.receive(control.encode_control(said))

    @pytest.mark.parametrize(
        "frame",
        [
            b"",
            bytes(70_000),
            control.encode_control({"kind": "KEPT", "seq": 1})[:-1],
            control.encode_control({"kind": "KEPT", "seq": 1})[:-1] + b"x",
            pack(Header(Kind.BEAT, Flag.LAST), 0),
            bytes(HEADER_BYTES),
        ],
        ids=["nothing", "long", "short", "changed", "beat", "zeros"],
    )
    def test_frames(self, make: Callable[..., Side], frame: bytes) -> None:
        with pytest.raises(RemoteProtocolError):
            make(GPU).control.receive(frame)


def test_a_stream_that_comes_after_the_end_is_ended(make: Callable[..., Side]) -> None:
    gpu = make(NPU)
    gpu.control.close()
    until(lambda: gpu.lane.over)
    assert gpu.joined().over
    assert not gpu.control.up

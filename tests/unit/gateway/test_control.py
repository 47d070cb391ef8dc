"""The control stream of two gateways: heads that are kept or refused, notices of lost workers, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.gateway.networks import issue_certificates, wait_until
from whale_nebula.errors import RemoteProtocolError, TransportError
from whale_nebula.gateway import control
from whale_nebula.gateway.control import ControlStreams
from whale_nebula.security import Credentials, Files, Identity
from whale_nebula.security.audit import Head, KeptHeads, read_heads
from whale_nebula.transport.grpc.connection import Lane
from whale_nebula.transport.grpc.limits import TokenBucket
from whale_nebula.wire.frame import HEADER_BYTES, Flag, Header, Kind, pack_header

GPU, NPU = (Identity("mt", cluster, "gateway") for cluster in ("gpu", "npu"))


@pytest.fixture(scope="module")
def files() -> Iterator[dict[str, Files]]:
    with issue_certificates() as gateway_files:
        yield gateway_files


class ControlSide:
    """The control streams of one gateway, with the lost workers that it handled and its records."""

    def __init__(self, there: Identity, stored_heads: KeptHeads | None = None) -> None:
        self.lost_workers: list[tuple[str, str]] = []
        self.records: list[dict[str, Any]] = []
        self.control = ControlStreams(
            there,
            stored_heads,
            lambda *lost: self.lost_workers.append(lost),
            lambda action, **fields: self.records.append(fields),
        )
        self.lane = self.add_stream()

    def add_stream(self) -> Lane:
        lane = Lane()
        self.control.add_stream(lane)
        return lane

    def next(self, lane: Lane | None = None) -> bytes:
        return next((lane or self.lane).yield_frames())


@pytest.fixture
def make_side() -> Iterator[Callable[..., ControlSide]]:
    sides: list[ControlSide] = []

    def make_one(*arguments: Any) -> ControlSide:
        sides.append(ControlSide(*arguments))
        return sides[-1]

    yield make_one
    for side in sides:
        side.control.close()


class TestHeads:
    def make_sides(
        self, make_side: Callable[..., ControlSide], files: dict[str, Files], folder: Path
    ) -> tuple[ControlSide, ControlSide, Credentials]:
        credentials = Credentials.load(files["gpu/gateway"])
        return make_side(NPU), make_side(GPU, KeptHeads(folder / "heads.jsonl", credentials.trust)), credentials

    def test_stored_head_is_confirmed(
        self, make_side: Callable[..., ControlSide], files: dict[str, Files], tmp_path: Path
    ) -> None:
        gpu, npu, credentials = self.make_sides(make_side, files, tmp_path)
        head = Head.sign(credentials, 7, "ab" * 32)
        gpu.control.send_head(head)
        npu.control.receive(gpu.next())
        assert not gpu.control.wait_head_stored(0.0)
        gpu.control.receive(npu.next())
        assert gpu.control.wait_head_stored(10.0)
        assert list(read_heads(tmp_path / "heads.jsonl")) == [head]

    def test_rolled_back_head_is_refused_and_recorded_on_both_sides(
        self, make_side: Callable[..., ControlSide], files: dict[str, Files], tmp_path: Path
    ) -> None:
        gpu, npu, credentials = self.make_sides(make_side, files, tmp_path)
        for number, digest in ((7, "ab" * 32), (5, "cd" * 32)):
            gpu.control.send_head(Head.sign(credentials, number, digest))
            npu.control.receive(gpu.next())
            gpu.control.receive(npu.next())
        assert "was rewritten or rolled back" in npu.records[-1]["reason"]
        assert "was rewritten or rolled back" in gpu.records[-1]["reason"]

    def test_new_stream_begins_with_the_last_head(
        self, make_side: Callable[..., ControlSide], files: dict[str, Files]
    ) -> None:
        gpu = make_side(NPU)
        gpu.lane.end("a test")
        head = Head.sign(Credentials.load(files["gpu/gateway"]), 7, "ab" * 32)
        gpu.control.send_head(head)
        assert control.decode_control(gpu.next(gpu.add_stream()))["head"] == head._asdict()


class TestLostWorkers:
    def test_lost_worker_is_handled_once_from_several_streams(self, make_side: Callable[..., ControlSide]) -> None:
        gpu, npu = make_side(NPU), make_side(GPU)
        second = gpu.add_stream()
        gpu.control.announce_lost("gpu/0", "its port refuses")
        for lane in (gpu.lane, second):
            npu.control.receive(gpu.next(lane))
        assert npu.lost_workers == [("gpu/0", "its port refuses")]

    def test_lost_worker_is_announced_on_a_later_stream(self, make_side: Callable[..., ControlSide]) -> None:
        gpu, npu = make_side(NPU), make_side(GPU)
        gpu.lane.end("the line is cut")
        gpu.control.announce_lost("gpu/0", "its port refuses")
        npu.control.receive(gpu.next(gpu.add_stream()))
        assert npu.lost_workers == [("gpu/0", "its port refuses")]

    def test_returned_worker_is_not_announced_later(self, make_side: Callable[..., ControlSide]) -> None:
        gpu = make_side(NPU)
        gpu.lane.end("the line is cut")
        gpu.control.announce_lost("gpu/0", "its port refuses")
        gpu.control.withdraw_lost("gpu/0")
        lane = gpu.add_stream()
        gpu.control.announce_lost("gpu/1", "its port refuses")
        assert control.decode_control(gpu.next(lane))["worker"] == "gpu/1"

    def test_notice_about_a_worker_of_another_cluster_is_refused(self, make_side: Callable[..., ControlSide]) -> None:
        message = {"kind": "GONE", "id": "00", "worker": "npu/0", "why": "a lie"}
        with pytest.raises(RemoteProtocolError, match="which is not its worker"):
            make_side(GPU).control.receive(control.encode_control(message))


class TestRateLimits:
    def test_frequent_messages_wait(self, make_side: Callable[..., ControlSide]) -> None:
        side = make_side(NPU)
        side.control._message_bucket = TokenBucket(2, 0.0)
        received_numbers: list[int] = []

        def receive_messages() -> None:
            for number in range(3):
                side.control.receive(control.encode_control({"kind": "REFUSED", "seq": number, "why": "no"}))
                received_numbers.append(number)

        thread = threading.Thread(target=receive_messages)
        thread.start()
        wait_until(lambda: len(received_numbers) == 2)
        thread.join(0.05)
        assert len(side.records) == 2
        side.control.close()  # nobody waits any longer
        thread.join(10.0)
        assert received_numbers == [0, 1, 2]

    def test_surplus_streams_end_the_oldest(self, make_side: Callable[..., ControlSide]) -> None:
        side = make_side(NPU)
        lanes = [side.lane, *(side.add_stream() for _ in range(5))]
        assert [lane.is_over for lane in lanes] == [True, True, False, False, False, False]

    def test_frequent_new_streams_are_refused(self, make_side: Callable[..., ControlSide]) -> None:
        side = make_side(NPU)
        side.control._stream_bucket = TokenBucket(1, 0.0)
        side.control.check_rate()
        with pytest.raises(TransportError, match="too many new streams"):
            side.control.check_rate()


class TestInvalidMessages:
    @pytest.mark.parametrize(
        "message", [{"kind": "STOP"}, {"kind": "GONE"}, {"kind": "HEAD", "head": 1}, {"kind": "KEPT", "seq": "1"}]
    )
    def test_unknown_or_invalid_message_is_refused(
        self, make_side: Callable[..., ControlSide], message: dict[str, Any]
    ) -> None:
        with pytest.raises(RemoteProtocolError, match="unknown message between gateways"):
            make_side(GPU).control.receive(control.encode_control(message))

    @pytest.mark.parametrize(
        "frame",
        [
            b"",
            bytes(70_000),
            control.encode_control({"kind": "KEPT", "seq": 1})[:-1],
            control.encode_control({"kind": "KEPT", "seq": 1})[:-1] + b"x",
            pack_header(Header(Kind.BEAT, Flag.LAST), 0),
            bytes(HEADER_BYTES),
        ],
        ids=["nothing", "long", "short", "changed", "beat", "zeros"],
    )
    def test_invalid_frame_is_refused(self, make_side: Callable[..., ControlSide], frame: bytes) -> None:
        with pytest.raises(RemoteProtocolError):
            make_side(GPU).control.receive(frame)


def test_stream_added_after_close_is_ended(make_side: Callable[..., ControlSide]) -> None:
    gpu = make_side(NPU)
    gpu.control.close()
    wait_until(lambda: gpu.lane.is_over)
    assert gpu.add_stream().is_over
    assert not gpu.control.is_connected

"""Links over an unreliable carrier: both ends in this process, on a cable with planned faults."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest

from tests.simulation.carrier import Cable, Passage
from tests.unit.transport.link_pairs import (
    TIMEOUT_SECONDS,
    WORKERS,
    LinkPair,
    build_step_message,
    make_back_key,
    make_key,
    wait_for_threads,
)
from whale_nebula.errors import (
    DeadlineError,
    LinkClosedError,
    LocalProtocolError,
    RemoteFailureError,
    RemoteProtocolError,
)
from whale_nebula.transport import peer
from whale_nebula.transport.base import FaultPolicy, lost_error
from whale_nebula.transport.deadlines import Deadlines, Wait
from whale_nebula.transport.peer import PeerLink
from whale_nebula.transport.protocol import Key
from whale_nebula.wire.buffers import Bound
from whale_nebula.wire.frame import CHUNK_BYTES, HEADER_BYTES, Kind, compute_checksum, pack_header, unpack_header
from whale_nebula.wire.greeting import Greeting


@pytest.fixture
def make_pair() -> Iterator[Callable[..., LinkPair]]:
    pairs: list[LinkPair] = []

    def make_one(*arguments: object, **options: object) -> LinkPair:
        pairs.append(LinkPair(*arguments, **options))
        return pairs[-1]

    yield make_one
    for pair in pairs:
        pair.close()
    wait_for_threads()


def read_kind(frame: bytes) -> int:
    return unpack_header(frame[:HEADER_BYTES], sealed=True)[0].kind


def is_tensor(passage: Passage, source: str = "gpu/0") -> bool:
    return passage.source == source and read_kind(passage.frame) == Kind.BOUNDARY


class TestTransfer:
    def test_on_sent_reports_tensors(self, make_pair: Callable[..., LinkPair]) -> None:
        pair = make_pair()
        sent_reports: list[tuple[Key, int, float, float]] = []
        pair.here.on_sent = lambda *about: sent_reports.append(about)
        pair.announce_steps()
        pair.here.send(make_key(), np.zeros(2 * CHUNK_BYTES, np.uint8))
        pair.there.receive(make_key(), TIMEOUT_SECONDS)
        pair.close()
        ((about, size, began, ended),) = sent_reports
        assert (about, size) == (make_key(), 2 * (CHUNK_BYTES + HEADER_BYTES))
        assert began <= ended

    def test_close_arrives_after_sent_tensors(self, make_pair: Callable[..., LinkPair]) -> None:
        pair = make_pair()
        big = np.ones(8 * CHUNK_BYTES, np.uint8)
        pair.here.post(build_step_message())
        pair.here.send(make_key(), big)
        pair.here.close()
        pair.here.close()
        np.testing.assert_array_equal(pair.there.receive(make_key(), TIMEOUT_SECONDS), big)
        with pytest.raises(LinkClosedError, match="'gpu/0' has closed its link"):
            pair.there.receive(make_key(1), TIMEOUT_SECONDS)
        with pytest.raises(LinkClosedError, match="has closed its link to 'npu/0'"):
            pair.here.receive(make_back_key(), TIMEOUT_SECONDS)

    def test_last_failure_arrives_after_sent_tensors(self, make_pair: Callable[..., LinkPair]) -> None:
        """The other side may still send, and an immediate failure may follow."""
        pair = make_pair()
        pair.announce_steps()
        big = np.ones(8 * CHUNK_BYTES, np.uint8)
        pair.here.send(make_key(), big)
        for _ in range(2):
            pair.here.fail({"what": "a NaN"}, last=True)
        np.testing.assert_array_equal(pair.there.receive(make_key(), TIMEOUT_SECONDS), big)
        with pytest.raises(RemoteFailureError, match="'gpu/0' failed: a NaN"):
            pair.there.receive(make_key(1), TIMEOUT_SECONDS)
        pair.there.send(make_back_key(), np.zeros(3))
        assert pair.here.receive(make_back_key(), TIMEOUT_SECONDS).shape == (3,)
        pair.here.fail({"what": "a NaN"})

    def test_tensor_before_a_step_fails_its_sender(self, make_pair: Callable[..., LinkPair]) -> None:
        pair = make_pair()
        pair.here.send(make_key(), np.zeros(3))  # no step was announced
        with pytest.raises(LocalProtocolError, match="invalid outgoing frame"):
            pair.here.receive(make_back_key(), TIMEOUT_SECONDS)
        with pytest.raises(RemoteFailureError, match="invalid outgoing frame"):
            pair.there.receive(make_key(), TIMEOUT_SECONDS)


class TestInvalidFrames:
    def test_repeated_gap_without_a_window_ends_the_link(self, make_pair: Callable[..., LinkPair]) -> None:
        """Each gap breaks the connection; the same gap again is no accident."""
        missing = {"tensor": 2}

        def lose_tensor(passage: Passage) -> Iterable[bytes]:
            first = is_tensor(passage) and unpack_header(passage.frame[:HEADER_BYTES])[0].slot == 0
            if first and missing["tensor"]:
                missing["tensor"] -= 1
                return ()
            return (passage.frame,)

        pair = make_pair(lose_tensor, window=0)
        pair.announce_steps()
        for slot in range(4):
            pair.here.send(make_key(slot), np.arange(3))
        with pytest.raises(RemoteProtocolError, match="but expected frame"):
            pair.there.receive(make_key(3), TIMEOUT_SECONDS)
        with pytest.raises(RemoteFailureError, match="invalid data from 'gpu/0'"):
            pair.here.receive(make_back_key(), TIMEOUT_SECONDS)

    def test_repeated_damage_ends_the_link(self, make_pair: Callable[..., LinkPair]) -> None:
        def damage_tensors(passage: Passage) -> Iterable[bytes]:
            return (passage.frame[:-1] + b"?",) if is_tensor(passage) else (passage.frame,)

        pair = make_pair(damage_tensors)
        pair.announce_steps()
        pair.here.send(make_key(), np.arange(1000))
        with pytest.raises(RemoteProtocolError, match="checksum"):
            pair.there.receive(make_key(), TIMEOUT_SECONDS)

    def test_tensor_outside_the_plan_fails_both_sides(self, make_pair: Callable[..., LinkPair]) -> None:
        pair = make_pair(expect={make_key(0): Bound("float32", (4,))}.get)
        pair.announce_steps()
        pair.here.send(make_key(0), np.zeros(3, np.float32))
        assert pair.there.receive(make_key(0), TIMEOUT_SECONDS).shape == (3,)
        pair.here.send(make_key(1), np.zeros(3, np.float32))
        with pytest.raises(RemoteProtocolError, match="is not in the plan"):
            pair.there.receive(make_key(1), TIMEOUT_SECONDS)
        with pytest.raises(RemoteFailureError, match="'npu/0' failed"):
            pair.here.receive(make_back_key(), TIMEOUT_SECONDS)


class TestUnexpectedErrors:
    def test_unexpected_exception_is_reported_to_both_sides(
        self, make_pair: Callable[..., LinkPair], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pair = make_pair()
        pair.announce_steps()
        pair.there.take("SESSION", TIMEOUT_SECONDS)

        def overflow(message: dict[str, object]) -> None:
            if message.get("step") == 1:  # only here: the report of it must reach the other side
                raise OverflowError("int too large to convert to float")

        monkeypatch.setattr(peer, "check_message", overflow)
        pair.here.post(build_step_message(1))
        with pytest.raises(RemoteProtocolError, match="cannot process received data"):
            pair.there.take("SESSION", TIMEOUT_SECONDS)
        with pytest.raises(RemoteFailureError, match="invalid data from"):
            pair.here.receive(make_back_key(), TIMEOUT_SECONDS)

    def test_liveness_check_survives_an_exception(
        self, make_pair: Callable[..., LinkPair], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checks = threading.Semaphore(0)

        def fail(link: PeerLink) -> None:
            checks.release()
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(PeerLink, "_check_liveness", fail)
        make_pair(deadlines=Deadlines(patience=TIMEOUT_SECONDS, silence=0.08, grace=2.0))
        for _ in range(6):  # of two links
            assert checks.acquire(timeout=TIMEOUT_SECONDS)

    def test_close_ends_without_acknowledgements(
        self, make_pair: Callable[..., LinkPair], caplog: pytest.LogCaptureFixture
    ) -> None:
        pair = make_pair(deadlines=Deadlines(patience=TIMEOUT_SECONDS, silence=0.2, grace=0.1), budget=1 << 20)
        pair.connect(patience=0.4)
        pair.there._conversation._update_acknowledgement = lambda: 0  # heartbeats still arrive
        pair.here.send(make_key(), np.zeros(1000))
        closing = threading.Thread(target=pair.here.close, daemon=True)
        closing.start()
        closing.join(TIMEOUT_SECONDS)
        assert not closing.is_alive()


class TestBudget:
    def test_full_line_blocks_the_sender(self, make_pair: Callable[..., LinkPair]) -> None:
        may_continue = threading.Event()

        def block_tensors(passage: Passage) -> Iterable[bytes]:
            if is_tensor(passage):
                may_continue.wait(TIMEOUT_SECONDS)
            return (passage.frame,)

        pair = make_pair(
            block_tensors, budget=CHUNK_BYTES, deadlines=Deadlines(patience=0.1, silence=TIMEOUT_SECONDS, grace=1.0)
        )
        pair.here.post(build_step_message())
        with pytest.raises(DeadlineError, match=r"0\.1 s to send to worker 'npu/0'"):
            for slot in range(20):
                pair.here.send(make_key(slot), np.zeros(CHUNK_BYTES, np.uint8))
        may_continue.set()


class TestAbsence:
    def test_dead_worker_is_reported_to_all_waits(self, make_pair: Callable[..., LinkPair]) -> None:
        pair = make_pair()
        pair.announce_steps()
        pair.there.take("SESSION", TIMEOUT_SECONDS)
        pair.cable.kill("npu/0", lost_error("npu/0", "its address refused twice"))
        for attempt in (
            lambda: pair.here.receive(make_back_key(), TIMEOUT_SECONDS),
            lambda: pair.here.send(make_key(), np.zeros(3)),
        ):
            with pytest.raises(LinkClosedError, match="worker 'npu/0' is gone"):
                attempt()
        pair.cable.kill("gpu/0", lost_error("gpu/0", "so that the other end has not to be waited for"))

    def test_silence_is_announced_and_ends_the_link(self, make_pair: Callable[..., LinkPair]) -> None:
        waits: list[Wait] = []
        deadlines = Deadlines(patience=TIMEOUT_SECONDS, silence=0.2, grace=0.2)
        pair = make_pair(deadlines=deadlines, announce=waits.append)
        pair.connect(patience=0.6)
        waits.clear()
        pair.cable.frame_filter = lambda passage: ()  # a hole: the connection stands, nothing comes
        with pytest.raises(DeadlineError, match=r"no message from worker 'npu/0' for 0\.6 s"):
            pair.here.receive(make_back_key(), TIMEOUT_SECONDS)
        about_npu = [wait for wait in waits if wait.target == "worker 'npu/0'"]
        assert about_npu[0].reason == "no messages from it"
        assert about_npu[0].limit == 0.6

    def test_peer_that_never_authenticates_counts_as_absent(self, make_pair: Callable[..., LinkPair]) -> None:
        """It repeats HELLO without AUTH; the patience ends as if nothing had arrived."""

        def drop_auth(passage: Passage) -> Iterable[bytes]:
            header = unpack_header(passage.frame[:HEADER_BYTES])[0]
            if header.conversation or b'"AUTH"' not in passage.frame:
                return (passage.frame,)
            assert is_ready.wait(TIMEOUT_SECONDS)
            pair.cable.disconnect("it was about to prove who it is")
            return ()

        is_ready = threading.Event()
        pair = make_pair(
            drop_auth, deadlines=Deadlines(patience=2.0, silence=0.2, grace=0.2), announce=lambda wait: None
        )
        is_ready.set()
        for link in (pair.here, pair.there):
            with pytest.raises(DeadlineError, match="did not connect within 2 s"):
                link.take("SESSION", TIMEOUT_SECONDS)
        assert pair.cable.ends[0].state().connections > 2

    def test_repeated_invalid_greeting_ends_the_link(self, make_pair: Callable[..., LinkPair]) -> None:
        """After a few attempts, before the patience ends."""

        def change_hello(passage: Passage) -> Iterable[bytes]:
            if passage.source == "gpu/0" or b'"HELLO"' not in passage.frame:
                return (passage.frame,)
            changed = passage.frame[HEADER_BYTES:].replace(b'"worker":"npu/0"', b'"worker":[[0,0]]')
            header = unpack_header(passage.frame[:HEADER_BYTES])[0]
            return (pack_header(header, compute_checksum(np.frombuffer(changed, np.uint8))) + changed,)

        pair = make_pair(change_hello)
        with pytest.raises(RemoteProtocolError, match="invalid HELLO in the greeting: worker"):
            pair.here.take("SESSION", TIMEOUT_SECONDS)
        assert pair.cable.ends[0].state().connections < 12

    def test_early_deadline_error_describes_the_link(self, make_pair: Callable[..., LinkPair]) -> None:
        """The error of a shorter deadline does not call a silent peer alive."""
        pair = make_pair(
            deadlines=Deadlines(patience=TIMEOUT_SECONDS, silence=0.2, grace=0.2), announce=lambda wait: None
        )
        pair.announce_steps()
        pair.there.take("SESSION", TIMEOUT_SECONDS)
        with pytest.raises(DeadlineError, match="'gpu/0' waited 0 s for worker 'npu/0'") as caught:
            pair.here.receive(make_back_key(), 0.0)
        assert "alive" in caught.value.why
        pair.cable.frame_filter = lambda passage: ()
        with pytest.raises(DeadlineError, match="no message from worker 'npu/0' for") as caught:
            pair.here.receive(make_back_key(1), 0.6)
        assert (caught.value.where, caught.value.why) == ("memory", "no messages from it")
        with pytest.raises(DeadlineError, match="no message from worker 'npu/0' for"):
            pair.here.take("AGREE", 0.0)
        for worker in WORKERS:
            pair.cable.kill(worker, lost_error(worker, "so that nobody waits for what does not come any more"))

    def test_heartbeats_keep_an_idle_link_alive(self, make_pair: Callable[..., LinkPair]) -> None:
        beats = threading.Semaphore(0)

        def count_beats(passage: Passage) -> Iterable[bytes]:
            if read_kind(passage.frame) == Kind.BEAT:
                beats.release()
            return (passage.frame,)

        waits: list[Wait] = []
        deadlines = Deadlines(patience=TIMEOUT_SECONDS, silence=1.5, grace=1.0)
        pair = make_pair(count_beats, deadlines=deadlines, announce=waits.append)
        pair.connect(patience=1.5)
        for _ in range(12):  # more than two seconds' worth, both ways
            assert beats.acquire(timeout=TIMEOUT_SECONDS)
        assert [wait for wait in waits if wait.reason == "no messages from it"] == []
        pair.here.send(make_key(), np.zeros(3))
        assert pair.there.receive(make_key(), TIMEOUT_SECONDS).shape == (3,)

    def test_absent_worker_is_announced_with_address_and_limit(self) -> None:
        waits: list[Wait] = []
        cable = Cable(*WORKERS)
        link = PeerLink(
            cable.ends[0],
            Greeting("run-1", *WORKERS),
            WORKERS,
            deadlines=Deadlines(patience=1.5, silence=0.2, grace=0.1),
            announce=waits.append,
        )
        with pytest.raises(DeadlineError, match=r"'npu/0' did not connect within 0\.1 s") as caught:
            link.take("SESSION", 0.1)
        assert (caught.value.why, "--cluster npu" in caught.value.mend) == ("there is no connection", True)
        with pytest.raises(DeadlineError, match=r"'npu/0' did not connect within 1\.5 s \(memory\)"):
            link.take("SESSION", TIMEOUT_SECONDS)
        assert (waits[0].target, waits[0].address, waits[0].limit) == ("worker 'npu/0'", "memory", 1.5)
        link.close()
        cable.ends[1].close()


def test_repeated_damage_at_one_frame_is_given_up() -> None:
    from whale_nebula.errors import DamagedFrameError

    faults = FaultPolicy()
    damage = DamagedFrameError("no")
    assert [faults.should_give_up(damage, 5) for _ in range(9)] == [False] * 8 + [True]
    assert not faults.should_give_up(damage, 6)

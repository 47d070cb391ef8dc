"""Links over an unreliable carrier: both ends in this process, on a cable with planned faults."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest

from tests.simulation.carrier import Cable, Passage
from tests.unit.transport.cable import SOON, WORKERS, Pair, back, key, step, wait_for_threads
from whale_nebula.errors import (
    DeadlineError,
    LinkClosedError,
    LocalProtocolError,
    RemoteFailureError,
    RemoteProtocolError,
)
from whale_nebula.transport import peer
from whale_nebula.transport.base import Faults, lost_error
from whale_nebula.transport.deadlines import Deadlines, Wait
from whale_nebula.transport.peer import PeerLink
from whale_nebula.transport.protocol import Key
from whale_nebula.wire.buffers import Bound
from whale_nebula.wire.frame import CHUNK_BYTES, HEADER_BYTES, Kind, checksum, pack, unpack
from whale_nebula.wire.greeting import Greeting


@pytest.fixture
def make() -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def one(*given: object, **options: object) -> Pair:
        pairs.append(Pair(*given, **options))
        return pairs[-1]

    yield one
    for pair in pairs:
        pair.close()
    wait_for_threads()


def kind_of(frame: bytes) -> int:
    return unpack(frame[:HEADER_BYTES], sealed=True)[0].kind


def tensor(passage: Passage, source: str = "gpu/0") -> bool:
    return passage.source == source and kind_of(passage.frame) == Kind.BOUNDARY


class TestUndisturbed:
    def test_on_sent_tells_of_tensors(self, make: Callable[..., Pair]) -> None:
        pair = make()
        told: list[tuple[Key, int, float, float]] = []
        pair.here.on_sent = lambda *about: told.append(about)
        pair.begin()
        pair.here.send(key(), np.zeros(2 * CHUNK_BYTES, np.uint8))
        pair.there.receive(key(), SOON)
        pair.close()
        ((about, size, began, ended),) = told
        assert (about, size) == (key(), 2 * (CHUNK_BYTES + HEADER_BYTES))
        assert began <= ended

    def test_a_close_comes_after_everything_that_was_sent(self, make: Callable[..., Pair]) -> None:
        pair = make()
        big = np.ones(8 * CHUNK_BYTES, np.uint8)
        pair.here.post(step())
        pair.here.send(key(), big)
        pair.here.close()
        pair.here.close()
        np.testing.assert_array_equal(pair.there.receive(key(), SOON), big)
        with pytest.raises(LinkClosedError, match="'gpu/0' has closed its link"):
            pair.there.receive(key(1), SOON)
        with pytest.raises(LinkClosedError, match="has closed its link to 'npu/0'"):
            pair.here.receive(back(), SOON)

    def test_a_last_failure_comes_after_everything_that_was_sent(self, make: Callable[..., Pair]) -> None:
        """What the other side still sends is not an error of it, and a failure at once may follow."""
        pair = make()
        pair.begin()
        big = np.ones(8 * CHUNK_BYTES, np.uint8)
        pair.here.send(key(), big)
        for _ in range(2):
            pair.here.fail({"what": "a NaN"}, last=True)
        np.testing.assert_array_equal(pair.there.receive(key(), SOON), big)
        with pytest.raises(RemoteFailureError, match="'gpu/0' failed: a NaN"):
            pair.there.receive(key(1), SOON)
        pair.there.send(back(), np.zeros(3))
        assert pair.here.receive(back(), SOON).shape == (3,)
        pair.here.fail({"what": "a NaN"})

    def test_a_word_out_of_turn_is_the_senders_mistake(self, make: Callable[..., Pair]) -> None:
        pair = make()
        pair.here.send(key(), np.zeros(3))  # no step was announced
        with pytest.raises(LocalProtocolError, match="invalid outgoing frame"):
            pair.here.receive(back(), SOON)
        with pytest.raises(RemoteFailureError, match="invalid outgoing frame"):
            pair.there.receive(key(), SOON)


class TestCuts:
    def test_without_a_window_none_may(self, make: Callable[..., Pair]) -> None:
        """Each gap breaks the connection; the same gap again is meant so."""
        missing = {"tensor": 2}

        def loses(passage: Passage) -> Iterable[bytes]:
            first = tensor(passage) and unpack(passage.frame[:HEADER_BYTES])[0].slot == 0
            if first and missing["tensor"]:
                missing["tensor"] -= 1
                return ()
            return (passage.frame,)

        pair = make(loses, window=0)
        pair.begin()
        for slot in range(4):
            pair.here.send(key(slot), np.arange(3))
        with pytest.raises(RemoteProtocolError, match="but expected frame"):
            pair.there.receive(key(3), SOON)
        with pytest.raises(RemoteFailureError, match="invalid data from 'gpu/0'"):
            pair.here.receive(back(), SOON)

    def test_damage_without_end_ends_the_link(self, make: Callable[..., Pair]) -> None:
        def damages(passage: Passage) -> Iterable[bytes]:
            return (passage.frame[:-1] + b"?",) if tensor(passage) else (passage.frame,)

        pair = make(damages)
        pair.begin()
        pair.here.send(key(), np.arange(1000))
        with pytest.raises(RemoteProtocolError, match="checksum"):
            pair.there.receive(key(), SOON)

    def test_what_the_plan_does_not_allow_is_refused_on_both_sides(self, make: Callable[..., Pair]) -> None:
        pair = make(expect={key(0): Bound("float32", (4,))}.get)
        pair.begin()
        pair.here.send(key(0), np.zeros(3, np.float32))
        assert pair.there.receive(key(0), SOON).shape == (3,)
        pair.here.send(key(1), np.zeros(3, np.float32))
        with pytest.raises(RemoteProtocolError, match="is not in the plan"):
            pair.there.receive(key(1), SOON)
        with pytest.raises(RemoteFailureError, match="'npu/0' failed"):
            pair.here.receive(back(), SOON)


class TestWhatNobodyForesaw:
    def test_an_error_of_another_kind_ends_the_link_and_loses_nothing_in_silence(
        self, make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pair = make()
        pair.begin()
        pair.there.take("SESSION", SOON)

        def overflow(message: dict[str, object]) -> None:
            if message.get("step") == 1:  # and nothing else: what is said of it has to reach the other side
                raise OverflowError("int too large to convert to float")

        monkeypatch.setattr(peer, "check_message", overflow)
        pair.here.post(step(1))
        with pytest.raises(RemoteProtocolError, match="cannot process received data"):
            pair.there.take("SESSION", SOON)
        with pytest.raises(RemoteFailureError, match="invalid data from"):
            pair.here.receive(back(), SOON)

    def test_the_watch_outlives_a_look_that_fails(
        self, make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks = threading.Semaphore(0)

        def fail(link: PeerLink) -> None:
            looks.release()
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(PeerLink, "_check_liveness", fail)
        make(deadlines=Deadlines(patience=SOON, silence=0.08, grace=2.0))
        for _ in range(6):  # of two links
            assert looks.acquire(timeout=SOON)

    def test_a_close_ends_though_the_other_side_takes_nothing(
        self, make: Callable[..., Pair], caplog: pytest.LogCaptureFixture
    ) -> None:
        pair = make(deadlines=Deadlines(patience=0.4, silence=0.2, grace=0.1), budget=1 << 20)
        pair.begin()
        pair.there.take("SESSION", SOON)
        pair.there._conversation._acknowledge = lambda: 0  # it beats, and is heard
        pair.here.send(key(), np.zeros(1000))
        closing = threading.Thread(target=pair.here.close, daemon=True)
        closing.start()
        closing.join(SOON)
        assert not closing.is_alive()


class TestBudget:
    def test_a_full_line_holds_the_sender(self, make: Callable[..., Pair]) -> None:
        stuck = threading.Event()

        def sticks(passage: Passage) -> Iterable[bytes]:
            if tensor(passage):
                stuck.wait(SOON)
            return (passage.frame,)

        pair = make(sticks, budget=CHUNK_BYTES, deadlines=Deadlines(patience=0.1, silence=SOON, grace=1.0))
        pair.here.post(step())
        with pytest.raises(DeadlineError, match=r"0\.1 s to send to worker 'npu/0'"):
            for slot in range(20):
                pair.here.send(key(slot), np.zeros(CHUNK_BYTES, np.uint8))
        stuck.set()


class TestAbsence:
    def test_a_dead_worker_reaches_all_who_wait(self, make: Callable[..., Pair]) -> None:
        pair = make()
        pair.begin()
        pair.there.take("SESSION", SOON)
        pair.cable.kill("npu/0", lost_error("npu/0", "its address refused twice"))
        for attempt in (lambda: pair.here.receive(back(), SOON), lambda: pair.here.send(key(), np.zeros(3))):
            with pytest.raises(LinkClosedError, match="worker 'npu/0' is gone"):
                attempt()
        pair.cable.kill("gpu/0", lost_error("gpu/0", "so that the other end has not to be waited for"))

    def test_silence_is_announced_and_ended(self, make: Callable[..., Pair]) -> None:
        said: list[Wait] = []
        deadlines = Deadlines(patience=0.6, silence=0.2, grace=0.2)
        pair = make(deadlines=deadlines, announce=said.append)
        pair.begin()
        pair.there.take("SESSION", SOON)
        pair.cable.plan = lambda passage: ()  # a hole: the connection stands, nothing comes
        with pytest.raises(DeadlineError, match=r"no message from worker 'npu/0' for 0\.6 s"):
            pair.here.receive(back(), SOON)
        about_npu = [wait for wait in said if wait.who == "worker 'npu/0'"]
        assert about_npu[0].why == "no messages from it"
        assert about_npu[0].limit == 0.6

    def test_who_only_greets_is_not_heard(self, make: Callable[..., Pair]) -> None:
        """It greets again and again and proves nothing: patience ends as if nothing came."""

        def half(passage: Passage) -> Iterable[bytes]:
            header = unpack(passage.frame[:HEADER_BYTES])[0]
            if header.conversation or b'"AUTH"' not in passage.frame:
                return (passage.frame,)
            assert made.wait(SOON)
            pair.cable.cut("it was about to prove who it is")
            return ()

        made = threading.Event()
        pair = make(half, deadlines=Deadlines(patience=0.6, silence=0.2, grace=0.2), announce=lambda wait: None)
        made.set()
        for link in (pair.here, pair.there):
            with pytest.raises(DeadlineError, match=r"did not connect within 0\.6 s"):
                link.take("SESSION", SOON)
        assert pair.cable.ends[0].state().connections > 2

    def test_a_greeting_that_cannot_be_read_ends_the_link(self, make: Callable[..., Pair]) -> None:
        """After a few times, and not as late as patience does."""

        def odd(passage: Passage) -> Iterable[bytes]:
            if passage.source == "gpu/0" or b'"HELLO"' not in passage.frame:
                return (passage.frame,)
            changed = passage.frame[HEADER_BYTES:].replace(b'"worker":"npu/0"', b'"worker":[[0,0]]')
            header = unpack(passage.frame[:HEADER_BYTES])[0]
            return (pack(header, checksum(np.frombuffer(changed, np.uint8))) + changed,)

        pair = make(odd)
        with pytest.raises(RemoteProtocolError, match="invalid HELLO in the greeting: worker"):
            pair.here.take("SESSION", SOON)
        assert pair.cable.ends[0].state().connections < 12

    def test_a_wait_that_ends_before_patience_does_says_what_the_link_knows(self, make: Callable[..., Pair]) -> None:
        """Whichever of the two clocks is over first: who is not heard is not said to be alive."""
        pair = make(deadlines=Deadlines(patience=SOON, silence=0.2, grace=0.2), announce=lambda wait: None)
        pair.begin()
        pair.there.take("SESSION", SOON)
        with pytest.raises(DeadlineError, match="'gpu/0' waited 0 s for worker 'npu/0'") as caught:
            pair.here.receive(back(), 0.0)
        assert "alive" in caught.value.why
        pair.cable.plan = lambda passage: ()
        with pytest.raises(DeadlineError, match="no message from worker 'npu/0' for") as caught:
            pair.here.receive(back(1), 0.6)
        assert (caught.value.where, caught.value.why) == ("memory", "no messages from it")
        with pytest.raises(DeadlineError, match="no message from worker 'npu/0' for"):
            pair.here.take("AGREE", 0.0)
        for worker in WORKERS:
            pair.cable.kill(worker, lost_error(worker, "so that nobody waits for what does not come any more"))

    def test_beats_keep_a_quiet_link_alive(self, make: Callable[..., Pair]) -> None:
        beats = threading.Semaphore(0)

        def counts(passage: Passage) -> Iterable[bytes]:
            if kind_of(passage.frame) == Kind.BEAT:
                beats.release()
            return (passage.frame,)

        said: list[Wait] = []
        pair = make(counts, deadlines=Deadlines(patience=1.0, silence=0.2, grace=1.0), announce=said.append)
        pair.begin()
        for _ in range(50):  # more than a second's worth, both ways
            assert beats.acquire(timeout=SOON)
        assert [wait for wait in said if wait.why == "no messages from it"] == []
        pair.here.send(key(), np.zeros(3))
        assert pair.there.receive(key(), SOON).shape == (3,)

    def test_who_has_not_come_yet_is_announced_with_where_and_how_long(self) -> None:
        said: list[Wait] = []
        cable = Cable(*WORKERS)
        link = PeerLink(
            cable.ends[0],
            Greeting("run-1", *WORKERS),
            WORKERS,
            deadlines=Deadlines(patience=1.5, silence=0.2, grace=0.1),
            announce=said.append,
        )
        with pytest.raises(DeadlineError, match=r"'npu/0' did not connect within 0\.1 s") as caught:
            link.take("SESSION", 0.1)
        assert (caught.value.why, "--cluster npu" in caught.value.mend) == ("there is no connection", True)
        with pytest.raises(DeadlineError, match=r"'npu/0' did not connect within 1\.5 s \(memory\)"):
            link.take("SESSION", SOON)
        assert (said[0].who, said[0].where, said[0].limit) == ("worker 'npu/0'", "memory", 1.5)
        link.close()
        cable.ends[1].close()


def test_faults_at_one_place_are_hopeless_and_damage_has_chances() -> None:
    from whale_nebula.errors import DamagedFrameError

    faults = Faults()
    damage = DamagedFrameError("no")
    assert [faults.should_give_up(damage, 5) for _ in range(9)] == [False] * 8 + [True]
    assert not faults.should_give_up(damage, 6)

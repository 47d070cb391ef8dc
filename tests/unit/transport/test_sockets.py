"""Socket links over real connected sockets: both ends in this process, so that each can be looked at."""

import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from whale_nebula.errors import (
    DeadlineError,
    LinkClosedError,
    LocalProtocolError,
    RemoteFailureError,
    RemoteProtocolError,
)
from whale_nebula.transport.memory import MemoryNetwork
from whale_nebula.transport.protocol import Key, Link
from whale_nebula.transport.sockets import SocketLink
from whale_nebula.wire import CHUNK_BYTES, Bound
from whale_nebula.wire.message import MOST_WAITING
from whale_nebula.wire.tensor import DTYPE_NAMES, dtype_code, dtype_of

WORKERS = ("gpu/0", "npu/0", "tpu/0")
SOON = 20.0


def key(slot: int = 0, source: str = "gpu/0", destination: str = "npu/0", step: int = 0) -> Key:
    return Key("forward", 1, step, 0, -1, slot, source, destination)


def back(slot: int = 0) -> Key:
    return key(slot, "npu/0", "gpu/0")


def unix_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname(), timeout=SOON)
        other, _ = server.accept()
    return one, other


@pytest.fixture(params=[unix_pair, tcp_pair], ids=["unix", "tcp"])
def links(request: pytest.FixtureRequest) -> Iterator[tuple[SocketLink, SocketLink]]:
    one, other = request.param()
    here = SocketLink(one, "gpu/0", "npu/0", WORKERS, grace=2.0)
    there = SocketLink(other, "npu/0", "gpu/0", WORKERS, grace=2.0)
    yield here, there
    closing = threading.Thread(target=here.close)
    closing.start()
    there.close()
    closing.join(SOON)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nebula-")]


@pytest.fixture
def raw() -> Iterator[tuple[SocketLink, socket.socket]]:
    """A link, and the bare socket at its other end."""
    one, other = socket.socketpair()
    other.settimeout(SOON)
    link = SocketLink(one, "gpu/0", "npu/0", WORKERS, grace=0.2)
    yield link, other
    other.close()
    link.close()


SHAPES = [(), (0,), (0, 3), (7,), (2, 3, 4)]


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_every_type_and_shape_arrives_bit_for_bit(links: tuple[SocketLink, SocketLink], dtype: str) -> None:
    here, there = links
    sent = [np.ones(shape, dtype_of(dtype_code(dtype))) for shape in SHAPES]
    for slot, array in enumerate(sent):
        here.send(key(slot), array)
    for slot, array in reversed(list(enumerate(sent))):
        again = there.receive(key(slot), SOON)
        assert (again.dtype, again.shape, again.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_large_tensors_both_ways_at_once(links: tuple[SocketLink, SocketLink]) -> None:
    here, there = links
    draw = np.random.default_rng(0)
    sent = [draw.standard_normal((5, CHUNK_BYTES // 8 + 3)) for _ in range(2)]
    here.send(key(), sent[0])
    there.send(back(), sent[1].T)
    np.testing.assert_array_equal(there.receive(key(), SOON), sent[0])
    np.testing.assert_array_equal(here.receive(back(), SOON), sent[1].T)


def test_received_arrays_may_be_written_to(links: tuple[SocketLink, SocketLink]) -> None:
    links[0].send(key(), np.zeros(3))
    links[1].receive(key(), SOON)[:] = 1


def test_messages_arrive(links: tuple[SocketLink, SocketLink]) -> None:
    here, there = links
    here.post({"kind": "PONG", "clock": 5.0})
    there.post({"kind": "SPENT", "cpu": 0.5})
    assert there.take("PONG", SOON) == {"kind": "PONG", "clock": 5.0}
    assert here.take("SPENT", SOON) == {"kind": "SPENT", "cpu": 0.5}


def test_a_message_that_no_registry_has_can_be_neither_posted_nor_heard(links: tuple[SocketLink, SocketLink]) -> None:
    link, other = links
    with pytest.raises(LocalProtocolError, match="'NEWS', which no registry has"):
        link.post({"kind": "NEWS"})
    with pytest.raises(LocalProtocolError, match="'LEAVING' without program"):
        link.post({"kind": "LEAVING", "step": 1, "why": "SIGTERM"})
    other._put(other._parcel({"kind": "PONG", "clock": "noon"}))  # as a peer that checks nothing
    with pytest.raises(RemoteProtocolError, match="a wrong value of 'clock'"):
        link.take("PONG", SOON)


def test_messages_that_nobody_takes_do_not_pile_up(links: tuple[SocketLink, SocketLink]) -> None:
    link, other = links
    for _ in range(MOST_WAITING + 1):
        other.post({"kind": "PING", "last": False})
    with pytest.raises(RemoteProtocolError, match="wait to be taken"):
        link.receive(back(), SOON)


def test_a_deadline_passes_with_a_name(links: tuple[SocketLink, SocketLink]) -> None:
    with pytest.raises(DeadlineError, match=r"'npu/0' waited 0\.01 s for worker 'gpu/0'"):
        links[1].receive(key(), 0.01)


def test_a_close_comes_after_everything_that_was_sent(links: tuple[SocketLink, SocketLink]) -> None:
    here, there = links
    big = np.ones(4 * CHUNK_BYTES, np.uint8)
    here.send(key(0), big)
    here.close()
    here.close()
    np.testing.assert_array_equal(there.receive(key(0), SOON), big)
    with pytest.raises(LinkClosedError, match="'gpu/0' has closed its link"):
        there.receive(key(1), SOON)
    with pytest.raises(LinkClosedError):
        there.send(back(), big)
    with pytest.raises(LinkClosedError, match="has closed its link to 'npu/0'"):
        here.receive(back(), SOON)


def test_a_failure_overtakes_and_reaches_all_who_wait(links: tuple[SocketLink, SocketLink]) -> None:
    here, there = links
    there.post({"kind": "PING", "last": False})
    here.take("PING", SOON)
    here.send(key(0), np.ones(64 * CHUNK_BYTES, np.uint8))
    here.fail({"what": "division by zero", "why": "stage decoder", "mend": "do not"})
    with pytest.raises(RemoteFailureError, match="'gpu/0' failed: division by zero") as caught:
        there.receive(key(1), SOON)
    assert (caught.value.why, caught.value.mend) == ("stage decoder", "worker 'gpu/0' says: do not")
    with pytest.raises(RemoteFailureError):
        there.send(back(), np.zeros(3))


def every_waiter(link: SocketLink, act: Callable[[], object]) -> list[BaseException]:
    """What three threads that wait on a link are told after `act`."""
    errors: list[BaseException] = []

    def wait(attempt: Callable[[], object]) -> None:
        with pytest.raises(Exception) as caught:
            attempt()
        errors.append(caught.value)

    attempts = (
        lambda: link.receive(back(0), SOON),
        lambda: link.receive(back(1), SOON),
        lambda: link.take("AGREE", SOON),
    )
    threads = [threading.Thread(target=wait, args=(attempt,)) for attempt in attempts]
    for thread in threads:
        thread.start()
    act()
    for thread in threads:
        thread.join(SOON)
    return errors


def test_the_peers_death_reaches_all_who_wait_at_once(raw: tuple[SocketLink, socket.socket]) -> None:
    link, other = raw
    start = time.monotonic()
    errors = every_waiter(link, other.close)
    assert time.monotonic() - start < SOON / 2
    assert [type(error) for error in errors] == [LinkClosedError] * 3
    assert "worker 'npu/0' is gone" in str(errors[0])
    with pytest.raises(LinkClosedError):
        link.send(key(), np.zeros(3))


def test_bytes_that_are_no_frames_end_the_link_and_are_answered(
    raw: tuple[SocketLink, socket.socket],
) -> None:
    link, other = raw
    errors = every_waiter(link, lambda: other.sendall(b"GET / HTTP/1.1\r\n" * 20))
    assert [type(error) for error in errors] == [RemoteProtocolError] * 3
    assert b"could not understand" in other.recv(10_000)


def peer_of(raw: tuple[SocketLink, socket.socket], here: str = "npu/0", there: str = "gpu/0") -> SocketLink:
    """A second link on the bare socket, which may claim to be somebody else."""
    return SocketLink(raw[1].dup(), here, there, WORKERS, grace=0.2)


def test_frames_of_another_worker_end_the_link(raw: tuple[SocketLink, socket.socket]) -> None:
    other = peer_of(raw, here="tpu/0")
    other.send(key(0, "tpu/0", "gpu/0"), np.zeros(3))
    with pytest.raises(RemoteProtocolError, match="on the link from npu/0 to gpu/0"):
        raw[0].receive(back(), SOON)
    other.close()


def test_the_same_key_twice_ends_the_link(links: tuple[SocketLink, SocketLink]) -> None:
    here, there = links
    for _ in range(2):
        here.send(key(), np.zeros(3))
    with pytest.raises(RemoteProtocolError, match="came twice"):
        there.receive(key(1), SOON)
    with pytest.raises(RemoteFailureError, match="'npu/0' failed: it could not understand what 'gpu/0' sent"):
        here.receive(back(), SOON)


def test_what_the_plan_does_not_allow_ends_the_link() -> None:
    one, other = socket.socketpair()
    bounds = {key(0): Bound("float32", (4,))}
    here = SocketLink(one, "gpu/0", "npu/0", WORKERS)
    there = SocketLink(other, "npu/0", "gpu/0", WORKERS, expect=bounds.get)
    here.send(key(0), np.zeros(3, np.float32))
    assert there.receive(key(0), SOON).shape == (3,)
    here.send(key(1), np.zeros(3, np.float32))
    with pytest.raises(RemoteProtocolError, match="the plan does not know"):
        there.receive(key(1), SOON)
    here.close()
    there.close()


def test_sending_blocks_on_the_budget_and_says_so(raw: tuple[SocketLink, socket.socket]) -> None:
    """Nobody reads at the other end: the kernel's buffers fill, then the budget."""
    one, _ = unused = socket.socketpair()
    link = SocketLink(one, "gpu/0", "npu/0", WORKERS, budget=CHUNK_BYTES, patience=0.05, grace=0.05)
    with pytest.raises(DeadlineError, match=r"0\.05 s to send to worker 'npu/0'"):
        for slot in range(100):
            link.send(key(slot), np.zeros(CHUNK_BYTES, np.uint8))
    start = time.monotonic()
    link.close()
    assert time.monotonic() - start < SOON / 2
    unused[1].close()


def test_mistakes_of_the_caller_are_raised_where_he_makes_them(links: tuple[SocketLink, SocketLink]) -> None:
    here, there = links
    for attempt, words in [
        (lambda: here.send(key(), np.array(["text"])), "dtype 'str"),
        (lambda: here.send(back(), np.zeros(3)), "does not belong"),
        (lambda: here.send(key(step=2**64), np.zeros(3)), "does not fit"),
        (lambda: here.send(key(), np.zeros((1,) * 9)), "rank 9"),
        (lambda: here.post({"kind": "FAIL"}), "not posted"),
        (lambda: here.post({"no": "kind"}), "needs a 'kind'"),
    ]:
        with pytest.raises(LocalProtocolError, match=words):
            attempt()
    here.send(key(), np.zeros(3))
    assert there.receive(key(), SOON).shape == (3,)


def speak(here: Link, there: Link) -> None:
    """One of everything."""
    for slot, size in enumerate([0, 1, 1000, CHUNK_BYTES, 3 * CHUNK_BYTES + 17]):
        here.send(key(slot), np.zeros(size, np.float16), raw_bytes=4 * size)
        there.receive(key(slot), SOON)
    here.send(key(9), np.float32(3.0).reshape(()))
    here.post({"kind": "LEAVING", "program": 1, "step": 2, "why": "é" * 10})
    there.take("LEAVING", SOON)
    here.fail({"what": "nothing"})
    here.close()


def test_memory_links_and_sockets_count_the_same(links: tuple[SocketLink, SocketLink]) -> None:
    network = MemoryNetwork()
    memory = network.link("gpu/0", "npu/0", "gpu", "npu"), network.link("npu/0", "gpu/0", "npu", "gpu")
    speak(*links)
    speak(*memory)
    assert links[0].totals() == memory[0].totals()
    assert links[0].totals().bytes > links[0].totals().payload_bytes > 0


def test_the_total_is_what_the_socket_carried(raw: tuple[SocketLink, socket.socket]) -> None:
    link, other = raw
    received: list[int] = []

    def drain() -> None:
        while data := other.recv(1 << 16):
            received.append(len(data))

    thread = threading.Thread(target=drain)
    thread.start()
    for slot, size in enumerate([0, 1, CHUNK_BYTES + 1]):
        link.send(key(slot), np.zeros(size, np.uint8))
    link.post({"kind": "PING", "last": True})
    link.close()
    thread.join(SOON)
    assert sum(received) == link.totals().bytes

"""A sender that is faster than its receiver: it is blocked, nothing is lost, and there are no deadlocks.

Cases that depend on the order of threads run as simulations: a seed decides which thread runs next.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation import carrier
from tests.simulation.carrier import Cable
from tests.simulation.simulated_threads import Scheduler
from tests.unit.transport.grpc_workers import open_workers
from tests.unit.transport.link_pairs import TIMEOUT_SECONDS, LinkPair
from whale_nebula.errors import RemoteFailureError, RemoteProtocolError
from whale_nebula.transport import base, deadlines, mailbox, outbox, peer
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.mailbox import Waiters
from whale_nebula.transport.peer import PeerLink
from whale_nebula.transport.protocol import Key
from whale_nebula.wire import frame
from whale_nebula.wire.buffers import Bound
from whale_nebula.wire.greeting import Greeting
from whale_nebula.wire.message import build_message

WORKERS = ("gpu/0", "npu/0", "tpu/0")
BUDGET, CHUNK = 4096, 512
SIMULATED_MODULES: tuple[ModuleType, ...] = (peer, outbox, mailbox, deadlines, base, carrier)


def build_step_message(step: int) -> dict[str, object]:
    return build_message("SESSION", "STEP", program=1, step=step, rows=1, inputs={})


class DueLimit:
    """A plan's limits: any size; of tensors of a step, `most` bytes are due once it has begun, none before."""

    def __init__(self, most: float = math.inf) -> None:
        self.step, self.most = -1, most

    def __call__(self, key: Key) -> Bound:
        return Bound("uint8", (1 << 32,), due=self.most if key.step <= self.step else 0)


class SentTensor:
    """A tensor of the traffic; it is received after the next `late` tensors were sent."""

    def __init__(self, step: int, number: int, ends: tuple[str, str], size: int, late: int) -> None:
        self.key = Key("forward", 1, step, 0, -1, number, *ends)
        self.array = np.full(size, number, np.uint8)
        self.taken_at = number + late

    def __repr__(self) -> str:
        return f"{self.key} of {self.array.size} bytes, taken at {self.taken_at}"


Traffic = list[list[SentTensor]]


@st.composite
def make_traffic(draw: st.DrawFn) -> Traffic:
    """By step, tensors in the order in which they are sent; each is received then or later in the step."""
    row = WORKERS[: draw(st.integers(2, 3))]
    pairs = st.sampled_from([(one, other) for one in row for other in row if one != other])
    one = st.tuples(pairs, st.integers(0, 2 * BUDGET), st.integers(0, 30))
    steps = draw(st.lists(st.lists(one, max_size=30), min_size=1, max_size=3))
    return [[SentTensor(step, number, *each) for number, each in enumerate(sent)] for step, sent in enumerate(steps)]


def list_moves(traffic: list[SentTensor]) -> dict[str, list[tuple[bool, SentTensor]]]:
    """What each worker does: (whether it sends, the tensor). Sends are in the order of the course, and nobody takes
    before it has sent what comes earlier: with room without end this cannot stand still.
    """
    moves = [((each.key.slot, 0), each.key.source, True, each) for each in traffic]
    moves += [((each.taken_at, 1), each.key.destination, False, each) for each in traffic]
    done: dict[str, list[tuple[bool, SentTensor]]] = {worker: [] for worker in WORKERS}
    for _, worker, sends, each in sorted(moves, key=lambda move: move[0]):
        done[worker].append((sends, each))
    return done


class SimulatedWorkers:
    """Workers with links to each other, in simulated threads."""

    def __init__(self, seed: int) -> None:
        self.scheduler = Scheduler(random.Random(seed), limit=100.0)
        self.cables: dict[frozenset[str], Cable] = {}
        self.received: dict[Key, bytes] = {}

    def run(self, traffic: Traffic) -> None:
        chunk, frame.CHUNK_BYTES = frame.CHUNK_BYTES, CHUNK
        try:
            with self.scheduler.replace_threading(SIMULATED_MODULES):
                for number, one in enumerate(WORKERS):
                    for other in WORKERS[number + 1 :]:
                        self.cables[frozenset((one, other))] = Cable(one, other)
                steps = [list_moves(step) for step in traffic]
                for worker in WORKERS:
                    moves = [step[worker] for step in steps]
                    self.scheduler.spawn(partial(self._script, worker, moves), worker, worker, awaited=True)
                self.scheduler.run()
        finally:
            frame.CHUNK_BYTES = chunk

    def _script(self, worker: str, steps: list[list[tuple[bool, SentTensor]]]) -> None:
        """Each step is announced at its beginning, and what the others announce is heard at its end, as runs do."""
        waiters, due = Waiters(), DueLimit()
        links = {there: self._link(worker, there, waiters, due) for there in WORKERS if there != worker}
        for number, moves in enumerate(steps):
            due.step = number
            for link in links.values():
                link.post(build_step_message(number))
            for sends, each in moves:
                if sends:
                    links[each.key.destination].send(each.key, each.array)
                else:
                    self.received[each.key] = links[each.key.source].receive(each.key, TIMEOUT_SECONDS).tobytes()
            for link in links.values():
                link.take("SESSION", TIMEOUT_SECONDS)
        for link in links.values():
            link.send_farewell()
        for link in links.values():
            link.close()

    def _link(self, here: str, there: str, waiters: Waiters, due: DueLimit) -> PeerLink:
        end = next(each for each in self.cables[frozenset((here, there))].ends if each.here == here)
        return PeerLink(
            end,
            Greeting("flow", here, there),
            WORKERS,
            expect=due,
            budget=BUDGET,
            deadlines=Deadlines(patience=TIMEOUT_SECONDS, grace=2.0),
            waiters=waiters,
            now=self.scheduler.now,
        )


@given(make_traffic(), st.integers(0, 1 << 30))
def test_exchanges_complete_without_deadlock_or_loss(traffic: Traffic, seed: int) -> None:
    """However much is taken late, though all send more than anybody has room for, and though some are a step ahead of
    others: no deadline is near.
    """
    simulated = SimulatedWorkers(seed)
    simulated.run(traffic)
    assert (simulated.scheduler.unexpected_errors, simulated.scheduler.is_hanging) == ([], False)
    assert simulated.received == {each.key: each.array.tobytes() for step in traffic for each in step}
    assert simulated.scheduler.time < TIMEOUT_SECONDS


@pytest.fixture
def pair() -> Iterator[LinkPair]:
    pair = LinkPair(budget=1 << 20)
    pair.announce_steps()
    for link in (pair.here, pair.there):
        link.take("SESSION", TIMEOUT_SECONDS)
    yield pair
    for link in (pair.here, pair.there):
        link.send_farewell()
    pair.close()


def test_slow_consumer_stalls_the_sender_without_loss(pair: LinkPair) -> None:
    """While nothing is received, the sender stops with little more than two budgets at the other side."""
    count, size = 40, 1 << 18
    keys = [Key("forward", 1, 0, 0, -1, slot, *WORKERS[:2]) for slot in range(count)]
    sent = np.random.default_rng(0).integers(0, 255, (count, size), np.uint8)
    sending = threading.Thread(target=lambda: [pair.here.send(*each) for each in zip(keys, sent, strict=True)])
    sending.start()
    rested, before = 0, -1
    while rested < 40:  # 40 checks without a new frame
        threading.Event().wait(0.01)
        rested, before = (
            (rested + 1 if pair.there._conversation.expected_number == before else 0),
            (pair.there._conversation.expected_number),
        )
    budget = 1 << 20
    assert pair.there._inbox.unrequested_bytes <= 3 * budget
    assert pair.here._conversation.room <= 0
    for number, each in enumerate(keys):
        assert pair.there.receive(each, TIMEOUT_SECONDS).tobytes() == sent[number].tobytes()
    sending.join(TIMEOUT_SECONDS)
    assert pair.there._inbox.unrequested_bytes == 0


@pytest.mark.parametrize("awaited", [False, True], ids=["nothing awaited", "something else awaited"])
def test_unrequested_values_are_bounded(pair: LinkPair, awaited: bool) -> None:
    """A sender that ignores its budget is refused, whether it is blocked or not, and is notified."""
    pair.here.post(build_message("SESSION", "MEET"))
    assert pair.there.take("SESSION", TIMEOUT_SECONDS)["about"] == "MEET"
    pair.here._conversation._sent.budget = 1 << 40
    value = np.zeros(1 << 20, np.uint8)

    def send() -> None:
        for slot in range(200):
            pair.here.send(Key("control", 1, 0, 0, -1, slot, *WORKERS[:2]), value)

    with ThreadPoolExecutor(1) as executor:
        waits = executor.submit(pair.there.take, "SESSION", TIMEOUT_SECONDS) if awaited else None
        with pytest.raises(RemoteFailureError, match="invalid data from"):
            send()
        with pytest.raises(RemoteProtocolError, match=r"bytes are not acknowledged|that were not requested"):
            waits.result(TIMEOUT_SECONDS) if waits else pair.there.take("SESSION", TIMEOUT_SECONDS)
    assert pair.there._inbox.unrequested_bytes <= 3 * len(value) + (16 << 20)


@contextlib.contextmanager
def open_links(carrier_name: str, due: DueLimit) -> Iterator[tuple[PeerLink, PeerLink]]:
    """Two links that have announced step 0, over the simulated carrier or over gRPC."""
    options = {"expect": due, "budget": 1 << 20}
    with contextlib.ExitStack() as stack:
        if carrier_name == "gRPC":
            pair = stack.enter_context(open_workers(None, **options))
            here, there = pair.gpu, pair.npu
        else:
            links = LinkPair(**options)
            stack.callback(links.close)
            here, there = links.here, links.there
        for link in (here, there):
            link.post(build_step_message(0))
        for link in (here, there):
            link.take("SESSION", TIMEOUT_SECONDS)
        yield here, there
        for link in (here, there):
            link.send_farewell()


@pytest.mark.parametrize("carrier_name", ["simulated", "gRPC"])
@pytest.mark.parametrize(("step", "most"), [(1, math.inf), (0, 1 << 10)], ids=["of the next step", "of too many rows"])
def test_tensors_not_due_are_bounded_during_another_wait(carrier_name: str, step: int, most: float) -> None:
    """A sender that ignores its budget is refused, although a thread waits: that admits only tensors of the step."""
    due = DueLimit(most)
    due.step = 0
    with open_links(carrier_name, due) as (here, there), ThreadPoolExecutor(2) as executor:
        waits = executor.submit(there.receive, Key("forward", 1, 0, 0, -1, 1000, *WORKERS[:2]), TIMEOUT_SECONDS)
        here._conversation._sent.budget = 1 << 40
        value = np.zeros(1 << 20, np.uint8)

        def send() -> None:
            here.post(build_step_message(step))
            for slot in range(200):
                here.send(Key("forward", 1, step, 0, -1, slot, *WORKERS[:2]), value)

        sends = executor.submit(send)
        with pytest.raises(RemoteProtocolError, match=r"bytes are not acknowledged"):
            waits.result(TIMEOUT_SECONDS)
        with pytest.raises(RemoteFailureError, match="invalid data from"):
            sends.result(TIMEOUT_SECONDS)
        assert there._inbox.unrequested_bytes <= 3 * len(value) + (16 << 20)


@pytest.mark.parametrize("carrier_name", ["simulated", "gRPC"])
def test_sender_one_step_ahead_is_blocked_until_the_step_begins(carrier_name: str) -> None:
    due = DueLimit()
    due.step = 0
    with open_links(carrier_name, due) as (here, there), ThreadPoolExecutor(2) as executor:
        value = np.arange(1 << 18).astype(np.uint8)
        keys = [Key("forward", 1, 1, 0, -1, slot, *WORKERS[:2]) for slot in range(40)]
        here.post(build_step_message(1))
        sends = executor.submit(lambda: [here.send(key, value) for key in keys])
        assert there.take("SESSION", TIMEOUT_SECONDS)["step"] == 1
        # A thread of this process waits for something.
        waits = executor.submit(there.receive, keys[-1], TIMEOUT_SECONDS)
        assert not waits.done() and not sends.done()
        assert there._inbox.unrequested_bytes <= 3 << 20
        due.step = 1
        there.post(build_step_message(1))
        assert waits.result(TIMEOUT_SECONDS).tobytes() == value.tobytes()
        for key in keys[:-1]:
            assert there.receive(key, TIMEOUT_SECONDS).tobytes() == value.tobytes()
        sends.result(TIMEOUT_SECONDS)

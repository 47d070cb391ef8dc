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
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation import carrier
from tests.simulation.carrier import Cable
from tests.simulation.stepping import Turns
from tests.unit.transport.cable import SOON, Pair
from tests.unit.transport.crossing import workers
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

ROW = ("gpu/0", "npu/0", "tpu/0")
BUDGET, CHUNK = 4096, 512
SWAPPED: tuple[ModuleType, ...] = (peer, outbox, mailbox, deadlines, base, carrier)


def announce(step: int) -> dict[str, object]:
    return build_message("SESSION", "STEP", program=1, step=step, rows=1, inputs={})


class Due:
    """What a plan allows: any bytes, of which none are due before their step has begun, and then `most`."""

    def __init__(self, most: float = math.inf) -> None:
        self.step, self.most = -1, most

    def __call__(self, key: Key) -> Bound:
        return Bound("uint8", (1 << 32,), due=self.most if key.step <= self.step else 0)


class Sent:
    """A tensor of a course: from whom to whom, of which size, and after how many later ones it is taken."""

    def __init__(self, step: int, number: int, ends: tuple[str, str], size: int, late: int) -> None:
        self.key = Key("forward", 1, step, 0, -1, number, *ends)
        self.array = np.full(size, number, np.uint8)
        self.taken_at = number + late

    def __repr__(self) -> str:
        return f"{self.key} of {self.array.size} bytes, taken at {self.taken_at}"


Course = list[list[Sent]]


@st.composite
def courses(draw: st.DrawFn) -> Course:
    """By step, tensors in the order in which all send them; each is taken then or later in the step, in any order."""
    row = ROW[: draw(st.integers(2, 3))]
    pairs = st.sampled_from([(one, other) for one in row for other in row if one != other])
    one = st.tuples(pairs, st.integers(0, 2 * BUDGET), st.integers(0, 30))
    steps = draw(st.lists(st.lists(one, max_size=30), min_size=1, max_size=3))
    return [[Sent(step, number, *each) for number, each in enumerate(sent)] for step, sent in enumerate(steps)]


def programs(course: list[Sent]) -> dict[str, list[tuple[bool, Sent]]]:
    """What each worker does: (whether it sends, the tensor). Sends are in the order of the course, and nobody takes
    before it has sent what comes earlier: with room without end this cannot stand still.
    """
    moves = [((each.key.slot, 0), each.key.source, True, each) for each in course]
    moves += [((each.taken_at, 1), each.key.destination, False, each) for each in course]
    done: dict[str, list[tuple[bool, Sent]]] = {worker: [] for worker in ROW}
    for _, worker, sends, each in sorted(moves, key=lambda move: move[0]):
        done[worker].append((sends, each))
    return done


class World:
    """Workers with links to each other, in turns."""

    def __init__(self, seed: int) -> None:
        self.turns = Turns(random.Random(seed), limit=100.0)
        self.cables: dict[frozenset[str], Cable] = {}
        self.got: dict[Key, bytes] = {}

    def run(self, course: Course) -> None:
        chunk, frame.CHUNK_BYTES = frame.CHUNK_BYTES, CHUNK
        try:
            with self.turns.instead_of_threads(SWAPPED):
                for number, one in enumerate(ROW):
                    for other in ROW[number + 1 :]:
                        self.cables[frozenset((one, other))] = Cable(one, other)
                steps = [programs(step) for step in course]
                for worker in ROW:
                    moves = [step[worker] for step in steps]
                    self.turns.spawn(partial(self._script, worker, moves), worker, worker, awaited=True)
                self.turns.run()
        finally:
            frame.CHUNK_BYTES = chunk

    def _script(self, worker: str, steps: list[list[tuple[bool, Sent]]]) -> None:
        """Each step is announced at its beginning, and what the others announce is heard at its end, as runs do."""
        waiters, due = Waiters(), Due()
        links = {there: self._link(worker, there, waiters, due) for there in ROW if there != worker}
        for number, moves in enumerate(steps):
            due.step = number
            for link in links.values():
                link.post(announce(number))
            for sends, each in moves:
                if sends:
                    links[each.key.destination].send(each.key, each.array)
                else:
                    self.got[each.key] = links[each.key.source].receive(each.key, SOON).tobytes()
            for link in links.values():
                link.take("SESSION", SOON)
        for link in links.values():
            link.part()
        for link in links.values():
            link.close()

    def _link(self, here: str, there: str, waiters: Waiters, due: Due) -> PeerLink:
        end = next(each for each in self.cables[frozenset((here, there))].ends if each.here == here)
        return PeerLink(
            end,
            Greeting("flow", here, there),
            ROW,
            expect=due,
            budget=BUDGET,
            deadlines=Deadlines(patience=SOON, grace=2.0),
            waiters=waiters,
            now=self.turns.now,
        )


@settings(deadline=None, max_examples=60)
@given(courses(), st.integers(0, 1 << 30))
def test_nobody_waits_for_ever_and_all_arrives_as_it_was_sent(course: Course, seed: int) -> None:
    """However much is taken late, though all send more than anybody has room for, and though some are a step ahead of
    others: no deadline is near.
    """
    world = World(seed)
    world.run(course)
    assert (world.turns.broken, world.turns.hangs) == ([], False)
    assert world.got == {each.key: each.array.tobytes() for step in course for each in step}
    assert world.turns.time < SOON


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(budget=1 << 20)
    made.begin()
    for link in (made.here, made.there):
        link.take("SESSION", SOON)
    yield made
    for link in (made.here, made.there):
        link.part()
    made.close()


def test_a_slow_consumer_stalls_the_sender_and_loses_nothing(pair: Pair) -> None:
    """It takes nothing for a while: the sender comes to rest with little more than two budgets at the other side."""
    count, size = 40, 1 << 18
    keys = [Key("forward", 1, 0, 0, -1, slot, *ROW[:2]) for slot in range(count)]
    sent = np.random.default_rng(0).integers(0, 255, (count, size), np.uint8)
    sending = threading.Thread(target=lambda: [pair.here.send(*each) for each in zip(keys, sent, strict=True)])
    sending.start()
    rested, before = 0, -1
    while rested < 40:  # 40 looks without anything more
        threading.Event().wait(0.01)
        rested, before = (
            (rested + 1 if pair.there._conversation.received == before else 0),
            (pair.there._conversation.received),
        )
    budget = 1 << 20
    assert pair.there._inbox.held <= 3 * budget
    assert pair.here._conversation.room() <= 0
    for number, each in enumerate(keys):
        assert pair.there.receive(each, SOON).tobytes() == sent[number].tobytes()
    sending.join(SOON)
    assert pair.there._inbox.held == 0


@pytest.mark.parametrize("awaited", [False, True], ids=["nothing awaited", "something else awaited"])
def test_values_that_nobody_asks_for_are_bounded(pair: Pair, awaited: bool) -> None:
    """One that sends them and keeps to no budget is refused, whether it is held or not, and hears of it."""
    pair.here.post(build_message("SESSION", "MEET"))
    assert pair.there.take("SESSION", SOON)["about"] == "MEET"
    pair.here._conversation._replay.budget = 1 << 40
    value = np.zeros(1 << 20, np.uint8)

    def send() -> None:
        for slot in range(200):
            pair.here.send(Key("control", 1, 0, 0, -1, slot, *ROW[:2]), value)

    with ThreadPoolExecutor(1) as beside:
        waits = beside.submit(pair.there.take, "SESSION", SOON) if awaited else None
        with pytest.raises(RemoteFailureError, match="invalid data from"):
            send()
        with pytest.raises(RemoteProtocolError, match=r"bytes are not acknowledged|that were not requested"):
            waits.result(SOON) if waits else pair.there.take("SESSION", SOON)
    assert pair.there._inbox.held <= 3 * len(value) + (16 << 20)


@contextlib.contextmanager
def linked(carried: str, due: Due) -> Iterator[tuple[PeerLink, PeerLink]]:
    """Two links that have announced step 0, over the simulated carrier or over gRPC."""
    options = {"expect": due, "budget": 1 << 20}
    with contextlib.ExitStack() as stack:
        if carried == "gRPC":
            pair = stack.enter_context(workers(None, **options))
            here, there = pair.gpu, pair.npu
        else:
            made = Pair(**options)
            stack.callback(made.close)
            here, there = made.here, made.there
        for link in (here, there):
            link.post(announce(0))
        for link in (here, there):
            link.take("SESSION", SOON)
        yield here, there
        for link in (here, there):
            link.part()


@pytest.mark.parametrize("carried", ["simulated", "gRPC"])
@pytest.mark.parametrize(("step", "most"), [(1, math.inf), (0, 1 << 10)], ids=["of the next step", "of too many rows"])
def test_what_is_not_due_is_bounded_while_something_else_is_awaited(carried: str, step: int, most: float) -> None:
    """A sender that keeps to no budget is refused, though a thread waits: that lets in only what the step has."""
    due = Due(most)
    due.step = 0
    with linked(carried, due) as (here, there), ThreadPoolExecutor(2) as beside:
        waits = beside.submit(there.receive, Key("forward", 1, 0, 0, -1, 1000, *ROW[:2]), SOON)
        here._conversation._replay.budget = 1 << 40
        value = np.zeros(1 << 20, np.uint8)

        def send() -> None:
            here.post(announce(step))
            for slot in range(200):
                here.send(Key("forward", 1, step, 0, -1, slot, *ROW[:2]), value)

        sends = beside.submit(send)
        with pytest.raises(RemoteProtocolError, match=r"bytes are not acknowledged"):
            waits.result(SOON)
        with pytest.raises(RemoteFailureError, match="invalid data from"):
            sends.result(SOON)
        assert there._inbox.held <= 3 * len(value) + (16 << 20)


@pytest.mark.parametrize("carried", ["simulated", "gRPC"])
def test_who_is_a_step_ahead_is_held_until_the_step_begins(carried: str) -> None:
    due = Due()
    due.step = 0
    with linked(carried, due) as (here, there), ThreadPoolExecutor(2) as beside:
        value = np.arange(1 << 18).astype(np.uint8)
        keys = [Key("forward", 1, 1, 0, -1, slot, *ROW[:2]) for slot in range(40)]
        here.post(announce(1))
        sends = beside.submit(lambda: [here.send(key, value) for key in keys])
        assert there.take("SESSION", SOON)["step"] == 1
        waits = beside.submit(there.receive, keys[-1], SOON)  # a thread of this process waits for something
        assert not waits.done() and not sends.done()
        assert there._inbox.held <= 3 << 20
        due.step = 1
        there.post(announce(1))
        assert waits.result(SOON).tobytes() == value.tobytes()
        for key in keys[:-1]:
            assert there.receive(key, SOON).tobytes() == value.tobytes()
        sends.result(SOON)

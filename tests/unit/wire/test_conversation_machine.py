"""Two conversations over lines that break, repeat and reorder: everything arrives once, in order, unchanged."""

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.wire.talk import STEP, Node, conversation, said, tensor, whole
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire.frame import HEADER_BYTES, is_bare

CHUNK = 64  # instead of 1 MiB, so that small tensors have many frames
BUDGET = 2_000
SIDES = st.integers(0, 1)


class Lines(RuleBasedStateMachine):
    """What both kinds of line have in common: two nodes that say things, are cut, and greet again."""

    options: ClassVar[dict[str, Any]] = {}

    @initialize(sealed=st.booleans())
    def begin(self, sealed: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("whale_nebula.wire.frame.CHUNK_BYTES", CHUNK)
        self.nodes = [Node(conversation(side, sealed=sealed, budget=BUDGET, **self.options)) for side in (0, 1)]
        self.up = False
        self.clear()
        self.connect(through=True)
        for side, node in enumerate(self.nodes):
            node.say(said(side, STEP), STEP)

    def teardown(self) -> None:
        if not hasattr(self, "nodes"):
            return
        try:
            self.finish()
        finally:
            self.patch.undo()

    def finish(self) -> None:
        """Let the line hold, and see that all has arrived."""
        if not self.up:
            self.connect(through=True)
        moved = True
        while moved:
            moved = any([node.pump() for node in self.nodes] + [self.deliver_all(side) for side in (0, 1)])
        for node, other in (self.nodes, self.nodes[::-1]):
            assert other.got == node.sent
            other.line.append(whole(other.talk.beat()))
        for side in (0, 1):
            self.deliver_all(side)
        assert [node.talk.unacked for node in self.nodes] == [0, 0]

    @abstractmethod
    def deliver_all(self, side: int) -> bool:
        """Deliver all that this side has sent; whether there was any."""

    @abstractmethod
    def greet(self, side: int) -> None:
        """Deliver what this side has to greet with."""

    @abstractmethod
    def clear(self) -> None:
        """A new line has nothing of the old one."""

    @precondition(lambda self: not self.up)
    @rule(through=st.booleans())
    def connect(self, through: bool) -> None:
        """A new connection; `through`: on which the greeting gets through at once."""
        self.up = True
        for node in self.nodes:
            node.up()
        while through and any(node.greetings for node in self.nodes):
            for side in (0, 1):
                self.greet(side)

    @precondition(lambda self: self.up)
    @rule()
    def cut(self) -> None:
        self.up = False
        self.clear()
        for node in self.nodes:
            node.down()

    @rule(side=SIDES, size=st.integers(0, 5 * CHUNK), pumped=st.integers(0, 9))
    def say_tensor(self, side: int, size: int, pumped: int) -> None:
        node = self.nodes[side]
        array = np.random.default_rng(len(node.sent)).integers(0, 255, size, np.uint8)
        node.say(tensor(side, array, slot=len(node.sent)), array.tobytes())
        self.pump(side, pumped)

    @rule(side=SIDES)
    def say_message(self, side: int) -> None:
        message = {"kind": "PONG", "clock": len(self.nodes[side].sent)}
        self.nodes[side].say(said(side, message), message)
        self.pump(side, 20)

    def pump(self, side: int, frames: int) -> None:
        for _ in range(frames):
            self.nodes[side].pump()

    @precondition(lambda self: any(node.talk.ready for node in self.nodes))
    @rule(side=SIDES)
    def beat(self, side: int) -> None:
        if self.nodes[side].talk.ready:
            self.nodes[side].line.append(whole(self.nodes[side].talk.beat()))

    @invariant()
    def what_came_is_the_beginning_of_what_was_said(self) -> None:
        for node, other in (self.nodes, self.nodes[::-1]) if hasattr(self, "nodes") else ():
            assert other.got == node.sent[: len(other.got)]
            assert node.talk.unacked < BUDGET + HEADER_BYTES + CHUNK + 200


class Messages(Lines):
    """Several connections that carry whole frames: they overtake one another, and what comes twice is refused."""

    options: ClassVar[dict[str, Any]] = {"window": 1 << 20}

    def clear(self) -> None:
        self.delivered: list[list[bytes]] = [[], []]

    def _hand_over(self, side: int, frame: bytes) -> None:
        other = self.nodes[1 - side]
        other.take(other.talk.receive(frame))

    @rule(side=SIDES, places=st.lists(st.integers(0, 9), min_size=1, max_size=6))
    def deliver(self, side: int, places: list[int]) -> None:
        """Greetings first, as carriers have it, and any of the frames after them."""
        node = self.nodes[side]
        for place in places:
            if node.greetings:
                self._hand_over(side, node.greetings.popleft())
            elif node.line:
                self.delivered[side].append(node.line.pop(place % len(node.line)))
                self._hand_over(side, self.delivered[side][-1])

    @precondition(lambda self: self.up and all(node.talk.ready for node in self.nodes))
    @rule(side=SIDES, place=st.integers(0, 9))
    def deliver_again(self, side: int, place: int) -> None:
        """A frame with a number is refused, and the connection ends."""
        numbered = [frame for frame in self.delivered[side] if not is_bare(frame)]
        if numbered:
            with pytest.raises(RemoteProtocolError, match="was received twice over one connection"):
                self._hand_over(side, numbered[place % len(numbered)])
            self.cut()

    def greet(self, side: int) -> None:
        while self.nodes[side].greetings:
            self._hand_over(side, self.nodes[side].greetings.popleft())

    def deliver_all(self, side: int) -> bool:
        node = self.nodes[side]
        found = bool(node.greetings or node.line)
        while node.greetings or node.line:
            self.deliver(side, [0])
        return found


TestMessages = Messages.TestCase
TestMessages.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

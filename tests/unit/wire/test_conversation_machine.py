"""Two conversations over connections that break and repeat or reorder frames: all arrives once, in order, unchanged."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.wire.conversations import STEP, Node, frame_message, frame_tensor, join_packet, make_conversation
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire.frame import HEADER_BYTES, is_bare

CHUNK = 64  # instead of 1 MiB, so that small tensors have many frames
BUDGET = 2_000
SIDES = st.integers(0, 1)


class ReorderingConnections(RuleBasedStateMachine):
    """Two nodes that send tensors and messages over connections that reorder frames, break, and are replaced."""

    @initialize(sealed=st.booleans())
    def begin(self, sealed: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("whale_nebula.wire.frame.CHUNK_BYTES", CHUNK)
        self.nodes = [Node(make_conversation(side, sealed=sealed, budget=BUDGET, window=1 << 20)) for side in (0, 1)]
        self.connected = False
        self.clear()
        self.connect(greeted=True)
        for side, node in enumerate(self.nodes):
            node.queue_frames(frame_message(side, STEP), STEP)

    def teardown(self) -> None:
        if not hasattr(self, "nodes"):
            return
        try:
            self.finish()
        finally:
            self.patch.undo()

    def finish(self) -> None:
        """Deliver everything over a connection that does not break, and check that all has arrived."""
        if not self.connected:
            self.connect(greeted=True)
        progressed = True
        while progressed:
            progressed = any([node.send_next() for node in self.nodes] + [self.deliver_all(side) for side in (0, 1)])
        for node, other in (self.nodes, self.nodes[::-1]):
            assert other.received == node.queued
            other.line.append(join_packet(other.conversation.build_heartbeat()))
        for side in (0, 1):
            self.deliver_all(side)
        assert [node.conversation.unacknowledged_bytes for node in self.nodes] == [0, 0]

    @precondition(lambda self: not self.connected)
    @rule(greeted=st.booleans())
    def connect(self, greeted: bool) -> None:
        """Connect; with `greeted` the greeting is completed at once."""
        self.connected = True
        for node in self.nodes:
            node.connect()
        while greeted and any(node.greetings for node in self.nodes):
            for side in (0, 1):
                self.greet(side)

    @precondition(lambda self: self.connected)
    @rule()
    def disconnect(self) -> None:
        self.connected = False
        self.clear()
        for node in self.nodes:
            node.disconnect()

    @rule(side=SIDES, size=st.integers(0, 5 * CHUNK), count=st.integers(0, 9))
    def send_tensor(self, side: int, size: int, count: int) -> None:
        node = self.nodes[side]
        array = np.random.default_rng(len(node.queued)).integers(0, 255, size, np.uint8)
        node.queue_frames(frame_tensor(side, array, slot=len(node.queued)), array.tobytes())
        self.send_next(side, count)

    @rule(side=SIDES)
    def send_message(self, side: int) -> None:
        message = {"kind": "PONG", "clock": len(self.nodes[side].queued)}
        self.nodes[side].queue_frames(frame_message(side, message), message)
        self.send_next(side, 20)

    def send_next(self, side: int, count: int) -> None:
        for _ in range(count):
            self.nodes[side].send_next()

    @precondition(lambda self: any(node.conversation.ready for node in self.nodes))
    @rule(side=SIDES)
    def send_heartbeat(self, side: int) -> None:
        if self.nodes[side].conversation.ready:
            self.nodes[side].line.append(join_packet(self.nodes[side].conversation.build_heartbeat()))

    @invariant()
    def received_is_a_prefix_of_sent(self) -> None:
        for node, other in (self.nodes, self.nodes[::-1]) if hasattr(self, "nodes") else ():
            assert other.received == node.queued[: len(other.received)]
            assert node.conversation.unacknowledged_bytes < BUDGET + HEADER_BYTES + CHUNK + 200

    def clear(self) -> None:
        """A new connection delivers no frames of an earlier one."""
        self.delivered: list[list[bytes]] = [[], []]

    def _deliver_frame(self, side: int, frame: bytes) -> None:
        other = self.nodes[1 - side]
        other.handle_events(other.conversation.receive(frame))

    @rule(side=SIDES, places=st.lists(st.integers(0, 9), min_size=1, max_size=6))
    def deliver(self, side: int, places: list[int]) -> None:
        """Deliver greetings first, as carriers do, and then frames in any order."""
        node = self.nodes[side]
        for place in places:
            if node.greetings:
                self._deliver_frame(side, node.greetings.popleft())
            elif node.line:
                self.delivered[side].append(node.line.pop(place % len(node.line)))
                self._deliver_frame(side, self.delivered[side][-1])

    @precondition(lambda self: self.connected and all(node.conversation.ready for node in self.nodes))
    @rule(side=SIDES, place=st.integers(0, 9))
    def deliver_again(self, side: int, place: int) -> None:
        """A repeated numbered frame is refused, and the connection ends."""
        numbered = [frame for frame in self.delivered[side] if not is_bare(frame)]
        if numbered:
            with pytest.raises(RemoteProtocolError, match="was received twice over one connection"):
                self._deliver_frame(side, numbered[place % len(numbered)])
            self.disconnect()

    def greet(self, side: int) -> None:
        while self.nodes[side].greetings:
            self._deliver_frame(side, self.nodes[side].greetings.popleft())

    def deliver_all(self, side: int) -> bool:
        node = self.nodes[side]
        found = bool(node.greetings or node.line)
        while node.greetings or node.line:
            self.deliver(side, [0])
        return found


TestReorderingConnections = ReorderingConnections.TestCase
TestReorderingConnections.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

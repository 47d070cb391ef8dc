"""Conversations over several connections, on which frames overtake one another."""

import numpy as np
import pytest

from tests.unit.wire.talk import (
    STEP,
    changed,
    contents,
    cut,
    greet,
    opened,
    pair,
    said,
    sent,
    tensor,
    whole,
)
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire import MessageArrived
from whale_nebula.wire.conversation import Opened

SMALL = np.arange(5, dtype=np.float32)


class TestSeveralConnections:
    """Frames that overtake one another."""

    def test_early_frames_wait_for_their_turn(self) -> None:
        a, b = opened(window=1 << 20, stepping=True)
        frames = sent(a, [*tensor(0, SMALL), *tensor(0, SMALL + 1, slot=1), *tensor(0, SMALL + 2, slot=2)])
        assert b.receive(frames[2]) == b.receive(frames[1]) == []
        events = b.receive(frames[0])
        assert list(contents(events)) == [(SMALL + n).tobytes() for n in range(3)]
        assert b.receive(frames[1]) == [] and b.twice == 1

    def test_a_frame_may_overtake_the_greeting(self) -> None:
        a, b = pair(window=1 << 20)
        to_a, to_b = whole(b.connected()[0]), whole(a.connected()[0])
        (auth_of_a,) = a.receive(to_a)
        (auth_of_b,) = b.receive(to_b)
        a.receive(whole(auth_of_b.packets[0]))
        frame, beat = sent(a, said(0, STEP))[0], whole(a.beat())
        assert b.receive(frame) == b.receive(beat) == []
        events = b.receive(whole(auth_of_a.packets[0]))
        assert [type(event) for event in events] == [Opened, MessageArrived]

    def test_only_so_many_bytes_may_overtake_it(self) -> None:
        a, b = opened(window=1000)
        frames = [whole(a.beat()) for _ in range(20)]
        cut(b)
        b.connected()
        with pytest.raises(RemoteProtocolError, match="before the greeting"):
            for frame in frames:
                b.receive(frame)

    def test_what_was_held_at_a_cut_comes_again(self) -> None:
        a, b = opened(window=1 << 20, stepping=True)
        frames = sent(a, [*tensor(0, SMALL), *tensor(0, SMALL + 1, slot=1)])
        b.receive(frames[1])
        cut(a, b)
        again = [whole(packet) for packet in greet(a, b)[0][-1].resend]
        events = [event for frame in again for event in b.receive(frame)]
        assert len(list(contents(events))) == 2 and b.twice == 0

    def test_what_came_before_a_bad_held_frame_is_not_lost(self) -> None:
        a, b = opened(window=1 << 20, stepping=True)
        frames = [*sent(a, tensor(0, SMALL)), changed(sent(a, tensor(0, SMALL, slot=1))[0], step=9)]
        b.receive(frames[1])
        assert list(contents(b.receive(frames[0]))) == [SMALL.tobytes()]
        with pytest.raises(RemoteProtocolError, match="a tensor of step 9"):
            b.receive(whole(a.beat()))

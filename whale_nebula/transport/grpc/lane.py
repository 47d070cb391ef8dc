"""One stream: gRPC pulls what is sent out of an iterator and gives what comes as another; here both become calls.

Between a sender and gRPC lies room for one frame, no more: the connection's own flow control reaches the sender,
and what is urgent waits for one frame at most.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator


def _nothing(why: str) -> None:
    """A stream that is not attached yet has nothing to break."""


class Lane:
    """One stream of frames each way, for any number of threads. Lanes of one connection share one condition.

    `on_end` is told once why the stream is over.
    """

    def __init__(self, changed: threading.Condition | None = None) -> None:
        self.changed = changed or threading.Condition()
        self.why = ""
        self.trouble = ""  # what the side that was dialled knows of the way beyond it
        self.in_order = False  # the other side has ended it, and all that it sent was heard
        self.finished = False  # this side has ended it, and all that it sent has left
        self.on_end: Callable[[str], None] = _nothing
        self._frame: bytes | None = None
        self._finishing = False
        self._over = False
        self._breaks: Callable[[str], None] = _nothing

    def attach(self, breaks: Callable[[str], None]) -> None:
        """Say how the stream is broken, once there is one."""
        with self.changed:
            self._breaks = breaks
            over = self._over
        if over:
            breaks(self.why)

    @property
    def over(self) -> bool:
        """Whether nothing goes over it any more."""
        return self._over

    def send(self, frame: bytes) -> bool:
        """Hand over one frame, once there is room; False if the stream is over."""
        with self.changed:
            while not self.free and not (self._over or self._finishing):
                self.changed.wait()
            return self.put(frame)

    @property
    def free(self) -> bool:
        """Whether there is room for a frame. The condition is held."""
        return self._frame is None and not self._over and not self._finishing

    def put(self, frame: bytes) -> bool:
        """Hand over one frame for which there is room. The condition is held."""
        if self._over or self._finishing:
            return False
        self._frame = frame
        self.changed.notify_all()
        return True

    def outgoing(self) -> Iterator[bytes]:
        """The frames for gRPC, as it takes them."""
        while (frame := self._pull()) is not None:
            yield frame

    def _pull(self) -> bytes | None:
        with self.changed:
            while self._frame is None and not self._over and not self._finishing:
                self.changed.wait()
            frame, self._frame = (None, None) if self._over else (self._frame, None)
            self.changed.notify_all()
            return frame

    def read(self, incoming: Iterable[bytes], hear: Callable[[bytes], None]) -> str:
        """Hear everything that comes, in this thread, until the stream ends; gives why it did."""
        try:
            for frame in incoming:
                if self._over:
                    break
                hear(frame)
        except Exception as error:  # gRPC raises bare ones too; whatever it was, this stream is over
            self.gone(reason(error))
        else:
            self.in_order = not self._over
            self.gone("the stream has ended")
        return self.why

    def finish(self) -> None:
        """Take no more; once the last frame has left, this side of the stream ends in order."""
        with self.changed:
            self._finishing = True
            self.changed.notify_all()

    def gone(self, why: str) -> None:
        """The stream is no more. If this side had said all that it had to say, there is nothing to break."""
        with self.changed:
            said_all = self._finishing and self._frame is None
            if said_all and not self._over:
                self.finished, self._breaks = True, _nothing
        self.end(why)

    def end(self, why: str) -> None:
        """Break it now, for this reason; the first reason stays."""
        with self.changed:
            if self._over:
                return
            self._over, self.why = True, why
            self._frame = None
            breaks = self._breaks
            self.changed.notify_all()
        breaks(why)
        self.on_end(why)


def reason(error: BaseException) -> str:
    """Why something went wrong, in one line. gRPC's errors hold it in `details`."""
    details = getattr(error, "details", None)
    text = details() if callable(details) else None
    lines = str(text or error or type(error).__name__).strip().splitlines()
    return lines[0] if lines else type(error).__name__

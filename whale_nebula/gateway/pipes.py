"""Forwarding of bytes of links between connections of the public port and gRPC behind it, in the thread of the front.

One part of each connection is moved at a time, so none waits for another; one side is read only as fast as the other
one accepts.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable
from functools import partial

_PART_BYTES = 256 << 10
_WRONG = select.EPOLLHUP | select.EPOLLERR


class Poll:
    """Open files with the handlers that are called when one is readable or writable; used by one thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self.buffer = memoryview(bytearray(_PART_BYTES))

    def watch(self, line: socket.socket, events: int, handler: Callable[[int], None]) -> None:
        """Set the events of a file that are handled from now on; with none it is not watched."""
        file, known = line.fileno(), line.fileno() in self._handlers
        if not events:
            self.leave(line)
            return
        (self._epoll.modify if known else self._epoll.register)(file, events)
        self._handlers[file] = handler

    def leave(self, line: socket.socket) -> None:
        """Stop watching a file, which may then be closed."""
        if self._handlers.pop(line.fileno(), None) is not None:
            self._epoll.unregister(line)

    def handle(self, seconds: float) -> None:
        """Wait for events for so long, and handle them. An event may be of a closed file with the same number."""
        for file, events in self._epoll.poll(seconds):
            handler = self._handlers.get(file)
            if handler is not None:
                handler(events)

    def close(self) -> None:
        """Stop watching all files."""
        self._epoll.close()


class _Side:
    """One of the two connections: the bytes waiting to be sent over it, and whether its input has ended."""

    def __init__(self, line: socket.socket) -> None:
        self.line, self.waits, self.ended, self.events = line, memoryview(b""), False, 0


class Pipe:
    """Two connections connected back to back, until both have ended; `over` is called once."""

    def __init__(self, poll: Poll, outer: socket.socket, inner: socket.socket, over: Callable[[], None]) -> None:
        self._poll, self._over = poll, over
        self._sides = _Side(outer), _Side(inner)
        self.closed = False
        self._watch()

    def close(self) -> None:
        """End both connections."""
        if not self.closed:
            self.closed = True
            for side in self._sides:
                self._poll.leave(side.line)
                side.line.close()
            self._over()

    def _watch(self) -> None:
        for side, other in (self._sides, self._sides[::-1]):
            events = select.EPOLLOUT if side.waits else 0
            events |= select.EPOLLIN if not side.ended and not other.waits else 0
            if events != side.events:
                side.events = events
                self._poll.watch(side.line, events, partial(self._handle, side, other))

    def _handle(self, side: _Side, other: _Side, events: int) -> None:
        if self.closed:
            return
        try:
            if events & (select.EPOLLOUT | _WRONG) and side.waits:
                self._send(side, other, side.waits)
            if events & (select.EPOLLIN | _WRONG) and not side.ended and not other.waits:
                self._read(side, other)
        except OSError:  # the connection broke
            self.close()
            return
        if all(each.ended and not each.waits for each in self._sides):
            self.close()
        else:
            self._watch()

    def _read(self, side: _Side, other: _Side) -> None:
        try:
            size = side.line.recv_into(self._poll.buffer)
        except BlockingIOError:
            return
        if size:
            self._send(other, side, self._poll.buffer[:size])
        else:
            side.ended = True
            self._end(other, side)

    def _send(self, side: _Side, other: _Side, data: memoryview) -> None:
        try:
            sent = side.line.send(data)
        except BlockingIOError:
            sent = 0
        if data is not side.waits and sent < len(data):
            data, sent = memoryview(bytes(data[sent:])), 0  # the buffer is shared
        side.waits = data[sent:]
        self._end(side, other)

    def _end(self, side: _Side, other: _Side) -> None:
        """Forward an end of input, once everything before it is sent."""
        if other.ended and not side.waits:
            with contextlib.suppress(OSError):
                side.line.shutdown(socket.SHUT_WR)

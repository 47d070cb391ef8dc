"""The stream on which two gateways speak of themselves: what their audit logs have come to, and who is gone.

Whoever has the other's address dials, and dials again; if both have one there are two, and either will do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from whale_nebula.errors import AuditError, IdentityError, RemoteProtocolError
from whale_nebula.gateway import word
from whale_nebula.security.heads import Head, KeptHeads
from whale_nebula.security.identity import Identity
from whale_nebula.transport.grpc.lane import Lane

_WAITING = 64  # words; heads are cumulative, so an old one may be lost


def _nothing() -> None:
    """Nobody waits for the end."""


class Trunk:
    """All streams to one other gateway. `gone(worker, why)` hears which of its workers are; `noted(action, **said)`
    writes down what becomes of heads.
    """

    def __init__(
        self,
        there: Identity,
        kept: KeptHeads | None,
        gone: Callable[[str, str], None],
        noted: Callable[..., None],
    ) -> None:
        self.there = there
        self._kept, self._gone, self._noted = kept, gone, noted
        self._changed = threading.Condition()
        self._lanes: list[Lane] = []
        self._words: deque[bytes] = deque(maxlen=_WAITING)
        self._last_head: Head | None = None
        self._confirmed = self._denied = -1  # the last head of ours that was kept over there, and that was not
        self._closed = False
        self._sender = threading.Thread(target=self._send, name=f"nebula-trunk-{there.cluster}", daemon=True)
        self._sender.start()

    @property
    def up(self) -> bool:
        """Whether there is a stream."""
        with self._changed:
            return bool(self._lanes)

    def adopt(self, lane: Lane, over: Callable[[], None] = _nothing) -> None:
        """Take in a stream, which the other gateway has dialled or this one; `over` is called when it ends."""

        def drop(why: str) -> None:
            self._drop(lane)
            over()

        lane.on_end = drop
        with self._changed:
            self._lanes.append(lane)
            if self._last_head is not None:
                self._words.append(_of_head(self._last_head))
            self._changed.notify_all()
        if lane.over:
            drop(lane.why)

    def send_head(self, head: Head) -> None:
        """Have a head of our log kept over there."""
        with self._changed:
            self._last_head = head
        self._say(_of_head(head))

    def send_gone(self, worker: str, why: str) -> None:
        """Say that one of our workers is gone."""
        self._say(word.written({"kind": word.GONE, "worker": worker, "why": why}))

    def wait_kept(self, seconds: float) -> bool:
        """Wait until the other gateway has kept the last head of our log, at most so long."""
        with self._changed:
            wanted = self._last_head.seq if self._last_head is not None else -1
            self._changed.wait_for(lambda: max(self._confirmed, self._denied) >= wanted or not self._lanes, seconds)
            return self._confirmed >= wanted

    def close(self) -> None:
        """End the streams."""
        with self._changed:
            self._closed = True
            lanes = list(self._lanes)
            self._changed.notify_all()
        for lane in lanes:
            lane.end("this gateway has ended")

    def end(self, why: str) -> None:
        """Break the streams; they are dialled again."""
        with self._changed:
            lanes = list(self._lanes)
        for lane in lanes:
            lane.end(why)

    def _drop(self, lane: Lane) -> None:
        with self._changed:
            if lane in self._lanes:
                self._lanes.remove(lane)
            self._changed.notify_all()

    def _say(self, frame: bytes) -> None:
        with self._changed:
            self._words.append(frame)
            self._changed.notify_all()

    def _send(self) -> None:
        while (found := self._next()) is not None:
            lane, frame = found
            if not lane.send(frame):
                with self._changed:
                    self._words.appendleft(frame)

    def _next(self) -> tuple[Lane, bytes] | None:
        with self._changed:
            while not self._closed:
                if self._words and self._lanes:
                    return self._lanes[0], self._words.popleft()
                self._changed.wait()
            return None

    def hear(self, frame: bytes) -> None:
        """A word of the other gateway."""
        message = word.read(frame)
        match message:
            case {"kind": word.HEAD, "head": dict(head)}:
                self._keep(head)
            case {"kind": word.KEPT, "seq": int(seq)}:
                with self._changed:
                    self._confirmed = max(self._confirmed, seq)
                    self._changed.notify_all()
            case {"kind": word.REFUSED, "seq": int(seq), "why": str(why)}:
                with self._changed:
                    self._denied = max(self._denied, seq)
                    self._changed.notify_all()
                self._noted("refused", actor=self.there.uri, log_seq=seq, reason=why[:500])
            case {"kind": word.GONE, "worker": str(worker), "why": str(why)}:
                if not worker.startswith(f"{self.there.cluster}/"):
                    raise RemoteProtocolError(f"{self.there.worker} speaks of {worker[:60]!r}, which is not its own")
                self._gone(worker, why[:500])
            case _:
                raise RemoteProtocolError(f"a word between gateways that is not known: {message['kind'][:20]!r}")

    def _keep(self, said: dict[str, Any]) -> None:
        """Keep a head; a log that went back is written down, loudly, and the work goes on."""
        if self._kept is None:
            return
        head = Head.from_dict(said)
        try:
            new = self._kept.keep(head, self.there)
        except (AuditError, IdentityError) as error:
            reason = f"{error.what}: {error.why}" if error.why else error.what
            self._noted("head", actor=self.there.uri, decision="deny", reason=reason)
            self._say(word.written({"kind": word.REFUSED, "seq": head.seq, "why": reason}))
            return
        if new:
            self._noted("head", actor=self.there.uri, log_seq=head.seq, digest=head.digest)
        self._say(word.written({"kind": word.KEPT, "seq": head.seq}))


def _of_head(head: Head) -> bytes:
    return word.written({"kind": word.HEAD, "head": head.as_dict()})

"""The common part of links that send frames: tensors and messages are queued for a writer, arrivals go to the
mailbox.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from whale_nebula.errors import LocalProtocolError, NebulaError, RemoteProtocolError
from whale_nebula.transport.base import BYE, FAIL, LinkEnd, closed_by, failed_error, refuse_reserved
from whale_nebula.transport.mailbox import Mailbox, Waiters
from whale_nebula.transport.outbox import Outbox, Parcel
from whale_nebula.transport.protocol import Key, Packed, Payload, Roster
from whale_nebula.wire.assembly import Bound, MessageArrived, TensorArrived
from whale_nebula.wire.frame import Flag, Header, Kind, chunks, find_fault, pack
from whale_nebula.wire.message import check_message, encode_message
from whale_nebula.wire.tensor import Bytes, array_bytes, dtype_code, dtype_of

_MOST_CODEC, _MOST_NUMBER = (1 << 16) - 1, (1 << 32) - 1


class Described(NamedTuple):
    """A payload on its way out: its header, its bytes, and what it was before a codec."""

    header: Header
    data: Bytes
    raw_bytes: int


def describe_payload(header: Header, payload: Payload) -> Described:
    """A payload under the header of its key.

    >>> packed = Packed(np.zeros(5, np.uint8), codec=3, state=9, dtype="float32", dims=(4, 8))
    >>> sent = describe_payload(Header(Kind.SCALAR), packed)
    >>> sent.header.codec, sent.header.state, sent.header.dims, sent.data.size, sent.raw_bytes
    (3, 9, (4, 8), 5, 128)
    """
    if isinstance(payload, Packed):
        check_packed(payload)
        return Described(_with(header, payload), payload.data, payload.raw_bytes)
    array = np.asarray(payload)
    header = header._replace(dtype=dtype_code(array.dtype.name), dims=array.shape)
    return Described(header, array_bytes(array), array.nbytes)


def read_payload(event: TensorArrived) -> Payload:
    """What came, as it was sent."""
    header, dtype = event.header, dtype_of(event.header.dtype)
    if not header.encoded or dtype is None:
        return event.array
    return Packed(event.array, header.codec, header.state, dtype.name, header.dims)


def check_packed(packed: Packed) -> Packed:
    """Refuse what no frame can say, wherever it goes: a memory link takes no more than the others."""
    fault = _fault(packed)
    if fault:
        raise LocalProtocolError(f"this Packed cannot cross a link: {fault}")
    return packed


def _fault(packed: Packed) -> str | None:
    data: Any = packed.data
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        return "its data is no row of bytes"
    if not 1 <= packed.codec <= _MOST_CODEC:
        return f"codec {packed.codec}; what no codec made is sent as an array"
    if not 0 <= packed.state <= _MOST_NUMBER:
        return f"state {packed.state}"
    if not all(0 <= size <= _MOST_NUMBER for size in packed.dims):
        return f"sizes {packed.dims}"
    return find_fault(_with(Header(Kind.SCALAR, flags=Flag.LAST), packed))


def _with(header: Header, packed: Packed) -> Header:
    return header._replace(
        codec=packed.codec, state=packed.state, dtype=dtype_code(packed.dtype), dims=tuple(packed.dims)
    )


_LONGEST_REASON = 4096
_UINT8 = dtype_code("uint8")

ExpectKey: TypeAlias = Callable[[Key], Bound | None]


class FramedEnd(LinkEnd):
    """The end of a link whose writer takes parcels from an outbox; `stall` says how long a send may wait for room.

    `window` is how many bytes may lie here that nobody has asked for before the sender should be held; `waiters` are
    those of all links of this process.
    """

    def __init__(
        self,
        here: str,
        there: str,
        workers: Iterable[str],
        outbox: Outbox,
        *,
        expect: ExpectKey | None,
        stall: Callable[[], float],
        window: int,
        waiters: Waiters,
    ) -> None:
        super().__init__(Mailbox(here, there, fault=RemoteProtocolError, window=window, waiters=waiters))
        self._roster = Roster(workers)
        self._ends = self._roster.number(there), self._roster.number(here)
        self._expect = expect
        self._stall = stall
        self._outbox = outbox
        self._farewell = self._parcel({"kind": BYE})

    def send(self, key: Key, array: Payload, *, raw_bytes: int | None = None, size: int | None = None) -> None:
        """Queue a tensor for the writer. `size` is not needed here: the array has one."""
        self._check(key, self.here, self.there)
        header, data, raw = describe_payload(self._roster.header(key), array)
        self._put(Parcel(header, data))
        self._tally.tensor(data.nbytes, raw if raw_bytes is None else raw_bytes)

    def post(self, message: Mapping[str, Any]) -> None:
        """Queue a control message for the writer."""
        refuse_reserved(message)
        parcel = self._parcel(message)
        self._put(parcel)
        self._tally.message(parcel.payload.size)

    def fail(self, reason: Mapping[str, Any]) -> None:
        """Tell the other worker that this one failed and why, before everything that is queued."""
        cut = {name: value[:_LONGEST_REASON] if isinstance(value, str) else value for name, value in reason.items()}
        parcel = self._parcel({"kind": FAIL, "reason": cut})
        if self._outbox.put_urgent(parcel):
            self._tally.message(parcel.payload.size)

    def _say_farewell(self) -> None:
        if self._outbox.finish(self._farewell):
            self._tally.message(self._farewell.payload.size)

    def _put(self, parcel: Parcel) -> None:
        self._inbox.check_open()
        # what is wrong with a parcel is raised here, to the caller, and not to the writer
        pack(next(iter(chunks(parcel.header, parcel.payload)))[0], 0)
        if not self._outbox.put(parcel, self._stall(), self.there):
            self._inbox.check_open()

    def _parcel(self, message: Mapping[str, Any]) -> Parcel:
        payload = np.frombuffer(encode_message(message), np.uint8)
        there, here = self._ends
        header = Header(Kind.CONTROL, source=here, destination=there, dtype=_UINT8, dims=(payload.size,))
        return Parcel(header, payload)

    def _arrived(self, event: TensorArrived | MessageArrived) -> None:
        """Whatever has come whole."""
        if isinstance(event, MessageArrived):
            check_message(event.message)
            self._told(event.message, event.header.whole)
        else:
            self._inbox.put(self._roster.key(event.header), read_payload(event))

    def _told(self, message: dict[str, Any], size: int) -> None:
        if message["kind"] == BYE:
            self._inbox.end(partial(closed_by, self.there))
            self._say_farewell()
        elif message["kind"] == FAIL:
            self._inbox.end(partial(failed_error, self.there, message.get("reason")), at_once=True)
        else:
            self._inbox.put_message(message, size=size)

    def _refuse(self, error: NebulaError) -> None:
        """What comes cannot be understood from here on: say so to both sides."""
        self._inbox.end(lambda: error.with_traceback(None), at_once=True)
        self.fail({"what": f"it could not understand what '{self.there}' sent", "why": error.what})
        self._outbox.finish()

    def _bound(self, header: Header) -> Bound | None:
        """What the plan allows for a tensor that begins: asked before anything is allocated for it."""
        self._check_ends(header)
        if self._expect is None:
            return None
        key = self._roster.key(header)
        bound = self._expect(key)
        if bound is None:
            raise RemoteProtocolError(f"{key} came, which the plan does not know")
        return bound

    def _check_ends(self, header: Header) -> None:
        if (header.source, header.destination) != self._ends:
            raise RemoteProtocolError(
                f"a frame from worker {header.source} to worker {header.destination}, "
                f"on the link from {self.there} to {self.here}"
            )

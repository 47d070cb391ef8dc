"""The content of a link: tensors as payloads with their keys, the plan's limits of them, and statistics."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from whale_nebula.errors import LocalProtocolError, RemoteProtocolError
from whale_nebula.wire.buffers import Bound, TensorArrived
from whale_nebula.wire.frame import Direction, Header, Kind, find_tensor_fault
from whale_nebula.wire.tensor import Bytes, count_raw_bytes, encode_array, find_dtype, find_dtype_code

KeyKind: TypeAlias = Literal["forward", "backward", "part", "scalar", "result", "control", "round"]

# A numpy array or a `Packed`; over a memory link, which passes references, also any object: an eager tensor.
Payload: TypeAlias = Any

_KINDS: dict[KeyKind, tuple[str, Kind, Direction]] = {
    "forward": ("boundary", Kind.BOUNDARY, Direction.FORWARD),
    "backward": ("gradient of boundary", Kind.BOUNDARY, Direction.BACKWARD),
    "part": ("part of tied gradient", Kind.PART, Direction.NONE),
    "scalar": ("scalar", Kind.SCALAR, Direction.NONE),
    "result": ("result", Kind.RESULT, Direction.NONE),
    "control": ("control value", Kind.VALUE, Direction.NONE),
    "round": ("difference of weights", Kind.ROUND, Direction.NONE),
}
_BY_HEADER: dict[tuple[int, int], KeyKind] = {
    (int(kind), int(direction)): name for name, (_, kind, direction) in _KINDS.items()
}
_MAX_CODEC, _MAX_NUMBER = (1 << 16) - 1, (1 << 32) - 1


class Packed(NamedTuple):
    """A tensor encoded by a codec: a row of bytes that links do not interpret.

    `codec` is its number on the wire (1 to 65535), `state` the version of the state that it encoded with. `dtype` and
    `dims` are those of the tensor before encoding.
    """

    data: Bytes
    codec: int
    state: int
    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes, without the headers of frames."""
        return self.data.nbytes

    @property
    def raw_bytes(self) -> int:
        """The size in bytes of the tensor before encoding."""
        return count_raw_bytes(find_dtype_code(self.dtype), self.dims)

    def describe(self, header: Header) -> Header:
        """The header of a key, completed with the fields of this payload."""
        dtype, dims = find_dtype_code(self.dtype), tuple(self.dims)
        return header._replace(codec=self.codec, state=self.state, dtype=dtype, dims=dims)


def check_packed(packed: Packed) -> Packed:
    """Refuse a payload that a frame cannot represent, on every link: a memory link accepts no more than the others."""
    data: Any = packed.data
    fault: str | None
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        fault = "its data is not a byte string"
    elif not 1 <= packed.codec <= _MAX_CODEC:
        fault = f"codec {packed.codec} is not from 1 to {_MAX_CODEC}; data without a codec is sent as an array"
    elif not 0 <= packed.state <= _MAX_NUMBER:
        fault = f"state {packed.state} is out of range"
    elif not all(0 <= size <= _MAX_NUMBER for size in packed.dims):
        fault = f"sizes {packed.dims} are out of range"
    else:
        fault = find_tensor_fault(packed.describe(Header(Kind.SCALAR)))
    if fault:
        raise LocalProtocolError(f"cannot send this Packed over a link: {fault}")
    return packed


class DescribedPayload(NamedTuple):
    """An outgoing payload: its header, its bytes, and its form before encoding."""

    header: Header
    data: Bytes
    raw_bytes: int


def describe_payload(header: Header, payload: Payload) -> DescribedPayload:
    """The bytes of a payload, with the header of its key completed by the fields that describe the tensor.

    >>> packed = Packed(np.zeros(5, np.uint8), codec=3, state=9, dtype="float32", dims=(4, 8))
    >>> sent = describe_payload(Header(Kind.SCALAR), packed)
    >>> sent.header.codec, sent.header.state, sent.header.dims, sent.data.size, sent.raw_bytes
    (3, 9, (4, 8), 5, 128)
    """
    if isinstance(payload, Packed):
        check_packed(payload)
        return DescribedPayload(payload.describe(header), payload.data, payload.raw_bytes)
    array = np.asarray(payload)
    header = header._replace(dtype=find_dtype_code(array.dtype.name), dims=array.shape)
    return DescribedPayload(header, encode_array(array), array.nbytes)


def read_payload(event: TensorArrived) -> Payload:
    """The payload of a received tensor: its array, or a `Packed` if a codec encoded it."""
    header, dtype = event.header, find_dtype(event.header.dtype)
    if not header.encoded or dtype is None:
        return event.array
    return Packed(event.array, header.codec, header.state, dtype.name, header.dims)


@dataclass(frozen=True, slots=True)
class Key:
    """Identity of a tensor in a run: `slot` is its number in the plan, `micro_batch` -1 if it has none.

    The kind `part` is a gradient part of a variable that two stages hold, `round` an exchange of local SGD.

    >>> print(Key("backward", 7, step=3, phase=0, micro_batch=1, slot=2, source="npu/0", destination="gpu/0"))
    gradient of boundary 2 (step 3, phase 0, micro-batch 1) from npu/0 to gpu/0
    """

    kind: KeyKind
    program: int
    step: int
    phase: int
    micro_batch: int
    slot: int
    source: str
    destination: str

    def __str__(self) -> str:
        micro_batch = f", micro-batch {self.micro_batch}" if self.micro_batch >= 0 else ""
        place = f"step {self.step}, phase {self.phase}{micro_batch}"
        return f"{_KINDS[self.kind][0]} {self.slot} ({place}) from {self.source} to {self.destination}"


@dataclass(frozen=True, slots=True)
class LinkTotals:
    """Statistics of the data that one worker has sent on one link.

    `payload_bytes` are the tensors as they were sent, `bytes` everything (including frame headers and control
    messages), `raw_bytes` the same tensors in their own element type, before any codec.
    """

    payload_bytes: int = 0
    bytes: int = 0
    raw_bytes: int = 0
    frames: int = 0

    def counts(self) -> tuple[int, int, int, int]:
        """The fields, in order."""
        return self.payload_bytes, self.bytes, self.raw_bytes, self.frames

    def __add__(self, other: LinkTotals) -> LinkTotals:
        return LinkTotals(*map(operator.add, self.counts(), other.counts()))

    def __sub__(self, other: LinkTotals) -> LinkTotals:
        return LinkTotals(*map(operator.sub, self.counts(), other.counts()))


OnSent: TypeAlias = Callable[[Key, int, float, float], None]
"""Called after a tensor was sent: with its key, its bytes on the wire, and when it began and ceased to occupy the link
(seconds of the link's clock).
"""


ExpectKey: TypeAlias = Callable[[Key], Bound | None]
"""The plan's limits of a key; None for an unexpected one."""


class Roster:
    """The workers of a run, each with its number on the wire: its place in the sorted list of names.

    >>> roster = Roster(["npu/0", "gpu/0"])
    >>> key = Key("forward", 7, step=3, phase=0, micro_batch=1, slot=2, source="gpu/0", destination="npu/0")
    >>> roster.build_header(key).destination, roster.read_key(roster.build_header(key)) == key
    (1, True)
    """

    def __init__(self, workers: Iterable[str]) -> None:
        self.workers = tuple(sorted(set(workers)))
        self._numbers = {name: number for number, name in enumerate(self.workers)}

    def find_number(self, worker: str) -> int:
        """The number of a worker."""
        if worker not in self._numbers:
            raise LocalProtocolError(f"this run has no worker '{worker}'", why=f"its workers are {self.workers}")
        return self._numbers[worker]

    def build_header(self, key: Key) -> Header:
        """The header of this key; the fields that describe the tensor are still empty."""
        _, kind, direction = _KINDS[key.kind]
        return Header(
            kind=kind,
            direction=direction,
            program=key.program,
            step=key.step,
            phase=key.phase,
            micro_batch=key.micro_batch,
            slot=key.slot,
            source=self.find_number(key.source),
            destination=self.find_number(key.destination),
        )

    def read_key(self, header: Header) -> Key:
        """The key in this header."""
        if max(header.source, header.destination) >= len(self.workers):
            raise RemoteProtocolError(f"invalid frame: worker {header.source} or {header.destination} does not exist")
        ends = self.workers[header.source], self.workers[header.destination]
        kind = _BY_HEADER[header.kind, header.direction]
        return Key(kind, header.program, header.step, header.phase, header.micro_batch, header.slot, *ends)

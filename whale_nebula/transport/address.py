"""Keys as the runtime has them, headers as the wire has them: one is written as the other."""

from __future__ import annotations

from collections.abc import Iterable

from whale_nebula.errors import LocalProtocolError, RemoteProtocolError
from whale_nebula.transport.protocol import Key, KeyKind
from whale_nebula.wire.frame import Direction, Header, Kind

_WIRE: dict[KeyKind, tuple[Kind, Direction]] = {
    "forward": (Kind.BOUNDARY, Direction.FORWARD),
    "backward": (Kind.BOUNDARY, Direction.BACKWARD),
    "part": (Kind.PART, Direction.NONE),
    "scalar": (Kind.SCALAR, Direction.NONE),
    "result": (Kind.RESULT, Direction.NONE),
    "control": (Kind.VALUE, Direction.NONE),
    "round": (Kind.ROUND, Direction.NONE),
}
_KEYS: dict[tuple[int, int], KeyKind] = {(int(kind), int(way)): name for name, (kind, way) in _WIRE.items()}


class Roster:
    """The workers of a run, each with its number on the wire: its place in the sorted list of names.

    >>> roster = Roster(["npu/0", "gpu/0"])
    >>> key = Key("forward", 7, step=3, phase=0, micro_batch=1, slot=2, source="gpu/0", destination="npu/0")
    >>> roster.header(key).destination, roster.key(roster.header(key)) == key
    (1, True)
    """

    def __init__(self, workers: Iterable[str]) -> None:
        self.workers = tuple(sorted(set(workers)))
        self._numbers = {name: number for number, name in enumerate(self.workers)}

    def number(self, worker: str) -> int:
        """The number of a worker."""
        if worker not in self._numbers:
            raise LocalProtocolError(
                f"no worker '{worker}' in this run", why=f"its workers are {self.workers}"
            )
        return self._numbers[worker]

    def header(self, key: Key) -> Header:
        """The header that carries this key; what describes the tensor itself is still empty."""
        kind, direction = _WIRE[key.kind]
        return Header(
            kind=kind,
            direction=direction,
            program=key.program,
            step=key.step,
            phase=key.phase,
            micro_batch=key.micro_batch,
            slot=key.slot,
            source=self.number(key.source),
            destination=self.number(key.destination),
        )

    def key(self, header: Header) -> Key:
        """The key that this header carries."""
        if max(header.source, header.destination) >= len(self.workers):
            raise RemoteProtocolError(
                f"a frame from worker {header.source} to {header.destination}, which do not exist"
            )
        return Key(
            _KEYS[header.kind, header.direction],
            header.program,
            header.step,
            header.phase,
            header.micro_batch,
            header.slot,
            self.workers[header.source],
            self.workers[header.destination],
        )

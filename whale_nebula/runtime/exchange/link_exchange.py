"""Exchange values between concurrent stages: in shared memory within a host, over links between hosts. A host is a unit
of shared memory: a cluster in one process, a worker in several. A value that several stages of a host read crosses
once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import tensorflow as tf

from whale_nebula.errors import DeadlineError, RemoteProtocolError
from whale_nebula.ir.routing import Seat
from whale_nebula.runtime.exchange.auto import StepEstimate
from whale_nebula.runtime.exchange.crossing import Channels, Crossing, Route
from whale_nebula.runtime.exchange.state import Residue, Tally, TensorPosition
from whale_nebula.runtime.step.clock import StageClock
from whale_nebula.spec import Value
from whale_nebula.transport import Key, KeyKind, Link, Packed

Place = tuple[str, Value, int]
"""A value of a micro-batch at a host."""


@dataclass
class LinkExchange:
    """The exchange of one step, shared by the stages of a process.

    `slices` are the inputs of each micro-batch and `rows` their numbers of rows; `outlook` are estimates for the step.
    """

    channels: Channels
    links: Mapping[tuple[str, str], Link]
    program: int
    step: int
    patience: float
    slices: Sequence[Sequence[Any]] = ()
    rows: Sequence[int] = ()
    outlook: StepEstimate = field(default_factory=StepEstimate)
    here: Callable[[str], bool] = lambda host: True
    clocks: Mapping[Seat, StageClock] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    _residues: dict[Place, Residue] = field(default_factory=dict)
    _shelf: dict[Place, Any] = field(default_factory=dict)
    _left: dict[Place, int] = field(default_factory=dict)
    _coded: set[Place] = field(default_factory=set)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _failed: BaseException | None = None

    def __post_init__(self) -> None:
        self.crossings = self.channels.crossings
        self._before = self.channels.states.copy()
        self.channels.auto.choose(self.outlook, self.channels.last, self.tally)

    def undo(self) -> None:
        """Restore the codec states from before a failed or skipped step."""
        self.channels.states.restore(self._before)

    def put(self, value: Value, micro_batch: int, tensor: Any, rows: Any = None) -> None:
        """Make a value available to other stages: it is sent once to each host."""
        crossing = self.crossings.by_value[value]
        lane = self.crossings.lane(crossing, micro_batch)
        packed = None
        for host in lane.readers:
            if host == lane.home:
                self._lay(lane, (host, value, micro_batch), tensor)
            elif host not in lane.packed:
                self._send(crossing, lane.home, host, micro_batch, tensor, tensor)
            else:
                if packed is None:
                    packed = self._pack(crossing, lane, micro_batch, tensor, rows)
                self._send(crossing, lane.home, host, micro_batch, packed, tensor)

    def _send(self, crossing: Crossing, home: str, host: str, micro_batch: int, given: Any, tensor: Any) -> None:
        """Send an encoded tensor."""
        raw = int(tensor.shape.num_elements()) * tensor.dtype.size  # tf.size would run an op
        if isinstance(given, Packed):
            size = given.nbytes
        else:
            size = int(given.shape.num_elements()) * given.dtype.size
            given = given if self.here(host) else given.numpy()
        self.links[home, host].send(self._key(crossing, micro_batch, home, host), given, raw_bytes=raw, size=size)

    def get(self, value: Value, micro_batch: int, stage: int) -> Any:
        """Receive a value; the first stage of a host that needs it receives it for all."""
        crossing = self.crossings.by_value[value]
        lane = self.crossings.lane(crossing, micro_batch)
        host, seat = lane.seats[stage]
        place = host, value, micro_batch
        with self._changed:
            first = host != lane.home and place not in self._left
            self._left.setdefault(place, lane.readers[host])
        if first:
            key = self._key(crossing, micro_batch, lane.home, host)
            came = self.links[host, lane.home].receive(key, self.patience)
            packed = host in lane.packed
            made = self._unpack(crossing, lane, place, seat, came) if packed else tf.convert_to_tensor(came)
            self._lay(lane, place, made)
        with self._changed:
            if place not in self._shelf:
                self._wait_for(self._shelf, place)
            self._left[place] -= 1
            return self._shelf[place] if self._left[place] else self._shelf.pop(place)

    def _key(self, crossing: Crossing, micro_batch: int, home: str, host: str) -> Key:
        kind = cast(KeyKind, crossing.kind)
        return Key(kind, self.program, self.step, crossing.phase, micro_batch, crossing.number, home, host)

    # ------------------------------------------------------------------ codecs
    def _pack(self, crossing: Crossing, lane: Route, micro_batch: int, tensor: Any, rows: Any) -> Any:
        """Encode a tensor."""
        at = TensorPosition(self.step, micro_batch, self.channels.training, self.channels.seed, lane.lead)
        end = self.channels.end(crossing, lane.home, lane.name, out=True)
        place, ids = (lane.home, crossing.tensor, micro_batch), crossing.ids and self._ids(crossing.ids, micro_batch)
        with self._coding("encode", crossing, lane, (lane.home, crossing.value, micro_batch), lane.seat):
            before = self._residues.get(place) if crossing.back else None
            payload, after = end.send(tensor, at, self.tally, before, rows, ids)
            if not crossing.back:
                self._residues[place] = after
        return payload

    def _unpack(self, crossing: Crossing, lane: Route, taken: Place, seat: Seat, came: Any) -> Any:
        """Decode a tensor."""
        host, _, micro_batch = taken
        end = self.channels.end(crossing, host, lane.name, out=False)
        place, ids = (host, crossing.tensor, micro_batch), crossing.ids and self._ids(crossing.ids, micro_batch)
        first = self.channels.training and micro_batch == lane.lead
        with self._coding("decode", crossing, lane, taken, seat):
            if isinstance(came, Packed) and self.rows and crossing.boundary is not None:
                # a few bytes may unpack to any number of rows: refuse all but that of the micro-batch
                entries = self.channels.entries.get(crossing.tensor)
                due = came.dims[0] if entries is None else entries * self.rows[micro_batch]
                if came.dims[0] != due:
                    raise RemoteProtocolError(
                        f"received {end.name} with {came.dims[0]} rows instead of {due}", where=end.name
                    )
            before = self._residues.get(place) if crossing.back else None
            tensor, after = end.take(came, self.tally, before, ids, first=first)
            if not crossing.back:
                self._residues[place] = after
        return tensor

    def _ids(self, ids: Value, micro_batch: int) -> Any:
        leaf = self.channels.cut.program.leaf_ops[ids.op]
        return np.asarray(self.slices[micro_batch][leaf]).astype(np.int64).reshape(-1)

    @contextlib.contextmanager
    def _coding(self, what: str, crossing: Crossing, lane: Route, place: Place, seat: Seat) -> Iterator[None]:
        """Context of a codec; its time counts for the stage that sends, or that reads first. Codec state is used in the
        order of micro-batches, independent of the speeds of local replicas.
        """
        host, value, micro_batch = place
        clock = None if crossing.way.plain else self.clocks.get(seat)
        timed = None if clock is None else clock.time_codec(what, crossing.kind, micro_batch, crossing.phase)
        with timed or contextlib.nullcontext():
            if lane.before is not None and (host, value, lane.before) not in self._coded:
                with self._changed:
                    self._wait_for(self._coded, (host, value, lane.before))
            yield
            with self._changed:
                self._coded.add(place)
                self._changed.notify_all()

    # ------------------------------------------------------------------ values stored on a host
    def _lay(self, lane: Route, place: Place, tensor: Any) -> None:
        with self._changed:
            self._left.setdefault(place, lane.readers[place[0]])
            self._shelf[place] = tensor
            self._changed.notify_all()

    def _wait_for(self, ready: Mapping[Place, Any] | set[Place], place: Place) -> None:
        """Block until a condition on a micro-batch's local value holds; raises if a stage fails or patience ends."""
        come = self._changed.wait_for(lambda: place in ready or self._failed is not None, self.patience)
        if self._failed is not None:
            raise self._failed
        if not come:
            raise self._late_error(*place)

    def _late_error(self, host: str, value: Value, micro_batch: int) -> DeadlineError:
        crossing = self.crossings.by_value[value]
        stage = self.crossings.cut.program.stages[crossing.source].key
        return DeadlineError(
            f"{host} waited {self.patience:.0f} s for {crossing.kind} {crossing.number} of micro-batch {micro_batch}",
            where=f"stage {stage!r}",
            why=f"stage {stage!r} of the same host has not produced it",
            mend="increase patience in the config if a micro-batch can take that long",
        )

    def abort(self, failure: BaseException) -> None:
        """Wake all waits for values, because a stage failed."""
        with self._changed:
            self._failed = self._failed or failure
            self._changed.notify_all()

    @property
    def leftover(self) -> int:
        """The number of values that were never received; 0 after a step."""
        return len(self._shelf)

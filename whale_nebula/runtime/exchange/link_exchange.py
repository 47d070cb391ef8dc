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

    `slices` are the inputs of each micro-batch and `rows` their numbers of rows, if known; `estimate` are estimates for
    the step. Tensors for hosts that are not `is_local` are sent as arrays. `clocks` are those of this process's
    replicas. A wait for another stage takes at most `patience` seconds.
    """

    channels: Channels
    links: Mapping[tuple[str, str], Link]
    program: int
    step: int
    patience: float
    slices: Sequence[Sequence[Any]] = ()
    rows: Sequence[int] = ()
    estimate: StepEstimate = field(default_factory=StepEstimate)
    is_local: Callable[[str], bool] = lambda host: True
    clocks: Mapping[Seat, StageClock] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    _residues: dict[Place, Residue] = field(default_factory=dict)
    _values: dict[Place, Any] = field(default_factory=dict)
    _reads_left: dict[Place, int] = field(default_factory=dict)
    _finished_codings: set[Place] = field(default_factory=set)
    _condition: threading.Condition = field(default_factory=threading.Condition)
    _failure: BaseException | None = None

    def __post_init__(self) -> None:
        self.crossings = self.channels.crossings
        self._saved_states = self.channels.states.copy()
        self.channels.codec_chooser.choose(self.estimate, self.channels.last_reports, self.tally)

    def restore_states(self) -> None:
        """Restore the codec states from before a failed or skipped step."""
        self.channels.states.restore(self._saved_states)

    def put(self, value: Value, micro_batch: int, tensor: Any, rows: Any = None) -> None:
        """Make a value available to other stages: it is sent once to each host."""
        crossing = self.crossings.by_value[value]
        route = self.crossings.routes[value, micro_batch]
        packed = None
        for host in route.readers:
            if host == route.source_host:
                self._store_value(route, (host, value, micro_batch), tensor)
            elif host not in route.packed_hosts:
                self._send(crossing, route.source_host, host, micro_batch, tensor, tensor)
            else:
                if packed is None:
                    packed = self._pack(crossing, route, micro_batch, tensor, rows)
                self._send(crossing, route.source_host, host, micro_batch, packed, tensor)

    def _send(
        self, crossing: Crossing, source_host: str, host: str, micro_batch: int, sent_tensor: Any, tensor: Any
    ) -> None:
        """Send a `tensor` to another host as `sent_tensor`, which may be encoded."""
        raw = int(tensor.shape.num_elements()) * tensor.dtype.size  # tf.size would run an op
        if isinstance(sent_tensor, Packed):
            size = sent_tensor.nbytes
        else:
            size = int(sent_tensor.shape.num_elements()) * sent_tensor.dtype.size
            sent_tensor = sent_tensor if self.is_local(host) else sent_tensor.numpy()
        self.links[source_host, host].send(
            self._make_key(crossing, micro_batch, source_host, host), sent_tensor, raw_bytes=raw, size=size
        )

    def get(self, value: Value, micro_batch: int, stage: int) -> Any:
        """Receive a value; the first stage of a host that needs it receives it for all."""
        crossing = self.crossings.by_value[value]
        route = self.crossings.routes[value, micro_batch]
        host, seat = route.seats[stage]
        place = host, value, micro_batch
        with self._condition:
            first = host != route.source_host and place not in self._reads_left
            self._reads_left.setdefault(place, route.readers[host])
        if first:
            key = self._make_key(crossing, micro_batch, route.source_host, host)
            received = self.links[host, route.source_host].receive(key, self.patience)
            packed = host in route.packed_hosts
            made = self._unpack(crossing, route, place, seat, received) if packed else tf.convert_to_tensor(received)
            self._store_value(route, place, made)
        with self._condition:
            if place not in self._values:
                self._wait_for(self._values, place)
            self._reads_left[place] -= 1
            return self._values[place] if self._reads_left[place] else self._values.pop(place)

    def _make_key(self, crossing: Crossing, micro_batch: int, source_host: str, host: str) -> Key:
        kind = cast(KeyKind, crossing.kind)
        return Key(kind, self.program, self.step, crossing.phase, micro_batch, crossing.number, source_host, host)

    # ------------------------------------------------------------------ codecs
    def _pack(self, crossing: Crossing, route: Route, micro_batch: int, tensor: Any, rows: Any) -> Any:
        at = TensorPosition(self.step, micro_batch, self.channels.training, self.channels.seed, route.first_micro_batch)
        end = self.channels.find_end(crossing, route.source_host, route.name, out=True)
        place, ids = (
            (route.source_host, crossing.tensor, micro_batch),
            crossing.ids and self._read_ids(crossing.ids, micro_batch),
        )
        with self._time_coding("encode", crossing, route, (route.source_host, crossing.value, micro_batch), route.seat):
            before = self._residues.get(place) if crossing.is_gradient else None
            payload, after = end.encode(tensor, at, self.tally, before, rows, ids)
            if not crossing.is_gradient:
                self._residues[place] = after
        return payload

    def _unpack(self, crossing: Crossing, route: Route, value_place: Place, seat: Seat, received: Any) -> Any:
        host, _, micro_batch = value_place
        end = self.channels.find_end(crossing, host, route.name, out=False)
        place, ids = (host, crossing.tensor, micro_batch), crossing.ids and self._read_ids(crossing.ids, micro_batch)
        first = self.channels.training and micro_batch == route.first_micro_batch
        with self._time_coding("decode", crossing, route, value_place, seat):
            if isinstance(received, Packed) and self.rows and crossing.boundary is not None:
                # a few bytes may unpack to any number of rows: refuse all but that of the micro-batch
                entries = self.channels.entries.get(crossing.tensor)
                due = received.dims[0] if entries is None else entries * self.rows[micro_batch]
                if received.dims[0] != due:
                    raise RemoteProtocolError(
                        f"received {end.name} with {received.dims[0]} rows instead of {due}", where=end.name
                    )
            before = self._residues.get(place) if crossing.is_gradient else None
            tensor, after = end.decode(received, self.tally, before, ids, first=first)
            if not crossing.is_gradient:
                self._residues[place] = after
        return tensor

    def _read_ids(self, ids: Value, micro_batch: int) -> Any:
        leaf = self.channels.cut.program.leaf_ops[ids.op]
        return np.asarray(self.slices[micro_batch][leaf]).astype(np.int64).reshape(-1)

    @contextlib.contextmanager
    def _time_coding(self, what: str, crossing: Crossing, route: Route, place: Place, seat: Seat) -> Iterator[None]:
        """Context of a codec; its time counts for the stage that sends, or that reads first. It first waits for the
        previous micro-batch of its route: codec state is used in their order, whichever local replica is faster.
        """
        host, value, micro_batch = place
        if route.previous_micro_batch is not None:
            with self._condition:
                self._wait_for(self._finished_codings, (host, value, route.previous_micro_batch))
        clock = None if crossing.encoding.plain else self.clocks.get(seat)
        timed = None if clock is None else clock.time_codec(what, crossing.kind, micro_batch, crossing.phase)
        with timed or contextlib.nullcontext():
            yield
        with self._condition:
            self._finished_codings.add(place)
            self._condition.notify_all()

    # ------------------------------------------------------------------ values stored on a host
    def _store_value(self, route: Route, place: Place, tensor: Any) -> None:
        with self._condition:
            self._reads_left.setdefault(place, route.readers[place[0]])
            self._values[place] = tensor
            self._condition.notify_all()

    def _wait_for(self, ready: Mapping[Place, Any] | set[Place], place: Place) -> None:
        """Wait until `ready` contains a place, with the condition held; raises if a stage fails or patience ends."""
        come = self._condition.wait_for(lambda: place in ready or self._failure is not None, self.patience)
        if self._failure is not None:
            raise self._failure
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
        with self._condition:
            self._failure = self._failure or failure
            self._condition.notify_all()

"""Exchange values between concurrent stages: by shared memory within a host, by links between hosts.

A host is what shares memory for free: in one process a cluster, in several a worker. A value that several stages of
a host read crosses once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import tensorflow as tf

from whale_nebula.codec.way import NONE
from whale_nebula.errors import DeadlineError
from whale_nebula.ir.cut import Cut
from whale_nebula.ir.routing import Routing, Seat
from whale_nebula.runtime.exchange.channels import Channels
from whale_nebula.runtime.exchange.coding import decode_cast, encode_cast
from whale_nebula.runtime.step.clock import StageClock
from whale_nebula.spec import Value
from whale_nebula.transport.protocol import Key, KeyKind, Link, Packed


@dataclass(frozen=True)
class Slot:
    """A value that may cross: its number, who makes it, who reads it, and how it is encoded."""

    kind: str
    number: int
    phase: int
    source: int
    readers: tuple[int, ...]
    codec: str
    dtype: Any


@dataclass(frozen=True)
class Slots:
    """Every value of a plan that goes from one stage to another."""

    cut: Cut

    @cached_property
    def by_value(self) -> Mapping[Value, Slot]:
        """Boundaries forward, and their gradients' shares backward."""
        found: dict[Value, Slot] = {}
        spec = self.cut.program.graph.spec
        codecs: dict[Value, str] = {}
        for b in self.cut.boundaries:
            dtype = tf.as_dtype(spec(b.value).dtype)
            found[b.value] = Slot("forward", b.slot, b.phase, b.source, b.destinations, b.codec, dtype)
            codecs[b.value] = b.backward_codec
        phases = {request: phase.index for phase in self.cut.phases for request in phase.requests}
        flows = [(phases[r.index], flow) for r in self.cut.program.requests for flow in r.flows]
        for number, (phase, flow) in enumerate(flows):
            target = self.cut.program.labels.get(flow.boundary.op, 0)
            dtype = tf.as_dtype(spec(flow.gradient).dtype)
            codec = codecs.get(flow.boundary, "none")
            found[flow.gradient] = Slot("backward", number, phase, flow.stage, (target,), codec, dtype)
        return found


@dataclass
class Post:
    """The exchange of one step, shared by the stages of a process."""

    slots: Slots
    routing: Routing
    links: Mapping[tuple[str, str], Link]
    program: int
    step: int
    patience: float
    here: Callable[[str], bool] = lambda host: True
    channels: Channels | None = None
    clocks: Mapping[Seat, StageClock] = field(default_factory=dict)
    clusters: Mapping[str, str] = field(default_factory=dict)
    _shelf: dict[tuple[str, Value, int], Any] = field(default_factory=dict)
    _left: dict[tuple[str, Value, int], int] = field(default_factory=dict)
    _coded: set[tuple[str, Value, int]] = field(default_factory=set)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _failed: BaseException | None = None

    def put(
        self, value: Value, micro_batch: int, source: int, destinations: Sequence[int], tensor: Any, rows: Any = None
    ) -> None:
        """Give a value to other stages: once to each host."""
        slot = self.slots.by_value[value]
        home = self.routing.host(source, micro_batch)
        encoded = None
        for host in dict.fromkeys(self.routing.host(d, micro_batch) for d in destinations):
            if host == home:
                self._lay(host, value, micro_batch, tensor)
                continue
            if self._near(home, host):
                self._send(slot, home, host, micro_batch, tensor, _size(tensor))
                continue
            if encoded is None:
                with self._time_codec("encode", slot, source, micro_batch):
                    encoded = self._encode_value(value, slot, home, micro_batch, tensor, rows)
            self._send(slot, home, host, micro_batch, encoded, _size(tensor))

    def _near(self, home: str, host: str) -> bool:
        """Whether two hosts are in one cluster: between them things go as they are."""
        return self.clusters.get(home, home) == self.clusters.get(host, host)

    def _encode_value(self, value: Value, slot: Slot, home: str, micro_batch: int, tensor: Any, rows: Any) -> Any:
        if self.channels is not None and self.channels.takes(value):
            with self._in_order(self.channels, value, home, micro_batch):
                return self.channels.encode(value, tensor, home, self.step, micro_batch, rows)
        return encode_cast(slot.codec, tensor)

    def _decode_value(self, value: Value, slot: Slot, host: str, micro_batch: int, came: Any) -> Any:
        if self.channels is not None and self.channels.takes(value):
            with self._in_order(self.channels, value, host, micro_batch):
                return self.channels.decode(value, came, host, micro_batch)
        return decode_cast(tf.convert_to_tensor(came), slot.dtype)

    @contextlib.contextmanager
    def _in_order(self, channels: Channels, value: Value, host: str, micro_batch: int) -> Iterator[None]:
        """What an end of a channel remembers goes from micro-batch to micro-batch, whichever replica here is faster."""
        before = channels.before(value, micro_batch)
        with self._changed:
            self._await(lambda: before is None or (host, value, before) in self._coded, value, host, before)
        yield
        with self._changed:
            self._coded.add((host, value, micro_batch))
            self._changed.notify_all()

    def _send(self, slot: Slot, home: str, host: str, micro_batch: int, tensor: Any, raw: int) -> None:
        link = self.links[home, host]
        by_reference = isinstance(tensor, Packed) or self.here(host)
        payload = tensor if by_reference else tensor.numpy()
        size = tensor.nbytes if isinstance(tensor, Packed) else _size(tensor)
        link.send(self._key(slot, micro_batch, home, host), payload, raw_bytes=raw, size=size)

    def get(self, value: Value, micro_batch: int, stage: int) -> Any:
        """Take a value; the first stage of a host to ask for it waits at the link for all."""
        slot = self.slots.by_value[value]
        host, home = self.routing.host(stage, micro_batch), self.routing.host(slot.source, micro_batch)
        if host != home and self._first(host, value, micro_batch):
            received = self.links[host, home].receive(self._key(slot, micro_batch, home, host), self.patience)
            self._lay(
                host, value, micro_batch, self._open_value(value, slot, stage, (home, host), micro_batch, received)
            )
        return self._take(host, value, micro_batch)

    def _open_value(
        self, value: Value, slot: Slot, stage: int, ends: tuple[str, str], micro_batch: int, came: Any
    ) -> Any:
        if self._near(*ends):
            return tf.convert_to_tensor(came)
        with self._time_codec("decode", slot, stage, micro_batch):
            return self._decode_value(value, slot, ends[1], micro_batch, came)

    def _time_codec(
        self, what: str, slot: Slot, stage: int, micro_batch: int
    ) -> contextlib.AbstractContextManager[None]:
        """A codec takes the time of the stage that sends, or that is the first to read."""
        clock = self.clocks.get(self.routing.seat(stage, micro_batch))
        if clock is None or slot.codec == NONE:
            return contextlib.nullcontext()
        return clock.codes(what, slot.kind, micro_batch, slot.phase)

    def _key(self, slot: Slot, micro_batch: int, home: str, host: str) -> Key:
        kind = cast(KeyKind, slot.kind)
        return Key(kind, self.program, self.step, slot.phase, micro_batch, slot.number, home, host)

    def _readers(self, host: str, value: Value, micro_batch: int) -> int:
        slot = self.slots.by_value[value]
        readers = (stage for stage in slot.readers if stage != slot.source)
        return sum(self.routing.host(stage, micro_batch) == host for stage in readers)

    def _first(self, host: str, value: Value, micro_batch: int) -> bool:
        key = (host, value, micro_batch)
        with self._changed:
            if key in self._left:
                return False
            self._left[key] = self._readers(*key)
            return True

    def _lay(self, host: str, value: Value, micro_batch: int, tensor: Any) -> None:
        key = (host, value, micro_batch)
        with self._changed:
            self._left.setdefault(key, self._readers(*key))
            self._shelf[key] = tensor
            self._changed.notify_all()

    def _take(self, host: str, value: Value, micro_batch: int) -> Any:
        key = (host, value, micro_batch)
        with self._changed:
            self._await(lambda: key in self._shelf, value, host, micro_batch)
            self._left[key] -= 1
            return self._shelf[key] if self._left[key] else self._shelf.pop(key)

    def _await(self, ready: Callable[[], bool], value: Value, host: str, micro_batch: int | None) -> None:
        """Until something holds of a micro-batch of a value here; a failed stage, and patience, end it."""
        come = self._changed.wait_for(lambda: ready() or self._failed is not None, self.patience)
        if self._failed is not None:
            raise self._failed
        if not come:
            raise self._late(value, host, micro_batch)

    def _late(self, value: Value, host: str, micro_batch: int | None) -> DeadlineError:
        slot = self.slots.by_value[value]
        stage = self.slots.cut.program.stages[slot.source].key
        return DeadlineError(
            f"{host} waited {self.patience:.0f} s for {slot.kind} {slot.number} of micro-batch {micro_batch}",
            where=f"stage {stage!r}",
            why=f"stage {stage!r} of the same host has not made it",
            mend="raise patience in the configuration if a micro-batch really takes that long",
        )

    def abort(self, failure: BaseException) -> None:
        """A stage failed: whoever waits on the shelf stops waiting."""
        with self._changed:
            self._failed = self._failed or failure
            self._changed.notify_all()

    @property
    def leftover(self) -> int:
        """Values that nobody took; 0 after a step."""
        return len(self._shelf)


def _size(tensor: Any) -> int:
    return int(tensor.shape.num_elements()) * tensor.dtype.size  # tf.size would run an op

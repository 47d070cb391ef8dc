"""Exchange values between concurrent stages: by shared memory within a host, by links between hosts.

A host is what shares memory for free: in one process a cluster, in several a worker. A value that several stages of
a host read crosses once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import tensorflow as tf

from whale_nebula.errors import DeadlineError
from whale_nebula.ir.routing import Seat
from whale_nebula.runtime.exchange.channels import Channels
from whale_nebula.runtime.exchange.crossing import Crossing
from whale_nebula.runtime.step.clock import StageClock
from whale_nebula.spec import Value
from whale_nebula.transport.protocol import Key, KeyKind, Link, Packed


@dataclass
class Post:
    """The exchange of one step, shared by the stages of a process."""

    channels: Channels
    links: Mapping[tuple[str, str], Link]
    program: int
    step: int
    patience: float
    here: Callable[[str], bool] = lambda host: True
    clocks: Mapping[Seat, StageClock] = field(default_factory=dict)
    _shelf: dict[tuple[str, Value, int], Any] = field(default_factory=dict)
    _left: dict[tuple[str, Value, int], int] = field(default_factory=dict)
    _coded: set[tuple[str, Value, int]] = field(default_factory=set)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _failed: BaseException | None = None

    def __post_init__(self) -> None:
        self.crossings, self.routing = self.channels.crossings, self.channels.routing

    def put(
        self, value: Value, micro_batch: int, source: int, destinations: Sequence[int], tensor: Any, rows: Any = None
    ) -> None:
        """Give a value to other stages: once to each host."""
        crossing = self.crossings.by_value[value]
        home, cluster = self.routing.host(source, micro_batch), self.crossings.cluster
        encoded = None
        for host in dict.fromkeys(self.routing.host(d, micro_batch) for d in destinations):
            if host == home:
                self._lay(host, value, micro_batch, tensor)
            elif cluster(home) == cluster(host) or not self.channels.takes(value):
                self._send(crossing, home, host, micro_batch, tensor, _size(tensor))
            else:
                if encoded is None:
                    with self._coding("encode", crossing, source, home, micro_batch):
                        encoded = self.channels.encode(value, tensor, home, self.step, micro_batch, rows)
                self._send(crossing, home, host, micro_batch, encoded, _size(tensor))

    @contextlib.contextmanager
    def _coding(self, what: str, crossing: Crossing, stage: int, host: str, micro_batch: int) -> Iterator[None]:
        """A codec takes the time of the stage that sends, or that is the first to read. What an end of a channel
        remembers goes from micro-batch to micro-batch, whichever replica here is faster.
        """
        value, before = crossing.value, self.crossings.lane(crossing, micro_batch).before
        clock = (
            None
            if crossing.way.codec is None and crossing.way.plain
            else self.clocks.get(self.routing.seat(stage, micro_batch))
        )
        with (
            contextlib.nullcontext() if clock is None else clock.codes(what, crossing.kind, micro_batch, crossing.phase)
        ):
            if before is not None:
                with self._changed:
                    self._await(lambda: (host, value, before) in self._coded, value, host, before)
            yield
            with self._changed:
                self._coded.add((host, value, micro_batch))
                self._changed.notify_all()

    def _send(self, crossing: Crossing, home: str, host: str, micro_batch: int, tensor: Any, raw: int) -> None:
        link = self.links[home, host]
        by_reference = isinstance(tensor, Packed) or self.here(host)
        payload = tensor if by_reference else tensor.numpy()
        size = tensor.nbytes if isinstance(tensor, Packed) else _size(tensor)
        link.send(self._key(crossing, micro_batch, home, host), payload, raw_bytes=raw, size=size)

    def get(self, value: Value, micro_batch: int, stage: int) -> Any:
        """Take a value; the first stage of a host to ask for it waits at the link for all."""
        crossing = self.crossings.by_value[value]
        host, home = self.routing.host(stage, micro_batch), self.routing.host(crossing.source, micro_batch)
        if host != home and self._first(host, value, micro_batch):
            x = self.links[host, home].receive(self._key(crossing, micro_batch, home, host), self.patience)
            if self.crossings.cluster(home) == self.crossings.cluster(host) or not self.channels.takes(value):
                x = tf.convert_to_tensor(x)
            else:
                with self._coding("decode", crossing, stage, host, micro_batch):
                    x = self.channels.decode(value, x, host, micro_batch)
            self._lay(host, value, micro_batch, x)
        return self._take(host, value, micro_batch)

    def _key(self, crossing: Crossing, micro_batch: int, home: str, host: str) -> Key:
        kind = cast(KeyKind, crossing.kind)
        return Key(kind, self.program, self.step, crossing.phase, micro_batch, crossing.number, home, host)

    def _readers(self, host: str, value: Value, micro_batch: int) -> int:
        crossing = self.crossings.by_value[value]
        readers = (stage for stage in crossing.readers if stage != crossing.source)
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
        crossing = self.crossings.by_value[value]
        stage = self.crossings.cut.program.stages[crossing.source].key
        return DeadlineError(
            f"{host} waited {self.patience:.0f} s for {crossing.kind} {crossing.number} of micro-batch {micro_batch}",
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

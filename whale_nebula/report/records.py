"""The records of a report: stages, links, boundaries, meetings, totals of the run, and its goodput: time by purpose."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any


def duration(seconds: float) -> str:
    """Seconds in a readable unit.

    >>> duration(1.5), duration(0.0123), duration(0.000456)
    ('1.500 s', '12.3 ms', '0.456 ms')
    """
    if seconds >= 0.1:
        return f"{seconds:.3f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e3 * seconds:.3g} ms"


def size(count: float) -> str:
    """Bytes in a readable unit.

    >>> size(512), size(2048), size(5 * 2**20)
    ('512 B', '2.0 KiB', '5.0 MiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


@dataclass(frozen=True)
class PredictionGap:
    """A measurement, as the median of several steps, and its prediction, if known."""

    measured: float
    predicted: float | None = None

    @property
    def gap(self) -> float:
        """The measurement minus the prediction; 0 without a prediction."""
        return 0.0 if self.predicted is None else self.measured - self.predicted

    def text(self, unit: Callable[[float], str], qualifier: str = "") -> str:
        """Both numbers as formatted by `unit`; `qualifier` follows the prediction."""
        measured = unit(self.measured)
        return measured if self.predicted is None else f"{measured} (predicted {unit(self.predicted)}{qualifier})"


ALONE = "local/0"
"""The worker of a run in one process; other workers are named in printed reports."""


@dataclass(frozen=True)
class WorkerReport:
    """Memory of a worker: bytes of its variables (or shards of them), and the peak memory of the process as a whole."""

    variable_bytes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True)
class Span:
    """Something that took time, in seconds from the start of the step: a stage's forward of a micro-batch, a message
    that occupied a link, or a part that runs once per step.

    `lane` is the name of the stage or link ("gpu->npu"), or `ONCE`; `micro_batch` may be None, `bytes` are those of a
    message.
    """

    lane: str
    what: str
    start: float
    end: float
    micro_batch: int | None = None
    phase: int = 0
    bytes: int | None = None


ONCE = "once a step"
"""The lane of spans that belong to no stage; it is not a valid name of a stage."""


EXCHANGE = "exchange"
"""`Span.what` in that lane while an update waits for other workers: for scalars, results, gradients of tied variables.
"""


@dataclass(frozen=True)
class StageReport:
    """A stage in a step. Seconds are None if the step ran as one function and stages were not timed separately.

    `in_flight` is the most micro-batches that were forward but not yet backward, at any time of the step;
    `codec_seconds` is the time of decoding inputs and encoding outputs. For a stage with several replicas these are the
    values of the busiest, and `replicas` has those of all. In a run of several processes they are this process's own,
    and `replicas` has the last known computing times. `copies` is the number of replicas; if these were not timed
    separately, `replicas` is None.
    """

    compute_seconds: float | None = None
    wait_seconds: float | None = None
    cluster: str = ""
    in_flight: int | None = None
    codec_seconds: float = 0.0
    replicas: tuple[StageReport, ...] | None = ()
    copies: int = 1

    @property
    def idle_seconds(self) -> float | None:
        """Total idle time of the replicas that waited for the busiest; None if they were not timed separately.

        >>> busiest([StageReport(3.0, 0.0), StageReport(1.0, 2.0)]).idle_seconds, StageReport(3.0).idle_seconds
        (2.0, 0.0)
        """
        if self.replicas is None:
            return None
        seconds = [each.compute_seconds or 0.0 for each in self.replicas]
        return sum(max(seconds) - each for each in seconds) if seconds else 0.0


def busiest(replicas: Sequence[StageReport]) -> StageReport:
    """The report of a stage whose replicas were timed separately: that of the busiest one, with those of all."""
    first = max(replicas, key=lambda each: each.compute_seconds or 0.0)
    return first if len(replicas) == 1 else replace(first, replicas=tuple(replicas), copies=len(replicas))


@dataclass(frozen=True)
class LinkReport:
    """Everything that workers of one cluster sent to workers of another in a step.

    `seconds` is how long that occupied the link: by the rate for an emulated link, by the time of writing for a socket.

    >>> LinkReport(payload_bytes=50, bytes=60, raw_bytes=120).ratio
    0.5
    """

    payload_bytes: int = 0
    bytes: int = 0
    raw_bytes: int = 0
    frames: int = 0
    seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Bytes on the link for each byte of the uncompressed tensors."""
        return self.bytes / self.raw_bytes if self.raw_bytes else 0.0

    def __add__(self, other: LinkReport) -> LinkReport:
        return LinkReport(
            self.payload_bytes + other.payload_bytes,
            self.bytes + other.bytes,
            self.raw_bytes + other.raw_bytes,
            self.frames + other.frames,
            self.seconds + other.seconds,
        )


class Scalars(Mapping[str, float]):
    """Numbers by name. They may be on a device: each is fetched when it is read.

    >>> Scalars(("loss",), [0.5])["loss"]
    0.5
    """

    def __init__(self, names: Sequence[str] = (), values: Sequence[Any] = ()) -> None:
        self._values = dict(zip(names, values, strict=True))

    def __getitem__(self, name: str) -> float:
        return float(self._values[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass(frozen=True)
class RunTotals:
    """Totals of all steps of the run."""

    steps: int = 0
    seconds: float = 0.0
    links: Mapping[str, LinkReport] = field(default_factory=dict)


@dataclass(frozen=True)
class RemoteMeasurements:
    """Reports of other processes on the previous step, received with the announcements of this one."""

    stages: Mapping[str, StageReport] = field(default_factory=dict)
    links: Mapping[str, LinkReport] = field(default_factory=dict)
    workers: Mapping[str, WorkerReport] = field(default_factory=dict)


@dataclass(frozen=True)
class BoundaryReport:
    """Statistics of a boundary in this process, sent and received.

    `error` is the norm of the codec's error relative to that of the tensor: measured on the first micro-batch in steps
    1, 2, 4 ... and every fiftieth, else None.

    >>> BoundaryReport(raw_bytes=400, payload_bytes=100, wire_bytes=120, frames=1).ratio
    0.3
    """

    codec: str = ""
    raw_bytes: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    frames: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    error: float | None = None
    clamped: int = 0
    notes: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """Bytes on the line for each byte of the uncompressed tensor."""
        return self.wire_bytes / self.raw_bytes if self.raw_bytes else 0.0

    def __add__(self, other: BoundaryReport) -> BoundaryReport:
        return BoundaryReport(
            other.codec or self.codec,
            self.raw_bytes + other.raw_bytes,
            self.payload_bytes + other.payload_bytes,
            self.wire_bytes + other.wire_bytes,
            self.frames + other.frames,
            self.encode_seconds + other.encode_seconds,
            self.decode_seconds + other.decode_seconds,
            self.error if other.error is None else other.error,
            self.clamped + other.clamped,
            (*self.notes, *(note for note in other.notes if note not in self.notes)),
        )


_MIN_ADVISED_SHARE = 0.05
"""A smaller share of waiting is not worth a change."""


@dataclass(frozen=True)
class MeetingsReport:
    """Statistics of local SGD: in `steps` steps all weights were exchanged `met` times with the clusters `others`, to
    which this process has sent `sent_bytes`. `seconds` are those of the steps since the first synchronisation, as steps
    before it include tracing; `waited_seconds` are the part spent waiting. `chosen` is the reason for the interval of
    `sync_every="auto"`, and `missed` how many meetings each cluster has missed, for those that missed any.

    >>> report = MeetingsReport(("npu",), 80, 9.7, seconds=4.0, waited_seconds=1.0, sent_bytes=2048, missed={"npu": 2})
    >>> print(report)
    with npu: 9.7 in 80 steps, sent 2.0 KiB, waited 1.000 s of 4.000 s; npu missed 2
    """

    others: tuple[str, ...]
    steps: int
    met: float
    seconds: float
    waited_seconds: float
    sent_bytes: int = 0
    chosen: str = ""
    missed: Mapping[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The share of time spent waiting."""
        return self.waited_seconds / self.seconds if self.seconds else 0.0

    def sentence(self) -> str:
        """The bottleneck under local SGD: how long this cluster waited for the others, and how to reduce that."""
        waited = f"{100 * self.share:.0f} % of the time so far was spent waiting for {', '.join(self.others)}"
        if self.share < _MIN_ADVISED_SHARE:
            return f"the cluster's own computation; {waited}"
        return f"{waited}; a stronger codec, a larger sync_every or delay, or speeds in the config would reduce it"

    def __str__(self) -> str:
        waited = f"waited {duration(self.waited_seconds)} of {duration(self.seconds)}"
        sent = f"sent {size(self.sent_bytes)}"
        missed = "".join(f"; {cluster} missed {count:.4g}" for cluster, count in self.missed.items())
        return f"with {', '.join(self.others)}: {self.met:.4g} in {self.steps} steps, {sent}, {waited}{missed}"


# ---------------------------------------------------------------------- goodput
@dataclass(frozen=True)
class Goodput:
    """Seconds of a run since its first step, including earlier starts: in steps that count, in waiting for saving, in
    steps that were lost by a failure, and from a failure to the next step. The rest is spent by the script: data,
    callbacks, evaluation.

    >>> Goodput(100.0, steps=80.0, saving=1.0, lost=4.0, recovery=5.0).other
    10.0
    """

    total: float = 0.0
    steps: float = 0.0
    saving: float = 0.0
    lost: float = 0.0
    recovery: float = 0.0

    @property
    def other(self) -> float:
        """Seconds with none of these purposes."""
        return max(0.0, self.total - self.steps - self.saving - self.lost - self.recovery)

    @property
    def share(self) -> float:
        """The share of the time that was not spent on saving, or by failures.

        >>> Goodput(100.0, steps=80.0, saving=1.0, lost=4.0, recovery=5.0).share
        0.9
        """
        return 1.0 - (self.saving + self.lost + self.recovery) / self.total if self.total > 0 else 1.0


def goodput_text(goodput: Goodput) -> str:
    """The goodput and what reduced it, as a line of a report.

    >>> goodput_text(Goodput(100.0, steps=80.0, saving=1.0, lost=4.0, recovery=5.0))
    'goodput: 90.0 % of 100.000 s; saving 1.000 s, lost steps 4.000 s, restarts 5.000 s'
    """
    parts = f"saving {duration(goodput.saving)}"
    if goodput.lost or goodput.recovery:
        parts += f", lost steps {duration(goodput.lost)}, restarts {duration(goodput.recovery)}"
    return f"goodput: {100 * goodput.share:.1f} % of {duration(goodput.total)}; {parts}"


@dataclass
class TimeAccount:
    """Counts a run's time by purpose, over all its starts. `earlier` is a checkpoint's count of earlier starts; `ended`
    is when the last of them ended, in seconds since 1970, if a launcher has observed it.
    """

    ended: float | None = None
    earlier: Goodput = field(default_factory=Goodput)
    _now: Goodput = field(default_factory=Goodput)
    _began: float | None = None

    def resume(self, before: Goodput, at: float) -> None:
        """Resume from a checkpoint taken at the moment `at`, if known: work after it is lost."""
        self.earlier = before
        if self.ended is not None and at:
            self._now = replace(self._now, lost=max(0.0, self.ended - at))

    def begin(self) -> None:
        """Record that a step begins; the first one ends the recovery."""
        if self._began is None:
            self._began = time.monotonic()
            if self.ended is not None and self.earlier.total:
                self._now = replace(self._now, recovery=max(0.0, time.time() - self.ended))

    @contextlib.contextmanager
    def count_step(self) -> Iterator[None]:
        """Context around a step."""
        began = time.monotonic()
        yield
        self._now = replace(self._now, steps=self._now.steps + time.monotonic() - began)

    @contextlib.contextmanager
    def count_saving(self) -> Iterator[None]:
        """Context around the part of saving for which training waits."""
        began = time.monotonic()
        yield
        self._now = replace(self._now, saving=self._now.saving + time.monotonic() - began)

    def sum_up(self) -> Goodput:
        """The sum over all starts."""
        passed = 0.0 if self._began is None else time.monotonic() - self._began
        now = replace(self._now, total=passed + self._now.lost + self._now.recovery)
        return Goodput(
            *(mine + theirs for mine, theirs in zip(asdict(now).values(), asdict(self.earlier).values(), strict=True))
        )

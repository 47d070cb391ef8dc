"""Time accounting of a stage: spans of computing and waiting, and of the rest of a step.

Each piece also adds its name to a profile if TensorFlow's profiler runs (`tf.profiler`); otherwise this costs a
microsecond.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import tensorflow as tf

from whale_nebula.ir.program import Stage
from whale_nebula.ir.routing import Seat, row_name
from whale_nebula.report.prediction import Basis
from whale_nebula.report.records import (
    EXCHANGE,
    ONCE,
    BoundaryReport,
    LinkReport,
    MeetingsReport,
    RemoteMeasurements,
    Span,
    StageReport,
    WorkerReport,
    busiest,
)
from whale_nebula.runtime.exchange.state import StepLines
from whale_nebula.transport import Key, Link

annotation = tf.profiler.experimental.Trace
"""TensorFlow's context that names the code inside in a profile; without a profile it does nothing."""


CODING = ("encode", "decode")
"""The prefixes of names of codecs' spans; the direction of the crossing and the micro-batch follow."""


@dataclass
class StageClock:
    """The timing of one stage, or of one of its replicas (`copies`), in one step. `lane` names its spans, which are in
    seconds from the step's `start`; `doing` is its current activity.
    """

    lane: str = ""
    start: float = 0.0
    cluster: str = ""
    stage: str = ""
    compute_seconds: float = 0.0
    wait_seconds: float = 0.0
    codec_seconds: float = 0.0
    doing: str = ""
    spans: list[Span] = field(default_factory=list)
    copies: int = 1

    @contextlib.contextmanager
    def time_computing(self, kind: str, micro_batch: int | None = None, phase: int = 0) -> Iterator[None]:
        """Time a piece of computing."""
        self.doing = what = kind if micro_batch is None else f"{kind} {micro_batch}"
        with annotation(f"{self.lane}: {kind}", micro_batch=micro_batch, phase=phase):
            began = time.perf_counter()
            yield
            ended = time.perf_counter()
        self.doing = ""
        self.compute_seconds += ended - began
        self.spans.append(Span(self.lane, what, began - self.start, ended - self.start, micro_batch, phase))

    @contextlib.contextmanager
    def time_wait(self) -> Iterator[None]:
        """Time a wait for other stages, without decoding in the meantime."""
        began, coded = time.perf_counter(), self.codec_seconds
        self.doing = "waits"
        yield
        self.wait_seconds += time.perf_counter() - began - (self.codec_seconds - coded)

    @contextlib.contextmanager
    def time_exchange(self, phase: int) -> Iterator[None]:
        """Time a wait for other workers in a part that runs once a step."""
        began = time.perf_counter()
        yield
        ended = time.perf_counter()
        self.wait_seconds += ended - began
        self.spans.append(Span(self.lane, EXCHANGE, began - self.start, ended - self.start, None, phase))

    @contextlib.contextmanager
    def time_codec(self, what: str, kind: str, micro_batch: int, phase: int = 0) -> Iterator[None]:
        """Time a codec: `what` is "encode" or "decode", `kind` the direction of the crossing."""
        doing, self.doing = self.doing, f"{what}s {micro_batch}"
        with annotation(f"{self.lane}: {what}", micro_batch=micro_batch, phase=phase):
            began = time.perf_counter()
            yield
            ended = time.perf_counter()
        self.doing = doing
        self.codec_seconds += ended - began
        label = f"{what} {kind} {micro_batch}"
        self.spans.append(Span(self.lane, label, began - self.start, ended - self.start, micro_batch, phase))

    def report(self) -> StageReport:
        """The stage's part of the step's report."""
        return StageReport(
            self.compute_seconds, self.wait_seconds, self.cluster, count_in_flight(self.spans), self.codec_seconds
        )


@dataclass
class Clocks:
    """The clocks of one step: of each local replica of a stage, of parts that run once a step, and of the lines."""

    stages: Mapping[Seat, StageClock]
    whole_batch: StageClock
    lines: LineClock

    @classmethod
    def start(cls, stages: Mapping[Seat, Stage], lines: LineClock) -> Clocks:
        """Start all clocks; the clock of the lines started with the step."""
        now = time.perf_counter()
        lanes = {seat: row_name(stage.key, stage.replicas, seat.replica) for seat, stage in stages.items()}
        clocks = {
            s: StageClock(lanes[s], now, stage.cluster, stage.key, copies=stage.replicas) for s, stage in stages.items()
        }
        return cls(clocks, StageClock(ONCE, now), lines)

    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.whole_batch.start

    def reports(self) -> dict[str, StageReport]:
        """The stages' part of the step's report; for several local replicas, that of the busiest."""
        found: dict[str, list[StageReport]] = {}
        copies: dict[str, int] = {}
        for clock in self.stages.values():
            name = clock.stage or clock.lane
            found.setdefault(name, []).append(clock.report())
            copies[name] = clock.copies
        return {name: _report_stage(replicas, copies[name]) for name, replicas in found.items()}

    def doing(self) -> dict[str, str]:
        """The current activity of each local replica of a stage, by its lane; "" between its pieces."""
        return {clock.lane: clock.doing for clock in self.stages.values()}

    def spans(self) -> tuple[Span, ...]:
        """All spans of the step."""
        own = [span for clock in (*self.stages.values(), self.whole_batch) for span in clock.spans]
        return (*own, *self.lines.spans)


def count_in_flight(spans: Sequence[Span]) -> int:
    """The maximum number of micro-batches of a stage that were in flight at any time.

    >>> whats = ("forward 0", "forward 1", "backward 0")
    >>> count_in_flight([Span("gpu", what, 0.0, 0.0, int(what[-1])) for what in whats])
    2
    """
    computed = [span for span in spans if not span.what.startswith((*CODING, "weights"))]
    twofold = {span.phase for span in computed if span.what.startswith("backward")}
    alive: set[tuple[int, int | None]] = set()
    most = min(len(computed), 1)
    for span in computed:
        if span.what.startswith("backward"):
            alive.discard((span.phase, span.micro_batch))
        elif span.phase in twofold:
            alive.add((span.phase, span.micro_batch))
            most = max(most, len(alive))
    return most


@dataclass
class LineClock:
    """Times at which a step's messages occupied their lines, in seconds from `began` on the monotonic clock, which
    links use. They report from any thread.
    """

    program: int
    step: int
    began: float
    spans: list[Span] = field(default_factory=list)

    @classmethod
    def start(cls, program: int, step: int, links: Iterable[tuple[str, Link]]) -> LineClock:
        """Begin a step: record every tensor that is sent over these links, named "a->b"."""
        clock = cls(program, step, time.monotonic())
        for name, link in links:
            link.on_sent = partial(clock._note_sent, name)
        return clock

    def _note_sent(self, name: str, key: Key, size: int, began: float, ended: float) -> None:
        if (key.program, key.step) == (self.program, self.step):
            number = None if key.micro_batch < 0 else key.micro_batch
            what = key.kind if number is None else f"{key.kind} {number}"
            span = Span(name, what, began - self.began, ended - self.began, number, key.phase, size)
            self.spans.append(span)

    def seconds(self) -> Mapping[str, float]:
        """Seconds for which messages have occupied each line; those to different workers may overlap."""
        found: defaultdict[str, float] = defaultdict(float)
        ends: defaultdict[str, float] = defaultdict(float)
        for span in sorted(self.spans, key=lambda each: each.start):
            found[span.lane] += max(0.0, span.end - max(span.start, ends[span.lane]))
            ends[span.lane] = max(ends[span.lane], span.end)
        return found


def _report_stage(replicas: Sequence[StageReport], copies: int) -> StageReport:
    """The report of a stage from those of its local replicas, of `copies` in all processes."""
    found = busiest(replicas)
    return found if len(replicas) == copies else replace(found, replicas=None, copies=copies)


def count_bytes(variables: Iterable[Any]) -> int:
    """The bytes of variables; those of unknown shape count as 0."""
    return sum(int(each.shape.num_elements() or 0) * each.dtype.size for each in variables)


def measure_memory(variable_bytes: int) -> WorkerReport:
    """Memory of this process: bytes of variables, and peak memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    return WorkerReport(variable_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


class Runner(ABC):
    """Runs a captured step on the tensors of its leaves.

    A runner that `takes_partial_inputs` receives inputs that this process has only in part; one that
    `synchronizes_clusters` synchronises the clusters of local SGD itself; one that is `plain` calls the original
    function.
    """

    takes_partial_inputs = False
    synchronizes_clusters = False
    plain = False
    clocks: Clocks | None = None

    held_bytes: int | None = None
    """Bytes of the variables in this process, unless it has all variables completely."""

    @abstractmethod
    def run(self, tensors: Sequence[Any]) -> StepOutcome:
        """Run one step."""

    def close(self) -> None:
        """Release resources; no steps run afterwards."""
        return

    @property
    def torn(self) -> bool:
        """Whether a failed step may have changed variables, unless its error states otherwise."""
        return True

    @property
    def innermost(self) -> Runner:
        """The runner of the step itself, inside all wrappers."""
        return self


@dataclass(frozen=True)
class StepOutcome:
    """The tensors that a step returns, and its measurements. `counts` are the rows of its micro-batches, `elsewhere`
    the measurements of other processes. `pace` are the seconds that all processes reported for earlier steps (see
    `Medians`), the same in each; empty if stages are not timed separately.
    """

    tensors: Sequence[Any]
    seconds: float
    counts: Sequence[int]
    stages: Mapping[str, StageReport] = field(default_factory=dict)
    links: Mapping[str, LinkReport] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    basis: Basis | None = None
    elsewhere: RemoteMeasurements = field(default_factory=RemoteMeasurements)
    boundaries: Mapping[str, BoundaryReport] = field(default_factory=dict)
    compression_lines: StepLines = field(default_factory=StepLines)
    notes: tuple[str, ...] = ()
    meetings: MeetingsReport | None = None
    pace: Mapping[str, float] = field(default_factory=dict)

    @property
    def summed_links(self) -> dict[str, LinkReport]:
        """The reports of links by all processes: several workers of a cluster may send over one link."""
        found = dict(self.elsewhere.links)
        for name, link in self.links.items():
            found[name] = found.get(name, LinkReport()) + link
        return found

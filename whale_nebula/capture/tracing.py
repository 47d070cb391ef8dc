"""State of the trace in progress: its scopes and its gradient requests."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import tensorflow as tf

from whale_nebula import scopes
from whale_nebula.capture.bottlenecks import Bottlenecks
from whale_nebula.capture.mirror import COMPRESS, COPIED, STAGE
from whale_nebula.capture.replicas import Replicas
from whale_nebula.capture.surroundings import check_strategy
from whale_nebula.errors import BoundaryInBodyError, NebulaWarning, OptionError
from whale_nebula.ir.graph import Graph
from whale_nebula.ir.program import Pipeline, Stage
from whale_nebula.ir.routing import enough
from whale_nebula.passes.checks import in_flow_order
from whale_nebula.passes.replicas import speeds
from whale_nebula.scopes import Frame, Site
from whale_nebula.tf import private as tf_private


class _Body(NamedTuple):
    called: str
    mend: str


_LOOP = _Body(
    "a loop (tf.while_loop, tf.map_fn, tf.scan, an RNN, or a Python loop that AutoGraph turned into one)",
    "enter nb.{kind} around the whole loop, which then is a part of that stage",
)
_BRANCH = _Body("a branch (tf.cond, or an if on a tensor)", "enter nb.{kind} around the whole condition")
_VECTORIZED = _Body("tf.vectorized_map", "enter nb.{kind} around the tf.vectorized_map")
_FUNCTION = _Body(
    "a nested tf.function", "enter nb.{kind} around the call of that function, or define it without @tf.function"
)
_COMPILED = _Body(
    "a tf.function with jit_compile=True",
    "leave jit_compile=True out there, and the function becomes a part of the step; or enter nb.{kind} around its call",
)
# by a part of the name that TensorFlow gives the body's graph
_BY_NAME = {"while_body": _LOOP, "while_cond": _LOOP, "cond_true": _BRANCH, "cond_false": _BRANCH, "branch": _BRANCH}


def in_body(frame: Frame, graph: str | None, *, compiled: bool = False) -> BoundaryInBodyError:
    """The error for a scope that was entered in a body; `graph` names its graph, where it has one of its own."""
    body = _VECTORIZED if graph is None else _body_of(graph)
    body = _COMPILED if compiled and body is _FUNCTION else body
    return BoundaryInBodyError(
        f"nb.{frame.kind} is entered inside {body.called}",
        where=str(frame.site),
        why="TensorFlow runs such a body as one op, so no boundary can lie inside it",
        mend=body.mend.format(kind=frame.kind),
    )


def _body_of(graph: str) -> _Body:
    return next((body for part, body in _BY_NAME.items() if part in graph), _FUNCTION)


_said: set[tuple[Site, Site]] = set()


def counting(before: Frame | None, frame: Frame, around: Collection[Frame]) -> Frame:
    """The one that counts of the pipeline met `before` and that which is entered now; `around` are the scopes that the
    whole step stands in.

    >>> one, same = (Frame("pipeline", {"micro_batch": 4}, Site("train.py", line)) for line in (2, 6))
    >>> counting(one, same, ()) is same
    True
    """
    mine, other = _unlike(frame, before) if before is not None else ("", "")
    if before is None or not mine:
        return frame
    if before not in around:
        raise OptionError(
            f"nb.pipeline says {mine}, and at {before.site} it says {other}",
            where=str(frame.site),
            why="a step has one batch, which is cut once, for all of its stages",
            mend="one nb.pipeline(...) around all stages, or the same options at both lines",
        )
    if (before.site, frame.site) not in _said:
        _said.add((before.site, frame.site))
        _tell(before, frame, mine, other)
    return frame


def _unlike(frame: Frame, before: Frame) -> tuple[str, str]:
    """The options in which two pipelines differ, as each has them."""
    names = [name for name in frame.options if frame.options[name] != before.options.get(name)]
    mine, other = (", ".join(f"{name}={each.options.get(name)!r}" for name in names) for each in (frame, before))
    return mine, other


def _tell(around: Frame, frame: Frame, mine: str, other: str) -> None:
    warning = NebulaWarning(
        f"nb.pipeline({other}) around the step does not count",
        where=str(around.site),
        why=f"the model has its own at {frame.site}, with {mine}; it is said once for this place",
        mend="leave one of the two out",
    )
    warnings.warn_explicit(warning, NebulaWarning, around.site.file, around.site.line)


@dataclass
class LiveRequest:
    """A gradient request as the trace holds it: tensors, not yet numbers. See `ir.program.Request`."""

    before: frozenset[str]
    targets: list[Any]
    sources: list[str]
    origins: list[Any] = field(default_factory=list)
    backward: frozenset[str] = frozenset()
    holders: list[tuple[int, tuple[Any, ...]]] = field(default_factory=list)
    arrivals: list[tuple[Any, Any]] = field(default_factory=list)
    flows: list[tuple[int, Any, Any]] = field(default_factory=list)
    made: list[tuple[int, Any]] = field(default_factory=list)
    parts: list[tuple[int, int, tuple[Any, ...]]] = field(default_factory=list)
    given: list[Any] = field(default_factory=list)


@dataclass
class Tracing:
    """One trace of one step. TensorFlow may trace twice (variables made on the way): `begin` forgets the first.

    A `plain` one is that of a step that runs uncut: nothing is differentiated by us, only projected: see `projection`.
    """

    graph: Any = None
    whole: frozenset[str] = frozenset()
    stages: dict[str, Stage] = field(default_factory=dict)
    numbers: scopes.Numbers = field(default_factory=scopes.Numbers)
    replicas: Replicas = field(default_factory=Replicas)
    compressions: list[Frame] = field(default_factory=list)
    pipeline: Pipeline = field(default_factory=Pipeline)
    pipe: Frame | None = None
    around: tuple[Frame, ...] = ()
    outer: Frame | None = None
    requests: list[LiveRequest] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    feeds: dict[str, Any] = field(default_factory=dict)
    leaves: list[Any] = field(default_factory=list)
    batched: list[bool] = field(default_factory=list)
    masks: list[tuple[Any, Any]] = field(default_factory=list)
    draws: list[Any] = field(default_factory=list)
    summed: list[Any] = field(default_factory=list)
    grown: set[str] = field(default_factory=set)
    tapes: list[Any] = field(default_factory=list)
    bottlenecks: Bottlenecks = field(default_factory=Bottlenecks)
    busy: bool = False
    vectorizing: bool = False
    compiled: bool = False
    plain: bool = False

    def begin(self, graph: Any, leaves: list[Any]) -> None:
        """A trace starts in `graph`; what an earlier one left is dropped."""
        fresh = Tracing(graph, self.whole, leaves=leaves, batched=self.batched, plain=self.plain)
        fresh.bottlenecks.owner = self.bottlenecks.owner
        fresh.around, fresh.tapes = scopes.open_frames(), self.tapes
        fresh.replicas.around = scopes.replica_of(fresh.around)
        self.__dict__.update(fresh.__dict__)

    @property
    def cut(self) -> bool:
        """Whether the batch is cut into micro-batches."""
        return self.pipeline.micro_batch > 1 or self.replicas.several

    def feed(self, name: str) -> Any:
        """A float32 scalar that the runtime fills for each micro-batch: 'share' or 'grow'."""
        if name not in self.feeds:
            with self.graph.as_default(), tf.control_dependencies(None):
                self.feeds[name] = tf.compat.v1.placeholder(tf.float32, [], name=f"nebula_{name}")
        return self.feeds[name]

    def stage_of(self, frame: Frame) -> str:
        """The key of a stage's frame, noted in order of first entry. One that names no cluster is where it was before.

        What stands in no block may belong to several programs: only here it is known that two entries meet in one.
        """
        key, cluster = self.numbers.identity(frame, self.around)
        key, cluster = key or "stage0", cluster or "local"
        known = self.stages.setdefault(key, Stage(key, cluster, str(frame.site)))
        if known.cluster != cluster and frame.options.get("cluster") is not None:
            raise scopes.two_clusters(key, cluster, str(frame.site), known.cluster, known.where)
        self._check_layout(frame, cluster)
        self.replicas.stage(key, scopes.open_frames(), frame.site)
        return key

    def meets(self, stages: Iterable[Frame]) -> None:
        """A model that was built in these stages belongs to the step."""
        self.numbers.meet(stages, self.around)

    def _check_layout(self, frame: Frame, cluster: str) -> None:
        """A block around the whole step, around `fit` say, holds all of its stages, wherever they were written."""
        if frame.options.get("cluster") is not None:
            what = "nb.place" if "rule" in frame.options else "nb.stage"
            scopes.check_layout(cluster, frame.site, scopes.cluster_block_of(self.around), what)

    def pipelined(self, frame: Frame) -> None:
        """A pipeline is entered: what it says holds for the whole step, wherever it stands."""
        self.pipe = counting(self.pipe, frame, self.around)
        self.pipeline = replace(self.pipeline, **dict(self.pipe.options))

    def order_stages(self, graph: Graph) -> None:
        """Number the stages by the way that tensors go; a gradient request makes the numbers final."""
        if not self.requests:
            self.stages = {key: self.stages[key] for key in in_flow_order(graph, list(self.stages))}

    def settle(self) -> None:
        """The trace is complete: give each stage its replicas, and the batch enough micro-batches for all of them.

        Where nobody says how many, there are as many as shares by speed need; but one for each replica where they
        add up as they compute.
        """
        stages = self.replicas.settled(list(self.stages.values()))
        asked, most = self.pipeline.micro_batch, max(stage.replicas for stage in stages)
        alike = self.replicas.apart or (self.summed and asked <= most)
        known = [()] * len(stages) if alike else speeds(stages, scopes.worker_speeds())
        self.stages = {stage.key: replace(stage, speeds=each) for stage, each in zip(stages, known, strict=True)}
        count = max(asked, most) if asked > 1 else enough(known, most)
        self.pipeline = replace(self.pipeline, micro_batch=count)

    def compression_of(self, frame: Frame) -> int:
        """The number of a compress scope; entering the same one again gives the same number."""
        if frame not in self.compressions:
            self.compressions.append(frame)
        return self.compressions.index(frame)


_LOCAL = threading.local()


def current() -> Tracing | None:
    """The trace that runs in this thread, if one does."""
    found: Tracing | None = getattr(_LOCAL, "tracing", None)
    return found


@contextlib.contextmanager
def tracing(trace: Tracing) -> Iterator[Tracing]:
    """Make `trace` the current one of this thread."""
    before = current()
    _LOCAL.tracing = trace
    try:
        yield trace
    finally:
        _LOCAL.tracing = before


@contextlib.contextmanager
def uncut() -> Iterator[None]:
    """Run a step uncut on purpose: the scopes that this thread meets in it have nothing to say."""
    before = getattr(_LOCAL, "uncut", False)
    _LOCAL.uncut = True
    try:
        yield
    finally:
        _LOCAL.uncut = before


def uncut_on_purpose() -> bool:
    """Whether what runs now is not meant to be cut: our oracle, Keras asking for shapes, a model being exported."""
    return getattr(_LOCAL, "uncut", False) or tf_private.in_symbolic_scope() or tf_private.exporting()


class _Stamper:
    """Watches scopes: while a step is traced, a scope stamps the ops made inside it."""

    @contextlib.contextmanager
    def enter(self, frame: Frame) -> Iterator[None]:
        trace = current()
        if frame.kind == "stage" and not uncut_on_purpose():
            check_strategy(lambda: str(frame.site))
        if trace is None or trace.graph is None or tf_private.in_symbolic_scope():  # Keras asks for shapes, to build
            frame.touched = frame.touched or (uncut_on_purpose() and not frame.building)
            yield
            return
        frame.touched = True
        with self._stamps(trace, frame):
            yield

    def _stamps(self, trace: Tracing, frame: Frame) -> contextlib.AbstractContextManager[None]:
        if frame.kind in ("cluster", "replica", "pipeline"):
            trace.outer = trace.outer or frame
        if frame.kind == "pipeline":
            trace.pipelined(frame)
        if frame.kind == "replica":
            trace.replicas.entered(frame)
        if frame.kind == "compress":
            trace.replicas.compressed(scopes.open_frames())
        graph = tf.compat.v1.get_default_graph()
        if frame.kind == "replica" and graph is trace.graph:
            return tf_private.stamp_ops(graph, {COPIED: 1})
        if frame.kind not in ("stage", "compress"):
            return contextlib.nullcontext()
        if graph is not trace.graph or trace.vectorizing:
            raise in_body(frame, None if graph is trace.graph else graph.name, compiled=trace.compiled)
        if frame.kind == "stage":
            return tf_private.stamp_ops(graph, {STAGE: trace.stage_of(frame)})
        return tf_private.stamp_ops(graph, {COMPRESS: trace.compression_of(frame)})


def install() -> list[scopes.Watcher]:
    """Watch scopes, once; gives the watcher if it was not there before."""
    if any(isinstance(watcher, _Stamper) for watcher in scopes.watchers):
        return []
    scopes.add_watcher(_Stamper())
    return scopes.watchers[-1:]

"""The scopes entered in the trace of a step: its stages, their numbers of replicas, its pipeline and its codecs.

A stage's number of replicas is that of the enclosing `nb.replica`; otherwise it follows from the workers of its
cluster. If a planner has decided the stages, ops that read a variable are stamped with the stage of that variable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from whale_nebula.codec.encoding import derive_encodings, mirror_options
from whale_nebula.errors import NestingError, NotYetError, OptionError
from whale_nebula.ir.graph import Graph
from whale_nebula.ir.program import Assignment, Constraints, LocalSgd, Pipeline, Program, ScopedStage, Stage
from whale_nebula.ir.routing import choose_micro_batches
from whale_nebula.passes.checks import order_stages
from whale_nebula.passes.effects import is_read
from whale_nebula.passes.replicas import find_replica_speeds
from whale_nebula.scopes.compress_options import find_local_sgd_options
from whale_nebula.scopes.frames import Frame, cluster_block_of, open_frames, replica_of, stage_of
from whale_nebula.scopes.identity import (
    StageNumbers,
    check_layout,
    cluster_conflict_error,
    clusters_of,
    count_most_workers,
    count_workers,
    find_default_cluster,
    find_own_cluster,
    get_worker_speeds,
    has_single_cluster,
    resolve_cluster,
)
from whale_nebula.scopes.step_options import StepOptions, current_step_options
from whale_nebula.site import Site, warn_once

REPLICA, SPLIT_STAGE = "replica", "split"
"""The stages of an `nb.replica` next to an `nb.split`, in a step without `nb.stage`."""


@dataclass
class EnteredScopes:
    """The scopes of each kind in a trace. `around` are those that enclose the whole step, `outer` is the first
    `nb.cluster`, `nb.replica` or `nb.pipeline` that is entered. `stage_texts` has for each stage the text of its scope,
    with its line, and the clusters that may run it (empty: any). If a planner has `decided` everything, scopes only
    group ops. `step_options` replace options of scopes.
    """

    around: tuple[Frame, ...] = field(default_factory=open_frames)
    outer: Frame | None = None
    stages: dict[str, Stage] = field(default_factory=dict)
    numbers: StageNumbers = field(default_factory=StageNumbers)
    compressions: list[Frame] = field(default_factory=list)
    splits: list[Frame] = field(default_factory=list)
    sibling_splits: list[Frame] = field(default_factory=list)
    pipeline: Pipeline = field(default_factory=Pipeline)
    pipeline_frame: Frame | None = None
    cluster_blocks: list[Frame] = field(default_factory=list)
    stage_texts: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    decided: bool = False
    step_options: StepOptions = field(default_factory=current_step_options)

    def __post_init__(self) -> None:
        if self.step_options.choose is not None:
            raise NotYetError(
                'a plan by a curriculum with "auto" before its first step',
                where=self.step_options.description,
                why="options are chosen before the first step that runs, from its arguments",
                mend="take a step first: with curriculum.use_options(step): train_step(...)",
            )
        self.replicas = Replicas(replica_of(self.around))
        self.pipeline = self._replace_count(self.pipeline)

    @property
    def is_cut(self) -> bool:
        """Whether the batch is divided into micro-batches."""
        return self.pipeline.micro_batch > 1 or self.replicas.has_several

    def stage_of(self, frame: Frame) -> str:
        """Record the entry of a stage and return its key. A stage without a cluster keeps its earlier one.

        Stages outside any block may belong to several programs: only here it is known whether two entries are in the
        same one.
        """
        key, cluster = self.numbers.find_identity(frame, self.around)
        key, cluster = key or "stage0", cluster or "local"
        known = self.stages.setdefault(key, Stage(key, resolve_cluster(cluster), str(frame.site)))
        if frame.options.get("cluster") is not None:
            if known.cluster != resolve_cluster(cluster):
                raise cluster_conflict_error(key, cluster, str(frame.site), known.cluster, known.where)
            # a block around the whole step, such as a call of `fit`, contains all of its stages
            what = "nb.place" if "rule" in frame.options else "nb.stage"
            check_layout(cluster, frame.site, cluster_block_of(self.around), what)
        self.replicas.enter_stage(key, open_frames(), frame.site)
        words, clusters = _describe_stage(frame), clusters_of(frame, (*self.around, *open_frames()))
        self.stage_texts[key] = (
            self.stage_texts.get(key, (words,))[0],
            clusters or self.stage_texts.get(key, ("", ()))[1],
        )
        return key

    def add_model(self, stages: Iterable[Frame]) -> None:
        """Add the stages in which a model of the step was built."""
        self.numbers.number_stages(stages, self.around)

    def enter_pipeline(self, frame: Frame) -> None:
        """Apply the options of a pipeline to the whole step; the model's own override those around it."""
        if self.decided:
            return
        before = self.pipeline_frame or frame
        names = [name for name in frame.options if frame.options[name] != before.options.get(name)]
        mine, other = (", ".join(f"{name}={each.options.get(name)!r}" for name in names) for each in (frame, before))
        if names and before not in self.around:
            raise OptionError(
                f"nb.pipeline has {mine}, and at {before.site} it has {other}",
                where=str(frame.site),
                why="the batch of a step is divided once, for all stages",
                mend="use one nb.pipeline(...) around all stages, or the same options at both lines",
            )
        if names:
            warn_once(
                before.site,
                f"nb.pipeline({other}) around the step is ignored",
                why=f"the model has its own at {frame.site}, with {mine}; this is reported once for this line",
                mend="remove one of the two",
                key=frame.site,
            )
        self.pipeline_frame = frame
        options = dict(frame.options)
        pipeline = replace(self.pipeline, **{**options, "micro_batch": options["micro_batch"] or 1})
        self.pipeline = self._replace_count(pipeline)

    def adopt_pipeline(self, pipeline: Pipeline) -> None:
        """Set the pipeline that a planner has decided."""
        self.pipeline, self.decided = self._replace_count(pipeline), True

    def _replace_count(self, pipeline: Pipeline) -> Pipeline:
        """The pipeline with the number of micro-batches that replaces that of scopes, if there is one."""
        count = self.step_options.micro_batch
        return pipeline if count is None else replace(pipeline, micro_batch=count)

    def enter_split(self, frame: Frame) -> int:
        """Record the entry of a split scope; returns its number."""
        open_now = open_frames()
        if self.replicas.local_sgd is None:
            self.replicas.home = find_default_cluster(open_now)
        stage = stage_of(open_now)
        key = None if stage is None else self.numbers.find_identity(stage, self.around)[0]
        self.replicas.splits.setdefault(key or "stage0", frame)
        if stage is None and replica_of(open_now) is None:
            self.sibling_splits.append(frame)
        return number_scope(self.splits, frame)

    def add_sibling_stages(self) -> bool:
        """Add a stage for an `nb.replica` and one for an `nb.split` next to it, in a step without `nb.stage`; returns
        whether the step has these stages.
        """
        copied = self.replicas.entered
        if not self.stages and self.sibling_splits and copied and self.replicas.local_sgd is None:
            home = self.replicas.home
            self.stages[REPLICA] = Stage(REPLICA, home, str(copied[0].site))
            self.stages[SPLIT_STAGE] = Stage(SPLIT_STAGE, home, str(self.sibling_splits[0].site))
            self.replicas.frames_by_stage[REPLICA] = copied[0]
            self.replicas.nonempty_frames.update(copied)
        return REPLICA in self.stages and bool(self.sibling_splits)

    def order_stages(self, graph: Graph) -> None:
        """Number the stages in the order of the data flow."""
        self.stages = {key: self.stages[key] for key in order_stages(graph, list(self.stages))}

    def settle(self, *, summed: bool) -> None:
        """At the end of a trace: give each stage its number of replicas, and the batch enough micro-batches for them.

        If no number is given, there are as many as shares by speed need, or one for each replica if replicas compute
        sums in the forward.
        """
        stages = self.replicas.settle(list(self.stages.values()))
        if self.replicas.local_sgd is not None and self.step_options.compress is not None:
            raise make_no_boundary_error(self.replicas.local_sgd, self.step_options.compress)
        asked, most = self.pipeline.micro_batch, max(stage.replicas for stage in stages)
        alike = self.replicas.local_sgd or (summed and asked <= most)
        known = [()] * len(stages) if alike else find_replica_speeds(stages, get_worker_speeds())
        self.stages = {stage.key: replace(stage, speeds=each) for stage, each in zip(stages, known, strict=True)}
        self.pipeline = replace(
            self.pipeline, micro_batch=max(asked, most) if asked > 1 else choose_micro_batches(known, most)
        )


def make_no_boundary_error(local_sgd: LocalSgd, replacement: Frame) -> OptionError:
    """The error for codecs by length in a step of which each cluster trains a copy; `replacement` has such a codec."""
    momenta = bool(local_sgd.exchange)
    codec, _ = derive_encodings(replacement.options)
    around = f"put nb.compress({str(codec)!r}) around the nb.replica at {local_sgd.where}, for all lengths"
    return OptionError(
        f"compress= of a curriculum has no effect on the step of the nb.replica at {local_sgd.where}",
        where=str(replacement.site),
        why="each cluster trains a copy of the step, so no tensor of it crosses a link; "
        + ("momenta cross as one bit per number" if momenta else "weight differences cross, which have no length"),
        mend="remove compress= from the curriculum" + f"\nor, to encode the differences, {around}" * (not momenta),
    )


def _describe_stage(frame: Frame) -> str:
    options = [f"{name}={frame.options[name]!r}" for name in ("cluster", "name") if frame.options.get(name) is not None]
    if "rule" in frame.options:
        return f"the stage {frame.key!r} of nb.place at {frame.site}"
    return f"nb.stage({', '.join(options)}) at {frame.site}"


def number_scope(entered: list[Frame], frame: Frame) -> int:
    """The number of a scope among those of its kind in `entered`, the same at every entry; a new one is added."""
    if frame not in entered:
        entered.append(frame)
    return entered.index(frame)


@dataclass
class Replicas:
    """The replica scopes entered in a trace: those around each stage, and those around the whole step. `splits` has the
    first split scope of each stage that contains one.

    >>> from whale_nebula.site import Site
    >>> three = Frame("replica", {"count": 3}, Site("train.py", 4))
    >>> entered = Replicas()
    >>> entered.enter(three)
    >>> entered.enter_stage("gpu", [three], Site("train.py", 5))
    >>> [stage.replicas for stage in entered.settle([Stage("gpu", "gpu"), Stage("npu", "npu")])]
    [3, 1]
    """

    around: Frame | None = None
    entered: list[Frame] = field(default_factory=list)
    frames_by_stage: dict[str, Frame | None] = field(default_factory=dict)
    splits: dict[str, Frame] = field(default_factory=dict)
    nonempty_frames: set[Frame] = field(default_factory=set)
    home: str = "local"
    local_sgd: LocalSgd | None = None
    local_sgd_frame: Frame | None = None
    decided: set[str] = field(default_factory=set)

    @property
    def has_several(self) -> bool:
        """Whether the batch may have to be divided for a stage's replicas, whose number may still be open."""
        return any((frame.options["count"] or count_most_workers()) > 1 for frame in self.all)

    @property
    def all(self) -> Sequence[Frame]:
        """All replica scopes: those entered in the step, then the one around it."""
        return [*self.entered, *([self.around] if self.around is not None else [])]

    def enter(self, frame: Frame) -> None:
        """Record the entry of a replica scope. If each cluster trains a copy, this applies to the whole step."""
        if frame not in self.all:
            self.entered.append(frame)
            if self.around is not None and self.around.options != frame.options:
                warn_once(
                    self.around.site,
                    f"{_describe_frame(self.around).partition(' at ')[0]} around the step is ignored",
                    why=f"its contents are in {_describe_frame(frame)}; this is reported once for this line",
                    mend="remove one of the two",
                    key=frame.site,
                )
        frames = open_frames()
        self.home = find_default_cluster(frames)
        apart = find_local_sgd_options(frames, frame)
        if apart is None:
            return
        if self.local_sgd is not None and replace(self.local_sgd, where="") != replace(apart, where=""):
            raise OptionError(
                f"nb.replica({apart.option}) differs from the one at {self.local_sgd.where}",
                where=apart.where,
                why=f"a step is copied to all clusters as a whole; here: {apart}; there: {self.local_sgd}",
                mend="use one nb.replica(sync_every=...) around the whole step",
            )
        self.local_sgd, self.local_sgd_frame, self.home = apart, frame, find_own_cluster(frames)

    def enter_compress(self, frames: Sequence[Frame]) -> None:
        """Record the entry of a compress scope, which under local SGD sets the codec of differences."""
        within = self.local_sgd_frame is not None and self.local_sgd_frame in frames and stage_of(frames) is None
        found = find_local_sgd_options(frames, self.local_sgd_frame) if within else None
        if self.local_sgd is not None and found is not None:
            self.local_sgd = replace(self.local_sgd, codec=found.codec)

    def enter_stage(self, key: str, frames: Sequence[Frame], site: object) -> None:
        """Record that a stage is entered inside these scopes."""
        frame = replica_of(frames) or self.around
        if frame is not None:
            self.nonempty_frames.add(frame)
        if key in self.decided:
            return
        stage = stage_of(frames)
        named = None if stage is None or self.local_sgd is None else stage.options.get("cluster")
        if named is not None and self.local_sgd_frame is not None:
            raise OptionError(
                f"nb.stage(cluster={named!r}) is inside {_describe_frame(self.local_sgd_frame)}",
                where=str(site),
                why="with sync_every each cluster trains a copy of everything inside, so no stage is assigned to one",
                mend=f'nb.stage(name="{named}"), or remove sync_every=',
            )
        before = self.frames_by_stage.setdefault(key, frame)
        if before is not frame and _count(before) != _count(frame):
            raise OptionError(
                f"stage {key!r} is in {_describe_frame(frame)}, but where it was first entered it is in "
                f"{_describe_frame(before)}",
                where=str(site),
                why="entering a stage again continues it, and its number of replicas must not change",
                mend="use the same nb.replica(...) around both, or a different name for the second: nb.stage(name=...)",
            )

    def settle(self, stages: Sequence[Stage]) -> list[Stage]:
        """The stages with their numbers of replicas; a step without a stage is one stage, on the first cluster if it
        has replicas. If replicas of one cluster exchange momenta, each runs a separate program.
        """
        found = self._number_all(stages)
        if self.local_sgd is None or not self.local_sgd.exchange or not has_single_cluster(self.local_sgd.clusters):
            return found
        self.local_sgd = replace(self.local_sgd, copies=_count(self.local_sgd_frame) or count_workers(self.home))
        return [replace(stage, replicas=1) for stage in found]

    def _number_all(self, stages: Sequence[Stage]) -> list[Stage]:
        frame = next(iter(self.all), None)
        if not stages and frame is None:
            return [Stage("stage0", self.home)]
        if not stages:
            alone = Stage("stage0", self.home)
            count = self._count_replicas(alone, frame, 1)
            where = str(frame.site) if frame and (count > 1 or self.local_sgd) else ""
            return [_apply_shard_option(replace(alone, where=where, replicas=count), frame)]
        if self.local_sgd is not None:
            stages = [replace(stage, cluster=self.home) for stage in stages]
        idle = next((frame for frame in self.entered if frame not in self.nonempty_frames), None)
        if idle is not None and not self.decided:
            raise NestingError(
                f"{_describe_frame(idle)} contains no nb.stage",
                where=str(idle.site),
                why=f"the step has stages elsewhere ({', '.join(stage.key for stage in stages[:3])}), "
                "and only stages can be replicated",
                mend='with nb.replica(...), nb.stage(name="..."): around the same lines',
            )
        around = [self.frames_by_stage.get(stage.key) for stage in stages]
        inside = Counter((frame, stage.cluster) for frame, stage in zip(around, stages, strict=True))
        return [
            _apply_shard_option(
                replace(stage, replicas=self._count_replicas(stage, frame, inside[frame, stage.cluster])), frame
            )
            for frame, stage in zip(around, stages, strict=True)
        ]

    def _count_replicas(self, stage: Stage, frame: Frame | None, sharing_stages: int) -> int:
        """The number of a stage's replicas: its scope's or, by default, the cluster's workers divided by the stages
        inside (`sharing_stages`) and by the devices of each replica.
        """
        if frame is None or _count(frame):
            return _count(frame)
        workers, split = count_workers(stage.cluster) // sharing_stages, self.splits.get(stage.key)
        devices = 1 if split is None else split.options["count"]
        if devices is None and split is not None and workers > 1:
            raise OptionError(
                f"neither nb.replica nor the nb.split inside it, at {split.site}, has a count",
                where=str(frame.site),
                why=f"stage {stage.key!r} has {workers} workers, which can be distributed in several ways",
                mend=f"nb.replica({workers}) or nb.split({workers}), or fewer: the other one gets the other workers",
            )
        return max(1, workers // (devices or 1))


def _count(frame: Frame | None) -> int:
    """The number of replicas that a scope specifies; 0 if it depends on the cluster, 1 without a scope."""
    return 1 if frame is None else int(frame.options["count"] or 0)


def _apply_shard_option(stage: Stage, frame: Frame | None) -> Stage:
    """The stage with the parts of optimizer slots and gradients (`shard=`) of its replica scope."""
    shard = None if frame is None else frame.options.get("shard")
    return replace(stage, shared_slots=shard is not None, shared_gradients=shard == "gradients")


def _describe_frame(frame: Frame | None) -> str:
    if frame is None:
        return "none"
    every = frame.options.get("sync_every")
    options = [str(_count(frame))] * bool(_count(frame)) + [f"sync_every={every!r}"] * (every is not None)
    return f"nb.replica({', '.join(options)}) at {frame.site}"


def adopt_stages(entered: EnteredScopes, assignment: Assignment, site: Site) -> None:
    """Set the stages of a trace to the decided ones, as if its own scopes, or new ones at this line, defined them."""
    numbers = dict[str, int]()
    for codec in dict.fromkeys(assignment.codecs.values()):
        numbers[codec] = len(entered.compressions)
        entered.compressions.append(Frame("compress", mirror_options(codec), site))
    entered.stages = {
        s.key: replace(s, compress=numbers.get(assignment.codecs.get(s.key, ""))) for s in assignment.stages
    }
    entered.adopt_pipeline(assignment.pipeline)
    for stage in assignment.stages:
        shard = ("gradients" if stage.shared_gradients else "optimizer") if stage.shared_slots else None
        frame = Frame("replica", {"count": stage.replicas, "shard": shard}, site)
        entered.replicas.frames_by_stage[stage.key] = frame
        entered.replicas.decided.add(stage.key)
        if stage.replicas > 1:
            entered.replicas.entered.append(frame)
            entered.replicas.nonempty_frames.add(frame)


def list_constraints(entered: EnteredScopes, program: Program) -> Constraints:
    """The constraints that the scopes of a trace impose on a planner."""
    frames = {key: entered.replicas.frames_by_stage.get(key) for key in entered.stage_texts}
    whole = set(frames.values()) if frames else set(entered.replicas.all[:1])
    around = whole.pop() if len(whole) == 1 else None
    pipeline_frame = entered.pipeline_frame
    stages = []
    for key, (words, clusters) in entered.stage_texts.items():
        frame = frames[key]
        stages.append(ScopedStage(key, words, clusters, None if frame is None else frame.options["count"]))
    layouts = [block.options["layout"] for block in entered.cluster_blocks]
    open_layout = not layouts or "all" in layouts
    return Constraints(
        tuple(stages),
        () if open_layout else tuple(dict.fromkeys(name for layout in layouts for name in layout)),
        entered.pipeline if pipeline_frame is not None else Pipeline(),
        entered.step_options.micro_batch or (None if pipeline_frame is None else pipeline_frame.options["micro_batch"]),
        None if around is None else around.options["count"],
        _explain_unplanned(entered, program),
    )


def _explain_unplanned(entered: EnteredScopes, program: Program) -> str:
    if program.local_sgd is not None:
        return "each cluster trains its own copy of it (nb.replica(sync_every=...))"
    if entered.splits:
        return f"it has nb.split at {entered.splits[0].site}, which already determines the divided variables"
    if entered.stage_texts and len(program.requests) > 1:
        return "it has its own stages and requests gradients more than once"
    return ""


def stamp_readers(graph: Graph, assignment: Assignment, paths: Mapping[int, str], forward: set[int] | None) -> Graph:
    """The graph with a stage for each forward op that reads a variable, and for the readers of its result, unless they
    also read results of later stages.

    `paths` names the variables by the op that holds their handle; without `forward` all ops belong to the forward.
    """
    ops, seen = list(graph.ops), Counter[str]()
    keys = {stage.key: number for number, stage in enumerate(assignment.stages)}
    inside = {op.index for op in ops} if forward is None else forward
    key_by_op: dict[int, str] = {}
    last_stages = [-1] * len(ops)  # the last stage whose results an op reads, directly or not, or its own
    for op in graph.ops:
        path = paths.get(op.inputs[0].op) if is_read(op) and op.inputs else None
        key = None
        if path is not None and op.index in inside:
            key = assignment.stage_of(path, seen[path])
            seen[path] += 1
        if key is not None:
            values = op.values if not op.type.startswith("ResourceGather") else ()
            readers = [reader.index for value in values for reader in graph.consumers(value)]
            for index in inside.intersection([op.index, *readers]):
                key_by_op[index] = max(key, key_by_op.get(index, key), key=keys.__getitem__)
        last = max((last_stages[value.op] for value in op.inputs), default=-1)
        if op.stage is None and op.index in key_by_op and keys[key_by_op[op.index]] >= last:
            ops[op.index] = replace(op, stage=key_by_op[op.index])
        last_stages[op.index] = keys.get(ops[op.index].stage or "", last)
    return replace(graph, ops=tuple(ops))


def map_handle_paths(graph: Any, numbers: Mapping[str, int], handles: Mapping[int, str]) -> dict[int, str]:
    """The paths of captured variables by the op of their handle; `handles` gives paths by the id of the handle."""
    captured = ((internal.op.name, handles.get(id(external))) for external, internal in graph.captures)
    return {numbers[name]: path for name, path in captured if path is not None}

"""The part of a plan on sharded stages: layouts of tensors, and collectives between devices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from whale_nebula.ir.cut import Cut, Fragment
from whale_nebula.ir.layout import ALL_GATHER, ALL_REDUCE, SPLIT, Layouts, count_bytes, find_local_spec
from whale_nebula.ir.program import Variable
from whale_nebula.ir.routing import count_turns
from whale_nebula.ir.sizes import Sizes
from whale_nebula.passes.split import list_accumulated_gradients, list_own_fragments
from whale_nebula.plan.records import PlanCollective, PlanStage
from whale_nebula.report.records import duration, size
from whale_nebula.schedule.lines import Line
from whale_nebula.spec import Spec, Value

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan


_SHOWN = 2
"""The number of variables that are listed, the largest ones."""
_VARIABLE = re.compile(r"variable (\S+) \w+\[([\d,]*)\]")


def list_device_facts(plan: Plan, stage: PlanStage) -> Iterator[tuple[str, str]]:
    """Facts on a sharded stage: the number of devices, their memory, layouts of the largest variables, and the bytes of
    a step's collectives by kind. Empty for other stages.
    """
    if stage.shards < 2:
        return
    yield "devices", f"{stage.shards}, {size(stage.shard_bytes)} each"
    shapes = {found[1]: found[2].split(",") for found in map(_VARIABLE.match, plan.lines) if found}
    sizes = {path: prod(int(entries) for entries in shape if entries) for path, shape in shapes.items()}
    held = sorted((path for path in stage.variables if path in plan.layouts), key=lambda path: -sizes.get(path, 0))
    shown = held if len(held) == _SHOWN + 1 else held[:_SHOWN]
    yield from ((path, plan.layouts[path]) for path in shown)
    if len(held) > len(shown):
        yield "also sharded", f"{len(held) - len(shown)} variables"
    own = [each for each in plan.collectives if each.stage == stage.name]
    for kind in dict.fromkeys(each.kind for each in sorted(own, key=lambda each: -each.bytes * each.times)):
        alike = [each for each in own if each.kind == kind]
        total, times = sum(each.bytes * each.times for each in alike), sum(each.times for each in alike)
        yield kind, f"{size(total)} in {times}{describe_seconds(alike, ', ')}"


def describe_seconds(collectives: Sequence[PlanCollective], before: str) -> str:
    """The seconds that collectives take in a step, after these words; nothing where they are unknown."""
    known = [each.seconds * each.times for each in collectives if each.seconds is not None]
    return f"{before}{duration(sum(known))}" if known and len(known) == len(collectives) else ""


_NUMBERS: Mapping[str, tuple[str, int]] = {
    "Softmax": (ALL_REDUCE, 2),
    "LogSoftmax": (ALL_REDUCE, 2),
    "SparseSoftmaxCrossEntropyWithLogits": (ALL_REDUCE, 4),
    "SoftmaxCrossEntropyWithLogits": (ALL_REDUCE, 4),
    "InTopK": (ALL_REDUCE, 4),
    "InTopKV2": (ALL_REDUCE, 4),
    "Max": (ALL_REDUCE, 1),
    "Min": (ALL_REDUCE, 1),
    "ArgMax": (ALL_GATHER, 1),
    "ArgMin": (ALL_GATHER, 1),
    "TopKV2": (ALL_GATHER, 1),
}
"""For ops that devices compute together: the collective, and the numbers per row that they exchange."""


def list_layouts(cut: Cut) -> dict[str, str]:
    """By name, the layout of each tensor that is not replicated on all devices; a variable's name is its path."""
    found: dict[str, str] = {}
    variables, graph = cut.program.variable_ops, cut.program.graph
    for layouts in cut.layouts.values():
        for value, layout in sorted(layouts.by_value.items()):
            op = graph.ops[value.op]
            name = variables[value.op].path if value.op in variables else op.name
            found[f"{name}:{value.out}" if value.out else name] = str(layout)
    return found


def list_collectives(
    cut: Cut, crossed: CrossingSizes, count: int, rings: Mapping[str, Line] | None = None
) -> tuple[PlanCollective, ...]:
    """The collectives of stages in a step of `count` micro-batches; for a stage with replicas, those of the replica
    with most micro-batches. `rings` are the links between neighbors inside clusters, by cluster.
    """
    orders, stages = cut.orders or [()] * len(cut.program.stages), cut.program.stages
    taken = {stage: max(count_turns(orders[stage], stages[stage].replicas, count)) for stage in cut.layouts}
    found: list[PlanCollective] = []
    for stage, layouts in cut.layouts.items():
        ring = (rings or {}).get(stages[stage].cluster)
        for each in _list_stage_collectives(cut, stage, crossed, taken[stage]):
            found.append(each if ring is None else replace(each, seconds=time_collective(each, layouts.count, ring)))
    return tuple(found)


def time_collective(collective: PlanCollective, devices: int, ring: Line) -> float:
    """Seconds of one run of a collective on a ring of `devices`: an all-reduce goes around twice."""
    rounds = (2 if collective.kind == ALL_REDUCE else 1) * (devices - 1)
    return ring.seconds(collective.bytes) + rounds * ring.delay


def list_notes(cut: Cut, crossed: CrossingSizes, count: int) -> tuple[str, ...]:
    """The notes of a cut. To one on an op that every device runs as a whole, the bytes that this costs are added."""
    costs: dict[str, float] = {}
    for stage, layouts in cut.layouts.items():
        fragments = _first_fragments(cut, stage)
        for op, note in layouts.whole_op_notes.items():
            crossing = [each for each in layouts.reshards.get(op, ()) if each.nbytes]
            sent = sum(count_bytes(each.kind, crossed.nbytes(each.value), layouts.count) for each in crossing)
            times = count if op in fragments and fragments[op].stage is not None else 1
            costs[note] = costs.get(note, 0.0) + sent * times
    return tuple(
        f"{note}; each device sends {size(costs[note])} per step for that" if note in costs else note
        for note in cut.notes
    )


@dataclass(frozen=True)
class CrossingSizes:
    """Sizes of tensors of split stages, for a first micro-batch of `rows[0]` rows and leaves with these `shapes`."""

    cut: Cut
    rows: Sequence[int]
    shapes: Sequence[tuple[int, ...]] = ()

    def shape(self, value: Value) -> tuple[int, ...]:
        """The shape of a whole tensor; of a gradient's placeholder that of its part."""
        return self._sizes.shape(self._sums.get(value, value))

    def nbytes(self, value: Value) -> int:
        """Bytes of a whole tensor; none of a variable's handle."""
        return self._sizes.nbytes(self._sums.get(value, value))

    @cached_property
    def _sums(self) -> Mapping[Value, Value]:
        return dict(list_accumulated_gradients(self.cut.program))

    @cached_property
    def _ops(self) -> list[int]:
        ops = {op for stage in self.cut.layouts for each in list_own_fragments(self.cut, stage) for op in each.ops}
        like = self.cut.program.arrivals
        above = self.cut.program.graph.ascend([*ops, *(arrival.boundary.op for _, arrival in like.values())])
        return sorted(above | like.keys())

    def _begin(self, rows: int) -> Sizes:
        program = self.cut.program
        known = zip(program.leaves, self.shapes, strict=True) if self.shapes else ()
        leaves = {Value(leaf.op): (rows, *shape[1:]) if leaf.batched else tuple(shape) for leaf, shape in known}
        like = {feed: arrival.boundary for feed, (_, arrival) in program.arrivals.items()}
        return Sizes(program.graph, rows, leaves, like=like)

    @cached_property
    def _sizes(self) -> Sizes:
        """The sizes of a micro-batch; those of values before the micro-batches are of the whole batch."""
        found, before = self._begin(self.rows[0]), [*self.cut.batch_fragments.values()]
        before += [fragment for phase in self.cut.phases for fragment in phase.prologue.values()]
        once = {value for fragment in before for value in fragment.fetches} if len(self.rows) > 1 else set[Value]()
        batch = self._begin(sum(self.rows)).follow(self._ops) if once else found
        found.shapes.update((value, batch.shape(value)) for value in once)
        found.numbers.update((value, batch.numbers[value]) for value in once & batch.numbers.keys())
        made = {value.op for value in once}
        return found.follow(op for op in self._ops if op not in made)


def _list_stage_collectives(cut: Cut, stage: int, crossed: CrossingSizes, count: int) -> Iterator[PlanCollective]:
    layouts, graph, key = cut.layouts[stage], cut.program.graph, cut.program.stages[stage].key
    fragments = _first_fragments(cut, stage)
    for each in layouts.sums:
        made = graph.ops[each.value.op].name
        yield PlanCollective(each.kind, round(each.nbytes), key, made, fragments[each.value.op].kind)
    seen = set()
    for op, reshards in layouts.reshards.items():
        for each in reshards:
            crossing = (each.value, each.target)
            fragment = fragments.get(each.value.op if op < 0 else op)
            if crossing in seen or not each.nbytes or fragment is None or graph.spec(each.value).dtype == "resource":
                continue
            seen.add(crossing)
            nbytes = count_bytes(each.kind, crossed.nbytes(each.value), layouts.count)
            yield _make_collective(cut, key, each.kind, each.value, nbytes, fragment, count)
    for op in sorted(layouts.joint_ops):
        if graph.ops[op].type in _NUMBERS and op in fragments:
            kind, nbytes = _count_numbers(cut, layouts, op, crossed)
            yield _make_collective(cut, key, kind, Value(op), nbytes, fragments[op], count)


def _count_numbers(cut: Cut, layouts: Layouts, op: int, crossed: CrossingSizes) -> tuple[str, float]:
    """The collective, and its bytes, of an op that devices compute together: numbers for each row, in the type of the
    scores; for the best ones also their positions.
    """
    made = cut.program.graph.ops[op]
    kind, times = _NUMBERS[made.type]
    scores = cut.program.graph.spec(made.inputs[0])
    row_bytes: float = (
        crossed.nbytes(made.inputs[0]) / crossed.shape(made.inputs[0])[layouts.layout(made.inputs[0]).axis]
    )
    if kind == ALL_REDUCE:
        return kind, count_bytes(kind, times * row_bytes, layouts.count)
    number = Spec(scores.dtype, ()).nbytes()
    best = (made.outputs[0].shape or (1,))[-1] if made.type == "TopKV2" else 1
    row_bytes *= (best or 1) * (number + Spec(made.outputs[-1].dtype, ()).nbytes()) / number
    return kind, count_bytes(kind, row_bytes * layouts.count, layouts.count)


def _first_fragments(cut: Cut, stage: int) -> Mapping[int, Fragment]:
    found: dict[int, Fragment] = {}
    for fragment in list_own_fragments(cut, stage):
        for op in fragment.ops:
            found.setdefault(op, fragment)
    return found


def _make_collective(
    cut: Cut, key: str, kind: str, value: Value, nbytes: float, fragment: Fragment, count: int
) -> PlanCollective:
    times = 1 if fragment.stage is None else count
    return PlanCollective(kind, round(nbytes), key, cut.program.graph.ops[value.op].name, fragment.kind, times)


def slot_bytes(cut: Cut, stage: int, slot: Variable) -> int:
    """Bytes of a slot that the first of a stage's replicas holds."""
    layouts = cut.layouts.get(stage)
    if layouts is None or not cut.program.stages[stage].shared_slots:
        return slot.spec.nbytes()
    return find_local_spec(slot.spec, layouts.layout(Value(slot.op)), layouts.count, 0).nbytes()


def shard_bytes(cut: Cut, stage: int, variables: Iterable[Variable]) -> int:
    """Bytes that a stage's first device holds: of these variables, and of its pieces of split variables and slots."""
    program, layouts = cut.program, cut.layouts[stage]
    pieces = [op for op, layout in layouts.variables.items() if layout.kind == SPLIT]
    held = dict.fromkeys([*(variable.op for variable in variables), *pieces])
    specs = ((program.variable_ops[op].spec, layouts.layout(Value(op))) for op in held)
    return sum(find_local_spec(spec, layout, layouts.count, 0).nbytes() for spec, layout in specs)

"""What a plan says of stages that are split over devices: how tensors lie there, and what crosses between devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from whale_nebula.ir.cut import Cut, Fragment
from whale_nebula.ir.layout import ALL_REDUCE, SPLIT, count_bytes, local_shape
from whale_nebula.ir.program import Variable
from whale_nebula.ir.routing import take_counts
from whale_nebula.passes.split import list_own_fragments
from whale_nebula.plan.records import PlanCollective
from whale_nebula.spec import Value

_SUMS = {
    "Softmax": 2,
    "LogSoftmax": 2,
    "SparseSoftmaxCrossEntropyWithLogits": 4,
    "SoftmaxCrossEntropyWithLogits": 4,
    "ArgMax": 2,
    "ArgMin": 2,
    "Max": 1,
    "Min": 1,
}
"""How many numbers for each row devices tell one another that compute an op together."""


def list_layouts(cut: Cut) -> dict[str, str]:
    """By its name, how each tensor lies that is not whole on each device; a variable's name is its path."""
    found: dict[str, str] = {}
    variables, graph = cut.program.variable_ops, cut.program.graph
    for layouts in cut.layouts.values():
        for value, layout in sorted(layouts.of.items()):
            op = graph.ops[value.op]
            name = variables[value.op].path if value.op in variables else op.name
            found[f"{name}:{value.out}" if value.out else name] = str(layout)
    return found


def list_collectives(cut: Cut, rows: int, count: int) -> tuple[PlanCollective, ...]:
    """What crosses between the devices of stages in a step of `count` micro-batches, of which the first has so many
    `rows`; of a stage in replicas, in the one that takes most of them.
    """
    orders, stages = cut.orders or [()] * len(cut.program.stages), cut.program.stages
    taken = {stage: max(take_counts(orders[stage], stages[stage].replicas, count)) for stage in cut.layouts}
    return tuple(chain.from_iterable(_of_stage(cut, stage, rows, taken[stage]) for stage in cut.layouts))


def _of_stage(cut: Cut, stage: int, rows: int, count: int) -> Iterator[PlanCollective]:
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
            if crossing in seen or not each.nbytes or fragment is None:
                continue
            seen.add(crossing)
            nbytes = count_bytes(each.kind, graph.spec(each.value).nbytes(rows), layouts.count)
            yield _collective(cut, key, each.kind, each.value, nbytes, fragment, count)
    for op in sorted(layouts.together):
        kind = graph.ops[op].type
        if kind in _SUMS and op in fragments:
            least = min(graph.spec(value).nbytes(rows) for value in graph.ops[op].values)
            nbytes = count_bytes(ALL_REDUCE, _SUMS[kind] * least, layouts.count)
            yield _collective(cut, key, ALL_REDUCE, Value(op), nbytes, fragments[op], count)


def _first_fragments(cut: Cut, stage: int) -> Mapping[int, Fragment]:
    found: dict[int, Fragment] = {}
    for fragment in list_own_fragments(cut, stage):
        for op in fragment.ops:
            found.setdefault(op, fragment)
    return found


def _collective(
    cut: Cut, key: str, kind: str, value: Value, nbytes: float, fragment: Fragment, count: int
) -> PlanCollective:
    times = 1 if fragment.stage is None else count
    return PlanCollective(kind, round(nbytes), key, cut.program.graph.ops[value.op].name, fragment.kind, times)


def slot_bytes(cut: Cut, stage: int, slot: Variable) -> int:
    """Bytes of a slot that the first of a stage's replicas holds."""
    layouts = cut.layouts.get(stage)
    if layouts is None or not cut.program.stages[stage].shared_slots:
        return slot.spec.nbytes()
    return local_shape(slot.spec, layouts.layout(Value(slot.op)), layouts.count, 0).nbytes()


def shard_bytes(cut: Cut, stage: int, own: Iterable[Variable]) -> int:
    """Bytes of a stage's `own` variables and of their slots in pieces that its first device holds."""
    program, layouts = cut.program, cut.layouts[stage]
    pieces = [op for op, layout in layouts.variables.items() if layout.kind == SPLIT]
    held = dict.fromkeys([*(variable.op for variable in own), *pieces])
    specs = ((program.variable_ops[op].spec, layouts.layout(Value(op))) for op in held)
    return sum(local_shape(spec, layout, layouts.count, 0).nbytes() for spec, layout in specs)

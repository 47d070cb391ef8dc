"""Sums over all replicas of a stage: where they can be had, and the words where they cannot.

Each replica comes to such a sum once a step, with one micro-batch. Had it a second one, its first could not go on
before the second was there, and both would have to be in its memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from whale_nebula.errors import BatchCoupledError
from whale_nebula.ir.cut import Cut, Fragment
from whale_nebula.ir.graph import REPLICA_SUM, Graph
from whale_nebula.ir.origin import Origin
from whale_nebula.ir.program import Program, Stage
from whale_nebula.passes.reduce.whole_batch import mends

Where = Callable[[int], str]


def sums_of(program: Program) -> Mapping[int, tuple[int, ...]]:
    """The sums over replicas of a program's forward, by their stage."""
    backward = {op for request in program.requests for op in request.backward}
    found: dict[int, tuple[int, ...]] = {}
    for op in sums_in(program.graph, backward):
        stage = program.labels.get(op, 0)
        found[stage] = (*found.get(stage, ()), op)
    return found


def sums_in(graph: Graph, left_out: Collection[int] = ()) -> list[int]:
    r"""The sums over replicas of a graph.

    >>> from whale_nebula.ir.text import from_text
    >>> sums_in(from_text("%0 = input x float32[4]\n%1 = ReplicaSum(%0) float32[4]"))
    [1]
    """
    return [op.index for op in graph.ops if op.type == REPLICA_SUM and op.index not in left_out]


def pieces_here(program: Program) -> int:
    """In how many micro-batches one process computes a step: replicas that add up on the way are one there."""
    return 1 if sums_of(program) else program.pipeline.micro_batch


def refusal(program: Program, where: Where) -> BatchCoupledError | None:
    """Why the sums of a program cannot be had from its micro-batches; None where they can, or where there are none."""
    count = program.pipeline.micro_batch
    for stage, ops in sums_of(program).items() if count > 1 else ():
        replicas = program.stages[stage].replicas
        if replicas != count:
            return _refused(program, stage, ops[0], where, _several(program.stages[stage], count))
    return None


def check_hosts(cut: Cut, worker: str, where: Where, *, collectives: bool) -> None:
    """Between processes each replica needs one of its own, and a `worker` that has one needs collectives."""
    for stage, ops in sums_of(cut.program).items() if cut.program.pipeline.micro_batch > 1 else ():
        key, replicas, hosts = cut.program.stages[stage].key, cut.program.stages[stage].replicas, cut.routing.of(stage)
        if len(hosts) < replicas:
            why = f"stage {key!r} has {replicas} replicas, each needs a worker of its own, and there are {len(hosts)}"
            raise _refused(cut.program, stage, ops[0], where, why)
        if worker in hosts and not collectives:
            raise _refused(cut.program, stage, ops[0], where, _STARTED)
        outside = next((op for fragment in _outside(cut) for op in fragment.ops if op in ops), None)
        if outside is not None:
            raise _refused(cut.program, stage, outside, where, _ELSEWHERE)


def _outside(cut: Cut) -> Iterator[Fragment]:
    """What a worker runs beside its stages, of rows that are its own or of no rows."""
    yield from cut.weight.values()
    for phase in cut.phases:
        yield from phase.prologue.values()
        for fragments in phase.updates.values():
            yield from fragments


_ELSEWHERE = "they are asked for outside of stages, where no replica comes to them"
_STARTED = (
    "its replicas add up by TensorFlow's collectives, which cannot be opened once TensorFlow has started: call "
    "nb.init() before anything that makes a tensor, a variable or a layer"
)


SHARED = "synchronized moments are those of all replicas of stage "
"""How a note begins that is said of a step with such sums."""


def notes(program: Program) -> list[str]:
    """What is to be said of a program with such sums, where there are replicas."""
    stages = sums_of(program) if program.pipeline.micro_batch > 1 else ()
    return [f"{SHARED}{program.stages[stage].key!r}; one process computes the batch as a whole" for stage in stages]


def _several(stage: Stage, count: int) -> str:
    return (
        f"they are added up over replicas that have one micro-batch each; stage {stage.key!r} has {count} "
        f"micro-batches for {stage.replicas} replica{'s' * (stage.replicas > 1)}"
    )


def _refused(program: Program, stage: int, op: int, where: Where, why: str) -> BatchCoupledError:
    line = where(op)
    layer = line.said if isinstance(line, Origin) else ""
    return BatchCoupledError(
        f"micro-batches would change the synchronized moments{f' of {layer}' if layer else ''}",
        op=f"{program.graph.ops[op].name} ({program.graph.ops[op].type})",
        line=str(line),
        why=why,
        mends=(*_as_many(program, stage), *_other_ways(program)),
    )


def _as_many(program: Program, stage: int) -> list[str]:
    """What gives each replica of a stage one micro-batch, if only its numbers are in the way."""
    replicas, count = program.stages[stage].replicas, program.pipeline.micro_batch
    most = max(each.replicas for each in program.stages)
    if replicas == count:
        return []
    if replicas == most > 1:
        return [f"nb.pipeline(micro_batch={replicas}), as many as there are replicas"]
    return [f"nb.replica({count}) around stage {program.stages[stage].key!r}, which gives each one micro-batch"]


def _other_ways(program: Program) -> tuple[str, str]:
    copied, count = max(stage.replicas for stage in program.stages), program.pipeline.micro_batch
    lines = mends(count if count > copied else 1, copied=copied > 1)
    return lines.alone, lines.allow

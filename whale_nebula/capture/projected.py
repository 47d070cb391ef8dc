"""What has to hold once tensors are projected on a learned basis, and is refused where it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from whale_nebula.capture.bottlenecks import Bottlenecks
from whale_nebula.capture.mirror import in_order
from whale_nebula.capture.places import place_of
from whale_nebula.capture.projection import home_of, learned, shrinks
from whale_nebula.capture.tracing import Tracing
from whale_nebula.errors import GradientError, NotYetError
from whale_nebula.ir.graph import Op
from whale_nebula.ir.program import Program
from whale_nebula.site import script_site


def check_crossed(trace: Tracing, program: Program) -> None:
    """Refuse a step in which something crosses whole that a learned basis covers: it was found too late."""
    if not any(map(learned, trace.compressions)):
        return
    graph, operations = program.graph, in_order(trace.graph.get_operations())
    for op in filter(_forward(program), graph.ops):
        for value in op.inputs:
            tensor = operations[value.op].outputs[value.out]
            apart = program.labels.get(value.op, program.labels[op.index]) != program.labels[op.index]
            if apart and _covered(trace, tensor, op):
                raise _crossed(tensor, place_of(operations[op.index]))


def _forward(program: Program) -> Callable[[Op], bool]:
    """Which ops may read what crosses: the forward's, not those that gradients or updates are made of."""
    first = min((request.start for request in program.requests), default=len(program.graph.ops))
    backward = frozenset(op for request in program.requests for op in request.backward)

    def forward(op: Op) -> bool:
        made = op.stage is not None or op.index < first
        return made and op.index in program.labels and op.index not in backward

    return forward


def _covered(trace: Tracing, tensor: Any, reader: Op) -> bool:
    home = home_of(trace, tensor)
    if home is None:
        return False
    number = reader.compress if home.compress is None else home.compress
    rank = None if number is None else learned(trace.compressions[number])
    return rank is not None and shrinks(tensor, rank)


def _crossed(tensor: Any, where: str) -> NotYetError:
    return NotYetError(
        f"a learned basis for {tensor.name!r}, which is read before it is known in which stage",
        where=where,
        why="it is projected where an op of another stage reads it, and this reader bears no stage",
        mend="put what reads it inside its nb.stage, and inside nb.compress where that is around the reader",
    )


def check_nested(bottlenecks: Bottlenecks, targets: Sequence[Any], sources: Sequence[Any]) -> None:
    """Refuse a gradient inside a gradient that goes through a bottleneck: it would need all of the tensor there."""
    smalls = [small for _, small in bottlenecks.small.values()]
    if not smalls:
        return
    inner = {id(external): internal for external, internal in smalls[0].graph.captures}
    handles = [getattr(source, "handle", source) for source in sources if source is not None]
    wanted = {inner.get(id(each), each).ref() for each in handles}
    between = {small.ref(): small for small in smalls}
    ends = [target for target in targets if hasattr(target, "graph")]
    if any(wanted & _above([between[ref]]) for ref in between.keys() & _above(ends)):
        raise NotYetError(
            "a gradient inside a gradient that goes back over a learned basis",
            where=str(script_site()),
            why="what is made of such a gradient needs all numbers of what crossed",
            mend="ask for the inner gradient within one stage, or leave basis out",
        )


def check_listed(bottlenecks: Bottlenecks) -> None:
    """Refuse a list of variables that was made before the first trace: the bottleneck's would never be trained."""
    own = {_handle(variable) for _, variable in bottlenecks.used.values()}
    for owner, variable in bottlenecks.used.values():
        others = {_handle(other) for other in owner.trainable_variables} - own
        if variable.trainable and _handle(variable) not in bottlenecks.asked and others and others <= bottlenecks.asked:
            raise GradientError(
                f"a gradient is asked for variables of {owner.name!r}, but not for {variable.path!r}",
                where=str(script_site()),
                why="the list was made before the model was first called: then its learned basis had no variables",
                mend=f"tape.gradient(loss, {owner.name}.trainable_variables), read in the step after it is called",
            )


def _handle(variable: Any) -> int:
    return id(getattr(variable, "value", variable).handle)


def _above(ends: Sequence[Any]) -> set[Any]:
    """All tensors that these are made of, and they themselves."""
    seen, stack = set[Any](), list(ends)
    while stack:
        tensor = stack.pop()
        if tensor.ref() not in seen:
            seen.add(tensor.ref())
            stack.extend(tensor.op.inputs)
    return seen

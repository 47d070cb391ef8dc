"""Branches, loops and calls: their bodies are interpreted with the states of their arguments."""

from __future__ import annotations

from whale_nebula.passes.reduce.algebra import joined
from whale_nebula.passes.reduce.registry import Result, Site, rule
from whale_nebula.passes.reduce.state import AFTER, COUNT, COUPLED, WHOLE, Fold

_TURNS = 8


@rule("PartitionedCall", "StatefulPartitionedCall", raw=True, positions=True)
def call(site: Site) -> Result:
    """What the body makes of the arguments."""
    return _run(site, site.op.functions[0], _forgotten(site.folds), len(site.op.outputs))


@rule("If", "StatelessIf", "Case", "StatelessCase", raw=True, positions=True)
def branch(site: Site) -> Result:
    """Every micro-batch must go the same way."""
    test, arguments = site.folds[0], _forgotten(site.folds[1:])
    if test.kind != WHOLE:
        return test.bare if test.kind == COUPLED else site.coupled("micro-batches may go different ways at a condition")
    found = _run(site, site.op.functions[0], arguments, len(site.op.outputs))
    for name in site.op.functions[1:]:
        other = _run(site, name, arguments, len(found))
        found = tuple(joined(site, one, two) for one, two in zip(found, other, strict=True))
    return found


@rule("While", "StatelessWhile", raw=True, positions=True)
def loop(site: Site) -> Result:
    """Turn by turn, until the states no longer change; every micro-batch must turn as often."""
    test, body = site.op.functions
    state = _forgotten(site.folds)
    for _ in range(_TURNS):
        turned = _run(site, body, state, len(state))
        found = tuple(joined(site, one, two) for one, two in zip(state, turned, strict=True))
        if found == state:
            break
        state = found
    else:
        return _spoilt(site, state, "a loop whose folds do not settle")
    end = _run(site, test, state, 1)[0]
    if end.kind == WHOLE:
        return state
    return _spoilt(site, state, _turning(end, state))


def _turning(end: Fold, state: tuple[Fold, ...]) -> str:
    """Why micro-batches may turn a loop differently often."""
    if end.kind == AFTER and any(fold.kind == COUNT for fold in state):
        return "a loop turns once for each row (tf.map_fn, tf.scan)"
    why = end.reason if end.kind in (AFTER, COUPLED) else f"its end hangs on {end.spoken}"
    return f"micro-batches may turn a loop differently often: {why}"


def _spoilt(site: Site, state: tuple[Fold, ...], reason: str) -> tuple[Fold, ...]:
    """All results are coupled, but for what the loop only hands through."""
    body = site.graph.functions[site.op.functions[1]]
    handed = {place for place, value in enumerate(body.returns) if value.op == body.arguments[place]}
    coupled = site.coupled(reason)
    return tuple(fold if place in handed or fold.kind == COUPLED else coupled for place, fold in enumerate(state))


def _run(site: Site, name: str, arguments: tuple[Fold, ...], expected: int) -> tuple[Fold, ...]:
    """The results of a body. A body that calls itself has none yet."""
    found = site.caller.call(site.graph, name, arguments, site.owner)
    return found if len(found) == expected else (site.coupled(f"{name!r} calls itself"),) * expected


def _forgotten(folds: tuple[Fold, ...]) -> tuple[Fold, ...]:
    """Inside a body it is not asked where a value comes from."""
    return tuple(fold._replace(inputs=False) for fold in folds)

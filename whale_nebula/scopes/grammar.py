"""How scopes nest: cluster > replica > pipeline > stage > split, each at most once on a path; compress anywhere.

A replica may also stand inside a pipeline, around the stages whose number of copies it gives.
"""

from __future__ import annotations

from dataclasses import replace

from whale_nebula.errors import NestingError
from whale_nebula.scopes.frames import Frame, Stack
from whale_nebula.site import Site, runs_now

LEVELS = ("cluster", "replica", "pipeline", "stage", "split")

_TWICE = {
    "cluster": "a cluster block opens a program: one block does not stand in another",
    "replica": "replicas are copies of the whole that is inside; there are no copies of copies",
    "pipeline": "a batch is cut into micro-batches once",
    "stage": "stages follow one another, they do not nest",
    "split": "an operator is sharded once",
}
_INSTEAD = {
    "cluster": "end the outer block first (dedent this line), or leave this one out",
    "replica": "nb.replica(count) once, around both",
    "pipeline": "one nb.pipeline(micro_batch=...) around all stages",
    "stage": "end the first stage before this line (dedent it), or leave one of them out",
    "split": "one nb.split(...) around the operators",
}


def settle(kind: str, site: Site, stack: Stack) -> Stack:
    """The stack on which a new scope may stand, or the error that says why there is none.

    Frames that were only replayed give way: a scope that is entered in a layer's `call` beats those in which
    the layer was built.
    """
    kept = tuple(
        frame
        for number, frame in enumerate(stack.frames)
        if number >= stack.replayed or not excludes(frame.kind, kind)
    )
    for frame in kept:
        if excludes(frame.kind, kind):
            raise _violation(kind, site, frame)
    gone = len(stack.frames) - len(kept)
    return replace(stack, frames=kept, replayed=stack.replayed - gone)


def excludes(outer: str, inner: str) -> bool:
    """Whether a scope of kind `inner` must not stand inside one of kind `outer`.

    >>> excludes("stage", "pipeline"), excludes("pipeline", "stage"), excludes("stage", "compress")
    (True, False, False)
    >>> excludes("pipeline", "replica"), excludes("replica", "pipeline")
    (False, False)
    """
    if inner == "compress" or (outer, inner) == ("pipeline", "replica"):
        return False
    if outer == "compress":
        return inner == "cluster"
    return LEVELS.index(outer) >= LEVELS.index(inner)


def _violation(kind: str, site: Site, outer: Frame) -> NestingError:
    if "layer" in outer.options:
        return _in_placed(kind, site, outer)
    if not runs_now(outer.site):
        return _left_open(kind, site, outer)
    if kind == outer.kind:
        why, mend = _TWICE[kind], _INSTEAD[kind]
    elif outer.kind == "compress":
        why = "compress stands anywhere inside a cluster block, not around it"
        mend = _swapped(kind, outer.kind)
    else:
        why = f"from the outside to the inside it is {' > '.join(LEVELS)}"
        mend = _swapped(kind, outer.kind)
    return NestingError(
        f"nb.{kind} stands inside nb.{outer.kind} at {outer.site}",
        where=str(site),
        why=why,
        mend=mend,
    )


def _in_placed(kind: str, site: Site, outer: Frame) -> NestingError:
    layer, cluster = outer.options["layer"], outer.cluster
    return NestingError(
        f"nb.{kind} stands in the code of layer {layer!r}, which nb.place at {outer.site} gives to {cluster!r}",
        where=str(site),
        why="a layer gets its stage from its own code or from nb.place, not from both",
        mend=f"take nb.{kind} out of the code, or leave the layer out of nb.place",
    )


def _left_open(kind: str, site: Site, outer: Frame) -> NestingError:
    return NestingError(
        f"nb.{kind} is entered while nb.{outer.kind} at {outer.site} is still open",
        where=str(site),
        why="what opened it (a generator that has yielded, a call of __enter__) has not closed it",
        mend=f"with nb.{outer.kind}(...): around the lines of the stage themselves, and no yield inside it",
    )


def _swapped(inner: str, outer: str) -> str:
    return f"swap them:\nwith nb.{inner}(...):\n    with nb.{outer}(...):"

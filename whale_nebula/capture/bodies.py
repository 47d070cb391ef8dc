"""A scope inside what TensorFlow runs as one op: a loop's body, a branch, a function of its own."""

from __future__ import annotations

from typing import NamedTuple

from whale_nebula.errors import BoundaryInBodyError
from whale_nebula.scopes import Frame


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
    body = _VECTORIZED if graph is None else _named(graph)
    body = _COMPILED if compiled and body is _FUNCTION else body
    return BoundaryInBodyError(
        f"nb.{frame.kind} is entered inside {body.called}",
        where=str(frame.site),
        why="TensorFlow runs such a body as one op, so no boundary can lie inside it",
        mend=body.mend.format(kind=frame.kind),
    )


def _named(graph: str) -> _Body:
    return next((body for part, body in _BY_NAME.items() if part in graph), _FUNCTION)

"""Trace a user's step once and make a Program of it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from whale_nebula import scopes, tf_private
from whale_nebula.capture import tracing
from whale_nebula.capture.assemble import assemble
from whale_nebula.capture.conditions import conditions_split
from whale_nebula.capture.constants import check_constants
from whale_nebula.capture.failures import translated
from whale_nebula.capture.graph_gradients import graph_asked
from whale_nebula.capture.inlining import inlining
from whale_nebula.capture.intercept import intercepted
from whale_nebula.capture.keras_replay import replaying
from whale_nebula.capture.keys import key_of
from whale_nebula.capture.place_hook import placing
from whale_nebula.capture.surroundings import check_surroundings
from whale_nebula.capture.tracing import Tracing
from whale_nebula.errors import UnsupportedError
from whale_nebula.ir.program import Program
from whale_nebula.passes.unbundle import Aliases, unbundle

_VARIABLES = (tf.Variable, keras.Variable)
"""As arguments they are no tensors: the step reads and writes the variable itself."""


@dataclass(frozen=True)
class Signature:
    """How a call's arguments lie: their structure, the tensors' names and specs, and the other values."""

    structure: Any
    names: tuple[str, ...]
    specs: tuple[Any, ...]
    batched: tuple[bool, ...]
    plain: tuple[Any, ...]
    key: Any


@dataclass(frozen=True)
class Captured:
    """A captured step: its Program, the traced graph, and how to pack its results."""

    program: Program
    graph: Any
    structured_outputs: Any
    variables: Mapping[str, Any]
    aliases: Aliases = field(default_factory=dict)

    def pack(self, tensors: Sequence[Any]) -> Any:
        """The user's own structure around the results."""
        found = iter(tensors)
        return tf.nest.map_structure(
            lambda leaf: next(found) if isinstance(leaf, tf.Tensor) else leaf,
            self.structured_outputs,
            expand_composites=True,
        )


def signature(
    arguments: Sequence[tuple[str, Any]], whole: frozenset[str] = frozenset()
) -> tuple[Signature, list[Any]]:
    """Lay out the arguments of a call; gives the signature and the tensors."""
    names: list[str] = []
    specs: list[Any] = []
    batched: list[bool] = []
    plain: list[Any] = []
    tensors: list[Any] = []
    marks: list[Any] = []
    for name, argument in arguments:
        marks.append(tf.nest.map_structure(lambda _: None, argument))
        for path, leaf in _paths(name, argument):
            tensor = _tensor(path, leaf)
            plain.append(None if tensor is not None else leaf)
            if tensor is None:
                continue
            split = tensor.shape.rank > 0 and name not in whole
            shape = [None, *tensor.shape[1:]] if split else tensor.shape
            names.append(path)
            specs.append(tf.TensorSpec(shape, tensor.dtype))
            batched.append(split)
            tensors.append(tensor)
    structure = [argument for _, argument in arguments]
    key = (tuple(n for n, _ in arguments), tuple(specs), str(marks), tuple(map(key_of, plain)))
    return Signature(structure, tuple(names), tuple(specs), tuple(batched), tuple(plain), key), tensors


def _paths(name: str, argument: Any) -> list[tuple[str, Any]]:
    return [("/".join([name, *map(str, path)]), leaf) for path, leaf in tf_private.leaf_paths(argument)]


def _tensor(path: str, leaf: Any) -> Any:
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        raise UnsupportedError(
            f"input {path!r} is a {type(leaf).__name__}",
            where=path,
            why="ragged and sparse inputs are not split by rows yet",
            mend="give a dense tensor: .to_tensor() or tf.sparse.to_dense(...)",
        )
    if isinstance(leaf, tf.Tensor):
        return leaf
    return tf.convert_to_tensor(leaf) if _is_tensor(leaf) else None


def bind(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Arguments with the names of a function's parameters."""
    return list(inspect.signature(fn).bind(*args, **kwargs).arguments.items())


def capture(
    call: Callable[[Sequence[Any]], Any],
    layout: Signature,
    *,
    paths: Callable[[], Mapping[int, str]] = dict,
) -> Captured:
    """Trace `call` (which takes the arguments in the structure of `layout`) under the scopes."""
    tracing.install()
    check_surroundings()
    trace = Tracing(batched=list(layout.batched))

    def body(*tensors: Any) -> Any:
        trace.begin(tf.compat.v1.get_default_graph(), list(tensors))
        with scopes.told_again():
            return call(filled(layout, tensors))

    given = list(zip(layout.names, layout.specs, strict=True))
    with translated(trace, given), tracing.tracing(trace), _tensorflow(), _keras(), scopes.numbering():
        traced = tf.function(body, autograph=False).get_concrete_function(*layout.specs)
    graph = traced.graph
    check_constants(graph)
    results = tf.nest.flatten(graph.structured_outputs, expand_composites=True)
    returned = [tensor for tensor in results if isinstance(tensor, tf.Tensor)]
    program, aliases = unbundle(assemble(trace, returned, layout.names, paths()))
    return Captured(program, graph, graph.structured_outputs, _variables(graph, program), aliases)


@contextlib.contextmanager
def _tensorflow() -> Iterator[None]:
    with intercepted(), graph_asked(), inlining(), conditions_split():
        yield


@contextlib.contextmanager
def _keras() -> Iterator[None]:
    with replaying(), placing():
        yield


def filled(layout: Signature, tensors: Sequence[Any]) -> list[Any]:
    """The user's arguments with the trace's tensors in their places."""
    found = iter(tensors)
    plain = iter(layout.plain)

    def fill(leaf: Any) -> Any:
        kept = next(plain)
        return kept if kept is not None or not _is_tensor(leaf) else next(found)

    return [tf.nest.map_structure(fill, argument) for argument in layout.structure]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) or (hasattr(leaf, "__array__") and not isinstance(leaf, _VARIABLES))


def _variables(graph: Any, program: Program) -> dict[str, Any]:
    """The live variables of a program by their path."""
    known = {id(v.handle): v for v in graph.variables}
    inner = {internal.op.name: external for external, internal in graph.captures}
    names = {variable.op: variable.path for variable in program.variables}
    return {path: known[id(inner[program.graph.ops[op].name])] for op, path in names.items()}

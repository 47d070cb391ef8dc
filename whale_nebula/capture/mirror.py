"""Convert a FuncGraph to an `ir.Graph` with source lines. Traced TensorFlow ops are read only here.

The location of an op is the innermost stack frame outside TensorFlow, Keras and this package. For a functional model,
it is the line that called the layer while the model was built.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf

from whale_nebula.ir.graph import REPLICA_SUM, Attribute, Graph, Op
from whale_nebula.passes.branches import Aliases
from whale_nebula.site import Origin, thread_site
from whale_nebula.spec import Spec, Value
from whale_nebula.tf import private as tf_private

BUILT = "_nebula_built"
"""Stamp of an op of a functional model: the line where its node was created."""

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_REPLAY = os.path.join(_OURS, "capture", "keras_scopes.py")


def find_origin(op: Any) -> Origin:
    """'file.py:12', or the op's name if no frame is in user code; and the Keras layer around the op."""
    layers, file = tf_private.find_layers_around(op)
    inside = layers[1:] if len(layers) > 1 else layers
    line = _find_line(op) or _THREAD_LINES.get(op.graph) or str(op.name)
    return Origin(line, "/".join(inside), _find_layer_class(file))


_THREAD_LINES: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""By graph the line that started the thread of its trace, for ops that no line of the user's code created there."""


def note_thread_line(graph: Any) -> None:
    """Record the line that started this thread for the ops of a graph, if it is not the thread of the script."""
    if (site := thread_site()) is not None:
        _THREAD_LINES[graph] = str(site)


def _find_line(op: Any) -> str:
    """The user's innermost source line; for ops of a functional model only lines within the replayed node count."""
    frames = tf_private.list_user_frames(op)
    built = tf_private.read_text_stamp(op, BUILT)
    start = max((number + 1 for number, (file, _) in enumerate(frames) if file == _REPLAY), default=0) if built else 0
    return next((f"{file}:{line}" for file, line in reversed(frames[start:]) if not is_library_file(file)), built)


def _find_layer_class(file: str) -> str:
    """The Keras layer that a file of Keras defines, if any."""
    for module in list(sys.modules.values()) if file else ():
        if getattr(module, "__file__", None) == file:
            classes = [each for _, each in inspect.getmembers(module, inspect.isclass)]
            found = [each.__name__ for each in classes if each.__module__ == module.__name__]
            return found[0] if len(found) == 1 else ""
    return ""


def is_library_file(file: str) -> bool:
    """Whether a file belongs to a library, not to the user."""
    libraries = (_OURS, *(path for path in sys.path if path.endswith(("site-packages", "dist-packages"))))
    return file.startswith("<") or file.startswith(libraries) or f"{os.sep}lib{os.sep}python" in file


STAGE, COMPRESS, SUMMED = "_nebula_stage", "_nebula_compress", "_nebula_replica_sum"
COPIED, SPLIT = "_nebula_copied", "_nebula_split"
"""Stamps of ops: the stage and the number of the compress scope, a sum over replicas, a replica and a split scope."""
_SMALL = 64
_BODIES = {"While": ("cond", "body"), "StatelessWhile": ("cond", "body"), "If": ("then_branch", "else_branch"),
           "StatelessIf": ("then_branch", "else_branch"), "PartitionedCall": ("f",), "StatefulPartitionedCall": ("f",),
           "Case": ("branches",), "StatelessCase": ("branches",)}  # fmt: skip
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def mirror(graph: Any, roles: Mapping[str, tuple[str, str]] | None = None) -> Graph:
    """The ops of a graph as pure data; `roles` gives (role, name) for the ops that hold inputs and captures.

    >>> import tensorflow as tf
    >>> traced = tf.function(lambda x: x + 1.0).get_concrete_function(tf.TensorSpec([None], tf.float32))
    >>> [op.type for op in mirror(traced.graph).ops]
    ['Placeholder', 'Const', 'AddV2', 'Identity']
    """
    return _Mirror({}).graph(graph, roles or {})


class _Mirror:
    def __init__(self, functions: dict[str, Graph]) -> None:
        self.functions = functions

    def graph(self, graph: Any, roles: Mapping[str, tuple[str, str]]) -> Graph:
        operations = order_operations(graph.get_operations())
        numbers = {op.name: index for index, op in enumerate(operations)}
        ops = tuple(self._op(graph, op, index, numbers, roles) for index, op in enumerate(operations))
        is_function = isinstance(graph, tf_private.FuncGraph)
        arguments = tuple(numbers[t.op.name] for t in graph.inputs) if is_function else ()
        returns = tuple(_value(t, numbers) for t in graph.outputs) if is_function else ()
        return Graph(ops, self.functions, arguments, returns)

    def _op(
        self, graph: Any, op: Any, index: int, numbers: Mapping[str, int], roles: Mapping[str, tuple[str, str]]
    ) -> Op:
        read = _parse_op(graph, op)
        role, name = roles.get(op.name, ("", op.name))
        return Op(
            index=index,
            type=REPLICA_SUM if read.summed else op.type,
            inputs=tuple(_value(t, numbers) for t in op.inputs),
            outputs=tuple(mirror_spec(t) for t in op.outputs),
            control=tuple(numbers[c.name] for c in op.control_inputs),
            name=name,
            role=role,
            stage=read.stage,
            compress=read.compress,
            stateful=bool(op.op_def is not None and op.op_def.is_stateful),
            attributes=read.attributes,
            constant=read.constant,
            functions=self._bodies(graph, op),
        )

    def _bodies(self, graph: Any, op: Any) -> tuple[str, ...]:
        names: list[str] = []
        for attribute in _BODIES.get(op.type, ()):
            value = op.node_def.attr[attribute]
            found = [f.name for f in value.list.func] if value.HasField("list") else [value.func.name]
            for name in found:
                if name not in self.functions:
                    self.functions[name] = Graph(())  # ends the recursion of a recursive call
                    self.functions[name] = self.graph(tf_private.find_function_graph(graph, name), {})
                names.append(name)
        if op.type in _CALLS:  # after differentiation, TensorFlow's graph of a function has more outputs than the call
            body = self.functions[names[0]]
            self.functions[names[0]] = replace(body, returns=body.returns[: len(op.outputs)])
        return tuple(names)


class _OpProperties(NamedTuple):
    """The properties of an op's definition."""

    attributes: Mapping[str, Attribute]
    constant: tuple[int, ...] | None
    stage: str | None
    compress: int | None
    summed: bool


_PARSED: weakref.WeakKeyDictionary[Any, dict[str, _OpProperties]] = weakref.WeakKeyDictionary()
"""The parsed definitions by graph and op name: a growing trace is mirrored repeatedly."""


def _parse_op(graph: Any, op: Any) -> _OpProperties:
    """Parse an op's definition, cached unless TensorFlow may change it: ops with bodies, and sums over replicas."""
    known = _PARSED.setdefault(graph, {})
    found = known.get(op.name)
    if found is None:
        found = _parse_definition(op)
        if op.type not in _BODIES and not found.summed:
            known[op.name] = found
    return found


def _parse_definition(op: Any) -> _OpProperties:
    definition = op.node_def
    attributes = {k: v for k, a in definition.attr.items() if (v := _attribute(a)) is not None}
    stage, compress = attributes.pop(STAGE, None), attributes.pop(COMPRESS, None)
    attributes.pop(BUILT, None)
    attributes.pop(COPIED, None)
    attributes.pop(SPLIT, None)
    summed = attributes.pop(SUMMED, None) is not None
    constant = _constant(op)
    if op.type == "Const" and constant is None:
        content = definition.attr["value"].tensor.SerializeToString(deterministic=True)
        attributes["content"] = hashlib.sha256(content).hexdigest()[:16]  # for constants without kept values
    stage, compress = stage if isinstance(stage, str) else None, compress if isinstance(compress, int) else None
    return _OpProperties(attributes, constant, stage, compress, summed)


def order_operations(operations: Sequence[Any]) -> list[Any]:
    """The ops in trace order, but after their inputs: differentiating a loop adds inputs that were traced later."""
    ordered: dict[Any, None] = {}
    for op in operations:
        stack = [op]
        while stack:
            top = stack[-1]
            late = [] if top in ordered else [t.op for t in top.inputs if t.op not in ordered]
            if late:
                stack.extend(reversed(late))
            else:
                ordered.setdefault(stack.pop())
    return list(ordered)


def iterate_ancestors(ends: Iterable[Any], is_passed: Callable[[Any], bool]) -> Iterator[Any]:
    """Ops and their transitive inputs, through ops for which `is_passed` is true."""
    stack, seen = list(ends), set[Any]()
    while stack:
        op = stack.pop()
        if op not in seen and is_passed(op):
            seen.add(op)
            yield op
            stack.extend(tensor.op for tensor in op.inputs)


def _value(tensor: Any, numbers: Mapping[str, int]) -> Value:
    return Value(numbers[tensor.op.name], tensor.value_index)


def mirror_spec(tensor: Any) -> Spec:
    """The spec of a traced tensor."""
    shape = tensor.shape
    return Spec(tensor.dtype.name, None if shape.rank is None else tuple(shape.as_list()))


def _constant(op: Any) -> tuple[int, ...] | None:
    if op.type != "Const":
        return None
    tensor = op.outputs[0]
    small = tensor.shape.num_elements() is not None and tensor.shape.num_elements() <= _SMALL
    countable = tensor.dtype.is_integer or tensor.dtype.is_bool or tensor.shape.rank == 0
    if not (small and countable) or tensor.dtype in (tf.string, tf.variant, tf.resource):
        return None
    return tuple(tf.make_ndarray(op.get_attr("value")).reshape(-1).tolist())


def _attribute(attribute: Any) -> Attribute | None:
    kind = attribute.WhichOneof("value")
    if kind in ("i", "f", "b"):
        plain: int | float | bool = getattr(attribute, kind)
        return plain
    if kind == "s":
        return str(attribute.s.decode("utf-8", "replace"))
    if kind == "type":
        return str(tf.as_dtype(attribute.type).name)
    if kind == "shape":
        return _shape(attribute.shape)
    if kind != "list":
        return None
    values = attribute.list
    if values.s:
        return tuple(item.decode("utf-8", "replace") for item in values.s)
    if values.type:
        return tuple(tf.as_dtype(item).name for item in values.type)
    return tuple(map(_shape, values.shape)) or tuple(values.i) or tuple(values.f) or tuple(values.b)


def _shape(shape: Any) -> Attribute:
    return "?" if shape.unknown_rank else tuple(axis.size for axis in shape.dim)


class Donor:
    """A traced graph from which parts are copied as GraphDefs; its definition is read once."""

    def __init__(self, graph: Any) -> None:
        self.operations = order_operations(graph.get_operations())
        self._definition = graph.as_graph_def()
        self._nodes = {node.name: node for node in self._definition.node}
        self._library = {f.signature.name: f for f in self._definition.library.function}

    def replace_inputs(self, aliases: Aliases) -> None:
        """Let all ops read the replacements in `aliases` in what is cut afterwards."""
        names = {self._text(old): self._text(new) for old, new in aliases.items()}
        for node in self._definition.node if names else ():
            for position, name in enumerate(node.input):
                if name in names:
                    node.input[position] = names[name]

    def _text(self, value: Value) -> str:
        """The name of a value in a node's inputs."""
        name: str = self.operations[value.op].name
        return f"{name}:{value.out}" if value.out else name

    def tensor(self, value: Value) -> Any:
        """The traced tensor of a value."""
        return self.operations[value.op].outputs[value.out]

    def cut(self, ops: Sequence[int], waits: Mapping[int, int] | None = None) -> Any:
        """A GraphDef of these ops only, without control inputs from other ops and without colocation. An op in `waits`
        gets a control input from the op it waits for.
        """
        waiting = {self.operations[op].name: self.operations[other].name for op, other in (waits or {}).items()}
        names = [self.operations[index].name for index in ops]
        definition = tf.compat.v1.GraphDef()
        definition.versions.CopyFrom(self._definition.versions)
        chosen = set(names)
        for name in names:
            node = definition.node.add()
            node.CopyFrom(self._nodes[name])
            node.attr.pop("_class", None)
            kept = [given for given in node.input if not given.startswith("^") or given[1:] in chosen]
            del node.input[:]
            node.input.extend(kept)
            if name in waiting:
                node.input.append(f"^{waiting[name]}")
        for name in self._called_functions(definition.node):
            definition.library.function.add().CopyFrom(self._library[name])
        return definition

    def cut_library(self, ops: Sequence[int]) -> Any:
        """The functions that these ops call, without the ops."""
        definition = self.cut(ops)
        definition.ClearField("node")
        return definition

    def _called_functions(self, nodes: Iterable[Any]) -> list[str]:
        """The library functions that nodes call, transitively."""
        found: dict[str, None] = {}
        waiting = list(nodes)
        while waiting:
            for attribute in waiting.pop().attr.values():
                listed = [f.name for f in attribute.list.func]
                for name in [attribute.func.name, *listed]:
                    if name in self._library and name not in found:
                        found[name] = None
                        waiting.extend(self._library[name].node_def)
        return list(found)


def import_nodes(definition: Any, known: Mapping[str, Any], tensor_names: Sequence[str], name: str = "") -> list[Any]:
    """Import nodes into the current graph, with `known` tensors as other inputs; returns the named tensors."""
    read = {given.split("^")[-1] for node in definition.node for given in node.input}
    used = {key: tensor for key, tensor in known.items() if key in read or key.removesuffix(":0") in read}
    fresh = list(dict.fromkeys(key for key in tensor_names if key not in known))
    found = tf.graph_util.import_graph_def(definition, input_map=used, return_elements=fresh, name=name) or []
    made = dict(zip(fresh, found, strict=True))
    return [known[key] if key in known else made[key] for key in tensor_names]

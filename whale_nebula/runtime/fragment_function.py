"""A fragment of the traced graph becomes a TensorFlow function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from whale_nebula import tf_private
from whale_nebula.capture.mirror import in_order
from whale_nebula.ir.plan import Fragment
from whale_nebula.ir.spec import Value
from whale_nebula.passes.unbundle import Aliases


@dataclass(frozen=True)
class Function:
    """A fragment that can be called: tensors of `feeds` in, tensors of `fetches` out."""

    fragment: Fragment
    concrete: Any
    captured: Sequence[Any]

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
        """Run it."""
        return tf_private.call_flat(self.concrete, tensors, self.captured)


class Workshop:
    """Makes functions out of one traced graph, which it reads once; `aliases` are values to read for others."""

    def __init__(self, graph: Any, aliases: Aliases | None = None) -> None:
        self._definition = graph.as_graph_def()
        self._nodes = {node.name: node for node in self._definition.node}
        self._library = {f.signature.name: f for f in self._definition.library.function}
        self._operations = in_order(graph.get_operations())
        self._external = {internal.op.name: external for external, internal in graph.captures}
        self._rename({self._text(old): self._text(new) for old, new in (aliases or {}).items()})

    def _rename(self, names: Mapping[str, str]) -> None:
        for node in self._definition.node if names else ():
            for position, name in enumerate(node.input):
                if name in names:
                    node.input[position] = names[name]

    def _text(self, value: Value) -> str:
        """How a node's input names a value."""
        name: str = self._operations[value.op].name
        return f"{name}:{value.out}" if value.out else name

    def make(self, fragment: Fragment) -> Function:
        """Build the function of a fragment."""
        operations = [self._operations[index] for index in fragment.ops]
        feeds = [self._tensor(value) for value in fragment.feeds]
        fetches = [self._tensor(value) for value in fragment.fetches]
        definition = self._prune(operations)
        used = {t.op.name for op in operations for t in op.inputs} | {t.op.name for t in fetches}
        captures = {name: self._external[name] for name in used if name in self._external}

        def body(*tensors: Any) -> list[Any]:
            graph = tf.compat.v1.get_default_graph()
            known = {tensor.name: given for tensor, given in zip(feeds, tensors, strict=True)}
            known |= {f"{name}:0": graph.capture(external) for name, external in captures.items()}
            return _import(definition, known, [tensor.name for tensor in fetches])

        signature = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in feeds]
        body.__name__ = _name(fragment)
        concrete = tf.function(body, input_signature=signature, autograph=False).get_concrete_function()
        return Function(fragment, concrete, concrete.captured_inputs)

    def _tensor(self, value: Value) -> Any:
        return self._operations[value.op].outputs[value.out]

    def _prune(self, operations: Sequence[Any]) -> Any:
        """The nodes of these ops alone; what orders them after ops left out is dropped, as is colocation."""
        definition = tf.compat.v1.GraphDef()
        definition.versions.CopyFrom(self._definition.versions)
        names = {op.name for op in operations}
        for op in operations:
            node = definition.node.add()
            node.CopyFrom(self._nodes[op.name])
            node.attr.pop("_class", None)
            kept = [name for name in node.input if not name.startswith("^") or name[1:] in names]
            del node.input[:]
            node.input.extend(kept)
        for name in self._called(definition.node):
            definition.library.function.add().CopyFrom(self._library[name])
        return definition

    def _called(self, nodes: Iterable[Any]) -> list[str]:
        """The library functions that nodes call, and those that these call."""
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


def _import(definition: Any, known: dict[str, Any], wanted: Sequence[str]) -> list[Any]:
    """Import nodes into the current graph, reading `known` where they read what was left out."""
    read = {name.split("^")[-1] for node in definition.node for name in node.input}
    used = {name: tensor for name, tensor in known.items() if name in read or name.removesuffix(":0") in read}
    fresh = list(dict.fromkeys(name for name in wanted if name not in known))
    found = tf.graph_util.import_graph_def(definition, input_map=used, return_elements=fresh, name="") or []
    made = dict(zip(fresh, found, strict=True))
    return [known[name] if name in known else made[name] for name in wanted]


def _name(fragment: Fragment) -> str:
    stage = "" if fragment.stage is None else f"_stage{fragment.stage}"
    return f"{fragment.kind}{stage}_phase{fragment.phase}"

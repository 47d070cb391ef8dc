"""Some ops of a traced graph, put into another: what they read from outside is given to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from whale_nebula.capture.mirror import in_order
from whale_nebula.passes.unbundle import Aliases
from whale_nebula.spec import Value


class Donor:
    """A graph that ops are taken from; it is read once."""

    def __init__(self, graph: Any) -> None:
        self.operations = in_order(graph.get_operations())
        self._definition = graph.as_graph_def()
        self._nodes = {node.name: node for node in self._definition.node}
        self._library = {f.signature.name: f for f in self._definition.library.function}

    def rename(self, aliases: Aliases) -> None:
        """Let every op read other values than it did."""
        names = {self._text(old): self._text(new) for old, new in aliases.items()}
        for node in self._definition.node if names else ():
            for position, name in enumerate(node.input):
                if name in names:
                    node.input[position] = names[name]

    def _text(self, value: Value) -> str:
        """How a node's input names a value."""
        name: str = self.operations[value.op].name
        return f"{name}:{value.out}" if value.out else name

    def tensor(self, value: Value) -> Any:
        """The traced tensor of a value."""
        return self.operations[value.op].outputs[value.out]

    def cut(self, ops: Sequence[int]) -> Any:
        """The nodes of these ops alone; what orders them after ops left out is dropped, as is colocation."""
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


def plant(definition: Any, known: Mapping[str, Any], wanted: Sequence[str], name: str = "") -> list[Any]:
    """Put nodes into the current graph, reading `known` where they read what was left out; gives tensors by name."""
    read = {given.split("^")[-1] for node in definition.node for given in node.input}
    used = {key: tensor for key, tensor in known.items() if key in read or key.removesuffix(":0") in read}
    fresh = list(dict.fromkeys(key for key in wanted if key not in known))
    found = tf.graph_util.import_graph_def(definition, input_map=used, return_elements=fresh, name=name) or []
    made = dict(zip(fresh, found, strict=True))
    return [known[key] if key in known else made[key] for key in wanted]

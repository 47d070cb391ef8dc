"""Replace ops during the trace of a step: stateful random ops, calls of tf.functions, and conditions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from whale_nebula.capture.mirror import Donor, in_order, mirror, plant
from whale_nebula.capture.tracing import Tracing, current
from whale_nebula.passes.branches import NOBODY, Branch, Owners, bundle_aliases, rewire, split_branches
from whale_nebula.passes.phases import SMALL
from whale_nebula.tf import private as tf_private
from whale_nebula.tf import random as tf_random


def find_draw_counter(seed: int, seed2: int) -> Any:
    """The variable of an op with these seeds; None where the op is to stay as it is."""
    trace = current()
    if trace is None or trace.busy or trace.plain or trace.vectorizing or tf.executing_eagerly():
        return None
    if tf.compat.v1.get_default_graph() is not trace.graph:
        return None
    state = tf_random.fresh_state(seed, seed2, f"{STATE}_{seed}_{seed2}")
    trace.draws.append(state)
    return state


STATE = "nebula_draws"
"""How the variables' names begin; the seeds come behind, so that processes with other seeds notice it."""


_call = tf_private.PolymorphicFunction.__call__


@functools.wraps(_call)  # AutoGraph goes by its module: it calls TensorFlow's own objects as they are
def call_inlined(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for the call of a tf.function: run its body in the trace, where that means the same."""
    trace = current()
    if trace is None or trace.busy or tf.compat.v1.get_default_graph() is not trace.graph:
        return _call(function, *args, **kwargs)
    if tf_private.compiled_by_xla(function):
        with _forbid_scopes_in_xla(trace):
            return _call(function, *args, **kwargs)
    if not tf_private.can_inline(function):
        return _call(function, *args, **kwargs)
    return tf_private.run_inline(function, args, kwargs)


@contextlib.contextmanager
def _forbid_scopes_in_xla(trace: Tracing) -> Iterator[None]:
    """Around the call of a function that XLA compiles: a scope inside it says so."""
    before, trace.compiled = trace.compiled, True
    try:
        yield
    finally:
        trace.compiled = before


def split_condition(pred: Any, branches: Sequence[Any]) -> bool:
    """Build the conds of each cluster in the place of one; False where there is nothing to take apart."""
    trace = current()
    if trace is None or trace.busy or tf.compat.v1.get_default_graph() is not trace.graph:
        return False
    if not trace.requests or any(branch.outputs for branch in branches) or len(_clusters(trace)) < 2:
        return False
    trace.busy = True
    try:
        return _split(trace, pred, [_Tree(branch) for branch in branches])
    finally:
        trace.busy = False


def _split(trace: Tracing, pred: Any, trees: Sequence[_Tree]) -> bool:
    found = split_branches([tree.branch for tree in trees], _owners(trace))
    if found is None:
        return False
    keys, splits = found
    for tree, split in zip(trees, splits, strict=True):
        tree.move(sorted(split.out))
    for key in keys:
        bodies = [tree.body(sorted(split.groups.get(key, ()))) for tree, split in zip(trees, splits, strict=True)]
        tf.cond(pred, *bodies)
    return True


@dataclass
class _Tree:
    """A branch of TensorFlow's, its mirror without bundles, and what its values are outside."""

    graph: Any
    outer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        around = tf.compat.v1.get_default_graph()
        plain = mirror(self.graph)
        aliases = bundle_aliases(plain, lambda op: True)
        self.donor = Donor(self.graph)
        self.donor.rename(aliases)
        self.outer = {internal.name: around.capture(external) for external, internal in self.graph.captures}
        numbers = {op.name: index for index, op in enumerate(self.donor.operations)}
        given = {numbers[internal.op.name]: self.outer[internal.name].name for _, internal in self.graph.captures}
        self.branch = Branch(rewire(plain, aliases), given)

    def move(self, ops: Sequence[int]) -> None:
        """Put ops into the outer graph."""
        made = [tensor.name for index in ops for tensor in self.donor.operations[index].outputs]
        with tf.control_dependencies(None):
            found = plant(self.donor.cut(ops), self.outer, made, name="nebula_shared")
        self.outer.update(zip(made, found, strict=True))

    def body(self, ops: Sequence[int]) -> Callable[[], None]:
        """A function that does what these ops do."""
        definition = self.donor.cut(ops)
        given = (value for index in ops for value in self.branch.graph.ops[index].inputs if value.op not in ops)
        read = sorted({self.donor.tensor(value).name for value in given})

        def run() -> None:
            graph = tf.compat.v1.get_default_graph()
            plant(definition, {name: graph.capture(self.outer[name]) for name in read}, ())

        return run


def _clusters(trace: Tracing) -> set[str]:
    return {stage.cluster for stage in trace.stages.values()}


def _owners(trace: Tracing) -> dict[str, Owners]:
    """Who each tensor of the trace belongs to: the clusters of the gradients and variables that it is made of."""
    clusters = [stage.cluster for stage in trace.stages.values()]
    operations = in_order(trace.graph.get_operations())
    found = _gradients(trace, clusters) | _variables(trace, operations, clusters)
    for op in operations:
        if not op.inputs or op.name in trace.labels:
            continue
        each = [found.get(tensor.name, NOBODY) for tensor in op.inputs]
        for number, tensor in enumerate(op.outputs):
            own = each[number] if op.type == "IdentityN" else NOBODY.union(*each)
            if own and (len(own) == 1 or not _small(tensor)):
                found[tensor.name] = own
    return found


def _gradients(trace: Tracing, clusters: Sequence[str]) -> dict[str, Owners]:
    found: dict[str, Owners] = {}
    for request in trace.requests:
        for source, tensors in request.holders:
            own = frozenset(clusters[stage] for stage, number, _ in request.parts if number == source)
            found.update({tensor.name: own for tensor in tensors})
    return found


def _variables(trace: Tracing, operations: Sequence[Any], clusters: Sequence[str]) -> dict[str, Owners]:
    """A variable belongs to the clusters whose stages read it; a single number (the loss scale) can cross."""
    found: dict[str, Owners] = {}
    for op in operations:
        stage = trace.labels.get(op.name)
        for tensor in op.inputs if stage is not None else ():
            if tensor.dtype == tf.resource and (tf_private.resource_spec(tensor) or ("", ()))[1] != ():
                found[tensor.name] = found.get(tensor.name, NOBODY) | {clusters[stage or 0]}
    return found


def _small(tensor: Any) -> bool:
    count = tensor.shape.num_elements()
    return count is not None and count * max(1, tensor.dtype.size) <= SMALL

"""Split a branch that updates variables of several clusters into one branch per cluster.

Loss scaling applies all gradients in one `tf.cond`. TensorFlow runs that as one op, which no cluster could run
alone. So its effects are grouped by the clusters that they depend on. Three kinds of ops are moved out of the branch:
those that mix clusters (a global norm), reads that all need (the scale), and small values with which another cluster's
variable is written. They have no effects, so they may be computed even if the branch is not taken, and cross.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter

from whale_nebula.ir.graph import Graph, Op
from whale_nebula.ir.program import Program
from whale_nebula.passes.effects import find_written_inputs, is_effect, is_read
from whale_nebula.passes.phases import is_small
from whale_nebula.spec import Value

Owners = frozenset[str]
"""The clusters that a value depends on; empty for values that every cluster has."""
NO_OWNER: Owners = frozenset()


@dataclass(frozen=True)
class Branch:
    """One branch of a cond: its ops, and the outer value of each of its arguments."""

    graph: Graph
    argument_names: Mapping[int, str]


@dataclass
class BranchSplit:
    """Decomposition of one branch: the ops to remove from it, the ops of each group, and those of its results, which
    are computed after all groups.
    """

    removed_ops: frozenset[int] = frozenset()
    groups: dict[Owners, frozenset[int]] = field(default_factory=dict)
    results: frozenset[int] = frozenset()
    predecessors: dict[Owners, set[Owners]] = field(default_factory=dict)


def split_branches(
    branches: Sequence[Branch], owners: dict[str, Owners]
) -> tuple[list[Owners], list[BranchSplit]] | None:
    """Groups of ops in an order that preserves the order of effects, and the decomposition of each branch.

    `owners` has the owners of outer values and variables; variables that only the branches touch are added. None if
    there is nothing to split, or if it is not possible.
    """
    while any(_assign_owners(branch, owners) for branch in branches):
        pass
    ownerships = [_find_ownership(branch, owners) for branch in branches]
    splits = [_split_branch(branch, found) for branch, found in zip(branches, ownerships, strict=True)]
    found = [split for split in splits if split is not None]
    keys = {key for split in found for key in split.groups}
    mixed = any(each.mixed for each in ownerships) or len(keys - {NO_OWNER}) > 1
    if len(found) < len(branches) or not mixed:
        return None
    after: dict[Owners, set[Owners]] = {key: set() for key in sorted(keys, key=sorted)}
    for split in found:
        for key, others in split.predecessors.items():
            after[key] |= others
    try:
        return list(TopologicalSorter(after).static_order()), found
    except CycleError:
        return None


@dataclass
class _Ownership:
    """The owner of each value of a branch, and the shared ones: reads of variables without owner, small mixtures, and
    small values that another owner's variable is written with. `mixed` is whether there are any of the latter two.
    """

    by_value: dict[Value, Owners] = field(default_factory=dict)
    effects: dict[int, Owners] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)
    mixed: bool = False


def _find_ownership(branch: Branch, owners: Mapping[str, Owners]) -> _Ownership:
    found = _Ownership()
    for op in branch.graph.ops:
        if op.index in branch.argument_names:
            found.by_value[Value(op.index)] = owners.get(branch.argument_names[op.index], NO_OWNER)
        else:
            _add_op(op, branch.graph, found)
    return found


def _add_op(op: Op, graph: Graph, found: _Ownership) -> None:
    each = [found.by_value.get(value, NO_OWNER) for value in op.inputs]
    together = NO_OWNER.union(*each)
    if op.type == "IdentityN":  # a bundle: each output is one of its inputs
        found.by_value.update(zip(op.values, each, strict=True))
        return
    if is_effect(op, graph):
        written = NO_OWNER.union(*(each[position] for position in find_written_inputs(op, graph)))
        foreign = [value for value, own in zip(op.inputs, each, strict=True) if written and not own <= written]
        if foreign and all(is_small(graph.spec(value)) for value in foreign):
            found.shared.update(value.op for value in foreign)
            together, found.mixed = written, True
        found.effects[op.index] = together
    elif is_read(op) and not together:
        found.shared.add(op.index)
    elif any(one and one != together for one in each) and all(map(is_small, op.outputs)):
        found.shared.add(op.index)
        together, found.mixed = NO_OWNER, True
    found.by_value.update(dict.fromkeys(op.values, together))


def _assign_owners(branch: Branch, owners: dict[str, Owners]) -> bool:
    """Assign a variable to the cluster whose values are written into it, such as an optimizer's slot."""
    found, changed = _find_ownership(branch, owners), False
    for index, own in found.effects.items():
        op = branch.graph.ops[index]
        for position in find_written_inputs(op, branch.graph):
            name = branch.argument_names.get(op.inputs[position].op)
            if name is not None and not own <= owners.get(name, NO_OWNER):
                owners[name] = owners.get(name, NO_OWNER) | own
                changed = True
    return changed


def _split_branch(branch: Branch, found: _Ownership) -> BranchSplit | None:
    graph = branch.graph
    movable = {op for op in found.shared if not is_read(graph.ops[op]) or _is_movable(graph.ops[op], found)}
    out = graph.ascend(movable) - branch.argument_names.keys()
    if any(index in found.effects or not _is_movable(graph.ops[index], found) for index in out):
        return None
    split = BranchSplit(frozenset(out))
    given = out | branch.argument_names.keys()
    for key in set(found.effects.values()):
        own = {index for index, owner in found.effects.items() if owner == key}
        split.groups[key] = frozenset(graph.ascend(own, stop=given.__contains__) - given)
    split.results = frozenset(graph.ascend([value.op for value in graph.returns], stop=given.__contains__) - given)
    if not all(_may_be_last(graph.ops[index], graph, found) for index in split.results):
        return None
    split.predecessors = {key: _find_predecessors(graph, key, split.groups) for key in split.groups}
    return split


def _find_predecessors(graph: Graph, key: Owners, groups: Mapping[Owners, frozenset[int]]) -> set[Owners]:
    """The groups with ops that must run before this one, by control edges: also a read before a write."""
    waits = {before for op in groups[key] for before in graph.ops[op].control}
    return {other for other, ops in groups.items() if other != key and not waits.isdisjoint(ops)}


def _may_be_last(op: Op, graph: Graph, found: _Ownership) -> bool:
    """Whether an op has the same result after all effects of its branch: what it reads is not written after it."""
    return not op.stateful or (is_read(op) and not any(op.index in graph.ops[one].control for one in found.effects))


def _is_movable(op: Op, found: _Ownership) -> bool:
    """Whether an op has the same result outside its branch: it has no effect, and reads nothing written in it."""
    return (is_read(op) or not op.stateful) and not any(before in found.effects for before in op.control)


Aliases = Mapping[Value, Value]


def remove_bundles(program: Program) -> tuple[Program, Aliases]:
    """The program without bundles (IdentityN ops) of gradients, and the bundled value that replaces each of their
    outputs.

    >>> from whale_nebula.ir.text import from_text
    >>> remove_bundles(Program(from_text("%0 = Const {value=(1,)} int32[]")))[1]
    {}
    """
    held = program.graph.descend(program.holders) if program.holders else set()
    aliases = find_bundle_aliases(program.graph, lambda op: op in held and program.request_of(op) is None)
    if not aliases:
        return program, {}
    returns = tuple(aliases.get(value, value) for value in program.returns)
    return replace(program, graph=rewire(program.graph, aliases), returns=returns), aliases


def find_bundle_aliases(graph: Graph, chosen: Callable[[int], bool]) -> Aliases:
    """The input that replaces each output of the chosen bundles (IdentityN ops)."""
    found: dict[Value, Value] = {}
    for op in graph.ops:
        if op.type == "IdentityN" and chosen(op.index):
            found.update({out: found.get(given, given) for out, given in zip(op.values, op.inputs, strict=True)})
    return found


def rewire(graph: Graph, aliases: Aliases) -> Graph:
    """The graph in which every op reads the replacements in `aliases`."""

    def read(op: Op) -> Op:
        if aliases.keys().isdisjoint(op.inputs):
            return op
        return replace(op, inputs=tuple(aliases.get(value, value) for value in op.inputs))

    return Graph(tuple(map(read, graph.ops)), graph.functions, graph.arguments, graph.returns)

"""Assign a stage to every op that no scope has stamped.

An op between two stages may run in any stage from the latest of its inputs to the earliest of its readers; the one with
the fewest crossing bytes is chosen, jointly for ops that save bytes only together (see `label_jointly`). Ops of
variables alone run in their owner's stage, so that an L2 penalty crosses as a scalar and not as a matrix; if the bytes
are equal they run early, so that the penalties of one stage are scaled and added up there. Ops that read and write one
variable run in one stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from whale_nebula.ir.graph import CAPTURE, FEED, HOLDER, INPUT, Graph, Op
from whale_nebula.passes.effects import find_written_handles, is_effect, is_read, is_seeded_draw, list_resources
from whale_nebula.spec import Value

Edges = Mapping[tuple[Hashable, Hashable], int]
NEVER_CUT = 1 << 62
"""The capacity of an edge that is never cut."""


def find_sink_side(edges: Edges, source: Hashable, sink: Hashable) -> set[Hashable]:
    """The nodes on the sink's side of a minimum cut; among several minimum cuts the fewest nodes.

    A cut costs the edges that lead from the source's side to the sink's.

    >>> sorted(find_sink_side({("early", "a"): 5, ("a", "b"): 9, ("b", "late"): 7}, "early", "late"))
    ['a', 'b', 'late']
    >>> sorted(find_sink_side({("early", "a"): 7, ("a", "b"): 9, ("b", "late"): 7}, "early", "late"))
    ['late']
    """
    left: dict[Hashable, dict[Hashable, int]] = {source: {}, sink: {}}
    for (start, end), capacity in edges.items():
        left.setdefault(start, {})[end] = left.get(start, {}).get(end, 0) + capacity
        left.setdefault(end, {}).setdefault(start, 0)
    while source in (after := _search_back(left, sink)):
        path = [(source, after[source])]
        while path[-1][1] != sink:
            path.append((path[-1][1], after[path[-1][1]]))
        most = min(left[start][end] for start, end in path)
        for start, end in path:
            left[start][end] -= most
            left[end][start] += most
    return set(after)


def _search_back(left: Mapping[Hashable, Mapping[Hashable, int]], sink: Hashable) -> dict[Hashable, Hashable]:
    """The nodes from which more can flow to the sink, each with the next one on a shortest path."""
    after: dict[Hashable, Hashable] = {sink: sink}
    queue = deque([sink])
    while queue:
        node = queue.popleft()
        for start in left[node]:  # every edge has a reverse edge
            if start not in after and left[start][node] > 0:
                after[start] = node
                queue.append(start)
    return after


_Edge = tuple[tuple[object, object], int]
_EARLY, _LATE = "early", "late"


def label_jointly(graph: Graph, labels: Mapping[int, int], free: Sequence[Op], stages: int) -> dict[int, int]:
    """New labels of `free` ops that should run later than they are labelled, as fewer bytes cross then.

    A tensor that crosses to a stage is counted once for all its readers there. Ops keep their label if the bytes are
    equal; ops that touch state, or descend from a gradient, always keep it.

    >>> from whale_nebula.ir.text import from_text
    >>> graph = from_text('''
    ... %0 = NotEqual bool[?,6]
    ... %1 = Cast(%0) float32[?,6]
    ... %2 = Sum(%1) float32[]
    ... %3 = Cast(%1) bool[?,6]
    ... %4 = SelectV2(%3, %2) float32[?,6]
    ... ''')
    >>> label_jointly(graph, {0: 0, 1: 0, 2: 0, 3: 0, 4: 1}, graph.ops[1:4], 2)
    {1: 1, 2: 1, 3: 1}
    """
    descended = graph.descend(op.index for op in graph.ops if op.role == HOLDER)
    movable = [op for op in free if not (op.stateful or op.index in descended or _reads_capture(graph, op))]
    found: dict[int, int] = {}
    for stage in reversed(range(1, stages)):
        known = {**labels, **found}
        region = _find_region(graph, known, movable, stage)
        late = find_sink_side(dict(_list_edges(graph, known, region, stage)), _EARLY, _LATE) if region else set()
        found.update(dict.fromkeys(sorted(region & late), stage))
    return found


def _find_region(graph: Graph, labels: Mapping[int, int], movable: Sequence[Op], stage: int) -> set[int]:
    """The unstamped ops that could run in a stage and run before it: all their readers are in it, later, or movable
    too.
    """
    found: set[int] = set()
    for op in reversed(movable):
        readers = [c.index for value in op.values for c in graph.consumers(value) if c.index in labels]
        if labels[op.index] < stage and readers and all(r in found or labels[r] >= stage for r in readers):
            found.add(op.index)
    return found


def _list_edges(graph: Graph, labels: Mapping[int, int], region: Collection[int], stage: int) -> Iterator[_Edge]:
    """Edges for `find_sink_side`: a tensor costs its bytes if it is computed early and read late; readers of a late op
    are late.
    """
    made = [value for index in region for value in graph.ops[index].values]
    given = {value: None for index in sorted(region) for value in graph.ops[index].inputs if value.op not in region}
    for value in (*made, *given):
        readers = [c.index for c in graph.consumers(value) if c.index in labels]
        there = any(r not in region and labels[r] == stage for r in readers)
        inside = value.op in region
        if inside or (labels.get(value.op, stage) < stage and not there):
            yield ((value.op if inside else _EARLY), value), count_crossing(graph, value)
            for reader in (each for each in readers if each in region):
                yield (value, reader), NEVER_CUT
                if inside:
                    yield (reader, value.op), NEVER_CUT
            if there:
                yield (value, _LATE), NEVER_CUT


def join_states(
    graph: Graph, labels: Mapping[int, int], free: Collection[int], earliest: Mapping[int, int]
) -> dict[int, int]:
    """New labels of `free` ops, so that no state of the forward is written in one stage and read in another.

    A write without readers could run in any stage, by default the last. It is moved with the reads to the first of
    their stages. Labels are kept if a stamp determines the variable's stage, or if a write is later (see `earliest`).

    >>> from whale_nebula.ir.text import from_text
    >>> graph = from_text('''
    ... %0 = capture seed resource[]
    ... %1 = ReadVariableOp(%0) int64[2] stateful
    ... %2 = StatelessRandomNormalV2(%1) float32[8]
    ... %3 = AssignAddVariableOp(%0, %1) stateful
    ... ''')
    >>> join_states(graph, {1: 0, 2: 0, 3: 1}, {1, 2, 3}, {})
    {1: 0, 3: 0}
    """
    writes = (op for op in graph.ops if op.index in free and is_effect(op, graph))
    touching: dict[int, list[Op]] = {handle: [] for op in writes for handle in find_written_handles(op, graph)}
    for op in graph.ops if touching else ():
        for handle in set(list_resources(op, graph)) & touching.keys() if op.index in labels else ():
            touching[handle].append(op)
    found: dict[int, int] = {}
    forward = (
        graph.ascend(op.index for op in graph.ops if op.stage is not None or is_seeded_draw(op)) if touching else ()
    )
    for ops in touching.values():
        first = min(labels[op.index] for op in ops)
        movable = all(op.index in free and earliest.get(op.index, first) <= first for op in ops)
        if movable and any(labels[op.index] != first for op in ops) and any(op.index in forward for op in ops):
            found.update({op.index: first for op in ops})
    return found


def count_crossing(graph: Graph, value: Value) -> int:
    """The cost of a crossing value: its bytes, those of the input of a reshape, or `NEVER_CUT` for a variant, such as a
    list of tensors.
    """
    while graph.ops[value.op].type == "Reshape":
        value = graph.ops[value.op].inputs[0]
    spec = graph.spec(value)
    return NEVER_CUT if spec.dtype == "variant" else spec.nbytes()


def _reads_capture(graph: Graph, op: Op) -> bool:
    return any(graph.ops[value.op].role == CAPTURE for value in op.inputs)


_UNLABELLED_ROLES = frozenset({INPUT, CAPTURE, HOLDER, FEED})


def label_ops(
    graph: Graph,
    stages: Sequence[str],
    *,
    fixed: Mapping[int, int] | None = None,
    skip: frozenset[int] = frozenset(),
    bound: Mapping[int, Collection[int]] | None = None,
) -> dict[int, int]:
    """The stage number of every op of the forward; inputs, captures, constants and `skip` ops have none.

    `fixed` has the labels that an earlier call gave to the first ops of the same trace: they are kept. `bound` has the
    stages that may run an op, where not all may: such an op is in the last of them before its own stage, else in the
    first.
    """
    if not stages:
        return {}
    numbers = {key: number for number, key in enumerate(stages)}
    found = _Labeler(graph, numbers, dict(fixed or {}), skip)
    labels = found.run()
    moved = join_states(graph, labels, found.free, found.needed)
    for op, allowed in (bound or {}).items():
        if allowed and op in found.free and labels[op] not in allowed:
            moved[op] = max((each for each in allowed if each < labels[op]), default=min(allowed))
    return _Labeler(graph, numbers, {**(fixed or {}), **moved}, skip).run() if moved else labels


@dataclass
class _Labeler:
    graph: Graph
    numbers: Mapping[str, int]
    labels: dict[int, int]
    skip: frozenset[int]
    variable_ops: frozenset[int] = frozenset()
    free: frozenset[int] = frozenset()
    needed: Mapping[int, int] = field(default_factory=dict)

    def run(self) -> dict[int, int]:
        free = [op for op in self.graph.ops if not self._is_settled(op)]
        self.free = frozenset(op.index for op in free)
        self.variable_ops = find_ops_of_variables(self.graph)
        owners = self._find_owners()
        earliest, self.needed = self._find_earliest(free, owners), self._find_earliest(free, {})
        for op in reversed(free):
            self._label_op(op, earliest, self.needed)
        each = [op for op in free if op.index not in self.variable_ops]
        self.labels.update(label_jointly(self.graph, self.labels, each, len(self.numbers)))
        return self.labels

    def _is_settled(self, op: Op) -> bool:
        """Whether an op needs no decision: it is stamped or fixed, or has no label."""
        if op.index in self.skip or op.role in _UNLABELLED_ROLES or op.type == "Const" or op.index in self.labels:
            return True
        if op.stage is None or op.stage not in self.numbers:
            return False
        self.labels[op.index] = self.numbers[op.stage]
        return True

    def _find_owners(self) -> dict[int, int]:
        """The owner of each captured variable: the first stage that touches it."""
        owners: dict[int, int] = {}
        for op in self.graph.ops:
            stage = self.labels.get(op.index)
            for value in op.inputs if stage is not None else ():
                if self.graph.ops[value.op].role == CAPTURE:
                    owners[value.op] = min(owners.get(value.op, stage or 0), stage or 0)
        return owners

    def _find_earliest(self, free: Sequence[Op], owners: Mapping[int, int]) -> dict[int, int]:
        """For each op, the latest stage among its inputs and the `owners` of its variables; ops of inputs alone have
        none.
        """
        found: dict[int, int] = {}
        for op in free:
            places = [owners.get(v.op, self.labels.get(v.op, found.get(v.op))) for v in op.inputs]
            stages = [stage for stage in places if stage is not None]
            if stages:
                found[op.index] = max(stages)
        return found

    def _label_op(self, op: Op, earliest: Mapping[int, int], needed: Mapping[int, int]) -> None:
        """Label an op, after its readers (in reverse trace order), so that its latest possible stage is known.

        An op that a reader needs in a stage before the variable's owner runs there: both stages hold the variable.
        """
        readers = [s for v in op.values for c in self.graph.consumers(v) if (s := self.labels.get(c.index)) is not None]
        latest = min(readers) if readers else len(self.numbers) - 1
        first = earliest.get(op.index)
        if first is not None and first > latest >= needed.get(op.index, 0):
            first = None
        if first is None:
            self.labels[op.index] = latest
        elif first >= latest or not readers or _reads_capture(self.graph, op):
            self.labels[op.index] = first
        else:
            late = self._is_cheaper_late(op, latest, earliest)
            self.labels[op.index] = latest if late else first

    def _is_cheaper_late(self, op: Op, latest: int, earliest: Mapping[int, int]) -> bool:
        """Compare the crossing bytes: the op's inputs if it runs late, its outputs if it runs early.

        Ops of variables alone run early if both are equal: their values are the same for each micro-batch.
        """
        inputs = sum(
            count_crossing(self.graph, value)
            for value in set(op.inputs)
            if self._would_cross(value, op, latest, earliest)
        )
        outputs = sum(count_crossing(self.graph, value) for value in op.values if self.graph.consumers(value))
        return inputs < outputs if op.index in self.variable_ops else inputs <= outputs

    def _would_cross(self, value: Value, op: Op, latest: int, earliest: Mapping[int, int]) -> bool:
        source = self.labels.get(value.op, earliest.get(value.op))
        if source is None or source >= latest:
            return False
        others = (c.index for c in self.graph.consumers(value) if c.index != op.index)
        return all(self.labels.get(other, -1) != latest for other in others)


def find_ops_of_variables(graph: Graph) -> frozenset[int]:
    """The ops that depend on variables and constants alone, and on at least one variable: a weight's penalty."""
    found: set[int] = set()
    constant: set[int] = set()
    for op in graph.ops:
        if op.role or (op.stateful and not is_read(op)) or (not op.inputs and op.type != "Const"):
            continue
        read = [v.op for v in op.inputs if v.op not in constant]
        if all(each in found or graph.ops[each].role == CAPTURE for each in read):
            (found if read else constant).add(op.index)
    return frozenset(found)

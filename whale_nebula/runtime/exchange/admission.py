"""The tensors that the plan allows to arrive from another worker; checked before memory is allocated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, permutations
from typing import Any, NamedTuple

from whale_nebula.codec.encoding import Encoding
from whale_nebula.codec.sizes import extra_bytes
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.feed.checks import MissingInput
from whale_nebula.ir.cut import Cut
from whale_nebula.ir.program import Leaf
from whale_nebula.passes.batch import count_entries_per_row
from whale_nebula.passes.exchange import list_bundles, list_replica_messages, list_shared_parts
from whale_nebula.runtime.exchange.crossing import Crossings
from whale_nebula.spec import Spec
from whale_nebula.transport.protocol import Key
from whale_nebula.wire.buffers import Bound
from whale_nebula.wire.tensor import count_raw_bytes, find_dtype_code

ANY_SIZE = 2**32 - 1
"""The bound of an axis known only in a step; the limit of a whole tensor still applies."""
_COLUMNS = 1 << 16
"""The assumed number of columns if known only in a step: a basis sent with a tensor has that many rows."""
_NARROW = {"fp16": "float16", "bf16": "bfloat16"}
_MICRO_BATCHED = ("forward", "backward", "result")


class Slot(NamedTuple):
    """The part of a key that a plan fixes."""

    kind: str
    phase: int
    number: int
    source: str
    destination: str


class _Anything(Bound):
    """A bound that is only the limit of a tensor's size."""

    def admits(self, dtype: str, dims: tuple[int, ...]) -> bool:
        return True


ANYTHING = _Anything("any", ())


def count_known_rows(leaves: Sequence[Leaf], tensors: Sequence[Any], counts: Sequence[int]) -> Sequence[int]:
    """The rows of each micro-batch of a step, `counts`; empty for a single one whose inputs differ in their rows."""
    if len(counts) > 1:
        return counts
    batched = [tensor for leaf, tensor in zip(leaves, tensors, strict=True) if leaf.batched]
    alike = not any(isinstance(each, MissingInput) for each in batched) and {int(each.shape[0]) for each in batched}
    return counts if alike == set(counts) else ()


class _Table(NamedTuple):
    bounds: Mapping[Slot, Bound]
    entries: Mapping[Slot, int]
    micro_batches: int


class _Step(NamedTuple):
    number: int
    rows: Sequence[int]


class Admission:
    """The bounds of tensors by key, for every program of a run; keys that no program has are refused.

    Tensors of a step that has not begun here, or whose number of rows differs from their micro-batch, are not expected.
    Values of variables (kind "control") belong to no program: each is admitted before it is sent, and dropped once
    received.
    """

    def __init__(self) -> None:
        self._values: dict[Key, Bound] = {}
        self._programs: dict[int, _Table] = {}
        self._rounds: dict[int, Bound] = {}
        self._steps: dict[int, _Step] = {}

    def add(self, program: int, cut: Cut) -> None:
        """Admit the tensors of a program, before its first step."""
        table = _Table(dict(list_slots(cut)), dict(_list_entries(cut)), cut.program.pipeline.micro_batch)
        self._programs[program] = table
        self._steps[program] = _Step(-1, ())

    def begin_step(self, program: int, step: int, rows: Sequence[int]) -> None:
        """Begin a step with these rows in each micro-batch, if known. Called before the step is announced to others."""
        self._steps[program] = _Step(step, tuple(rows))

    def add_round(self, program: int, most: int) -> None:
        """Admit messages of kind "round" with this number in place of a program's, of at most `most` bytes each."""
        self._rounds[program] = Bound("uint8", (most,))

    def add_value(self, key: Key, dtype: str, shape: Iterable[int | None]) -> None:
        """Admit the value of a variable."""
        self._values[key] = Bound(dtype, tuple(ANY_SIZE if axis is None else axis for axis in shape))

    def drop_value(self, key: Key) -> None:
        """Stop expecting a value that was received."""
        self._values.pop(key, None)

    def __call__(self, key: Key) -> Bound:
        """The bound of the tensor with this key; raises `RemoteProtocolError` if no tensor has it."""
        if key in self._values:
            return self._values[key]
        if key.kind == "round" and key.program in self._rounds:
            return self._rounds[key.program]
        table = self._programs.get(key.program)
        slot = Slot(key.kind, key.phase, key.slot, key.source, key.destination)
        if table is None or slot not in table.bounds:
            raise RemoteProtocolError(
                f"received {key}, which is not in any plan of this run", where=f"program {key.program}"
            )
        count = table.micro_batches if key.kind in _MICRO_BATCHED else 0
        once = key.micro_batch == -1 and key.kind not in ("forward", "backward")
        if not (once or 0 <= key.micro_batch < count):
            raise RemoteProtocolError(f"received {key}, but a step has {count} micro-batches of it")
        return table.bounds[slot]._replace(due=self._find_due(key, table.bounds[slot], table.entries.get(slot)))

    def _find_due(self, key: Key, bound: Bound, entries: int | None) -> float:
        """The `due` of a tensor's bound: 0 before its step begins, infinite if its number of rows is unknown."""
        step = self._steps[key.program]
        if key.step > step.number:
            return 0
        if entries is None or not 0 <= key.micro_batch < len(step.rows) or ANY_SIZE in bound.most[1:]:
            return math.inf
        sizes = entries * step.rows[key.micro_batch], *bound.most[1:]
        return count_raw_bytes(find_dtype_code(bound.dtype), sizes) + bound.extra


def list_slots(cut: Cut) -> Iterator[tuple[Slot, Bound]]:
    """All tensors that cross between workers in a step, with their bounds."""
    clusters = {worker.name: worker.cluster for worker in cut.workers}
    for each in Crossings(cut, cut.routing).by_value.values():
        near, far = _bound_of(each.spec), _bound_of(each.spec, each.encoding)
        for ends in cut.routing.pair_hosts(each.source, each.readers):
            same = clusters[ends[0]] == clusters[ends[1]]
            yield Slot(each.kind, each.phase, each.number, *ends), near if same else far
    for phase in cut.phases:
        for part in list_shared_parts(cut, phase):
            for destination in part.destinations:
                yield Slot("part", phase.index, part.slot, part.source, destination), _bound_of(part.spec)
        for message in list_replica_messages(cut, phase):
            bound = _bound_of(message.specs[0])
            if message.kind == "numbers":
                most = cut.program.pipeline.micro_batch * sum(spec.nbytes() for spec in message.specs)
                bound = Bound("uint8", (most,))
            alike = {cut.routings[worker].hosts_of(message.stage) for worker in cut.workers_of(message.stage)}
            for ends in chain.from_iterable(permutations(mates, 2) for mates in alike):
                yield Slot("result", phase.index, message.slot, *ends), bound
        for bundle in list_bundles(cut, phase):
            ends = bundle.source, bundle.destination
            yield Slot("scalar", phase.index, bundle.number, *ends), _bound_of(bundle.spec)


def _list_entries(cut: Cut) -> Iterator[tuple[Slot, int]]:
    """For boundaries whose first axis is known only in a step: the number of entries for each row of the batch."""
    open_first = [
        each for each in Crossings(cut, cut.routing).boundary_crossings if (each.spec.shape or (0,))[0] is None
    ]
    tensors = {each.value: each.boundary.value for each in open_first if each.boundary is not None}
    found = count_entries_per_row(cut.program, set(tensors.values()))
    for each in open_first:
        if (entries := found.get(tensors[each.value])) is not None:
            for ends in cut.routing.pair_hosts(each.source, each.readers):
                yield Slot(each.kind, each.phase, each.number, *ends), entries


def _bound_of(spec: Spec, encoding: Encoding | None = None) -> Bound:
    """The bound of a tensor that is sent with an encoding."""
    if spec.shape is None:
        return ANYTHING
    most = tuple(ANY_SIZE if axis is None else axis for axis in spec.shape)
    if encoding is not None and encoding.cast is not None and spec.floating and not spec.dtype.startswith("complex"):
        return Bound(_NARROW[encoding.cast], most)
    if encoding is None or not encoding.coded:
        return Bound(spec.dtype, most)
    columns = spec.shape[-1] if spec.shape and spec.shape[-1] is not None else _COLUMNS
    extra = extra_bytes(encoding, (*spec.fill_shape(unknown=1)[:-1], columns))
    return Bound(spec.dtype, most, frozenset(encoding.by_number), extra)

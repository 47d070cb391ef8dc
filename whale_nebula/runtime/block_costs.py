"""Measure the blocks of a captured step: each is run as a subgraph on this device, with copies of its variables."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.capture.step import Captured
from whale_nebula.hardware.measurements import BlockTime, CallTime, count_cores, read_blocks, save_blocks, time_calls
from whale_nebula.ir.graph import INPUT
from whale_nebula.ir.sizes import Sizes
from whale_nebula.planner.chain import Layers
from whale_nebula.planner.cluster_costs import WHOLE, MeasuredBlocks, Points, Subgraph, list_subgraphs
from whale_nebula.runtime.step.compiled import Function, FunctionBuilder
from whale_nebula.spec import Value
from whale_nebula.tf import private as tf_private

_LOG = logging.getLogger("whale_nebula.runtime.run")
_LOGGED_SECONDS = 2.0
"""Measuring that takes longer is logged."""
_MIN_WORK_SHARE = 0.1
"""The minimum share of a measurement that counts as work, when the seconds of an empty call are subtracted."""
_SMALL_SUM, _LARGE_SUM = 2.0**20, 2.0**26
"""The bounds of the size for measuring additions, which is the size of the largest gradient."""
_MIN_CALLS = 6
"""The minimum number of calls of a measurement."""
_LOOP_RUNS = 3
"""The runs of each sample of Python's speed."""


def measure_blocks(
    name: str,
    captured: Captured,
    layers: Layers,
    sizes: Mapping[int, Sizes],
    budget: float,
    tensors: Sequence[Any] | None = None,
    *,
    completes: bool = True,
    keys: BlockKeys | None = None,
) -> MeasuredBlocks:
    """Seconds of a step's blocks for batches with the numbers of rows in `sizes`: earlier measurements of this machine,
    completed by new ones within a budget of seconds. Unless this `completes` them, it measures only if there are none.
    `tensors` are a batch, if there is one; `keys` those of `find_block_keys`, if they are known.
    """
    own = find_block_keys(captured, layers, sizes) if keys is None else keys
    known = read_blocks()
    unknown = [key not in known for key in own.keys.values()]
    if budget and (any(unknown) or not own.rates <= known.keys() if completes else all(unknown)):
        bench = _Bench(name, captured, sizes, tensors, budget, dict(known))
        bench.measure(_group_by_block(own.subgraphs), layers, own.keys)
        if bench.new_times:
            with suppress(OSError):  # a cache that cannot be written is not used
                save_blocks(bench.new_times)
        known = bench.known_costs
    return own.collect_costs(known)


@dataclass(frozen=True)
class BlockKeys:
    """The subgraphs of a step's blocks, the keys of their measurements by kind, block and number of rows, and that of
    the seconds for `adding` a byte. `count` is the number of blocks.
    """

    subgraphs: Sequence[Subgraph]
    keys: Mapping[tuple[str, int, int], str]
    count: int
    adding: str

    def collect_costs(self, known: Mapping[str, BlockTime]) -> MeasuredBlocks:
        """The seconds of the blocks by these measurements."""
        found: dict[str, dict[int, Points]] = {}
        for (kind, block, rows), key in self.keys.items():
            if key in known:
                found.setdefault(kind, {}).setdefault(block, {})[rows] = known[key].seconds
        adding, python = (known[key].seconds if key in known else math.nan for key in (self.adding, PYTHON))
        return MeasuredBlocks.from_points(found, self.count, adding, python, count_cores())

    @property
    def rates(self) -> set[str]:
        """The keys of the measurements that belong to no block."""
        return {self.adding, PYTHON}

    def read_costs(self) -> MeasuredBlocks:
        """The seconds of the blocks by the measurements of this machine that are stored now."""
        return self.collect_costs(read_blocks())


def find_block_keys(captured: Captured, layers: Layers, sizes: Mapping[int, Sizes]) -> BlockKeys:
    """The keys of a step's blocks for batches of these rows, by `sizes`."""
    threading = tf.config.threading
    subgraphs = list(list_subgraphs(captured.program, layers.ops))
    settings = str((threading.get_intra_op_parallelism_threads(), threading.get_inter_op_parallelism_threads()))
    keys = {(each.kind, each.block, rows): each.key(own, settings) for each in subgraphs for rows, own in sizes.items()}
    return BlockKeys(subgraphs, keys, len(layers.chain), _adding_key(layers))


def _group_by_block(subgraphs: Sequence[Subgraph]) -> dict[int, dict[str, Subgraph]]:
    found: dict[int, dict[str, Subgraph]] = {}
    for each in subgraphs:
        found.setdefault(each.block, {})[each.kind] = each
    return found


PYTHON = "python"
"""The key of the seconds of `_loop`."""


def _loop() -> int:
    """Add 1,000 numbers: the unit of what a step does in Python."""
    total = 0
    for number in range(1000):
        total += number
    return total


def _adding_key(layers: Layers) -> str:
    """The key of the seconds for adding a byte of a gradient: it contains the size, because fresh memory makes large
    tensors slower for each byte.
    """
    return f"adding {2 ** int(math.log2(min(max(layers.chain.gradients.max(), _SMALL_SUM), _LARGE_SUM)))}"


class _UnfitError(ValueError):
    """A subgraph that cannot be run by itself."""


@dataclass
class _Bench:
    """Measures subgraphs, each with as many calls as the rest of the `budget` of seconds allows. `known_costs` are all
    measurements by key, and `new_times` those of this object; `loops` are samples of Python's speed in seconds.
    """

    name: str
    captured: Captured
    sizes: Mapping[int, Sizes]
    tensors: Sequence[Any] | None
    budget: float
    known_costs: dict[str, BlockTime]
    new_times: dict[str, BlockTime] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    is_logged: bool = False
    loops: list[float] = field(default_factory=list)

    def measure(
        self, blocks: Mapping[int, Mapping[str, Subgraph]], layers: Layers, keys: Mapping[tuple[str, int, int], str]
    ) -> None:
        """Measure unknown blocks: all together, then each, those with the most work first."""
        work = [
            sum(op.moved_bytes + op.flops for ops in ways for op in ops)
            for ways in zip(layers.forward, layers.backward, strict=True)
        ]
        for block in sorted(blocks, key=lambda each: -work[each] if each != WHOLE else -math.inf):
            own = blocks[block]
            if block == WHOLE and _count_bytes(layers) > os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 4:
                continue
            wanted = {(kind, rows): keys[kind, block, rows] for kind in own for rows in sorted(self.sizes)}
            if self.remaining_seconds > 0 and any(key not in self.known_costs for key in wanted.values()):
                if PYTHON not in self.known_costs:
                    self.loops.append(time_calls(_loop, _LOOP_RUNS).seconds)
                self._measure_block(own, wanted)
        if (adding := _adding_key(layers)) not in self.known_costs:
            size = int(adding.split()[1])
            tensor = tf.ones([size // 4])
            timed = time_calls(lambda: tensor + tensor)
            self._store(adding, timed.seconds / size, timed.spread)
        if PYTHON not in self.known_costs:  # samples of the whole time: the speed of a core may change within a second
            self._store(PYTHON, float(np.median(self.loops or [time_calls(_loop).seconds])), 0.0)
        count = len(self.new_times)
        _LOG.info("%s: measured %d subgraphs of blocks in %.1f s", self.name, count, self._spent)

    @property
    def _spent(self) -> float:
        return time.monotonic() - self.started

    @property
    def remaining_seconds(self) -> float:
        """The seconds that are left of the budget. Logs once that measuring takes long."""
        if self._spent > _LOGGED_SECONDS and not self.is_logged:
            self.is_logged = True
            _LOG.info("%s: measuring blocks, for at most %.0f s", self.name, self.budget)
        return self.budget - self._spent

    @cached_property
    def _variables(self) -> dict[int, Any]:
        """The variables of the step by the id of their handles."""
        return {id(variable.handle): variable for variable in self.captured.variables.values()}

    @cached_property
    def _builder(self) -> FunctionBuilder:
        return FunctionBuilder(self.captured.graph, self.captured.aliases)

    @cached_property
    def _empty_call_seconds(self) -> float:
        """Seconds of an empty call, the minimum of several."""
        empty = tf.function(lambda x: x, autograph=False).get_concrete_function(tf.TensorSpec([1]))
        x = tf.zeros([1])
        return min(time_calls(lambda: tf_private.call_flat(empty, [x], [])).seconds for _ in range(5))

    def _measure_block(self, own: Mapping[str, Subgraph], wanted: Mapping[tuple[str, int], str]) -> None:
        """Measure forward and backward with the fewest rows first, to see whether there is time for the most, and then
        with those between: a line through two of them is better than one from the fewest rows alone. What was begun may
        take as long again as it has taken so far, even if that exceeds the budget.
        """
        copies: dict[int, Any] = {}
        functions: dict[str, Function] = {}
        before = self._spent
        fewest, *others = sorted(self.sizes)
        for rows in (fewest, *reversed(others)):
            values: dict[Value, Any] = {}
            for kind in own:
                key, subgraph = wanted[kind, rows], own[kind]
                needed = kind == "forward" and "backward" in own and wanted["backward", rows] not in self.known_costs
                allowed = max(self.remaining_seconds, self._spent - before)
                if _MIN_CALLS * self._expect_seconds(kind, rows, wanted) > allowed or (
                    key in self.known_costs and not needed
                ):
                    continue
                try:
                    if kind not in functions:
                        functions[kind] = self._make_function(subgraph, copies)
                    inputs = [self._draw_input(value, rows, values) for value in subgraph.fragment.feeds]
                    timed = self._time_function(functions[kind], inputs, 20 if subgraph.block == WHOLE else 8)
                    if needed:
                        values |= zip(subgraph.fragment.fetches, functions[kind](inputs), strict=True)
                except (tf.errors.OpError, ValueError, TypeError, KeyError, RuntimeError) as failure:
                    _LOG.debug("%s: cannot measure %s of block %d: %s", self.name, kind, subgraph.block, failure)
                    break
                work = timed.seconds - self._empty_call_seconds
                self._store(key, max(work, _MIN_WORK_SHARE * timed.seconds), timed.spread)

    def _expect_seconds(self, kind: str, rows: int, wanted: Mapping[tuple[str, int], str]) -> float:
        """The most seconds that a call with these rows is expected to take, by those with others; 0 if unknown."""
        known = {each: self.known_costs[key] for each in self.sizes if (key := wanted[kind, each]) in self.known_costs}
        return max((found.seconds * max(rows / each, 1.0) for each, found in known.items()), default=0.0)

    def _store(self, key: str, seconds: float, spread: float) -> None:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        self.known_costs[key] = self.new_times[key] = BlockTime(seconds, spread, date)

    def _time_function(self, function: Function, inputs: Sequence[Any], part: int) -> CallTime:
        """Time a call with synchronised devices, using a share of the remaining budget."""
        has_gpu = bool(tf.config.list_physical_devices("GPU"))
        wait: Callable[[], Any] = tf.test.experimental.sync_devices if has_gpu else lambda: None

        def run() -> None:
            function(inputs)
            wait()

        return time_calls(run, most=self.remaining_seconds / part)

    def _make_function(self, subgraph: Subgraph, copies: dict[int, Any]) -> Function:
        """The function of a subgraph, which reads and writes copies of variables."""
        made = self._builder.build(subgraph.fragment)
        captured = []
        for tensor in made.captured_inputs:
            variable = self._variables.get(id(tensor))
            if variable is None and tensor.dtype == tf.resource:
                raise _UnfitError(f"{tensor!r} is not a variable of the step")
            if variable is not None and id(tensor) not in copies:
                copies[id(tensor)] = tf.Variable(_fill_tensor(variable.dtype, variable.shape, variable.trainable))
            captured.append(tensor if variable is None else copies[id(tensor)].handle)
        return Function(made.fragment, made.concrete, captured)

    def _draw_input(self, value: Value, rows: int, values: Mapping[Value, Any]) -> Any:
        """A tensor for an input of a subgraph: computed by a forward (`values`), from the batch, or with random
        numbers.
        """
        if value in values:
            return values[value]
        graph, sizes = self.captured.program.graph, self.sizes[rows]
        spec, shape, numbers = graph.spec(value), sizes.shape(value), sizes.numbers.get(value)
        if spec.dtype in ("variant", "resource", "string"):
            raise _UnfitError(f"an input has dtype {spec.dtype}")
        if numbers is not None and len(numbers) == int(np.prod(shape)):
            return tf.constant(np.reshape(numbers, shape), spec.dtype)
        if graph.ops[value.op].role == INPUT and self.tensors is not None:
            inputs = self.tensors[self.captured.program.leaf_ops[value.op]]
            if isinstance(inputs, tf.Tensor) and inputs.shape[1:] == shape[1:] and (inputs.shape[:1] or [0])[0] >= rows:
                return inputs[:rows]
        return _fill_tensor(tf.as_dtype(spec.dtype), shape, True)


def _fill_tensor(dtype: Any, shape: Any, is_random: bool) -> Any:
    """A tensor of random numbers (if `is_random`), or of ones; of zeros for integers."""
    if dtype.is_floating and is_random and len(shape):
        return tf.cast(np.random.default_rng(1).standard_normal(tuple(shape), "float32") * 0.1, dtype)
    return tf.ones(shape, dtype) if dtype.is_floating or dtype.is_bool else tf.zeros(shape, dtype)


def _count_bytes(layers: Layers) -> float:
    """The memory that all blocks together need for one step, in bytes."""
    chain = layers.chain
    return float((chain.weights + chain.slots + 2 * chain.gradients + layers.rows * chain.activations).sum())

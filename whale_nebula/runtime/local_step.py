"""A step whose stages all live in this process and whose links are free: one function, and exact errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from whale_nebula import tf_private
from whale_nebula.feed.batch import cut, micro_batches
from whale_nebula.runtime.compiled import Compiled
from whale_nebula.runtime.guard import Guard
from whale_nebula.runtime.sequence import one_function, run_in_sequence


@dataclass
class LocalStep:
    """Runs steps as one function for each way the batch is cut."""

    compiled: Compiled
    variables: Mapping[str, Any]
    _functions: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def run(self, tensors: Sequence[Any]) -> list[Any]:
        """Run one step; gives its results in the order of the program's returns."""
        program = self.compiled.cut.program
        counts = tuple(micro_batches(program.leaves, tensors, program.pipeline.micro_batch))
        key = counts if len(counts) > 1 else (0,)
        if key not in self._functions:
            self._functions[key] = one_function(self.compiled, counts)
        function = self._functions[key]
        guard = Guard(self.variables, self.compiled.cut.forward_written)
        try:
            return tf_private.call_flat(function, tensors, function.captured_inputs)
        except tf.errors.OpError as failure:
            guard.restore()
            self._locate(tensors, counts, guard)
            raise guard.torn(failure) from failure

    def _locate(self, tensors: Sequence[Any], counts: Sequence[int], guard: Guard) -> None:
        """Run the failed step again, piece by piece and without its update: the piece that fails has a name."""
        batch = cut(self.compiled.cut.program.leaves, tensors, counts)
        run_in_sequence(self.compiled, batch, guard=guard)

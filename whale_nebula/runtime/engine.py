"""What runs a captured step: the user's own function where nothing is cut, one function where all is local."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from whale_nebula.capture.places import place_of
from whale_nebula.capture.mirror import in_order
from whale_nebula.capture.step import Captured, Signature
from whale_nebula.ir.plan import Cut, Worker
from whale_nebula.passes.plan import cut_program
from whale_nebula.runtime.compiled import Compiled
from whale_nebula.runtime.fragment_function import Workshop
from whale_nebula.runtime.local_step import LocalStep


class Runner(Protocol):
    """Runs a step on the tensors of its leaves; gives the tensors it returns."""

    def run(self, tensors: Sequence[Any]) -> list[Any]:
        """Run one step."""
        ...


@dataclass
class Engine:
    """A captured step with its plan and its runner."""

    name: str
    captured: Captured
    cut: Cut
    runner: Runner

    def run(self, tensors: Sequence[Any]) -> Any:
        """Run one step and pack its results as the user's code returns them."""
        return self.captured.pack(self.runner.run(tensors))


@dataclass
class Uncut:
    """One stage, one micro-batch: the user's own function."""

    function: Any

    def run(self, tensors: Sequence[Any]) -> list[Any]:
        """Run it."""
        found = tf.nest.flatten(self.function(*tensors))
        return [leaf for leaf in found if isinstance(leaf, tf.Tensor)]


def engine(captured: Captured, call: Callable[[Sequence[Any]], Any], layout: Signature, name: str) -> Engine:
    """Plan a captured step and choose what runs it."""
    program = captured.program
    operations = in_order(captured.graph.get_operations())
    workers = [Worker("local/0", "local", tuple(range(len(program.stages))))]
    cut = cut_program(program, workers, lambda number: place_of(operations[number]))
    if len(program.stages) == 1 and program.pipeline.micro_batch == 1:
        return Engine(name, captured, cut, Uncut(plain_function(call, layout)))
    compiled = Compiled(cut, "local/0", Workshop(captured.graph))
    return Engine(name, captured, cut, LocalStep(compiled, captured.variables))


def plain_function(call: Callable[[Sequence[Any]], Any], layout: Signature) -> Any:
    """The user's step as a plain tf.function: the oracle of every other way to run it."""
    from whale_nebula.capture.step import filled

    def body(*tensors: Any) -> Any:
        return call(filled(layout, tensors))

    return tf.function(body, autograph=False, input_signature=list(layout.specs))

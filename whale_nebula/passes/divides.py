"""Whether a step could be cut into more micro-batches and stay the step that it is."""

from __future__ import annotations

from dataclasses import replace

from whale_nebula.errors import NebulaError
from whale_nebula.ir.program import Program
from whale_nebula.passes.batch import BatchFolds, fold_batch
from whale_nebula.passes.reduce import merge_rule


def divides(program: Program) -> bool:
    """Whether no row of what is differentiated, written or returned depends on another row.

    A step that was cut already, and without `coupled="allow"`, has been asked that before.
    """
    pipeline = program.pipeline
    if pipeline.micro_batch > 1 and pipeline.coupled == "error":
        return True
    tried = replace(program, pipeline=replace(pipeline, micro_batch=max(2, pipeline.micro_batch), coupled="error"))
    try:
        return _uncoupled(fold_batch(tried))
    except NebulaError:
        return False


def _uncoupled(folds: BatchFolds) -> bool:
    folding, program = folds.folding, folds.program
    if folding is None or program.weights:
        return True
    returned = [value for value in program.returns if value.op in program.of_batch]
    kept = all(merge_rule(folding.of(value)._replace(inputs=False)) != "coupled" for value in returned)
    return kept and all(folding.of(target).good for target in folds.targets)

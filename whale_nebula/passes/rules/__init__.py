"""The batch-axis analysis: which values of a step can be computed by micro-batch, and how they are merged.

An abstract interpretation of the traced graph: each value gets a fold (`registry.Fold`), each op type has a rule that
computes the folds of its outputs from those of its inputs. Ops without a rule couple the rows: nothing is guessed.

>>> from whale_nebula.spec import Value
>>> from whale_nebula.ir.text import from_text
>>> graph = from_text('''
... %0 = input x float32[?,4]
... %1 = capture w float32[4,4]
... %2 = MatMul(%0, %1) float32[?,4]
... %3 = Const {value=(0,)} int32[]
... %4 = Softmax(%2) float32[?,4]
... %5 = Sum(%4, %3) float32[4]
... ''')
>>> folding = fold(graph, {0: 0})
>>> [str(folding.fold_of(Value(op))) for op in (2, 4, 5)]
['rows(0)', 'rows(0)', 'sum']
>>> merge_rule(folding.fold_of(Value(5)))
'sum'
"""

from whale_nebula.passes.rules import control, creation, elementwise, layout, linear, reductions, slicing
from whale_nebula.passes.rules.creation import SAME_SEED
from whale_nebula.passes.rules.interpret import SHAPE_ONLY_OPS, Edge, Folding, fold
from whale_nebula.passes.rules.registry import COUPLED, ROWS, WHOLE, Fold
from whale_nebula.passes.rules.verdict import coupling_error, merge_rule

FAMILIES = (control, elementwise, layout, linear, creation, reductions, slicing)
"""The modules that hold the rules: importing them registers these."""

__all__ = [
    "COUPLED",
    "FAMILIES",
    "ROWS",
    "SAME_SEED",
    "SHAPE_ONLY_OPS",
    "WHOLE",
    "Edge",
    "Fold",
    "Folding",
    "coupling_error",
    "fold",
    "merge_rule",
]

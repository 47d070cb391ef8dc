"""The states that rules compute, op by op: the graphs of `folds.txt`."""

import pytest

from tests.unit.passes.programs import list_cases
from tests.unit.passes.rules.fold_texts import check_folds, fold_text
from whale_nebula.passes.rules.registry import UNKNOWN
from whale_nebula.spec import Value


@pytest.mark.parametrize("text", list_cases("rules/folds"))
def test_folds_match_the_expectations(text: str) -> None:
    check_folds(text)


ROW_COUNTS = """
%0 = input x float32[?,4]
%1 = Shape(%0) int32[2]
%2 = Const {value=(0)} int32[]
%3 = GatherV2(%1, %2, %2) {batch_dims=0} int32[]
%4 = Const {value=(2)} int32[]
%5 = Mul(%3, %4) int32[]
%6 = Pack(%3, %5) {N=2, axis=0} int32[2]
%7 = Const {value=(0, 1)} int32[1,2]
%8 = GatherV2(%6, %7, %2) {batch_dims=0} int32[1,2]
"""


def test_unequal_row_counts_are_unknown_after_packing() -> None:
    found = fold_text(ROW_COUNTS)
    assert [found.fold_of(Value(op)).per for op in (5, 6, 8)] == [2, UNKNOWN, UNKNOWN]

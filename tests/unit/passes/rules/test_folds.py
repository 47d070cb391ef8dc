"""The states that rules compute, op by op: the graphs of `folds.txt`."""

import pytest

from tests.unit.passes.programs import cases
from tests.unit.passes.rules.states import check, folding
from whale_nebula.passes.rules.registry import UNKNOWN
from whale_nebula.spec import Value


@pytest.mark.parametrize("text", cases("rules/folds"))
def test_every_value_has_the_state_that_is_said_of_it(text: str) -> None:
    check(text)


PERS = """
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


def test_numbers_of_rows_that_differ_are_not_taken_for_one() -> None:
    found = folding(PERS)
    assert [found.of(Value(op)).per for op in (5, 6, 8)] == [2, UNKNOWN, UNKNOWN]

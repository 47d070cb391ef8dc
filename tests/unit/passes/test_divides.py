"""Whether an undivided step could be divided into micro-batches."""

from dataclasses import replace

import pytest

from tests.unit.passes.programs import program_of
from whale_nebula.ir.program import Pipeline
from whale_nebula.passes.batch import divides

STEP = """
stages a b
%0 = input x float32[?,4]
%1 = Exp(%0) float32[?,4] @a
%2 = Const {value=(0, 1)} int32[2]
%3 = Mean(%1, %2) float32[] @b
returns %3
"""
MEETING = STEP.replace("%3 = Mean(%1, %2) float32[] @b", "%3 = MatMul(%1, %1) {transpose_b=true} float32[?,?] @b")


def test_a_mean_over_rows_may_be_cut() -> None:
    assert divides(program_of(STEP))


def test_rows_that_meet_each_other_may_not() -> None:
    assert not divides(program_of(MEETING))


@pytest.mark.parametrize(("coupled", "may"), [("allow", False), ("error", True)])
def test_a_step_that_is_cut_was_asked_before_unless_everything_was_allowed(coupled: str, may: bool) -> None:
    cut = replace(program_of(MEETING), pipeline=Pipeline(micro_batch=4, coupled=coupled))
    assert divides(cut) == may

"""The passes together: what a plan keeps of the batch, of coupled rows, and of where things were written."""

import pytest

from tests.unit.passes.examples import CUT_BATCH, ONCE, TWO_STAGES
from tests.unit.passes.programs import alone, cut, program_of
from whale_nebula.errors import BatchCoupledError
from whale_nebula.passes.pipeline import cut_program


def test_with_one_micro_batch_nothing_is_merged_and_nothing_computed_beforehand() -> None:
    plan = cut(CUT_BATCH.replace("micro 2", "micro 1"))
    assert set(plan.merges.values()) == {"only"} and plan.whole == {}


COUPLED = """
    stages a
    micro 2
    %0 = input x float32[?,4]
    %1 = capture w resource[]
    %2 = ReadVariableOp(%1) float32[4] stateful @a
    %3 = Mul(%0, %2) float32[?,4] @a
    %4 = MatMul(%3, %3) {transpose_b=true} float32[?,?] @a "negatives"
    %5 = Const {value=(0, 1)} int32[2]
    %6 = Mean(%4, %5) float32[] @a
    returns %6
"""


def test_a_value_that_couples_rows_is_refused_at_its_line() -> None:
    program = program_of(COUPLED)
    with pytest.raises(BatchCoupledError) as caught:
        cut_program(program, alone(program), lambda op: f"train.py:{op}")
    assert "train.py:4" in caught.value.where
    assert "nb.pipeline(micro_batch=1)" in caught.value.mend


def test_one_micro_batch_may_couple_its_rows() -> None:
    assert len(cut(COUPLED.replace("micro 2", "micro 1")).phases) == 1


def test_what_the_forward_writes_is_named_so_that_it_can_be_put_back() -> None:
    assert cut(ONCE).forward_written == ("count",)
    assert cut(TWO_STAGES + "returns %10").forward_written == ()

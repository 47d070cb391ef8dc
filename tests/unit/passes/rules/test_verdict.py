import pytest

from tests.unit.passes.rules.states import folding, read
from whale_nebula.errors import BatchCoupledError, StaticBatchError
from whale_nebula.passes.rules import Fold, merge_rule, registry, verdict
from whale_nebula.passes.rules.axes import check_mixed
from whale_nebula.passes.rules.registry import (
    AFTER,
    COUNT,
    COUPLED,
    MEAN,
    ROWS,
    SUM,
    WHOLE,
    Undecided,
    count,
    rows,
    vector,
    whole,
)
from whale_nebula.site import Origin
from whale_nebula.spec import Value


@pytest.mark.parametrize(
    ("fold", "rule"),
    [
        (Fold(WHOLE), "same"),
        (Fold(ROWS), "concat:0"),
        (Fold(ROWS, axis=2), "concat:2"),
        (Fold(ROWS, ragged=1), "concat:0"),
        (Fold(ROWS, order=(1, 1)), "coupled"),
        (Fold(ROWS, position=1), "coupled"),
        (Fold(COUNT), "sum"),
        (Fold(SUM), "sum"),
        (Fold(MEAN), "mean"),
        (Fold(AFTER), "after"),
        (Fold(COUPLED), "coupled"),
        (Fold(AFTER, inputs=True), "whole"),
        (Fold(COUPLED, inputs=True), "whole"),
        (Fold(SUM, inputs=True), "sum"),
        (vector((count(), whole(4), count(2))), "vector:sum,same,sum"),
        (vector((count(), whole(4)))._replace(inputs=True), "whole"),
    ],
)
def test_how_micro_batches_are_merged(fold: Fold, rule: str) -> None:
    assert merge_rule(fold) == rule


CENTRE = """
    %0 = input x float32[?,4]
    %1 = capture w float32[4]
    %2 = Mul(%0, %1) float32[?,4]
    %3 = Const {value=(0)} int32[1]
    %4 = Mean(%2, %3) float32[4]
"""
NORMALISED = (
    CENTRE
    + """\
    %5 = Sub(%2, %4) float32[?,4] "norm/sub"
    %6 = Const {value=(0, 1)} int32[2]
    %7 = Mean(%5, %6) float32[]
    %8 = Exp(%7) float32[]
    %9 = Mean(%2, %6) float32[]
    %10 = Sqrt(%9) float32[] "rms"
"""
)


def judged(op: int) -> BatchCoupledError | None:
    return verdict(folding(NORMALISED).of(Value(op)), read(NORMALISED), where=lambda index: f"train.py:{index}")


def refused(op: int) -> BatchCoupledError:
    error = judged(op)
    assert error is not None
    return error


def test_the_op_that_couples_is_named_not_the_one_that_is_asked_about() -> None:
    error = refused(8)
    assert (error.op, error.line) == ("norm/sub (Sub)", "train.py:5")
    assert "rows depend on each other" in str(error)
    assert "single rows are mixed with a mean over the batch" in str(error)
    assert [mend.partition(",")[0] for mend in error.mends] == ["nb.pipeline(micro_batch=1)", "nb.pipeline(..."]


def test_a_keras_layer_is_named_with_what_could_stand_in_its_place() -> None:
    origin = Origin("train.py:5", layer="encoder/norm", kind="BatchNormalization")
    error = verdict(folding(NORMALISED).of(Value(8)), read(NORMALISED), where=lambda index: origin)
    assert error is not None
    assert "BatchNormalization 'encoder/norm' makes its rows depend on each other" in error.what
    assert error.where == "train.py:5"
    assert "norm/sub (Sub)" in error.why
    assert "LayerNormalization" in error.mend


def test_a_loss_that_is_a_function_of_a_mean_is_refused() -> None:
    error = refused(10)
    assert (error.op, error.line) == ("rms (Sqrt)", "train.py:10")
    assert "neither a sum nor a mean" in str(error)
    assert "nb.loss_weight(t)" in error.mend


def test_rows_that_a_mean_is_added_to_are_averaged_first() -> None:
    text = NORMALISED.replace("Sub(%2, %4)", "AddV2(%2, %4)")
    error = verdict(folding(text).of(Value(8)), read(text))
    assert error is not None
    assert "tf.reduce_mean(rows) + mean" in error.mend


@pytest.mark.parametrize("op", [1, 2, 4, 9])
def test_rows_sums_means_and_wholes_can_be_differentiated(op: int) -> None:
    assert judged(op) is None


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("count", "a number of rows of the batch"),
        ("inverse", "one divided by the number of rows of the batch"),
        ("shape", "a shape that counts the rows of the batch"),
        ("sum", "a sum over the batch"),
        ("mean", "a mean over the batch"),
        ("empty", "a list that holds nothing yet"),
        ("after", "a value that is known when the whole batch is through: Sqrt of a sum over the batch is neither"),
    ],
)
def test_why_is_a_sentence_whatever_rows_are_mixed_with(kind: str, said: str) -> None:
    other = Fold(kind, reason="Sqrt of a sum over the batch is neither" if kind == "after" else "")
    with pytest.raises(Undecided) as caught:
        check_mixed((rows(0), other))
    assert str(caught.value) == f"single rows are mixed with {said}"


def test_every_state_can_be_spoken_of() -> None:
    kinds = set(registry._SPOKEN)
    assert kinds == {value for name, value in vars(registry).items() if name.isupper() and value == name.lower()}
    assert all(Fold(kind).spoken.split()[0] in ("a", "one", "rows") for kind in kinds)


def test_what_a_function_of_a_mean_is_not_is_said_in_words() -> None:
    assert refused(10).why == "Sqrt of a mean over the batch is neither a sum nor a mean over it"


BAKED = """
    %0 = input x float32[?,8]
    %1 = Const {value=(32, 8)} int32[2]
    %2 = Reshape(%0, %1) float32[32,8] "flat"
    %3 = capture w float32[8,1]
    %4 = MatMul(%2, %3) float32[32,1]
    %5 = input y float32[?,1]
    %6 = Sub(%5, %4) float32[32,1]
    %7 = Const {value=(0, 1)} int32[2]
    %8 = Mean(%6, %7) float32[]
"""


def test_rows_with_a_fixed_number_are_blamed_on_what_fixed_it() -> None:
    """They are inputs alone, so they are read whole: only at the labels they do not fit."""
    error = verdict(folding(BAKED).of(Value(8)), read(BAKED), where=lambda index: f"train.py:{index}")
    assert isinstance(error, StaticBatchError)
    assert error.where == "flat (Reshape), train.py:2"
    assert error.mend == "tf.reshape(x, [-1, 8])\nor nb.pipeline(micro_batch=1)"


def test_a_length_that_no_reshape_gave_is_no_baked_batch() -> None:
    text = BAKED.replace('%2 = Reshape(%0, %1) float32[32,8] "flat"', "%2 = capture flat float32[32,8]")
    assert isinstance(verdict(folding(text).of(Value(8)), read(text)), BatchCoupledError)


EXTREME = (
    CENTRE
    + """\
    %5 = Const {value=(1, 2, 3, 4)} float32[4]
    %6 = Maximum(%4, %5) float32[4]
"""
)


def test_a_constant_beside_what_has_no_rows_is_no_batch() -> None:
    """Four numbers beside a mean of four: nothing is as long as the batch."""
    assert isinstance(verdict(folding(EXTREME).of(Value(6)), read(EXTREME)), BatchCoupledError)

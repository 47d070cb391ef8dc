import pytest

from tests.unit.passes.rules.fold_texts import fold_text, parse_graph
from whale_nebula.errors import BatchCoupledError, StaticBatchError
from whale_nebula.passes.rules import Fold, coupling_error, merge_rule, registry
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
def test_merge_rule_of_each_fold(fold: Fold, rule: str) -> None:
    assert merge_rule(fold) == rule


MEAN_OVER_ROWS = """
    %0 = input x float32[?,4]
    %1 = capture w float32[4]
    %2 = Mul(%0, %1) float32[?,4]
    %3 = Const {value=(0)} int32[1]
    %4 = Mean(%2, %3) float32[4]
"""
CENTERED_ROWS = (
    MEAN_OVER_ROWS
    + """\
    %5 = Sub(%2, %4) float32[?,4] "norm/sub"
    %6 = Const {value=(0, 1)} int32[2]
    %7 = Mean(%5, %6) float32[]
    %8 = Exp(%7) float32[]
    %9 = Mean(%2, %6) float32[]
    %10 = Sqrt(%9) float32[] "rms"
"""
)


def judge(op: int) -> BatchCoupledError | None:
    return coupling_error(
        fold_text(CENTERED_ROWS).fold_of(Value(op)), parse_graph(CENTERED_ROWS), where=lambda index: f"train.py:{index}"
    )


def judge_refused(op: int) -> BatchCoupledError:
    error = judge(op)
    assert error is not None
    return error


def test_error_names_the_op_that_couples_the_rows() -> None:
    error = judge_refused(8)
    assert (error.op, error.line) == ("norm/sub (Sub)", "train.py:5")
    assert "rows depend on each other" in str(error)
    assert "single rows are mixed with a mean over the batch" in str(error)
    assert [mend.partition(",")[0] for mend in error.mends] == ["nb.pipeline(micro_batch=1)", "nb.pipeline(..."]


def test_error_names_a_keras_layer_and_its_replacement() -> None:
    origin = Origin("train.py:5", layer="encoder/norm", kind="BatchNormalization")
    error = coupling_error(
        fold_text(CENTERED_ROWS).fold_of(Value(8)), parse_graph(CENTERED_ROWS), where=lambda index: origin
    )
    assert error is not None
    assert "BatchNormalization 'encoder/norm' makes its rows depend on each other" in error.what
    assert error.where == "train.py:5"
    assert "norm/sub (Sub)" in error.why
    assert "LayerNormalization" in error.mend


def test_function_of_a_mean_is_refused_as_loss() -> None:
    error = judge_refused(10)
    assert (error.op, error.line) == ("rms (Sqrt)", "train.py:10")
    assert "neither a sum nor a mean" in str(error)
    assert "nb.loss_weight(t)" in error.mend


def test_fix_for_rows_plus_a_mean_averages_the_rows() -> None:
    text = CENTERED_ROWS.replace("Sub(%2, %4)", "AddV2(%2, %4)")
    error = coupling_error(fold_text(text).fold_of(Value(8)), parse_graph(text))
    assert error is not None
    assert "tf.reduce_mean(rows) + mean" in error.mend


@pytest.mark.parametrize("op", [1, 2, 4, 9])
def test_rows_sums_means_and_wholes_are_accepted(op: int) -> None:
    assert judge(op) is None


@pytest.mark.parametrize(
    ("kind", "description"),
    [
        ("count", "a number of rows of the batch"),
        ("inverse", "one divided by the number of rows of the batch"),
        ("shape", "a shape that counts the rows of the batch"),
        ("sum", "a sum over the batch"),
        ("mean", "a mean over the batch"),
        ("empty", "an empty list"),
        ("after", "a value that is known only after the entire batch: Sqrt of a sum over the batch is neither"),
    ],
)
def test_reason_for_mixed_rows_describes_the_other_fold(kind: str, description: str) -> None:
    other = Fold(kind, reason="Sqrt of a sum over the batch is neither" if kind == "after" else "")
    with pytest.raises(Undecided) as caught:
        check_mixed((rows(0), other))
    assert str(caught.value) == f"single rows are mixed with {description}"


def test_fold_kinds_all_have_a_description() -> None:
    kinds = set(registry._DESCRIPTIONS)
    assert kinds == {value for name, value in vars(registry).items() if name.isupper() and value == name.lower()}
    assert all(Fold(kind).description.split()[0] in ("a", "an", "one", "rows") for kind in kinds)


def test_reason_for_a_function_of_a_mean() -> None:
    assert judge_refused(10).why == "Sqrt of a mean over the batch is neither a sum nor a mean over it"


STATIC_BATCH = """
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


def test_static_batch_error_names_the_reshape() -> None:
    """The reshaped rows depend on inputs alone, so they are read whole; the error arises where they meet the labels."""
    error = coupling_error(
        fold_text(STATIC_BATCH).fold_of(Value(8)), parse_graph(STATIC_BATCH), where=lambda index: f"train.py:{index}"
    )
    assert isinstance(error, StaticBatchError)
    assert error.where == "flat (Reshape), train.py:2"
    assert error.mend == "tf.reshape(x, [-1, 8])\nor nb.pipeline(micro_batch=1)"


def test_fixed_size_without_a_reshape_is_no_static_batch() -> None:
    text = STATIC_BATCH.replace('%2 = Reshape(%0, %1) float32[32,8] "flat"', "%2 = capture flat float32[32,8]")
    assert isinstance(coupling_error(fold_text(text).fold_of(Value(8)), parse_graph(text)), BatchCoupledError)


MAXIMUM_OF_MEAN = (
    MEAN_OVER_ROWS
    + """\
    %5 = Const {value=(1, 2, 3, 4)} float32[4]
    %6 = Maximum(%4, %5) float32[4]
"""
)


def test_constant_combined_with_a_mean_is_no_static_batch() -> None:
    """Four constants and a mean of four entries: neither has the size of the batch."""
    assert isinstance(
        coupling_error(fold_text(MAXIMUM_OF_MEAN).fold_of(Value(6)), parse_graph(MAXIMUM_OF_MEAN)), BatchCoupledError
    )

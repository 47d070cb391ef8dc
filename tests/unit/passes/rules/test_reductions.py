import pytest

from tests.unit.passes.rules.states import check, reason


def test_over_the_batch_axis_and_over_others() -> None:
    check("""
        %0 = input x float32[?,4,8]
        %1 = capture w float32[8]
        %2 = Mul(%0, %1) float32[?,4,8]
        %3 = Const {value=(0)} int32[]
        %4 = Const {value=(-1)} int32[1]
        %5 = Const {value=(0, 1, 2)} int32[3]
        %6 = Sum(%2, %3) float32[4,8]                     => sum
        %7 = Mean(%2, %5) float32[]                       => mean
        %8 = Max(%2, %4) float32[?,4]                     => rows(0)
        %9 = Mean(%2, %4) {keep_dims=true} float32[?,4,1] => rows(0)
        %10 = Sum(%6, %3) float32[8]                      => sum
        %11 = Max(%6, %3) float32[8]                      => after
        %12 = L2Loss(%2) float32[]                        => sum
    """)


def test_the_batch_axis_moves_down_when_axes_before_it_go() -> None:
    check("""
        %0 = input x float32[4,?,8]
        %1 = Const {value=(0)} int32[]
        %2 = Sum(%0, %1) float32[?,8]                     => rows(0) of inputs
        %3 = Sum(%0, %1) {keep_dims=true} float32[1,?,8]  => rows(1) of inputs
        %4 = ArgMax(%0, %1) int64[?,8]                    => rows(0) of inputs
    """)


def test_rows_with_a_last_axis_of_one_are_no_vector() -> None:
    """As a mask is counted: one more axis behind, then a sum over time."""
    check("""
        %0 = input x float32[?,5]
        %1 = Const {value=(2)} int32[]
        %2 = Const {value=(1)} int32[]
        %3 = ExpandDims(%0, %1) float32[?,5,1]            => rows(0) of inputs
        %4 = Sum(%3, %2) float32[?,1]                     => rows(0) of inputs
        %5 = Max(%3, %1) float32[?,5]                     => rows(0) of inputs
    """)


@pytest.mark.parametrize("name", ["Max", "Min", "Prod", "EuclideanNorm", "All", "Any"])
def test_no_other_function_over_the_batch_is_linear(name: str) -> None:
    text = f"""
        %0 = input x float32[?,4]
        %1 = Const {{value=(0, 1)}} int32[2]
        %2 = {name}(%0, %1) float32[]                     => coupled of inputs
    """
    check(text)
    assert reason(text) == f"{name} over the batch is neither a sum nor a mean"


def test_axes_may_be_all_of_them_without_being_known() -> None:
    check("""
        %0 = input x float32[?,4]
        %1 = capture axes int32[?]
        %2 = Sum(%0, %1) float32[]                        => sum
        %3 = Sum(%0, %1) float32[*]                       => coupled
        %4 = Rank(%0) int32[]
        %5 = Const {value=(0)} int32[]
        %6 = Const {value=(1)} int32[]
        %7 = Range(%5, %4, %6) int32[2]
        %8 = Mean(%0, %7) float32[*]                      => mean of inputs
    """)


def test_searches_and_running_sums() -> None:
    check("""
        %0 = input x float32[?,4]
        %1 = Const {value=(0)} int32[]
        %2 = Const {value=(-1)} int32[]
        %3 = ArgMax(%0, %2) int64[?]                      => rows(0) of inputs
        %4 = ArgMax(%0, %1) int64[4]                      => coupled of inputs
        %5 = Cumsum(%0, %2) float32[?,4]                  => rows(0) of inputs
        %6 = Cumsum(%0, %1) float32[?,4]                  => coupled of inputs
        %7 = input k int32[?]
        %8 = Const {value=(2)} int32[]
        %9 = InTopKV2(%0, %7, %8) bool[?]                 => rows(0) of inputs
    """)


def test_heaps_of_rows_are_sums() -> None:
    check("""
        %0 = input x float32[?,4]
        %1 = input name int32[?]
        %2 = Const {value=(10)} int32[]
        %3 = UnsortedSegmentSum(%0, %1, %2) float32[10,4] => sum of inputs
        %4 = capture none float32[0]
        %5 = DenseBincount(%1, %2, %4) float32[10]        => sum
    """)


def test_a_share_of_rows_that_differs_from_row_to_row_has_no_mean() -> None:
    text = """
        %0 = input x float32[?]
        %1 = input mask bool[?]
        %2 = Where(%1) int64[?,1]                         => positions(0) ragged of inputs
        %3 = Squeeze(%2) {squeeze_dims=(1)} int64[?]      => positions(0) ragged of inputs
        %4 = Const {value=(0)} int32[]
        %5 = GatherV2(%0, %3, %4) float32[?]              => rows(0) ragged of inputs
        %6 = Sum(%5, %4) float32[]                        => sum of inputs
        %7 = Mean(%5, %4) float32[]                       => coupled of inputs
    """
    check(text)
    assert "each row has another number" in reason(text)

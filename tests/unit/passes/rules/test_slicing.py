# ruff: noqa: E501 (golden lines are as long as they are)
from tests.unit.passes.rules.states import check, reason


def test_slices_leave_the_batch_as_long_as_it_is() -> None:
    check("""
        %0 = input x float32[?,4,8]
        %1 = Const {value=(0, 1)} int32[2]
        %2 = Const {value=(0, 2)} int32[2]
        %3 = Const {value=(1, 1)} int32[2]
        %4 = StridedSlice(%0, %1, %2, %3) {begin_mask=1, end_mask=1, shrink_axis_mask=2} float32[?,8]  => rows(0) of inputs
        %5 = StridedSlice(%0, %1, %2, %3) {shrink_axis_mask=1} float32[1,8]  => coupled of inputs
        %6 = StridedSlice(%0, %1, %2, %3) {begin_mask=1, end_mask=1, ellipsis_mask=1} float32[?,4,1]  => rows(0) of inputs
        %7 = StridedSlice(%0, %1, %2, %3) {begin_mask=2, end_mask=2, new_axis_mask=1} float32[1,?,4,8] => rows(1) of inputs
        %8 = Const {value=(-1, -1)} int32[2]
        %9 = StridedSlice(%0, %1, %2, %8) {begin_mask=3, end_mask=3} float32[?,4,8]  => coupled of inputs
    """)


def test_as_many_rows_as_there_are_is_all_of_them() -> None:
    check("""
        %0 = input x float32[?,4]
        %1 = Shape(%0) int32[2]
        %2 = Const {value=(0)} int32[1]
        %3 = Const {value=(1)} int32[1]
        %4 = StridedSlice(%1, %2, %3, %3) int32[1]                     => count of inputs
        %5 = StridedSlice(%0, %2, %4, %3) float32[?,4]                 => rows(0) of inputs
        %6 = StridedSlice(%0, %3, %4, %3) float32[?,4]                 => coupled of inputs
        %7 = Const {value=(0, 0)} int32[2]
        %8 = Const {value=(-1, 2)} int32[2]
        %9 = Slice(%0, %7, %8) float32[?,2]                            => rows(0) of inputs
        %10 = Const {value=(2, 2)} int32[2]
        %11 = Slice(%0, %7, %10) float32[2,2]                          => coupled of inputs
    """)


def test_splits() -> None:
    text = """
        %0 = input x float32[?,4]
        %1 = Const {value=(1)} int32[]
        %2 = Split(%1, %0) {num_split=2} float32[?,2], float32[?,2]  => rows(0) of inputs | rows(0) of inputs
        %3 = Const {value=(1, 3)} int32[2]
        %4 = SplitV(%0, %3, %1) float32[?,1], float32[?,3]  => rows(0) of inputs | rows(0) of inputs
        %5 = Unpack(%0) {axis=1, num=2} float32[?], float32[?]  => rows(0) of inputs | rows(0) of inputs
        %6 = Const {value=(0)} int32[]
        %7 = Split(%6, %0) {num_split=2} float32[?,4], float32[?,4]  => coupled of inputs | coupled of inputs
    """
    check(text)
    assert "the batch axis is sliced" in reason(text)


def test_parts_of_sums_are_sums() -> None:
    check("""
        %0 = input x float32[?,4]
        %1 = capture w float32[4]
        %2 = Mul(%0, %1) float32[?,4]
        %3 = Const {value=(0)} int32[1]
        %4 = Sum(%2, %3) float32[4]                                    => sum
        %5 = Const {value=(1)} int32[1]
        %6 = StridedSlice(%4, %3, %5, %5) {shrink_axis_mask=1} float32[]  => sum
        %7 = Unpack(%4) float32[], float32[], float32[], float32[]     => sum | sum | sum | sum
    """)


def test_tensors_side_by_side_come_apart_again_along_their_own_axis_alone() -> None:
    check("""
        %0 = input x float32[2,?]                                      => rows(1) of inputs
        %1 = Mul(%0, %0) float32[2,?]                                  => rows(1) of inputs
        %2 = Pack(%0, %1) {N=2, axis=2} float32[2,?,2]                 => rows(1) of inputs
        %3 = Unpack(%2) {axis=2, num=2} float32[2,?], float32[2,?]     => rows(1) of inputs | rows(1) of inputs
        %4 = Unpack(%2) {axis=-1, num=2} float32[2,?], float32[2,?]    => rows(1) of inputs | rows(1) of inputs
        %5 = Unpack(%2) {axis=0, num=2} float32[?,2], float32[?,2]     => rows(0) of inputs | rows(0) of inputs
        %6 = Unpack(%2) {axis=1, num=2} float32[2,2], float32[2,2]     => coupled of inputs | coupled of inputs
    """)


def test_what_is_taken_of_a_row_must_not_hang_on_how_many_rows_there_are() -> None:
    text = """
        %0 = input x float32[?,4]
        %1 = Shape(%0) int32[2]
        %2 = Const {value=(0)} int32[1]
        %3 = Const {value=(1)} int32[1]
        %4 = Const {value=(0)} int32[]
        %5 = StridedSlice(%1, %2, %3, %3) {shrink_axis_mask=1} int32[]            => count of inputs
        %6 = Pack(%4, %5) {N=2, axis=0} int32[2]                                  => shape(whole, count) of inputs
        %7 = Const {value=(0, 0)} int32[2]
        %8 = Const {value=(1, 1)} int32[2]
        %9 = StridedSlice(%0, %7, %6, %8) {begin_mask=3, end_mask=1} float32[?,?] => coupled of inputs
        %10 = StridedSlice(%0, %6, %8, %8) {begin_mask=1, end_mask=1, shrink_axis_mask=2} float32[?]  => coupled of inputs
        %11 = Const {value=(1)} int32[]
        %12 = SplitV(%0, %6, %11) float32[?,?], float32[?,?]                      => coupled of inputs | coupled of inputs
        %13 = StridedSlice(%0, %7, %8, %8) {begin_mask=3, end_mask=1} float32[?,1]  => rows(0) of inputs
    """
    check(text)
    assert (
        reason(text, 9) == reason(text, 10) == reason(text, 12) == "rows are cut to a length that grows with the batch"
    )

from tests.unit.passes.rules.states import check, reason
from whale_nebula.passes.rules.registry import UNKNOWN
from whale_nebula.spec import Value


def test_a_shape_is_followed_entry_by_entry() -> None:
    check("""
        %0 = input x float32[?,4,8]
        %1 = Shape(%0) int32[3]                              => shape(count, whole, whole) of inputs
        %2 = Const {value=(0)} int32[1]
        %3 = Const {value=(1)} int32[1]
        %4 = StridedSlice(%1, %2, %3, %3) {shrink_axis_mask=1} int32[]  => count of inputs
        %5 = Const {value=(2)} int32[1]
        %6 = StridedSlice(%1, %3, %5, %3) {shrink_axis_mask=1} int32[]  => whole
        %7 = Const {value=(4)} int32[]
        %8 = Mul(%4, %7) int32[]                             => count of inputs
        %9 = Const {value=(-1)} int32[]
        %10 = Pack(%8, %9) int32[2]                          => shape(count, whole) of inputs
        %11 = Reshape(%0, %10) float32[?,8]                  => rows(0) of inputs
        %12 = Const {value=(1, 0)} int32[2]
        %13 = Const {value=(0)} int32[]
        %14 = GatherV2(%1, %12, %13) int32[2]                => shape(whole, count) of inputs
        %15 = Const {value=(0)} int32[1]
        %16 = Prod(%14, %15) int32[]                         => count of inputs
        %17 = ConcatV2(%14, %12, %13) int32[4]               => shape(whole, count, whole, whole) of inputs
        %18 = Unpack(%14) int32[], int32[]                   => whole | count of inputs
        %19 = Size(%0) int32[]                               => count of inputs
        %20 = Rank(%0) int32[]                               => whole
        %21 = FloorDiv(%8, %7) int32[]                       => count of inputs
        %22 = FloorDiv(%4, %7) int32[]                       => after of inputs
        %23 = Mul(%4, %4) int32[]                            => after of inputs
    """)


def test_numbers_that_stay_the_same_are_reckoned_with() -> None:
    check("""
        %0 = input x float32[?,4]
        %1 = Const {value=(3)} int32[]
        %2 = Const {value=(2)} int32[]
        %3 = Sub(%1, %2) int32[]
        %4 = Sub(%3, %2) int32[]
        %5 = Pack(%4, %2, %2) int32[3]
        %6 = Reshape(%0, %5) float32[?,2,2]                  => rows(0) of inputs
    """)


def test_tensors_are_stacked_and_put_side_by_side() -> None:
    check("""
        %0 = input x float32[?,4]
        %1 = input y float32[?,4]
        %2 = Pack(%0, %1) {axis=0} float32[2,?,4]            => rows(1) of inputs
        %3 = Pack(%0, %1) {axis=-1} float32[?,4,2]           => rows(0) of inputs
        %4 = Const {value=(-1)} int32[]
        %5 = ConcatV2(%0, %1, %4) float32[?,8]               => rows(0) of inputs
        %6 = Const {value=(0)} int32[]
        %7 = ConcatV2(%0, %1, %6) float32[?,4]               => rows(0) interleaved of inputs
        %8 = Split(%6, %7) {num_split=2} float32[?,4], float32[?,4]  => rows(0) of inputs | rows(0) of inputs
        %9 = capture w float32[1,4]
        %10 = ConcatV2(%0, %9, %6) float32[?,4]              => coupled
        %11 = Const {value=(0, 1)} int32[2]
        %12 = Sum(%7, %11) float32[]                         => sum of inputs
        %13 = Mean(%7, %11) float32[]                        => mean of inputs
        %14 = Pack(%12, %12) float32[2]                      => sum of inputs
        %15 = Pack(%12, %13) float32[2]                      => after of inputs
    """)


def test_interleaved_rows_meet_only_rows_of_their_own_order() -> None:
    text = """
        %0 = input x float32[?,2]
        %1 = Const {value=(0)} int32[]
        %2 = ConcatV2(%0, %0, %1) float32[?,2]               => rows(0) interleaved of inputs
        %3 = ConcatV2(%0, %0, %1) float32[?,2]               => rows(0) interleaved of inputs
        %4 = Mul(%2, %3) float32[?,2]                        => rows(0) interleaved of inputs
        %5 = Const {value=(-1, 1)} int32[2]
        %6 = Reshape(%0, %5) float32[?,1]                    => rows(0) of inputs
        %7 = Mul(%2, %6) float32[?,2]                        => coupled of inputs
    """
    check(text)
    assert "same order" in reason(text)


def test_shapes_that_are_broadcast() -> None:
    check("""
        %0 = input x float32[?,4]
        %1 = Shape(%0) int32[2]
        %2 = Const {value=(1, 4)} int32[2]
        %3 = BroadcastArgs(%1, %2) int32[2]                  => shape(count, whole) of inputs
        %4 = capture w float32[4]
        %5 = BroadcastTo(%4, %3) float32[?,4]                => rows(0)
    """)


def test_a_shape_whose_folded_axes_are_ones_is_put_together_by_number() -> None:
    """As the gradient of a sum over an axis does, where the batch's size is not known."""
    check("""
        %0 = input x float32[?,4]
        %1 = Shape(%0) int32[2]
        %2 = Const {value=(0, 1)} int32[2]
        %3 = Const {value=(1)} int32[1]
        %4 = Const {value=(1)} int32[1]
        %5 = DynamicStitch(%2, %3, %1, %4) int32[2]                     => shape(count, whole) of inputs
        %6 = capture g float32[]
        %7 = Fill(%5, %6) float32[?,1]                                  => rows(0)
        %8 = Const {value=(0)} int32[]
        %9 = Const {value=(9)} int32[]
        %10 = DynamicStitch(%2, %8, %1, %9) int32[2]                    => whole
    """)


def test_what_cannot_be_put_together_entry_by_entry() -> None:
    check("""
        %0 = input x float32[?,4]
        %1 = Shape(%0) int32[2]
        %2 = capture places int32[2]
        %3 = DynamicStitch(%2, %1) int32[2]                             => after
        %4 = Const {value=(0, 2)} int32[2]
        %5 = DynamicStitch(%4, %1) int32[3]                             => after of inputs
        %6 = capture numbers int32[2]
        %7 = DynamicStitch(%2, %6) int32[2]                             => whole
        %8 = Const {value=(0)} int32[1]
        %9 = DynamicStitch(%8, %0) float32[?,4]                         => coupled of inputs
    """)


def test_numbers_of_rows_that_differ_are_not_taken_for_one() -> None:
    found = check("""
        %0 = input x float32[?,4]
        %1 = Shape(%0) int32[2]
        %2 = Const {value=(0)} int32[]
        %3 = GatherV2(%1, %2, %2) {batch_dims=0} int32[]               => count of inputs
        %4 = Const {value=(2)} int32[]
        %5 = Mul(%3, %4) int32[]                                       => count of inputs
        %6 = Pack(%3, %5) {N=2, axis=0} int32[2]                       => count of inputs
        %7 = Const {value=(0, 1)} int32[1,2]
        %8 = GatherV2(%6, %7, %2) {batch_dims=0} int32[1,2]            => after of inputs
    """)
    assert found.of(Value(5)).per == 2
    assert found.of(Value(6)).per == UNKNOWN

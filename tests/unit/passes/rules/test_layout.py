from tests.unit.passes.rules.states import check, reason


def test_axes_move() -> None:
    check("""
        %0 = input x float32[?,4,8]
        %1 = Const {value=(1, 0, 2)} int32[3]
        %2 = Transpose(%0, %1) float32[4,?,8]                 => rows(1) of inputs
        %3 = Const {value=(0)} int32[]
        %4 = ExpandDims(%2, %3) float32[1,4,?,8]              => rows(2) of inputs
        %5 = Squeeze(%4) {squeeze_dims=(0)} float32[4,?,8]    => rows(1) of inputs
        %6 = Squeeze(%4) {squeeze_dims=()} float32[*]         => coupled of inputs
        %7 = capture order int32[3]
        %8 = Transpose(%0, %7) float32[?,?,?]                 => coupled
    """)


def test_the_batch_is_merged_with_axes_behind_it_and_split_again() -> None:
    check("""
        %0 = input x float32[?,6,8]
        %1 = Const {value=(-1, 8)} int32[2]
        %2 = Reshape(%0, %1) float32[?,8]                     => rows(0) of inputs
        %3 = Const {value=(-1, 6, 8)} int32[3]
        %4 = Reshape(%2, %3) float32[?,6,8]                   => rows(0) of inputs
        %5 = Const {value=(-1)} int32[1]
        %6 = Reshape(%0, %5) float32[?]                       => rows(0) of inputs
        %7 = Const {value=(-1, 2, 3, 8)} int32[4]
        %8 = Reshape(%0, %7) float32[?,2,3,8]                 => rows(0) of inputs
        %9 = Const {value=(-1, 96)} int32[2]
        %10 = Reshape(%0, %9) float32[?,96]                   => coupled of inputs
        %11 = Const {value=(6, -1)} int32[2]
        %12 = Reshape(%0, %11) float32[6,?]                   => coupled of inputs
        %13 = Const {value=(16, 6, 8)} int32[3]
        %14 = Reshape(%0, %13) float32[16,6,8]                => coupled of inputs
        %15 = Const {value=(-1, 1)} int32[2]
        %16 = Reshape(%0, %15) float32[?,1]                   => rows(0) of inputs
    """)


def test_several_rows_put_together_are_coupled() -> None:
    text = """
        %0 = input x float32[?]
        %1 = Const {value=(-1, 2)} int32[2]
        %2 = Reshape(%0, %1) float32[?,2]                     => coupled of inputs
    """
    check(text)
    assert "several rows together" in reason(text)


def test_other_axes_of_unknown_size() -> None:
    check("""
        %0 = input x float32[?,?,8]
        %1 = Const {value=(-1, 8)} int32[2]
        %2 = Reshape(%0, %1) float32[?,8]                     => rows(0) of inputs
        %3 = Shape(%0) int32[3]                               => shape(count, whole, whole) of inputs
        %4 = Reshape(%2, %3) float32[?,?,8]                   => rows(0) of inputs
        %5 = Const {value=(-1, 4)} int32[2]
        %6 = Reshape(%0, %5) float32[?,4]                     => rows(0) of inputs
        %7 = Const {value=(-1, 16)} int32[2]
        %8 = Reshape(%0, %7) float32[?,16]                    => coupled of inputs
    """)


def test_a_batch_under_other_axes_comes_out_again() -> None:
    check("""
        %0 = input x float32[7,?,8]
        %1 = Const {value=(-1, 8)} int32[2]
        %2 = Reshape(%0, %1) float32[?,8]                     => rows(0) interleaved of inputs
        %3 = capture w float32[8,8]
        %4 = MatMul(%2, %3) float32[?,8]                      => rows(0) interleaved
        %5 = Shape(%0) int32[3]
        %6 = Reshape(%4, %5) float32[7,?,8]                   => rows(1)
        %7 = Const {value=(0, 1)} int32[2]
        %8 = Mean(%4, %7) float32[]                           => mean
        %9 = Const {value=(7, -1, 8)} int32[3]
        %10 = Reshape(%0, %9) float32[7,?,8]                  => rows(1) of inputs
    """)


def test_rows_of_ragged_length_keep_their_first_axis() -> None:
    check("""
        %0 = input x float32[?,8]
        %1 = input mask bool[?]
        %2 = Where(%1) int64[?,1]
        %3 = GatherNd(%0, %2) float32[?,8]                    => rows(0) ragged of inputs
        %4 = Const {value=(-1, 2, 4)} int32[3]
        %5 = Reshape(%3, %4) float32[?,2,4]                   => rows(0) ragged of inputs
        %6 = Const {value=(-1)} int32[1]
        %7 = Reshape(%3, %6) float32[?]                       => coupled of inputs
    """)


def test_a_new_last_axis_is_not_squeezed_with_another() -> None:
    check("""
        %0 = input x float32[?]                                        => rows(0) of inputs
        %1 = Const {value=(0)} int32[]
        %2 = ExpandDims(%0, %1) float32[1,?]                           => rows(1) of inputs
        %3 = Const {value=(-1)} int32[]
        %4 = ExpandDims(%2, %3) float32[1,?,1]                         => rows(1) of inputs
        %5 = Squeeze(%4) {squeeze_dims=(0)} float32[?,1]               => rows(0) of inputs
        %6 = Squeeze(%4) {squeeze_dims=(-1)} float32[1,?]              => rows(1) of inputs
        %7 = Squeeze(%4) {squeeze_dims=(0, 2)} float32[?]              => rows(0) of inputs
    """)

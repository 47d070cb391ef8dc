from tests.unit.passes.rules.states import check, reason


def test_each_row_looks_up_its_own() -> None:
    check("""
        %0 = input ids int32[?,7]
        %1 = capture table resource[]
        %2 = ResourceGather(%1, %0) float32[?,7,16]                    => rows(0)
        %3 = capture other float32[5,9,2]
        %4 = Const {value=(1)} int32[]
        %5 = GatherV2(%3, %0, %4) float32[5,?,7,2]                     => rows(1)
        %6 = GatherV2(%2, %0, %4) {batch_dims=1} float32[?,7,16]       => rows(0)
        %7 = Const {value=(2, 0)} int32[2]
        %8 = GatherV2(%2, %7, %4) float32[?,2,16]                      => rows(0)
        %9 = Const {value=(0)} int32[]
        %10 = GatherV2(%2, %7, %9) float32[2,7,16]                     => coupled
        %11 = GatherV2(%2, %0, %9) float32[?,7,7,16]                   => coupled
        %12 = OneHot(%0, %4, %4, %9) {axis=-1} int32[?,7,1]            => rows(0) of inputs
        %13 = OneHot(%0, %4, %4, %9) {axis=0} int32[1,?,7]             => rows(1) of inputs
    """)


ROWS = """
    %0 = input x float32[?,6,4]
    %1 = input n int32[?]
    %2 = Shape(%0) int32[3]
    %3 = Const {value=(0)} int32[1]
    %4 = Const {value=(1)} int32[1]
    %5 = StridedSlice(%2, %3, %4, %4) {shrink_axis_mask=1} int32[]     => count of inputs
    %6 = Const {value=(0)} int32[]
    %7 = Const {value=(1)} int32[]
    %8 = Range(%6, %5, %7) int32[?]                                    => positions(0) of inputs
"""


def test_rows_may_be_found_by_their_own_numbers() -> None:
    check(
        ROWS
        + """
    %9 = Pack(%8, %1) {axis=1} int32[?,2]                              => positions(0) of inputs
    %10 = GatherNd(%0, %9) float32[?,4]                                => rows(0) of inputs
    %11 = Pack(%1, %8) {axis=1} int32[?,2]
    %12 = GatherNd(%0, %11) float32[?,4]                               => coupled of inputs
    %13 = GatherV2(%0, %8, %6) float32[?,6,4]                          => rows(0) of inputs
    %14 = AddV2(%8, %7) int32[?]                                       => positions(0) of inputs
    %15 = GatherV2(%0, %14, %6) float32[?,6,4]                         => coupled of inputs
    """
    )


def test_entries_of_a_merged_batch_may_be_found_block_by_block() -> None:
    check(
        ROWS
        + """
    %9 = Const {value=(-1, 4)} int32[2]
    %10 = Reshape(%0, %9) float32[?,4]                                 => rows(0) of inputs
    %11 = Const {value=(6)} int32[]
    %12 = Mul(%8, %11) int32[?]
    %13 = AddV2(%12, %1) int32[?]
    %14 = GatherV2(%10, %13, %6) float32[?,4]                          => rows(0) of inputs
    %15 = Const {value=(5)} int32[]
    %16 = Mul(%8, %15) int32[?]
    %17 = GatherV2(%10, %16, %6) float32[?,4]                          => coupled of inputs
    """
    )


def test_numbers_of_rows_mean_nothing_else() -> None:
    text = (
        ROWS
        + """
    %9 = Cast(%8) float32[?]                                           => positions(0) of inputs
    %10 = Exp(%9) float32[?]                                           => coupled of inputs
    """
    )
    check(text)
    assert "numbers of rows" in reason(text)
    check(
        ROWS
        + """
    %9 = capture table float32[100]
    %10 = GatherV2(%9, %8, %6) float32[?]                              => coupled
    """
    )


def test_rows_added_into_fixed_places_are_sums() -> None:
    check("""
        %0 = input at int32[?,1]
        %1 = input x float32[?]
        %2 = Const {value=(9)} int32[1]
        %3 = ScatterNd(%0, %1, %2) float32[9]                          => sum of inputs
        %4 = Shape(%1) int32[1]
        %5 = ScatterNd(%0, %1, %4) float32[?]                          => coupled of inputs
    """)

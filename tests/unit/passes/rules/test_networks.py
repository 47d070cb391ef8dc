# ruff: noqa: E501 (golden lines are as long as they are)
from tests.unit.passes.rules.states import check, reason


def test_samples_stay_on_their_own() -> None:
    check("""
        %0 = input x float32[?,8,8,3]
        %1 = MaxPool(%0) float32[?,4,4,3]                               => rows(0) of inputs
        %2 = Softmax(%0) float32[?,8,8,3]                               => rows(0) of inputs
    """)


def test_the_innermost_axes_must_not_be_the_batch() -> None:
    text = """
        %0 = input x float32[4,?]
        %1 = Softmax(%0) float32[4,?]                                   => coupled of inputs
    """
    check(text)
    assert reason(text) == "Softmax over the batch axis"
    check("""
        %0 = input x float32[?,4,4]
        %1 = Const {value=(-1)} int32[]
        %2 = Const {value=(0)} int32[]
        %3 = MatrixBandPart(%0, %1, %2) float32[?,4,4]                  => rows(0) of inputs
        %4 = Cholesky(%0) float32[?,4,4]                                => rows(0) of inputs
        %5 = input y float32[?,4]
        %6 = Cholesky(%5) float32[?,4]                                  => coupled of inputs
        %7 = TopKV2(%5, %1) float32[?,2], int32[?,2]  => rows(0) of inputs | rows(0) of inputs
    """)


def test_cross_entropy_wants_a_label_a_row() -> None:
    check("""
        %0 = input x float32[?,4]
        %1 = input y int32[?]
        %2 = SparseSoftmaxCrossEntropyWithLogits(%0, %1) float32[?], float32[?,4]  => rows(0) of inputs | rows(0) of inputs
        %3 = capture label int32[8]
        %4 = SparseSoftmaxCrossEntropyWithLogits(%0, %3) float32[?], float32[?,4]  => coupled | coupled
    """)


def test_batch_normalisation_in_training_is_coupled_and_at_rest_it_is_not() -> None:
    text = """
        %0 = input x float32[?,8,8,3]
        %1 = capture s float32[3]
        %2 = FusedBatchNormV3(%0, %1, %1, %1, %1) {is_training=false} float32[?,8,8,3], float32[3]  => rows(0) | whole
        %3 = FusedBatchNormV3(%0, %1, %1, %1, %1) {is_training=true} float32[?,8,8,3], float32[3]  => coupled | coupled
    """
    check(text)
    assert "batch normalisation in training" in reason(text)


def test_blocks_of_dilated_convolutions_are_put_together_again() -> None:
    check("""
        %0 = input x float32[?,8,8,3]
        %1 = Const {value=(2, 2)} int32[2]
        %2 = Const {value=(0, 0, 0, 0)} int32[2,2]
        %3 = SpaceToBatchND(%0, %1, %2) float32[?,4,4,3]                => rows(0) interleaved of inputs
        %4 = BatchToSpaceND(%3, %1, %2) float32[?,8,8,3]                => rows(0) of inputs
        %5 = Const {value=(1, 4)} int32[2]
        %6 = BatchToSpaceND(%3, %5, %2) float32[?,4,16,3]               => coupled of inputs
    """)


def test_where_samples_are_cut_is_the_same_for_all_if_a_seed_says_where() -> None:
    text = """
        %0 = input x float32[?,8,8,1]
        %1 = FractionalMaxPool(%0) {deterministic=true, seed=3} float32[?,4,4,1], int64[5], int64[5]  => rows(0) of inputs | whole | whole
        %2 = FractionalMaxPool(%0) float32[?,4,4,1], int64[5], int64[5]  => rows(0) of inputs | coupled of inputs | coupled of inputs
    """
    check(text)
    assert "give a seed" in reason(text, 2, 1)


def test_what_regularises_equations_is_no_number_of_rows() -> None:
    check("""
        %0 = input x float32[?,4,4]
        %1 = capture w float32[4,4]
        %2 = Mul(%0, %1) float32[?,4,4]                                => rows(0)
        %3 = Const {value=(0.5)} float64[]
        %4 = MatrixSolveLs(%2, %2, %3) float32[?,4,4]                  => rows(0)
        %5 = Size(%2) int32[]                                          => count
        %6 = Cast(%5) float64[]                                        => count
        %7 = MatrixSolveLs(%2, %2, %6) float32[?,4,4]                  => coupled
    """)

import pytest

from tests.unit.passes.rules.states import check, reason


def test_a_free_batch_axis_stays_and_a_contracted_one_leaves_a_sum() -> None:
    check("""
        %0 = input x float32[?,4]
        %1 = input y float32[?,4]
        %2 = capture w float32[4,4]
        %3 = MatMul(%0, %2) float32[?,4]                               => rows(0)
        %4 = MatMul(%2, %0) {transpose_b=true} float32[4,?]            => rows(1)
        %5 = MatMul(%3, %1) {transpose_a=true} float32[4,4]            => sum
        %6 = MatMul(%3, %2) {transpose_b=true} float32[?,4]            => rows(0)
        %7 = MatMul(%5, %2) float32[4,4]                               => sum
        %8 = MatMul(%5, %5) float32[4,4]                               => after
        %9 = MatMul(%3, %5) float32[?,4]                               => coupled
    """)


def test_in_batch_negatives_are_coupled() -> None:
    text = """
        %0 = input x float32[?,4]
        %1 = input y float32[?,4]
        %2 = MatMul(%0, %1) {transpose_b=true} float32[?,?]            => coupled of inputs
    """
    check(text)
    assert "in-batch negatives" in reason(text)


def test_products_of_stacks_of_matrices() -> None:
    check("""
        %0 = input x float32[?,3,4,5]
        %1 = input y float32[?,3,6,5]
        %2 = BatchMatMulV2(%0, %1) {adj_y=true} float32[?,3,4,6]       => rows(0) of inputs
        %3 = capture w float32[5,7]
        %4 = BatchMatMulV2(%0, %3) float32[?,3,4,7]                    => rows(0)
        %5 = capture v float32[8,3,5,7]
        %6 = BatchMatMulV2(%0, %5) float32[8,3,4,7]                    => coupled
    """)


@pytest.mark.parametrize(
    ("equation", "said"),
    [
        ("ab,ab->ab", "rows(0) of inputs"),
        ("ab,ab->ba", "rows(1) of inputs"),
        ("ab,ab->b", "sum of inputs"),
        ("ab,ab->", "sum of inputs"),
        ("ab,cb->ac", "coupled of inputs"),
        ("aa,ab->b", "coupled of inputs"),
        ("...b,...b->...", "rows(0) of inputs"),
    ],
)
def test_the_equation_of_an_einsum_says_which_axes_are_free(equation: str, said: str) -> None:
    check(f"""
        %0 = input x float32[?,4]
        %1 = input y float32[?,4]
        %2 = Einsum(%0, %1) {{equation="{equation}"}} float32[*]         => {said}
    """)


def test_convolutions_and_biases() -> None:
    check("""
        %0 = input x float32[?,8,8,3]
        %1 = capture filters float32[3,3,3,4]
        %2 = Conv2D(%0, %1) float32[?,6,6,4]                           => rows(0)
        %3 = capture bias float32[4]
        %4 = BiasAdd(%2, %3) {data_format="NHWC"} float32[?,6,6,4]     => rows(0)
        %5 = Shape(%0) int32[4]
        %6 = Conv2DBackpropInput(%5, %1, %2) float32[?,8,8,3]          => rows(0)
        %7 = Conv2D(%1, %0) float32[?,1,1,1]                           => coupled
    """)

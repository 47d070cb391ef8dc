import pytest

from tests.unit.passes.rules.states import check

SHAPE = """
    %0 = input x float32[?,4]
    %1 = capture w float32[4]
    %2 = Shape(%0) int32[2]
    %3 = capture seed int32[2]
    %4 = Const {value=(0.5)} float32[]
"""


@pytest.mark.parametrize(
    "made",
    [
        "Fill(%2, %4) float32[?,4]",
        "BroadcastTo(%1, %2) float32[?,4]",
        "RandomUniform(%2) float32[?,4] stateful",
        "StatelessRandomUniform(%2, %3) float32[?,4]",
        "StatelessRandomNormalV2(%2, %3, %3, %3) float32[?,4]",
    ],
)
def test_a_count_in_the_shape_makes_rows(made: str) -> None:
    rows = "rows(0) of inputs" if made.startswith("Fill") else "rows(0)"
    check(f"{SHAPE}    %5 = {made}   => {rows}\n    %6 = Mul(%5, %0) float32[?,4]   => {rows}")


def test_a_shape_without_a_count_makes_wholes() -> None:
    check("""
        %0 = Const {value=(3, 4)} int32[2]
        %1 = RandomUniform(%0) float32[3,4] stateful                    => whole
        %2 = input x float32[?,3,4]
        %3 = Mul(%1, %2) float32[?,3,4]                                 => rows(0)
    """)


def test_tensors_are_repeated() -> None:
    check("""
        %0 = input x float32[?,4]
        %1 = Const {value=(1, 3)} int32[2]
        %2 = Tile(%0, %1) float32[?,12]                                 => rows(0) of inputs
        %3 = Const {value=(2, 1)} int32[2]
        %4 = Tile(%0, %3) float32[?,4]                                  => rows(0) interleaved of inputs
        %5 = Shape(%0) int32[2]
        %6 = capture w float32[1,2]
        %7 = Tile(%6, %5) float32[?,8]                                  => rows(0)
        %8 = Tile(%0, %5) float32[?,?]                                  => coupled of inputs
    """)


def test_only_the_shape_of_rows_matters_for_zeros() -> None:
    check("""
        %0 = input x float32[?,4]
        %1 = ZerosLike(%0) float32[?,4]                                 => rows(0) of inputs
        %2 = Const {value=(0, 1)} int32[2]
        %3 = Sum(%0, %2) float32[]                                      => sum of inputs
        %4 = ZerosLike(%3) float32[]                                    => whole
        %5 = AddV2(%3, %4) float32[]                                    => sum of inputs
    """)


def test_padding_and_reversing_leave_the_batch_alone() -> None:
    check("""
        %0 = input x float32[?,4]
        %1 = Const {value=(0, 0, 1, 1)} int32[2,2]
        %2 = Pad(%0, %1) float32[?,6]                                   => rows(0) of inputs
        %3 = Const {value=(1, 0, 0, 0)} int32[2,2]
        %4 = Pad(%0, %3) float32[?,4]                                   => coupled of inputs
        %5 = Const {value=(-1)} int32[1]
        %6 = ReverseV2(%0, %5) float32[?,4]                             => rows(0) of inputs
        %7 = Const {value=(0)} int32[1]
        %8 = ReverseV2(%0, %7) float32[?,4]                             => coupled of inputs
        %9 = input n int32[?]
        %12 = Roll(%0, %5, %5) float32[?,4]                             => rows(0) of inputs
        %13 = Roll(%0, %5, %7) float32[?,4]                             => coupled of inputs
        %14 = ReverseSequence(%0, %9) {batch_dim=0, seq_dim=1} float32[?,4]  => rows(0) of inputs
        %15 = ReverseSequence(%0, %9) {batch_dim=1, seq_dim=0} float32[?,4]  => coupled of inputs
    """)

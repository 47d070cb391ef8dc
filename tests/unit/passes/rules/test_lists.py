from tests.unit.passes.rules.states import check, reason


def test_a_list_has_the_fold_of_its_elements() -> None:
    check("""
        %0 = input x float32[7,?,4]
        %1 = Const {value=(-1, 4)} int32[2]
        %2 = TensorListFromTensor(%0, %1) variant[]                     => rows(0) of inputs
        %3 = Const {value=(2)} int32[]
        %4 = TensorListGetItem(%2, %3, %1) float32[?,4]                 => rows(0) of inputs
        %5 = TensorListReserve(%1, %3) variant[]                        => empty
        %6 = TensorListSetItem(%5, %3, %4) variant[]                    => rows(0) of inputs
        %7 = TensorListStack(%6, %1) float32[?,?,4]                     => rows(1) of inputs
        %8 = capture w float32[4]
        %9 = TensorListSetItem(%6, %3, %8) variant[]                    => coupled
        %10 = TensorListLength(%6) int32[]                              => whole
    """)


def test_a_loop_over_the_rows_is_coupled() -> None:
    text = """
        %0 = input x float32[?,4]
        %1 = Const {value=(4)} int32[1]
        %2 = TensorListFromTensor(%0, %1) variant[]                     => coupled of inputs
    """
    check(text)
    assert reason(text) == "the batch is looped over row by row"

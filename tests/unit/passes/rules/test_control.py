# ruff: noqa: E501 (golden lines are as long as they are)
from tests.unit.passes.rules.states import check, reason

LOOP = """
    %0 = input x float32[?,4]
    %1 = capture w float32[4,4]
    %2 = Const {value=(0)} int32[]
    %3 = While[cond, body](%2, %0, %1) int32[], float32[?,4], float32[4,4]  => STATES
    func cond(%0, %1, %2)
      %0 = Placeholder int32[]
      %1 = Placeholder float32[?,4]
      %2 = Placeholder float32[4,4]
      %3 = Const {value=(3)} int32[]
      %4 = Less(%0, %3) bool[]
      return %4
    func body(%0, %1, %2)
      %0 = Placeholder int32[]
      %1 = Placeholder float32[?,4]
      %2 = Placeholder float32[4,4]
      %3 = Const {value=(1)} int32[]
      %4 = AddV2(%0, %3) int32[]
      %5 = MatMul(%1, %2) float32[?,4]
      return %4, %5, %2
"""


def test_a_loop_over_steps_keeps_rows() -> None:
    check(LOOP.replace("STATES", "whole | rows(0) | whole"))


def test_a_loop_whose_end_hangs_on_the_rows_is_coupled() -> None:
    text = (
        LOOP.replace("STATES", "coupled | coupled | whole")
        .replace(
            "%4 = Less(%0, %3) bool[]",
            "%4 = Const {value=(0, 1)} int32[2]\n      %5 = Sum(%1, %4) float32[]\n      %6 = Less(%5, %5) bool[]",
        )
        .replace("return %4\n", "return %6\n", 1)
    )
    check(text)
    assert "turn a loop differently often" in reason(text, 3)


def test_a_body_that_mixes_rows_names_the_op_inside() -> None:
    text = LOOP.replace("STATES", "whole | coupled | whole").replace(
        "%5 = MatMul(%1, %2) float32[?,4]",
        '%6 = Const {value=(0)} int32[]\n      %7 = Mean(%1, %6) float32[4]\n      %5 = Sub(%1, %7) float32[?,4] "norm/sub"',
    )
    check(text)
    assert reason(text, 3, 1) == "single rows are mixed with a mean over the batch (at Sub 'norm/sub' in its body)"


BRANCH = """
    %0 = input x float32[?,4]
    %1 = TEST
    %2 = If[yes, no](%1, %0) float32[?,4]                               => STATE
    func yes(%0)
      %0 = Placeholder float32[?,4]
      %1 = Neg(%0) float32[?,4]
      return %1
    func no(%0)
      %0 = Placeholder float32[?,4]
      return %0
"""


def test_every_micro_batch_must_take_the_same_branch() -> None:
    check(BRANCH.replace("TEST", "capture flag bool[]").replace("STATE", "rows(0)"))
    check(BRANCH.replace("TEST", "input flag bool[?]").replace("STATE", "coupled of inputs"))


def test_branches_of_different_folds_are_coupled() -> None:
    text = (
        BRANCH.replace("TEST", "capture flag bool[]")
        .replace("STATE", "coupled")
        .replace("%1 = Neg(%0) float32[?,4]", "%1 = Const float32[8,4]")
    )
    check(text)
    assert reason(text, 2) == (
        "one case gives a value that is the same in every micro-batch, and another rows of the batch"
    )


def test_a_call_is_what_its_body_is() -> None:
    check("""
        %0 = input x float32[?,4]
        %1 = capture w float32[4]
        %2 = PartitionedCall[f](%0, %1) float32[], float32[?,4]         => mean | rows(0)
        func f(%0, %1)
          %0 = Placeholder float32[?,4]
          %1 = Placeholder float32[4]
          %2 = Mul(%0, %1) float32[?,4]
          %3 = Const {value=(0, 1)} int32[2]
          %4 = Mean(%2, %3) float32[]
          return %4, %2
    """)


def test_a_function_that_calls_itself_is_coupled() -> None:
    text = """
        %0 = input x float32[?]
        %1 = PartitionedCall[f](%0) float32[?]                          => coupled of inputs
        func f(%0)
          %0 = Placeholder float32[?]
          %1 = PartitionedCall[f](%0) float32[?]
          return %1
    """
    check(text)
    assert "'f' calls itself" in reason(text, 1)

from tests.unit.passes.rules.states import check, reason


def test_functions_of_entries_keep_rows_and_lose_sums() -> None:
    check("""
        %0 = input x float32[?,4]                => rows(0) of inputs
        %1 = capture w float32[4]                => whole
        %2 = Mul(%0, %1) float32[?,4]            => rows(0)
        %3 = Tanh(%2) float32[?,4]               => rows(0)
        %4 = Const {value=(0, 1)} int32[2]
        %5 = Sum(%3, %4) float32[]               => sum
        %6 = Exp(%5) float32[]                   => after
        %7 = Mean(%3, %4) float32[]              => mean
        %8 = Sqrt(%7) float32[]                  => after
        %9 = AddV2(%8, %5) float32[]             => after
    """)


def test_operands_are_aligned_from_the_right() -> None:
    check("""
        %0 = input x float32[?,4,4]
        %1 = input y float32[?,1,4]
        %2 = AddV2(%0, %1) float32[?,4,4]        => rows(0) of inputs
        %3 = capture w float32[4,4]
        %4 = Maximum(%2, %3) float32[?,4,4]      => rows(0)
        %5 = capture row float32[1,4,4]
        %6 = Mul(%4, %5) float32[?,4,4]          => rows(0)
        %7 = capture rows float32[8,4,4]
        %8 = Mul(%6, %7) float32[?,4,4]          => coupled
    """)


def test_rows_that_meet_across_two_axes_are_coupled() -> None:
    text = """
        %0 = input a float32[?,1]
        %1 = input b float32[?]
        %2 = Sub(%0, %1) float32[?,?]            => coupled of inputs
    """
    check(text)
    assert reason(text) == "every row meets every other row: the batch lies along two axes"


def test_rows_along_the_entries_of_another_tensor_are_said_to_be_an_error_of_shapes() -> None:
    """A weight for each row meets a metric with seven entries for each: without micro-batches that fails as well."""
    text = """
        %0 = input weight float32[?]
        %1 = input metric float32[?,7]
        %2 = Mul(%0, %1) float32[?,7]            => coupled of inputs
    """
    check(text)
    said = "so without micro-batches it is an error of shapes unless a batch has 7 rows: micro_batch=1 shows it"
    assert reason(text).endswith(said)
    assert reason(text.replace("%0, %1", "%1, %0")).endswith(said)


def test_sums_and_means_under_arithmetic() -> None:
    check("""
        %0 = capture w float32[]
        %1 = capture v float32[?]
        %2 = input x float32[?]
        %3 = Mul(%2, %0) float32[?]
        %4 = Const {value=(0)} int32[1]
        %5 = Sum(%3, %4) float32[]               => sum
        %6 = Mean(%3, %4) float32[]              => mean
        %7 = AddV2(%5, %5) float32[]             => sum
        %8 = AddV2(%6, %0) float32[]             => mean
        %9 = AddV2(%5, %0) float32[]             => after
        %10 = AddV2(%5, %6) float32[]            => after
        %11 = Mul(%5, %0) float32[]              => sum
        %12 = RealDiv(%6, %0) float32[]          => mean
        %13 = RealDiv(%0, %6) float32[]          => after
        %14 = RealDiv(%5, %7) float32[]          => after
        %15 = Neg(%5) float32[]                  => sum
        %16 = AddN(%5, %7, %11) float32[]        => sum
        %17 = Const {value=(0.0)} float32[]
        %18 = AddV2(%5, %17) float32[]           => sum
        %19 = Mul(%6, %6) float32[]              => after
        %20 = Sub(%2, %6) float32[?]             => coupled
        %21 = Cast(%5) float64[]                 => sum
        %22 = Cast(%5) int32[]                   => after
    """)


def test_counts_make_means_of_sums_and_sums_of_means() -> None:
    check("""
        %0 = input x float32[?,4]
        %1 = capture w float32[4]
        %2 = Mul(%0, %1) float32[?,4]
        %3 = Shape(%2) int32[2]                  => shape(count, whole)
        %4 = Const {value=(0)} int32[1]
        %5 = Prod(%3, %4) int32[]                => count
        %6 = Cast(%5) float32[]                  => count
        %7 = Const {value=(0, 1)} int32[2]
        %8 = Sum(%2, %7) float32[]               => sum
        %9 = RealDiv(%8, %6) float32[]           => mean
        %10 = DivNoNan(%8, %6) float32[]         => mean
        %11 = Mul(%9, %6) float32[]              => sum
        %12 = Const {value=(1.0)} float32[]
        %13 = RealDiv(%12, %6) float32[]         => inverse
        %14 = Mul(%13, %8) float32[]             => mean
        %15 = RealDiv(%6, %6) float32[]          => whole
        %16 = Mul(%6, %6) float32[]              => after
        %17 = Sub(%5, %5) int32[]                => whole
    """)


def test_choices() -> None:
    check("""
        %0 = input x float32[?,4]
        %1 = input flag bool[?]
        %2 = capture w float32[4]
        %3 = capture always bool[]
        %4 = Mul(%0, %2) float32[?,4]
        %5 = Select(%1, %4, %0) float32[?,4]     => rows(0)
        %6 = SelectV2(%3, %4, %2) float32[?,4]   => rows(0)
        %7 = Const {value=(0, 1)} int32[2]
        %8 = Sum(%4, %7) float32[]
        %9 = SelectV2(%3, %8, %8) float32[]      => sum
        %10 = capture other float32[]
        %11 = SelectV2(%3, %8, %10) float32[]    => after
        %12 = SelectV2(%1, %4, %0) float32[?,4]  => coupled
        %13 = Mean(%4, %7) float32[]
        %14 = SelectV2(%3, %13, %10) float32[]   => mean
        %15 = Greater(%13, %10) bool[]           => after
        %16 = SelectV2(%15, %13, %10) float32[]  => after
    """)


def test_several_outputs_are_handed_through_one_by_one() -> None:
    check("""
        %0 = input x float32[?]
        %1 = capture w float32[]
        %2 = IdentityN(%0, %1) float32[?], float32[]  => rows(0) | whole
        %3 = Identity(%2:1) float32[]                 => whole
    """)


def test_what_no_rule_knows_is_coupled_and_says_so() -> None:
    text = """
        %0 = input x float32[?]
        %1 = Frobnicate(%0) float32[?]           => coupled of inputs
    """
    check(text)
    assert reason(text) == "no rule for op type Frobnicate"
    check("""
        %0 = capture x float32[4]
        %1 = Frobnicate(%0) float32[4]           => whole
    """)

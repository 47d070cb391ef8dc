"""Steps that several tests of the passes look at. Shapes are small, gradients only look like gradients."""

TWO_DENSE = """
stages a b
%0 = input x float32[?,4]
%1 = capture wa resource[]
%2 = capture wb resource[]
%3 = ReadVariableOp(%1) float32[4,8] stateful @a
%4 = MatMul(%0, %3) float32[?,8] @a
%5 = ReadVariableOp(%2) float32[8,2] stateful @b
%6 = MatMul(%4, %5) float32[?,2] @b
%7 = Const {value=(0, 1)} int32[2]
"""
"""The forward of two dense layers, each in a stage, with the axes of a mean."""

DENSE_TANH = """
stages a b
%0 = input x float32[?,4]
%1 = capture wa resource[]
%2 = ReadVariableOp(%1) float32[4,8] stateful @a
%3 = MatMul(%0, %2) float32[?,8] @a
%4 = Tanh(%3) float32[?,8] @b
%5 = Const {value=(0, 1)} int32[2]
"""
"""A dense layer in one stage, what it gives squashed in another, and the axes of a mean."""

TWO_STAGES = """
stages a b
%0 = input x float32[?,4]
%1 = input y float32[?,2]
%2 = capture wa resource[]
%3 = capture wb resource[]
%4 = ReadVariableOp(%2) float32[4,8] stateful @a
%5 = MatMul(%0, %4) float32[?,8] @a
%6 = ReadVariableOp(%3) float32[8,2] stateful @b
%7 = MatMul(%5, %6) float32[?,2] @b
%8 = Sub(%7, %1) float32[?,2]
%9 = Const {value=(0, 1)} int32[2]
%10 = Mean(%8, %9) float32[]
request of %10 for %2, %3
%11 = OnesLike(%10) float32[]
%12 = Mul(%11, %8) float32[?,2]
%13 = MatMul(%5, %12) {transpose_a=true} float32[8,2]
part b: %13 for %3
%14 = MatMul(%12, %6) {transpose_b=true} float32[?,8]
flow b: %14 for %5
%15 = feed arrival float32[?,8]
arrival %15 of %5
%16 = MatMul(%0, %15) {transpose_a=true} float32[4,8]
part a: %16 for %2
end
%17 = holder ga float32[4,8]
gradient %17 of %2
%18 = holder gb float32[8,2]
gradient %18 of %3
"""
"""Two dense layers, each in a stage, the loss unstamped, up to the gradients."""

DESCENT = """
%20 = AssignSubVariableOp(%2, %17) stateful
%21 = AssignSubVariableOp(%3, %18) stateful
returns %10
"""
"""Plain gradient descent after TWO_STAGES."""

GLOBAL_NORM = """
%20 = Square(%17) float32[4,8]
%21 = Sum(%20, %9) float32[]
%22 = Square(%18) float32[8,2]
%23 = Sum(%22, %9) float32[]
%24 = AddV2(%21, %23) float32[]
%25 = Mul(%17, %24) float32[4,8]
%26 = Mul(%18, %24) float32[8,2]
%27 = AssignSubVariableOp(%2, %25) stateful
%28 = AssignSubVariableOp(%3, %26) stateful
returns %10
"""
"""Descent scaled by the norm of all gradients, after TWO_STAGES."""

SKIP = """
stages a b c
%0 = input x float32[?,4]
%1 = capture wa resource[]
%2 = ReadVariableOp(%1) float32[4,4] stateful @a
%3 = MatMul(%0, %2) float32[?,4] @a
%4 = Tanh(%3) float32[?,4] @b
%5 = AddV2(%3, %4) float32[?,4] @c
%6 = Const {value=(0, 1)} int32[2]
%7 = Mean(%5, %6) float32[]
request of %7 for %1
%8 = Fill(%7) float32[?,4]
flow c: %8 for %3
flow c: %8 for %4
%9 = feed arrival float32[?,4]
arrival %9 of %3
%10 = feed arrival float32[?,4]
arrival %10 of %4
%11 = TanhGrad(%4, %10) float32[?,4]
flow b: %11 for %3
%12 = MatMul(%0, %9) {transpose_a=true} float32[4,4]
part a: %12 for %1
end
%13 = holder g float32[4,4]
gradient %13 of %1
%14 = AssignSubVariableOp(%1, %13) stateful
returns %7
"""
"""Stage a feeds b and, over it, c; the variable is in a alone."""

TIED = """
stages a b
%0 = input tokens int32[?]
%1 = capture table resource[]
%2 = ResourceGather(%1, %0) float32[?,8] stateful @a
%3 = ReadVariableOp(%1) float32[50,8] stateful @b
%4 = MatMul(%2, %3) {transpose_b=true} float32[?,50] @b
%5 = Const {value=(0, 1)} int32[2]
%6 = Mean(%4, %5) float32[]
request of %6 for %1
%7 = Fill(%6) float32[?,50]
%8 = MatMul(%7, %2) {transpose_a=true} float32[50,8]
part b: %8 for %1
%9 = MatMul(%7, %3) float32[?,8]
flow b: %9 for %2
%10 = feed arrival float32[?,8]
arrival %10 of %2
%11 = Identity(%10) float32[?,8]
part a: %11, %0 for %1
end
%12 = holder g float32[50,8]
gradient %12 of %1
%13 = AssignSubVariableOp(%1, %12) stateful
returns %6
"""
"""One table that embeds in stage a and projects in stage b: one gradient is sparse, the other dense."""

FROZEN = (
    TWO_DENSE
    + """\
%8 = Mean(%6, %7) float32[]
request of %8 for %2
%9 = Fill(%8) float32[?,2]
%10 = MatMul(%4, %9) {transpose_a=true} float32[8,2]
part b: %10 for %2
end
%11 = holder g float32[8,2]
gradient %11 of %2
%12 = AssignSubVariableOp(%2, %11) stateful
returns %8
"""
)
"""Only stage b is trained."""

TWO_PHASES = """
stages generator critic
%0 = input noise float32[?,4]
%1 = capture g resource[]
%2 = capture c resource[]
%3 = ReadVariableOp(%2) float32[4,1] stateful @critic
%4 = MatMul(%0, %3) float32[?,1] @critic
%5 = Const {value=(0, 1)} int32[2]
%6 = Mean(%4, %5) float32[]
request of %6 for %2
%7 = Fill(%6) float32[?,1]
%8 = MatMul(%0, %7) {transpose_a=true} float32[4,1]
part critic: %8 for %2
end
%9 = holder gc float32[4,1]
gradient %9 of %2
%10 = AssignSubVariableOp(%2, %9) stateful ^%3
%11 = ReadVariableOp(%1) float32[4,4] stateful @generator
%12 = MatMul(%0, %11) float32[?,4] @generator
%13 = ReadVariableOp(%2) float32[4,1] stateful @critic ^%10
%14 = MatMul(%12, %13) float32[?,1] @critic
%15 = Mean(%14, %5) float32[]
request of %15 for %1
%16 = Fill(%15) float32[?,1]
%17 = MatMul(%16, %13) {transpose_b=true} float32[?,4]
flow critic: %17 for %12
%18 = feed arrival float32[?,4]
arrival %18 of %12
%19 = MatMul(%0, %18) {transpose_a=true} float32[4,4]
part generator: %19 for %1
end
%20 = holder gg float32[4,4]
gradient %20 of %1
%21 = AssignSubVariableOp(%1, %20) stateful ^%11
returns %6, %15
"""
"""A critic is trained, and then, through the new critic, a generator."""

PENALTY = (
    DENSE_TANH
    + """\
%6 = Mean(%4, %5) float32[]
%7 = ReadVariableOp(%1) float32[4,8] stateful
%8 = Square(%7) float32[4,8]
%9 = Sum(%8, %5) float32[]
%10 = AddV2(%6, %9) float32[]
request of %10 for %1
%11 = OnesLike(%10) float32[]
%12 = TanhGrad(%4, %11) float32[?,8]
flow b: %12 for %3
flow b: %11 for %9
%13 = feed arrival float32[?,8]
arrival %13 of %3
%14 = feed arrival float32[]
arrival %14 of %9
%15 = MatMul(%0, %13) {transpose_a=true} float32[4,8]
%16 = Mul(%7, %14) float32[4,8]
%17 = AddV2(%15, %16) float32[4,8]
part a: %17 for %1
end
%18 = holder g float32[4,8]
gradient %18 of %1
%19 = AssignSubVariableOp(%1, %18) stateful
returns %10
"""
)
"""A loss with an L2 penalty that no scope stamps, on a variable of the first stage."""

ONCE = """
stages a b
%0 = input x float32[?,4]
%1 = capture count resource[]
%2 = capture wa resource[]
%3 = capture total resource[]
%4 = ReadVariableOp(%1) float32[] stateful
%5 = Const {value=(1.0)} float32[]
%6 = AssignAddVariableOp(%1, %5) stateful ^%4
%7 = ReadVariableOp(%1) float32[] stateful @a ^%6
%8 = Mul(%0, %7) float32[?,4] @a
%9 = ReadVariableOp(%2) float32[4,4] stateful @b
%10 = MatMul(%8, %9) float32[?,4] @b
%11 = Const {value=(0, 1)} int32[2]
%12 = Mean(%10, %11) float32[]
request of %12 for %2
%13 = Fill(%12) float32[?,4]
%14 = MatMul(%8, %13) {transpose_a=true} float32[4,4]
part b: %14 for %2
end
%15 = holder g float32[4,4]
gradient %15 of %2
%16 = ReadVariableOp(%2) float32[4,4] stateful
%17 = Mul(%16, %5) float32[4,4]
%18 = AssignSubVariableOp(%2, %17) stateful ^%9 ^%16
%19 = AssignSubVariableOp(%2, %15) stateful ^%18
%20 = AssignAddVariableOp(%3, %12) stateful
%21 = ReadVariableOp(%3) float32[] stateful ^%20
returns %21, %4
"""
"""A counter that is read, advanced, and read by the forward; weight decay; a metric."""

CUT_BATCH = """
stages a b
micro 2
codecs fp16 none
codecs bf16 bf16
%0 = input x float32[?,4]
%1 = input weights float32[?]
%2 = capture seen resource[]
%3 = capture w resource[]
%4 = ReadVariableOp(%3) float32[4] stateful @a
%5 = Mul(%0, %4) float32[?,4] @a compress=0
%6 = Tanh(%5) float32[?,4] @b compress=1
%7 = Const {value=(1)} int32[1]
%8 = Sum(%6, %7) float32[?]
%9 = Mul(%8, %1) float32[?]
%10 = Const {value=(0)} int32[1]
%11 = Sum(%9, %10) float32[]
%12 = Mean(%8, %10) float32[]
%13 = AssignAddVariableOp(%2, %11) stateful
%14 = ReadVariableOp(%2) float32[] stateful ^%13
%15 = Sum(%1, %10) float32[]
%16 = RealDiv(%11, %15) float32[]
%17 = Mul(%12, %16) float32[]
request of %16 for %3
%18 = OnesLike(%16) float32[]
%19 = RealDiv(%18, %15) float32[]
%20 = Mul(%19, %1) float32[?]
%21 = TanhGrad(%6, %20) float32[?,4]
flow b: %21 for %5
%22 = feed arrival float32[?,4]
arrival %22 of %5
%23 = Mul(%22, %0) float32[?,4]
%24 = Sum(%23, %10) float32[4]
part a: %24 for %3
end
%25 = holder g float32[4]
gradient %25 of %3
%26 = AssignSubVariableOp(%3, %25) stateful
returns %11, %12, %8, %14, %16, %17
"""
"""Two micro-batches: a sum, a mean, rows, a metric that adds a sum up, a weighted mean that is the loss, and a number
that is made of two others.
"""

EXAMPLES = {
    "two_stages": TWO_STAGES + DESCENT,
    "global_norm": TWO_STAGES + GLOBAL_NORM,
    "skip": SKIP,
    "tied": TIED,
    "frozen": FROZEN,
    "two_phases": TWO_PHASES,
    "penalty": PENALTY,
    "once": ONCE,
    "cut_batch": CUT_BATCH,
}

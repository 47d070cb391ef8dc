"""Digests: equal for every trace of a program, different for different programs, with the reason in words."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.processes import zygote
from tests.unit.ir.example_plans import PLANS, everything, plan
from tests.unit.passes.examples import EXAMPLES
from tests.unit.passes.programs import parse_program
from whale_nebula.ir.canonical import canonical_lines, describe_first_difference, digest_lines, program_digest
from whale_nebula.ir.cut import Cut, Exchange
from whale_nebula.ir.graph import INPUT, Graph, Op
from whale_nebula.ir.program import GradientPart, Holder, Leaf, LocalSgd, PartKey, Program, Request, Variable
from whale_nebula.ir.sizes import ExchangeSizes
from whale_nebula.ir.text import from_text
from whale_nebula.spec import Spec, Value

ROOT = Path(__file__).parents[3]
LENGTH = 20_000


def trace_unrelated_function() -> None:
    """Trace a function that advances the counters of names, functions and custom gradients in the process."""

    @tf.function
    def other(x: tf.Tensor) -> tf.Tensor:
        y = tf.while_loop(lambda h: tf.reduce_sum(h) < 9.0, lambda h: [h * 2.0], [tf.nn.gelu(x)])[0]
        return tf.cond(tf.reduce_sum(y) > 0.0, lambda: tf.custom_gradient(lambda z: (z, lambda d: d))(y), lambda: -y)

    other(tf.constant([1.0, 2.0]))


@functools.cache
def plan_unchanged() -> nb.Plan:
    return everything()


def test_digest_of_a_later_trace_is_equal() -> None:
    """For several processes the tests in tests/processes cover this: a run compares digests before it computes."""
    before = plan_unchanged()
    trace_unrelated_function()
    assert everything().program_digest == before.program_digest


@pytest.mark.grid
@pytest.mark.slow
def test_digests_are_equal_in_another_process() -> None:
    process = zygote.run("-m", "tests.unit.ir.example_plans", cwd=ROOT)
    assert process.returncode == 0, process.stderr
    first = {name: plan(name).program_digest for name in PLANS}
    trace_unrelated_function()
    retraced = {name: PLANS[name]().program_digest for name in ("tied", "everything")}
    assert first == {**first, **retraced} == json.loads(process.stdout)
    assert len(set(first.values())) == len(first)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"width": 5},
            r"variable embedding/embeddings: float32\[10,4\] .* here, float32\[10,5\] .* there",
        ),
        ({"fp16": True}, "codec 0: bf16, .* here, fp16, .* there"),
        ({"activation": tf.nn.relu}, r"op \d+: Tanh\(.* here, Relu\(.* there \(in function f\d+\)"),
        pytest.param({"table": (1.0, 2.0, 4.0)}, r"op \d+: Const \{.*content=", marks=pytest.mark.grid),
        (
            {"turns": 4},
            r"op \d+: Const \{value=\(3\).* here, .*value=\(4\).* there \(in function f0\)",
        ),
        pytest.param(
            {"rate": 0.2}, r"op \d+: Const \{.*value=\(0\.1.* here, .*value=\(0\.2.* there", marks=pytest.mark.grid
        ),
    ],
)
def test_change_of_a_program_changes_its_digest_and_is_described(change: dict[str, object], words: str) -> None:
    one, other = plan_unchanged(), everything(**change)  # type: ignore[arg-type]
    assert one.program_digest != other.program_digest
    difference = describe_first_difference(one.lines, other.lines)
    assert re.search(words, difference), difference


def test_digest_ignores_the_order_of_the_trace() -> None:
    one = parse_program("""
        stages a
        %0 = input x float32[?]
        %1 = Exp(%0) float32[?] @a
        %2 = Neg(%0) float32[?] @a
        %3 = Mul(%1, %2) float32[?] @a
        returns %3
    """)
    other = parse_program("""
        stages a
        %0 = input x float32[?]
        %2 = Neg(%0) float32[?] @a
        %9 = Abs(%0) float32[?] @a
        %1 = Exp(%0) float32[?] @a
        %3 = Mul(%1, %2) float32[?] @a
        returns %3
    """)
    assert program_digest(one) == program_digest(other)


def test_digest_depends_on_the_order_of_effects() -> None:
    text = """
        stages a
        %0 = capture w resource[]
        %1 = Const {{value=(1.0)}} float32[]
        %2 = AssignAddVariableOp(%0, %1) stateful
        %3 = AssignSubVariableOp(%0, %1) stateful {order}
    """
    assert program_digest(parse_program(text.format(order="^%2"))) != program_digest(
        parse_program(text.format(order=""))
    )


def test_digest_depends_on_stage_stamps() -> None:
    text = "stages a b\n%0 = input x float32[?]\n%1 = Exp(%0) float32[?]{}\n%2 = Neg(%1) float32[?] @b"
    text += "\nreturns %2"
    free, first, second = (parse_program(text.format(stamp)) for stamp in ("", " @a", " @b"))
    assert free.labels[1] == second.labels[1] == 1
    assert len({program_digest(program) for program in (free, first, second)}) == 3


def test_digest_depends_on_the_position_of_an_effect() -> None:
    """A counter before the request and one after it belong to different parts of the step."""
    before = EXAMPLES["two_stages"]
    write = "%30 = AssignAddVariableOp(%2, %40) stateful\n"
    constant = "%40 = Const {value=(1.0)} float32[]\n"
    early = before.replace("request of", constant + write + "request of")
    late = before.replace("end\n", "end\n" + constant + write)
    assert program_digest(parse_program(early)) != program_digest(parse_program(late))


BODIES = """
%0 = input x float32[]
%1 = PartitionedCall[{0}](%0) float32[]
%2 = PartitionedCall[{1}](%1) float32[]
func {0}(%0)
  %0 = Placeholder float32[]
  %1 = Exp(%0) float32[]
  return %1
func {1}(%0)
  %0 = Placeholder float32[]
  %1 = {2}(%0) float32[]
  return %1
returns %2
"""


def test_digest_identifies_functions_by_content() -> None:
    one, renamed, other = (
        parse_program(BODIES.format(*names)) for names in (("p", "q", "Exp"), ("r_7", "s_8", "Exp"), ("p", "q", "Log"))
    )
    assert program_digest(one) == program_digest(renamed)
    assert [line for line in canonical_lines(one) if line.startswith("func")] == ["func f0(%0)"]
    assert describe_first_difference(one, other) == (
        "op 2: PartitionedCall[f0](%1) float32[] here, PartitionedCall[f1](%1) float32[] there"
    )


def test_canonical_lines_omit_process_local_attributes() -> None:
    text = '%0 = input x float32[]\n%1 = IdentityN(%0) {{T=("float32"), {}}} float32[] "{}"\nreturns %1'
    lines = {
        canonical_lines(parse_program(text.format(attributes, name)))
        for attributes, name in [
            ('_gradient_op_type="CustomGradient-12", shared_name="a_1"', "IdentityN"),
            ('_gradient_op_type="CustomGradient-99", container="c", _class=("loc:@w")', "IdentityN_3"),
        ]
    }
    assert len(lines) == 1


def test_digest_ignores_texts_of_assertions() -> None:
    text = """
        %0 = input x bool[]
        %1 = Const {{content="{}"}} string[]
        %2 = {}(%0, %1) stateful
    """
    asserts = {program_digest(parse_program(text.format(content, "Assert"))) for content in ("a", "b")}
    lookups = {program_digest(parse_program(text.format(content, "LookupTableFindV2"))) for content in ("a", "b")}
    assert (len(asserts), len(lookups)) == (1, 2)


def test_first_difference_prefers_an_op_to_later_numbers() -> None:
    lines = [["arguments %0, %2", "%1 = Exp(%0)"], ["arguments %0, %3", "%1 = Log(%0)"]]
    assert describe_first_difference(*lines) == "op 1: Exp(%0) here, Log(%0) there"


def test_first_difference_of_an_extra_line() -> None:
    assert describe_first_difference(["returns (%1)"], ["returns (%1)", "weights (%2)"]) == (
        "the loss weights ((%2)) exists only there"
    )


def test_first_difference_of_local_sgd_and_of_a_split_names_it() -> None:
    split = ["split w axis=0 stage=a"], ["split w axis=1 stage=a"]
    assert describe_first_difference(*split) == "the split of w: axis=0 stage=a here, axis=1 stage=a there"
    copies = [[f"apart {LocalSgd(every)}"] for every in (2, 3)]
    assert describe_first_difference(*copies).startswith("local SGD: each cluster trains a copy")


def test_first_difference_of_lines_of_different_kinds() -> None:
    assert describe_first_difference(["stage 1 b cluster=b"], ["input x float32[?] batched"]) == (
        "stage 1 (b cluster=b) here is in the position of input x (float32[?] batched) there"
    )


def test_canonical_lines_of_a_long_program_need_no_recursion() -> None:
    scalar = (Spec("float32", ()),)
    chain = (Op(n, "Neg", inputs=(Value(n - 1),), outputs=scalar) for n in range(1, LENGTH))
    graph = Graph((Op(0, "Placeholder", outputs=scalar, role=INPUT), *chain))
    lines = canonical_lines(Program(graph, returns=(Value(LENGTH - 1),)))
    assert sum(line.startswith("%") for line in lines) == LENGTH
    assert len(digest_lines(lines)) == 64


# -------------------- Bytes that clusters exchange once per step: a table that two stages use
TABLE = Spec("float32", (50, 4))
SPARSE_KEY, DENSE_KEY = (0, 0, 0, 0), (0, 0, 1, 0)


def make_cut(ids: str = "int32[?,5]", choose: str = "Reshape(%0, %2)") -> Cut:
    """Make a cut: stage 0 has a sparse gradient of a table, stage 1 a dense one."""
    graph = from_text(f"""
        %0 = input ids {ids}
        %1 = capture table resource[]
        %2 = Const {{value=(-1)}} int32[1]
        %3 = {choose} int32[?]
        %4 = Placeholder float32[?,4]
        %5 = Placeholder float32[50,4]
        """)
    parts = (GradientPart(0, 0, (Value(4), Value(3))), GradientPart(1, 0, (Value(5),)))
    holder = Holder(0, (Value(4), Value(3)))
    request = Request(0, 6, frozenset(), (), ("table",), (1,), (holder,), parts=parts)
    leaves, variables = (Leaf(0, "ids", graph.ops[0].outputs[0]),), (Variable(1, "table", TABLE),)
    return Cut(Program(graph, leaves, variables, requests=(request,)), (), (), (), (), {}, {}, {})


def make_part_exchange(key: PartKey, piece: int, spec: Spec) -> Exchange:
    return Exchange("part", 0, -2, 0, "a", "b", spec, key, piece)


VALUES, INDICES = (
    make_part_exchange(SPARSE_KEY, 0, Spec("float32", (None, 4))),
    make_part_exchange(SPARSE_KEY, 1, Spec("int32", (None,))),
)


def test_sparse_gradient_size_counts_all_indices() -> None:
    sizes = ExchangeSizes(make_cut())
    assert sizes.nbytes(VALUES, (3, 2)) == 5 * 5 * 4 * 4
    assert sizes.nbytes(INDICES, (3, 2)) == 5 * 5 * 4
    assert not sizes.is_upper_bound(VALUES)


def test_dense_gradient_has_the_size_of_its_variable() -> None:
    assert (
        ExchangeSizes(make_cut()).nbytes(make_part_exchange(DENSE_KEY, 0, Spec("float32", None)), (3, 2))
        == TABLE.nbytes()
    )
    assert not ExchangeSizes(make_cut()).is_upper_bound(make_part_exchange(DENSE_KEY, 0, TABLE))


def test_size_uses_the_shapes_of_a_given_batch() -> None:
    assert ExchangeSizes(make_cut("int32[?,?]")).nbytes(VALUES, (3,)) is None
    assert ExchangeSizes(make_cut("int32[?,?]"), [(3, 7)]).nbytes(VALUES, (3,)) == 3 * 7 * 4 * 4


@pytest.mark.parametrize("op", ["Unique(%0)", "Where(%0)"])
def test_size_of_a_data_dependent_selection_is_an_upper_bound(op: str) -> None:
    assert ExchangeSizes(make_cut("int32[?]", op)).is_upper_bound(INDICES)
    assert ExchangeSizes(make_cut("int32[?]", op)).nbytes(INDICES, (6,)) == 6 * 4


@pytest.mark.parametrize(("shape", "size"), [((), 4), ((None, 3), 5 * 3 * 4), ((None, None), None), (None, None)])
def test_size_of_a_result_follows_the_batch_rows(shape: tuple[int | None, ...] | None, size: int | None) -> None:
    result = Exchange("scalar", 0, 0, 0, "a", "b", Spec("float32", shape), result=True)
    assert ExchangeSizes(make_cut()).nbytes(result, (3, 2)) == size
    assert result.what == "results" and not ExchangeSizes(make_cut()).is_upper_bound(result)

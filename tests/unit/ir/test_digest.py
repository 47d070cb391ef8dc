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
from whale_nebula.ir.canonical import canonical_lines, digest_lines, first_difference, program_digest
from whale_nebula.ir.cut import Cut, Exchange
from whale_nebula.ir.graph import INPUT, Graph, Op
from whale_nebula.ir.program import GradientPart, Holder, Leaf, PartKey, Program, Request, Variable
from whale_nebula.ir.sizes import Exchanged
from whale_nebula.ir.text import from_text
from whale_nebula.spec import Spec, Value

ROOT = Path(__file__).parents[3]
LENGTH = 20_000


def trace_something_else() -> None:
    """What counts up in a process: names, functions, custom gradients, variables."""

    @tf.function
    def other(x: tf.Tensor) -> tf.Tensor:
        y = tf.while_loop(lambda h: tf.reduce_sum(h) < 9.0, lambda h: [h * 2.0], [tf.nn.gelu(x)])[0]
        return tf.cond(tf.reduce_sum(y) > 0.0, lambda: tf.custom_gradient(lambda z: (z, lambda d: d))(y), lambda: -y)

    other(tf.constant([1.0, 2.0]))


@functools.cache
def unchanged() -> nb.Plan:
    return everything()


def test_a_later_trace_is_the_same_program() -> None:
    """Of several processes: all tests of tests/processes, which agree on a digest before they compute."""
    before = unchanged()
    trace_something_else()
    assert everything().program_digest == before.program_digest


@pytest.mark.grid
@pytest.mark.slow
def test_traces_in_one_process_and_in_another_are_the_same_program() -> None:
    elsewhere = zygote.run("-m", "tests.unit.ir.example_plans", cwd=ROOT)
    assert elsewhere.returncode == 0, elsewhere.stderr
    first = {name: plan(name).program_digest for name in PLANS}
    trace_something_else()
    again = {name: PLANS[name]().program_digest for name in ("tied", "everything")}
    assert first == {**first, **again} == json.loads(elsewhere.stdout)
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
        ({"table": (1.0, 2.0, 4.0)}, r"op \d+: Const \{.*content="),
        (
            {"turns": 4},
            r"op \d+: Const \{value=\(3\).* here, .*value=\(4\).* there \(in function f0\)",
        ),
        ({"rate": 0.2}, r"op \d+: Const \{.*value=\(0\.1.* here, .*value=\(0\.2.* there"),
    ],
)
def test_a_change_changes_the_digest_and_is_named(change: dict[str, object], words: str) -> None:
    one, other = unchanged(), everything(**change)  # type: ignore[arg-type]
    assert one.program_digest != other.program_digest
    said = first_difference(one.lines, other.lines)
    assert re.search(words, said), said


def test_the_order_of_the_trace_does_not_matter() -> None:
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


def test_the_order_of_effects_matters() -> None:
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


def test_being_stamped_or_placed_matters() -> None:
    text = "stages a b\n%0 = input x float32[?]\n%1 = Exp(%0) float32[?]{}\n%2 = Neg(%1) float32[?] @b"
    text += "\nreturns %2"
    free, first, second = (parse_program(text.format(stamp)) for stamp in ("", " @a", " @b"))
    assert free.labels[1] == second.labels[1] == 1
    assert len({program_digest(program) for program in (free, first, second)}) == 3


def test_what_an_effect_follows_matters() -> None:
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


def test_functions_stand_by_their_content() -> None:
    one, renamed, other = (
        parse_program(BODIES.format(*names)) for names in (("p", "q", "Exp"), ("r_7", "s_8", "Exp"), ("p", "q", "Log"))
    )
    assert program_digest(one) == program_digest(renamed)
    assert [line for line in canonical_lines(one) if line.startswith("func")] == ["func f0(%0)"]
    assert first_difference(one, other) == (
        "op 2: PartitionedCall[f0](%1) float32[] here, PartitionedCall[f1](%1) float32[] there"
    )


def test_what_is_local_to_a_process_is_left_out() -> None:
    text = '%0 = input x float32[]\n%1 = IdentityN(%0) {{T=("float32"), {}}} float32[] "{}"\nreturns %1'
    lines = {
        canonical_lines(parse_program(text.format(attributes, name)))
        for attributes, name in [
            ('_gradient_op_type="CustomGradient-12", shared_name="a_1"', "IdentityN"),
            ('_gradient_op_type="CustomGradient-99", container="c", _class=("loc:@w")', "IdentityN_3"),
        ]
    }
    assert len(lines) == 1


def test_messages_that_quote_names_are_left_out() -> None:
    text = """
        %0 = input x bool[]
        %1 = Const {{content="{}"}} string[]
        %2 = {}(%0, %1) stateful
    """
    asserts = {program_digest(parse_program(text.format(content, "Assert"))) for content in ("a", "b")}
    lookups = {program_digest(parse_program(text.format(content, "LookupTableFindV2"))) for content in ("a", "b")}
    assert (len(asserts), len(lookups)) == (1, 2)


def test_an_op_is_named_before_the_numbers_that_follow_from_it() -> None:
    lines = [["arguments %0, %2", "%1 = Exp(%0)"], ["arguments %0, %3", "%1 = Log(%0)"]]
    assert first_difference(*lines) == "op 1: Exp(%0) here, Log(%0) there"


def test_one_that_goes_on_where_the_other_ends() -> None:
    assert first_difference(["returns (%1)"], ["returns (%1)", "weights (%2)"]) == (
        "the loss weights ((%2)) exists only there"
    )


def test_different_kinds_of_things_are_both_named() -> None:
    assert first_difference(["stage 1 b cluster=b"], ["input x float32[?] batched"]) == (
        "stage 1 (b cluster=b) here is in the position of input x (float32[?] batched) there"
    )


def test_a_long_program_is_walked_without_recursion() -> None:
    scalar = (Spec("float32", ()),)
    chain = (Op(n, "Neg", inputs=(Value(n - 1),), outputs=scalar) for n in range(1, LENGTH))
    graph = Graph((Op(0, "Placeholder", outputs=scalar, role=INPUT), *chain))
    lines = canonical_lines(Program(graph, returns=(Value(LENGTH - 1),)))
    assert sum(line.startswith("%") for line in lines) == LENGTH
    assert len(digest_lines(lines)) == 64


# -------------------- Bytes that clusters exchange once a step, for a program written by hand: a table that two
TABLE = Spec("float32", (50, 4))
LISTED, WHOLE = (0, 0, 0, 0), (0, 0, 1, 0)


def cut(ids: str = "int32[?,5]", choose: str = "Reshape(%0, %2)") -> Cut:
    """Stage 0 lists a row for each index, stage 1 gives all of the table's gradient."""
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


def part(key: PartKey, piece: int, spec: Spec) -> Exchange:
    return Exchange("part", 0, -2, 0, "a", "b", spec, key, piece)


VALUES, INDICES = part(LISTED, 0, Spec("float32", (None, 4))), part(LISTED, 1, Spec("int32", (None,)))


def test_rows_are_listed_for_each_index_of_all_micro_batches() -> None:
    sizes = Exchanged(cut())
    assert sizes.nbytes(VALUES, (3, 2)) == 5 * 5 * 4 * 4
    assert sizes.nbytes(INDICES, (3, 2)) == 5 * 5 * 4
    assert not sizes.at_most(VALUES)


def test_a_dense_gradient_is_as_large_as_its_variable() -> None:
    assert Exchanged(cut()).nbytes(part(WHOLE, 0, Spec("float32", None)), (3, 2)) == TABLE.nbytes()
    assert not Exchanged(cut()).at_most(part(WHOLE, 0, TABLE))


def test_a_batch_at_hand_tells_the_length_that_the_program_leaves_open() -> None:
    assert Exchanged(cut("int32[?,?]")).nbytes(VALUES, (3,)) is None
    assert Exchanged(cut("int32[?,?]"), [(3, 7)]).nbytes(VALUES, (3,)) == 3 * 7 * 4 * 4


@pytest.mark.parametrize("op", ["Unique(%0)", "Where(%0)"])
def test_what_values_choose_is_at_most_as_much_as_they_are_chosen_from(op: str) -> None:
    assert Exchanged(cut("int32[?]", op)).at_most(INDICES)
    assert Exchanged(cut("int32[?]", op)).nbytes(INDICES, (6,)) == 6 * 4


@pytest.mark.parametrize(("shape", "size"), [((), 4), ((None, 3), 5 * 3 * 4), ((None, None), None), (None, None)])
def test_a_result_has_the_rows_of_the_batch(shape: tuple[int | None, ...] | None, size: int | None) -> None:
    result = Exchange("scalar", 0, 0, 0, "a", "b", Spec("float32", shape), result=True)
    assert Exchanged(cut()).nbytes(result, (3, 2)) == size
    assert result.what == "results" and not Exchanged(cut()).at_most(result)

"""The text form of a graph: stable, complete, and read back to the same graph."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.ir.graph import CAPTURE, FEED, HOLDER, INPUT, Graph, Op
from whale_nebula.ir.text import TextError, from_text, to_text
from whale_nebula.spec import Spec, Value

GOLDEN = """\
arguments %0
%0 = input x float32[?,4]
%1 = capture dense/kernel resource[]
%2 = ReadVariableOp(%1) {dtype="float32"} float32[4,8] stateful
%3 = MatMul(%0, %2) {transpose_a=false, transpose_b=true} float32[?,8] @gpu ^%1 ^%2 "dense/MatMul"
%4 = Const {value=(0, 1)} int32[2]
%5 = Const {value=(-0.5)} float32[]
%6 = While[cond, "body of it"](%4, %3) {parallel=10, shapes=((2), "?")} int32[2], float32[*] compress=2
%7 = holder "gradient of w" float32[4,8]
%8 = PlaceholderWithDefault(%5) float32[] role=feed "grow"
return %6:1, %3
func cond(%0, %1)
  %0 = Placeholder int32[2]
  %1 = Placeholder float32[*]
  %2 = NoOp @"two words" ^%1
  return %0
func "body of it"(%0)
  %0 = Placeholder int32[2]
  return %0, %0
"""


def test_golden_text_round_trips() -> None:
    assert to_text(from_text(GOLDEN)) == GOLDEN


def test_parsed_graph_has_the_fields_of_its_text() -> None:
    graph = from_text(GOLDEN)
    matmul, constant, loop, feed = graph.ops[3], graph.ops[4], graph.ops[6], graph.ops[8]
    assert (matmul.type, matmul.stage, matmul.control, matmul.name) == (
        "MatMul",
        "gpu",
        (1, 2),
        "dense/MatMul",
    )
    assert matmul.attributes == {"transpose_a": False, "transpose_b": True}
    assert (constant.constant, graph.ops[5].constant, constant.attributes) == ((0, 1), (-0.5,), {})
    assert loop.outputs == (Spec("int32", (2,)), Spec("float32", None))
    assert (loop.functions, loop.compress, loop.attributes["shapes"]) == (
        ("cond", "body of it"),
        2,
        ((2,), "?"),
    )
    assert (graph.ops[0].role, graph.ops[0].type, graph.ops[7].role) == (INPUT, "Placeholder", HOLDER)
    assert (feed.role, feed.name, feed.inputs) == (FEED, "grow", (Value(5),))
    assert graph.returns == (Value(6, 1), Value(3))
    assert graph.functions["cond"].ops[2].stage == "two words"
    assert graph.functions["body of it"].returns == (Value(0), Value(0))


def test_text_without_names_numbers_functions() -> None:
    text = to_text(from_text(GOLDEN), names=False)
    assert "While[f0, f1](%4, %3)" in text
    assert "func f1(%0)" in text
    assert "dense/MatMul" not in text
    assert "capture dense/kernel" in text


def test_op_numbers_with_gaps_are_renumbered() -> None:
    graph = from_text("%3 = input x float32[?]\n\n# a remark\n%9 = Neg(%3) float32[?] ^%3\nreturn %9")
    assert [(op.index, op.inputs, op.control) for op in graph.ops] == [(0, (), ()), (1, (Value(0),), (0,))]
    assert graph.returns == (Value(1),)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("%0 = Neg(%7) float32[]", "%7 is read, but no line defines it"),
        ("%0 = Neg\n%0 = Neg", "two ops have the same number"),
        ("%0 Neg", "cannot parse line 1: '%0 Neg'"),
        ("%0 = Neg {a=maybe}", "cannot parse attributes: 'a=maybe'"),
        ("%0 = Neg ;", "cannot parse line 1: '%0 = Neg ;'"),
        ("\nreturn %0 extra", "cannot parse line 2: 'return %0 extra'"),
    ],
)
def test_invalid_line_is_refused_with_its_reason(text: str, why: str) -> None:
    with pytest.raises(TextError) as caught:
        from_text(text)
    assert why in str(caught.value)


words = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S", "Zs"]), max_size=8)
numbers = st.integers() | st.floats()
attributes = st.recursive(
    st.booleans() | numbers | words, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5
)
specs = st.builds(
    Spec,
    st.sampled_from(["float32", "int64", "bool", "resource", "variant"]),
    st.none() | st.lists(st.none() | st.integers(0, 99), max_size=3).map(tuple),
)


@st.composite
def ops(draw: st.DrawFn, index: int, functions: tuple[str, ...]) -> Op:
    kind = draw(st.sampled_from(["Const", "MatMul", "Placeholder", "While", "_Arg"]))
    role = draw(st.sampled_from(["", "", INPUT, CAPTURE, HOLDER, FEED]))
    before = st.integers(0, index - 1) if index else st.nothing()
    given = {} if kind == "Const" else draw(st.dictionaries(words, attributes, max_size=3))
    return Op(
        index=index,
        type=kind,
        inputs=tuple(draw(st.lists(st.builds(Value, before, st.integers(0, 2)), max_size=3))) if index else (),
        outputs=tuple(draw(st.lists(specs, max_size=3))),
        control=tuple(draw(st.lists(before, max_size=2))) if index else (),
        name=draw(words),
        role=role,
        stage=draw(st.none() | words),
        compress=draw(st.none() | st.integers(-5, 5)),
        stateful=draw(st.booleans()),
        attributes=given,
        constant=draw(st.none() | st.lists(st.integers() | st.booleans(), max_size=3).map(tuple))
        if kind == "Const"
        else None,
        functions=tuple(draw(st.lists(st.sampled_from(functions), max_size=2))) if functions else (),
    )


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    names = tuple(draw(st.lists(words, max_size=3, unique=True)))
    functions: dict[str, Graph] = {}
    for number, name in enumerate(names):
        functions[name] = draw(bodies(names[:number], functions))
    return draw(bodies(names, functions))


@st.composite
def bodies(draw: st.DrawFn, names: tuple[str, ...], functions: Mapping[str, Graph]) -> Graph:
    made = tuple(draw(ops(index, names)) for index in range(draw(st.integers(0, 4))))
    places = st.integers(0, len(made) - 1) if made else st.nothing()
    arguments = tuple(draw(st.lists(places, max_size=2))) if made else ()
    returns = tuple(draw(st.lists(st.builds(Value, places, st.integers(0, 2)), max_size=2))) if made else ()
    return Graph(made, functions, arguments, returns)


@given(graphs())
def test_generated_graphs_round_trip(graph: Graph) -> None:
    parsed = from_text(to_text(graph))
    assert to_text(parsed) == to_text(graph)
    assert [list_fields(op) for op in parsed.ops] == [list_fields(op) for op in graph.ops]
    assert (parsed.arguments, parsed.returns) == (graph.arguments, graph.returns)
    for name, function in parsed.functions.items():
        assert [list_fields(op) for op in function.ops] == [list_fields(op) for op in graph.functions[name].ops]


def list_fields(op: Op) -> list[object]:
    """List the fields of an op as text, in which nan equals nan and true differs from 1."""
    values = [getattr(op, name) for name in Op.__dataclass_fields__ if name != "attributes"]
    return [repr(values), {key: repr(value) for key, value in op.attributes.items()}]

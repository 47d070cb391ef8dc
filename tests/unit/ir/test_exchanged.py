"""Bytes that clusters exchange once a step, for a program written by hand: a table that two stages look up."""

from __future__ import annotations

import pytest

from whale_nebula.ir.cut import Cut, Exchange
from whale_nebula.ir.program import GradientPart, Holder, Leaf, PartKey, Program, Request, Variable
from whale_nebula.ir.sizes import Exchanged
from whale_nebula.ir.text import from_text
from whale_nebula.spec import Spec, Value

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

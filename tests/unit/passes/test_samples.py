"""The ids for differences: their boundaries, their readers, and inputs without any."""

from dataclasses import replace

import pytest

from tests.unit.passes.examples import DESCENT, TWO_STAGES
from tests.unit.passes.programs import alone, apart, program_of
from whale_nebula.errors import AbsentInputError, OptionError
from whale_nebula.ir.cut import Cut
from whale_nebula.ir.program import Program
from whale_nebula.passes.pipeline import cut_program
from whale_nebula.passes.readings import check_here, readers_of, readings

A, B = "a/0", "b/0"
IDS = "%1 = input y float32[?,2]\n%50 = input ids int64[?]"


def program(ids: str = IDS, way: str = "int8, delta ids", text: str = TWO_STAGES + DESCENT) -> Program:
    """Two stages whose boundary is the product of the first, in a compress scope."""
    scoped = text.replace("%5 = MatMul(%0, %4) float32[?,8] @a", "%5 = MatMul(%0, %4) float32[?,8] @a compress=0")
    read = program_of(scoped.replace("%1 = input y float32[?,2]", ids))
    return replace(read, compressions=((way, "int8"),))


def plan(made: Program) -> Cut:
    return cut_program(made, apart(made))


def read(cut: Cut, worker: str) -> set[str]:
    return {cut.program.leaves[each.leaf].name for each in readings(cut, worker) if not each.rows}


def test_both_sides_of_a_boundary_read_its_ids() -> None:
    cut = plan(program())
    (boundary,) = cut.boundaries
    assert boundary.ids is not None and cut.program.leaf_ops[boundary.ids.op] == 2
    assert (read(cut, A), read(cut, B)) == ({"x", "ids"}, {"y", "ids"})
    assert readers_of(cut, ("x", "y", "ids")) == {"x": {A}, "y": {B}, "ids": {A, B}}


@pytest.mark.parametrize(("worker", "reader"), [(A, "stage 'a' of cluster 'a'"), (B, "stage 'b' of cluster 'b'")])
def test_a_side_that_is_not_given_them_is_refused(worker: str, reader: str) -> None:
    with pytest.raises(AbsentInputError, match=f"input 'ids' is None in this process, and {reader}"):
        check_here(plan(program()), worker, [2], lambda op: "")


def test_where_nothing_crosses_nobody_reads_them() -> None:
    made = program()
    cut = cut_program(made, alone(made))
    assert read(cut, "local/0") == {"x", "y"}


def test_without_differences_nobody_reads_them() -> None:
    cut = plan(program(way="int8"))
    assert cut.boundaries[0].ids is None and "ids" not in read(cut, A) | read(cut, B)


def test_a_step_without_a_gradient_reads_none() -> None:
    forward = TWO_STAGES[: TWO_STAGES.index("request")] + "returns %7\n"
    assert plan(program(text=forward)).boundaries[0].ids is None
    assert plan(program(text=forward, way="int8, delta idz")).boundaries[0].ids is None


def test_ids_may_lie_in_a_column() -> None:
    assert plan(program(IDS.replace("int64[?]", "int32[?,1]"))).boundaries[0].ids is not None


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(OptionError, match=r"nb.compress\(delta='idz'\) names no input of this step") as caught:
        plan(program(way="int8, delta idz"))
    assert caught.value.why == "its inputs are x, y, ids" and "'ids'" in caught.value.mend
    with pytest.raises(OptionError) as caught:
        plan(replace(program(way="int8, delta idz"), sites=("train.py:7",)))
    assert caught.value.where == "train.py:7"


def test_a_part_of_an_input_is_named_with_its_argument() -> None:
    with pytest.raises(OptionError, match="names no input") as caught:
        plan(program(IDS.replace("input ids", "input x/ids")))
    assert caught.value.mend == 'delta="x/ids"'


@pytest.mark.parametrize("spec", ["float32[?]", "int64[?,2]", "bool[?]", "int64[]"])
def test_what_holds_no_ids_is_refused(spec: str) -> None:
    with pytest.raises(OptionError, match=r"names an input .*, which holds no ids"):
        plan(program(IDS.replace("int64[?]", spec)))

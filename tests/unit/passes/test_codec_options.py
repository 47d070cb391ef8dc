"""The ids for differences: their boundaries, their readers, and inputs without any."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import whale_nebula as nb
from tests.unit.passes.examples import DESCENT, TWO_STAGES
from tests.unit.passes.programs import alone, apart, cut, program_of
from whale_nebula.errors import AbsentInputError, OptionError
from whale_nebula.ir.cut import Cut, Worker
from whale_nebula.ir.program import Program
from whale_nebula.passes.codec_options import lane_notes
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
    with pytest.raises(AbsentInputError, match=f"input 'ids' is None in this process, but {reader}"):
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
    with pytest.raises(OptionError, match=r"nb.compress\(delta='idz'\): the step has no input 'idz'") as caught:
        plan(program(way="int8, delta idz"))
    assert caught.value.why == "its inputs are x, y, ids" and "'ids'" in caught.value.mend
    with pytest.raises(OptionError) as caught:
        plan(replace(program(way="int8, delta idz"), sites=("train.py:7",)))
    assert caught.value.where == "train.py:7"


def test_a_part_of_an_input_is_named_with_its_argument() -> None:
    with pytest.raises(OptionError, match="the step has no input") as caught:
        plan(program(IDS.replace("input ids", "input x/ids")))
    assert caught.value.mend == 'delta="x/ids"'


@pytest.mark.parametrize("spec", ["float32[?]", "int64[?,2]", "bool[?]", "int64[]"])
def test_what_holds_no_ids_is_refused(spec: str) -> None:
    with pytest.raises(OptionError, match=r"input .* does not contain ids"):
        plan(program(IDS.replace("int64[?]", spec)))


# -------------------- A plan's note on a compress scope without effect, with its line
ROWS = np.ones((4, 8), "float32")


def line(function: Any, text: str) -> str:
    """Where a function says something."""
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{next(first + number for number, each in enumerate(lines) if text in each)}"


def notes(function: Any) -> list[str]:
    return [note for note in nb.plan(nb.function(function), ROWS).notes if "nb.compress at" in note]


def both(rows: Any) -> Any:
    with nb.stage(cluster="a"), nb.compress(fp16=True):
        hidden = 2.0 * rows
    with nb.stage(cluster="b"), nb.compress(int8=True):
        return hidden + 1.0


def consumer(rows: Any) -> Any:
    with nb.stage(cluster="a"):
        hidden = 2.0 * rows
    with nb.stage(cluster="b"), nb.compress(int8=True):
        return hidden + 1.0


def nested(rows: Any) -> Any:
    with nb.compress(int4=True):
        with nb.stage(cluster="a"), nb.compress(fp16=True):
            hidden = 2.0 * rows
        with nb.stage(cluster="b"):
            return hidden + 1.0


def last(rows: Any) -> Any:
    with nb.stage(cluster="a"), nb.compress(fp16=True):
        hidden = 2.0 * rows
    with nb.stage(cluster="b"):
        hidden = hidden + 1.0
        with nb.compress(bf16=True):
            return hidden * hidden


def test_one_around_the_consumer_gives_way_with_both_lines() -> None:
    there, here = line(both, "int8"), line(both, "fp16")
    assert notes(both) == [f"b0: nb.compress at {there} is ignored: the tensor is produced in nb.compress at {here}"]
    assert notes(nested) == [
        f"b0: nb.compress at {line(nested, 'int4')} is ignored: "
        f"the tensor is produced in nb.compress at {line(nested, 'fp16')}"
    ]


def test_one_that_nothing_crosses_under_says_so() -> None:
    where = line(last, "bf16")
    assert notes(last) == [f"nb.compress at {where} has no effect: it contains no tensor that crosses"]


def test_one_that_counts_says_nothing() -> None:
    assert notes(consumer) == []


# -------------------- Notes of a plan on codecs with state for each pair of workers
ALONE = (Worker("a/0", "a", (0,)), Worker("b/0", "b", (1,)))
SEVERAL = (*ALONE, Worker("b/1", "b", (1,)))


def notes_on_lanes(codecs: str, workers: tuple[Worker, ...]) -> list[str]:
    text = f"codecs {codecs}\nmicro 2\n" + TWO_STAGES.replace("@a\n%6", "@a compress=0\n%6") + DESCENT
    plan = cut(text, apart)
    return list(lane_notes(plan.program, plan.boundaries, workers))


@pytest.mark.parametrize("codec", ["none", "int8", "topk(0.5)", "fp16"])
def test_what_remembers_nothing_needs_no_note(codec: str) -> None:
    assert notes_on_lanes(f"{codec} {codec}", SEVERAL) == []


def test_a_basis_is_that_of_two_workers() -> None:
    assert notes_on_lanes("rank(4) none", ALONE) == []
    assert notes_on_lanes("rank(4) none", SEVERAL) == [
        "b0: each pair of workers has its own basis, so results depend on the number of workers"
    ]


def test_it_is_said_once_of_both_directions() -> None:
    assert len(notes_on_lanes("rank(4) rank(4)", SEVERAL)) == 1

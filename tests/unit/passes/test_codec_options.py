"""The ids for differences: their boundaries, their readers, and inputs without any."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import whale_nebula as nb
from tests.unit.passes.examples import DESCENT, TWO_STAGES
from tests.unit.passes.programs import assign_one_worker, assign_worker_per_stage, compile_text, parse_program
from whale_nebula.errors import AbsentInputError, OptionError
from whale_nebula.ir.cut import Cut, Worker
from whale_nebula.ir.program import Program
from whale_nebula.passes.codec_options import list_state_notes
from whale_nebula.passes.pipeline import cut_program
from whale_nebula.passes.readings import check_absent_inputs, find_readers, list_readings

WORKER_A, WORKER_B = "a/0", "b/0"
IDS = "%1 = input y float32[?,2]\n%50 = input ids int64[?]"


def make_program(ids: str = IDS, way: str = "int8, delta ids", text: str = TWO_STAGES + DESCENT) -> Program:
    """A program of two stages; the boundary between them is in a compress scope."""
    scoped = text.replace("%5 = MatMul(%0, %4) float32[?,8] @a", "%5 = MatMul(%0, %4) float32[?,8] @a compress=0")
    program = parse_program(scoped.replace("%1 = input y float32[?,2]", ids))
    return replace(program, compressions=((way, "int8"),))


def plan(program: Program) -> Cut:
    return cut_program(program, assign_worker_per_stage(program))


def read(cut: Cut, worker: str) -> set[str]:
    return {cut.program.leaves[each.leaf].name for each in list_readings(cut, worker) if not each.rows}


def test_both_ends_of_a_boundary_read_its_ids() -> None:
    cut = plan(make_program())
    (boundary,) = cut.boundaries
    assert boundary.ids is not None and cut.program.leaf_ops[boundary.ids.op] == 2
    assert (read(cut, WORKER_A), read(cut, WORKER_B)) == ({"x", "ids"}, {"y", "ids"})
    assert find_readers(cut, ("x", "y", "ids")) == {"x": {WORKER_A}, "y": {WORKER_B}, "ids": {WORKER_A, WORKER_B}}


@pytest.mark.parametrize(
    ("worker", "reader"), [(WORKER_A, "stage 'a' of cluster 'a'"), (WORKER_B, "stage 'b' of cluster 'b'")]
)
def test_absent_ids_are_refused(worker: str, reader: str) -> None:
    with pytest.raises(AbsentInputError, match=f"input 'ids' is None in this process, but {reader}"):
        check_absent_inputs(plan(make_program()), worker, [2], lambda op: "")


def test_ids_are_not_read_without_boundaries() -> None:
    program = make_program()
    cut = cut_program(program, assign_one_worker(program))
    assert read(cut, "local/0") == {"x", "y"}


def test_ids_are_not_read_without_delta() -> None:
    cut = plan(make_program(way="int8"))
    assert cut.boundaries[0].ids is None and "ids" not in read(cut, WORKER_A) | read(cut, WORKER_B)


def test_ids_are_not_read_in_a_step_without_gradients() -> None:
    forward = TWO_STAGES[: TWO_STAGES.index("request")] + "returns %7\n"
    assert plan(make_program(text=forward)).boundaries[0].ids is None
    assert plan(make_program(text=forward, way="int8, delta idz")).boundaries[0].ids is None


def test_ids_may_be_a_column() -> None:
    assert plan(make_program(IDS.replace("int64[?]", "int32[?,1]"))).boundaries[0].ids is not None


def test_unknown_ids_input_is_refused_with_the_input_names() -> None:
    with pytest.raises(OptionError, match=r"nb.compress\(delta='idz'\): the step has no input 'idz'") as caught:
        plan(make_program(way="int8, delta idz"))
    assert caught.value.why == "its inputs are x, y, ids" and "'ids'" in caught.value.mend
    with pytest.raises(OptionError) as caught:
        plan(replace(make_program(way="int8, delta idz"), compress_sites=("train.py:7",)))
    assert caught.value.where == "train.py:7"


def test_fix_names_the_component_of_a_nested_input() -> None:
    with pytest.raises(OptionError, match="the step has no input") as caught:
        plan(make_program(IDS.replace("input ids", "input x/ids")))
    assert caught.value.mend == 'delta="x/ids"'


@pytest.mark.parametrize("spec", ["float32[?]", "int64[?,2]", "bool[?]", "int64[]"])
def test_input_of_unsuitable_spec_is_refused_as_ids(spec: str) -> None:
    with pytest.raises(OptionError, match=r"input .* does not contain ids"):
        plan(make_program(IDS.replace("int64[?]", spec)))


# -------------------- A plan's note on a compress scope without effect, with its line
ROWS = np.ones((4, 8), "float32")


def find_line(function: Any, text: str) -> str:
    """Return the file and line of the first source line of a function that contains a text."""
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{next(first + number for number, each in enumerate(lines) if text in each)}"


def compress_notes(function: Any) -> list[str]:
    return [note for note in nb.plan(nb.function(function), ROWS).notes if "nb.compress at" in note]


def compress_producer_and_consumer(rows: Any) -> Any:
    with nb.stage(cluster="a"), nb.compress(fp16=True):
        hidden = 2.0 * rows
    with nb.stage(cluster="b"), nb.compress(int8=True):
        return hidden + 1.0


def compress_consumer(rows: Any) -> Any:
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


def compress_returned_tensor(rows: Any) -> Any:
    with nb.stage(cluster="a"), nb.compress(fp16=True):
        hidden = 2.0 * rows
    with nb.stage(cluster="b"):
        hidden = hidden + 1.0
        with nb.compress(bf16=True):
            return hidden * hidden


def test_compress_scope_of_the_consumer_is_reported_as_ignored() -> None:
    there, here = find_line(compress_producer_and_consumer, "int8"), find_line(compress_producer_and_consumer, "fp16")
    assert compress_notes(compress_producer_and_consumer) == [
        f"b0: nb.compress at {there} is ignored: the tensor is produced in nb.compress at {here}"
    ]
    assert compress_notes(nested) == [
        f"b0: nb.compress at {find_line(nested, 'int4')} is ignored: "
        f"the tensor is produced in nb.compress at {find_line(nested, 'fp16')}"
    ]


def test_compress_scope_without_a_crossing_tensor_is_reported() -> None:
    where = find_line(compress_returned_tensor, "bf16")
    assert compress_notes(compress_returned_tensor) == [
        f"nb.compress at {where} has no effect: it contains no tensor that crosses"
    ]


def test_effective_compress_scope_has_no_note() -> None:
    assert compress_notes(compress_consumer) == []


# -------------------- Notes of a plan on codecs with state for each pair of workers
ONE_READER = (Worker("a/0", "a", (0,)), Worker("b/0", "b", (1,)))
TWO_READERS = (*ONE_READER, Worker("b/1", "b", (1,)))


def list_lane_notes(codecs: str, workers: tuple[Worker, ...]) -> list[str]:
    text = f"codecs {codecs}\nmicro 2\n" + TWO_STAGES.replace("@a\n%6", "@a compress=0\n%6") + DESCENT
    plan = compile_text(text, assign_worker_per_stage)
    return list(list_state_notes(plan.program, plan.boundaries, workers))


@pytest.mark.parametrize("codec", ["none", "int8", "topk(0.5)", "fp16"])
def test_stateless_codec_has_no_lane_note(codec: str) -> None:
    assert list_lane_notes(f"{codec} {codec}", TWO_READERS) == []


def test_basis_with_several_readers_has_a_lane_note() -> None:
    assert list_lane_notes("rank(4) none", ONE_READER) == []
    assert list_lane_notes("rank(4) none", TWO_READERS) == [
        "b0: each pair of workers has its own basis, so results depend on the number of workers"
    ]


def test_lane_note_covers_both_directions_once() -> None:
    assert len(list_lane_notes("rank(4) rank(4)", TWO_READERS)) == 1

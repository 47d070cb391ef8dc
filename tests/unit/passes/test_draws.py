"""Seeds: writes that are a part of a draw, and draws that would repeat in each micro-batch."""

from dataclasses import replace

import pytest

from tests.unit.passes.programs import alone, program_of
from whale_nebula.errors import BatchCoupledError
from whale_nebula.ir.program import Program
from whale_nebula.passes.phases import FORWARD, UPDATE, split_parts
from whale_nebula.passes.pipeline import cut_program

DRAW = """
    stages a
    micro 3
    %0 = input x float32[?,4]
    %1 = capture seed resource[]
    %2 = ReadVariableOp(%1) int64[2] stateful @a
    %3 = Const {value=(1)} int64[]
    %4 = AddV2(%2, %3) int64[2]
    {before}
    %6 = Shape(%0) int32[2] @a
    %7 = Const {value=(1)} int32[]
    %8 = StatelessRandomUniformV2(%6, %2, %7) float32[?,4] @a
    %9 = Mul(%0, %8) float32[?,4] @a
    {after}
    returns %9
"""
WRITE = "%{0} = AssignVariableOp(%1, %4) stateful {1} ^%2"


def drawing(before: str = "", after: str = "") -> str:
    return DRAW.replace("{before}", before).replace("{after}", after)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (drawing(before=WRITE.format(5, "")), FORWARD),
        (drawing(before=WRITE.format(5, "@a")), FORWARD),
        (drawing(after=WRITE.format(10, "@a")), FORWARD),
        (drawing(after=WRITE.format(10, "")), UPDATE),
    ],
    ids=["before the draw", "in the stage", "in the stage after it", "after it"],
)
def test_a_write_belongs_to_a_draw_in_a_stage_or_before_it(text: str, kind: int) -> None:
    program = program_of(text)
    (write,) = (op.index for op in program.graph.ops if op.type == "AssignVariableOp")
    assert split_parts(program).part[write] % 3 == kind


@pytest.mark.parametrize("before", [WRITE.format(5, ""), WRITE.format(5, "@a")])
def test_a_seed_that_moves_on_draws_other_rows(before: str) -> None:
    program = program_of(drawing(before=before))
    assert not any("seed" in note for note in cut_program(program, alone(program)).notes)


def counted(delta: str) -> Program:
    """A program that draws from a generator, which moves on by this much."""
    text = drawing().replace("ReadVariableOp(%1) int64[2] stateful @a", "RngReadAndSkip(%1, %5) int64[2] stateful @a")
    lines = text.splitlines()
    return program_of("\n".join([*lines[:5], f"    %5 = {delta}", *lines[5:]]))


def test_a_generator_moves_on_by_what_each_micro_batch_draws() -> None:
    program = counted("Shape(%0) int32[2] @a")
    assert cut_program(program, alone(program)).phases
    program = counted("Const {value=(8, 4)} int32[2]")
    with pytest.raises(BatchCoupledError, match="its seed is the same"):
        cut_program(program, alone(program))


def test_replicas_in_several_processes_cannot_count_one_anothers_draws() -> None:
    program = counted("Shape(%0) int32[2] @a")
    (worker,) = alone(program)
    with pytest.raises(BatchCoupledError, match="each replica would count its own draws alone") as caught:
        cut_program(program, [worker, replace(worker, name="local/1")])
    assert "SeedGenerator" in caught.value.mend


@pytest.mark.parametrize("after", ["", WRITE.format(10, "")], ids=["never written", "written afterwards"])
def test_a_seed_that_all_micro_batches_share_is_refused(after: str) -> None:
    one = program_of(drawing(after=after).replace("micro 3", "micro 1"))
    assert cut_program(one, alone(one)).phases
    program = program_of(drawing(after=after))
    with pytest.raises(BatchCoupledError, match="its seed is the same") as caught:
        cut_program(program, alone(program))
    assert "SeedGenerator" in caught.value.mend

"""The verifier detects programs that a pass has damaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.passes.examples import GLOBAL_NORM, TWO_STAGES
from tests.unit.passes.programs import assign_one_worker, assign_worker_per_stage, parse_program
from whale_nebula.ir.graph import Graph, Op
from whale_nebula.passes.pipeline import Compilation, InvalidProgramError, find_faults, run_passes, verify
from whale_nebula.spec import Value

TEXT = """
    stages a b
    %0 = input x float32[?,4]
    %1 = capture w float32[4,4] @a
    %2 = MatMul(%0, %1) float32[?,4] @a
    %3 = Exp(%2) float32[?,4] @b
    returns %3
"""
CAPTURED = Compilation(parse_program(TEXT), tuple(assign_one_worker(parse_program(TEXT))))
COMPILED = run_passes(CAPTURED)
WRITTEN = parse_program("""
    stages a
    %0 = input x float32[?]
    %1 = capture w resource[]
    %2 = ReadVariableOp(%1) float32[] stateful @a
    %3 = Mul(%0, %2) float32[?] @a
    %4 = ReadVariableOp(%1) float32[] stateful
    %5 = AssignAddVariableOp(%1, %4) stateful ^%2 ^%4
    returns %3
""")


def replace_op(number: int, **changed: object) -> Compilation:
    ops: list[Op] = list(CAPTURED.program.graph.ops)
    ops[number] = replace(ops[number], **changed)
    return replace(CAPTURED, program=replace(CAPTURED.program, graph=Graph(tuple(ops))))


def replace_forward(**changed: object) -> Compilation:
    cut = COMPILED.require("cut")
    stage = cut.phases[0].stages[0]
    stage = replace(stage, forward=replace(stage.forward, **changed))
    return replace(COMPILED, cut=replace(cut, phases=(replace(cut.phases[0], stages=(stage,)),)))


def write_before_reading() -> Compilation:
    compilation = run_passes(Compilation(WRITTEN, tuple(assign_one_worker(WRITTEN))))
    cut = compilation.require("cut")
    ((worker, (update,)),) = cut.phases[0].updates.items()
    rounds = replace(update, ops=(5,), feeds=(Value(4),)), replace(update, ops=(4,), round=1)
    return replace(compilation, cut=replace(cut, phases=(replace(cut.phases[0], updates={worker: rounds}),)))


def remove_first_stage() -> Compilation:
    cut = COMPILED.require("cut")
    phase = replace(cut.phases[0], stages=cut.phases[0].stages[1:])
    return replace(COMPILED, cut=replace(cut, phases=(phase,), boundaries=()))


def read_gradient_of_another_worker() -> Compilation:
    program = parse_program(TWO_STAGES + GLOBAL_NORM)
    compilation = run_passes(Compilation(program, tuple(assign_worker_per_stage(program))))
    cut = compilation.require("cut")
    (first, *rest), _ = cut.phases[0].updates.values()
    foreign = next(each.values for each in program.requests[0].holders if each.values[0] not in first.feeds)
    updates = {**cut.phases[0].updates, first.worker: (replace(first, feeds=(*first.feeds, *foreign)), *rest)}
    return replace(compilation, cut=replace(cut, phases=(replace(cut.phases[0], updates=updates),)))


INVALID_BY_FAULT: dict[str, Callable[[], Compilation]] = {
    "op 3 Exp reads %9, which is not computed before it": lambda: replace_op(3, inputs=(Value(9),)),
    "op 2 MatMul reads %3, which is not computed before it": lambda: replace_op(2, inputs=(Value(0), Value(3))),
    "op 3 has the number 7": lambda: replace_op(3, index=7),
    "op 3 is labelled with stage 5 of 2": lambda: replace(CAPTURED, program=replace(CAPTURED.program, labels={3: 5})),
    "%9 is named, but does not exist": lambda: replace(
        CAPTURED, program=replace(CAPTURED.program, returns=(Value(9),))
    ),
    "the forward of stage 0 in phase 0 on local/0 reads %0 for op 2": lambda: replace_forward(feeds=()),
    "the forward of stage 0 in phase 0 on local/0 returns %3": lambda: replace_forward(fetches=(Value(3),)),
    "the forward of stage 0 in phase 0 on mars/0 runs on mars/0, which does not exist": lambda: replace_forward(
        worker="mars/0"
    ),
    "op 5 runs in round 0 on local/0, but follows op 4": write_before_reading,
    "the forward of stage 1 in phase 0 on local/0 is fed %2, which local/0 does not have": remove_first_stage,
    "which local/0 does not have, with a process for each cluster": lambda: replace(
        COMPILED, divided=remove_first_stage().cut
    ),
    "the update in phase 0 on a/0 is fed %": read_gradient_of_another_worker,
    "boundary 0 goes from stage 0 to (0,)": lambda: replace(
        COMPILED,
        cut=replace(
            COMPILED.require("cut"), boundaries=(replace(COMPILED.require("cut").boundaries[0], destinations=(0,)),)
        ),
    ),
}


@pytest.mark.parametrize("fault", INVALID_BY_FAULT)
def test_invalid_program_is_refused_with_its_fault(fault: str) -> None:
    with pytest.raises(InvalidProgramError, match="after pass 'mine' the program is not valid") as caught:
        verify(INVALID_BY_FAULT[fault](), "mine")
    assert fault in str(caught.value)


def test_captured_and_compiled_programs_are_valid() -> None:
    assert [*find_faults(CAPTURED), *find_faults(COMPILED)] == []

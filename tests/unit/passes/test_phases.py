"""When each op runs: once before the micro-batches, for each of them, or once after; and in which phase.

A remark in a case of `phases.txt` gives the expected value of a field of `Parts` (`# parts.phase_of 0 1`), or the ops
that wait for merged values (`# parts.once 7`).
"""

import re
from collections.abc import Callable, Mapping

import pytest

from tests.unit.passes.examples import TWO_DENSE
from tests.unit.passes.programs import check_op_texts, list_cases, parse_program
from whale_nebula.ir.program import Program
from whale_nebula.passes.phases import FORWARD, UPDATE, Parts, split_parts

KINDS = ("prologue", "forward", "update")


def describe_part(parts: Parts, op: int) -> str:
    """Describe the part of an op; `-` is an op that runs wherever it is read."""
    if op not in parts.part:
        return "-"
    phase, kind = divmod(parts.part[op], 3)
    return KINDS[kind] if parts.phases == 1 else f"{KINDS[kind]} {phase}"


def describe_field(value: object) -> str:
    """Format a field of `Parts` as in a remark."""
    if isinstance(value, Mapping):
        return " ".join(f"{key}:{each}" for key, each in value.items())
    listed = sorted(value) if isinstance(value, frozenset) else value if isinstance(value, tuple) else [value]
    return " ".join(map(str, listed))


@pytest.mark.parametrize("text", list_cases("phases"))
def test_ops_are_placed_in_the_expected_part(text: str) -> None:
    fields = dict(re.findall(r"^# parts\.(\w+) (.*)$", text, re.MULTILINE))
    once = frozenset(map(int, fields.pop("once", "").split()))
    parts = split_parts(parse_program(text), once)
    check_op_texts(text, lambda program: lambda op: describe_part(parts, op))
    assert {name: describe_field(getattr(parts, name)) for name in fields} == fields


# -------------------- A loss with a weight penalty of another stage
PENALIZED_LOSS = (
    TWO_DENSE
    + """\
%8 = Mean(%6, %7) float32[]                            => forward
%9 = ReadVariableOp(%1) float32[4,8] stateful          => any time
%10 = L2Loss(%9) float32[]                             => any time
%11 = AddV2(%8, %10) float32[]                         => update
request of %11 for %1, %2
%12 = Const {value=(1)} float32[]
%13 = MatMul(%4, %6) {transpose_a=true} float32[8,2]
part b: %13 for %2
%14 = MatMul(%6, %5) {transpose_b=true} float32[?,8]
flow b: %14 for %4
%15 = feed arrival float32[?,8]
arrival %15 of %4
%16 = MatMul(%0, %15) {transpose_a=true} float32[4,8]
%17 = Mul(%9, %12) float32[4,8]
%18 = AddV2(%16, %17) float32[4,8]
part a: %18 for %1
end
%19 = holder ga float32[4,8]
gradient %19 of %1
%20 = holder gb float32[8,2]
gradient %20 of %2
%21 = AssignSubVariableOp(%1, %19) stateful
%22 = AssignSubVariableOp(%2, %20) stateful
returns %11
"""
)


def describe_program(program: Program) -> Callable[[int], str]:
    parts = split_parts(program)
    words = {FORWARD: "forward", UPDATE: "update"}
    return lambda op: words.get(parts.part[op], "prologue") if op in parts.part else "any time"


def test_penalty_sum_is_deferred_to_the_update() -> None:
    check_op_texts(PENALIZED_LOSS, describe_program)


@pytest.mark.parametrize(
    "reader",
    [
        pytest.param("%12 = OnesLike(%11) float32[]", id="read by its gradient"),
        pytest.param("%12 = Const {value=(1)} float32[]\narrival %15 of %10", id="its gradient arrives from b"),
    ],
)
def test_penalty_sum_read_before_the_update_is_not_deferred(reader: str) -> None:
    text = PENALIZED_LOSS.replace("%12 = Const {value=(1)} float32[]", reader.partition("\n")[0])
    text = text.replace("arrival %15 of %4", f"arrival %15 of %4\n{reader.partition(chr(10))[2]}")
    parts = split_parts(parse_program(text))
    assert parts.part[11] == FORWARD
    assert not parts.late.sums


def test_penalty_of_the_same_stage_stays_in_the_forward() -> None:
    own = PENALIZED_LOSS.replace("%9 = ReadVariableOp(%1) float32[4,8]", "%9 = ReadVariableOp(%2) float32[8,2]")
    assert split_parts(parse_program(own)).part[11] == FORWARD


def test_readers_of_a_deferred_sum_are_deferred() -> None:
    scaled = PENALIZED_LOSS.replace("request of %11", "%30 = Neg(%11) float32[]\nrequest of %30").replace(
        "returns %11", "returns %30"
    )
    parts = split_parts(parse_program(scaled))
    assert (sorted(parts.late.sums), sorted(parts.late.terms)) == ([11, 12], [10])
    assert {parts.part[op] for op in parts.late.sums} == {UPDATE}

"""When each op runs: once before the micro-batches, for each of them, or once after; and in which phase.

Beside what each op is, a case of `phases.txt` may say in a remark what `Parts` holds (`# parts.phase_of 0 1`), and
which ops wait for merged values (`# parts.once 7`).
"""

import re
from collections.abc import Mapping

import pytest

from tests.unit.passes.programs import cases, check, program_of
from whale_nebula.passes.phases import Parts, split_parts

KINDS = ("prologue", "forward", "update")


def words(parts: Parts, op: int) -> str:
    """`-` is any time: the op runs wherever it is read."""
    if op not in parts.part:
        return "-"
    phase, kind = divmod(parts.part[op], 3)
    return KINDS[kind] if parts.phases == 1 else f"{KINDS[kind]} {phase}"


def describe(value: object) -> str:
    """A field of `Parts` as a remark says it."""
    if isinstance(value, Mapping):
        return " ".join(f"{key}:{each}" for key, each in value.items())
    listed = sorted(value) if isinstance(value, frozenset) else value if isinstance(value, tuple) else [value]
    return " ".join(map(str, listed))


@pytest.mark.parametrize("text", cases("phases"))
def test_each_op_has_its_time(text: str) -> None:
    said = dict(re.findall(r"^# parts\.(\w+) (.*)$", text, re.MULTILINE))
    once = frozenset(map(int, said.pop("once", "").split()))
    parts = split_parts(program_of(text), once)
    check(text, lambda program: lambda op: words(parts, op))
    assert {name: describe(getattr(parts, name)) for name in said} == said

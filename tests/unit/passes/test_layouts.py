"""Completion of layouts: the graphs of `layouts.txt`, and behind `=>` the layouts of what each op makes and what
crosses before it.

Remarks say which variables are split along which axes (`# split 1:1`), over how many devices (`# count 3`), what must
be whole at the end (`# wholes 17`); and what crosses (`# crosses`), which ops run together (`# together`), the notes.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace

import pytest

from tests.unit.passes.programs import cases
from tests.unit.passes.rules.states import batched, read
from whale_nebula.ir.layout import SPLIT, Layout, Layouts, count_bytes
from whale_nebula.passes.completion import Completion, Question, complete_layouts
from whale_nebula.passes.facts import Step
from whale_nebula.passes.rules import fold
from whale_nebula.spec import Value


def remarks(text: str) -> dict[str, str]:
    return dict(re.findall(r"^# (split|count|wholes|crosses|together|notes) (.*)$", text, re.MULTILINE))


def ask(text: str) -> Question:
    """What is to be completed of a graph."""
    graph, said = read(text), remarks(text)
    split = dict(map(int, each.split(":")) for each in said["split"].split())
    variables = {op: Layout(SPLIT, axis) for op, axis in split.items()}
    ends = [Value(int(op)) for op in said.get("wholes", "").split()]
    folds = fold(graph, batched(graph)).folds
    count = int(said.get("count", 2))
    return Question(graph, range(len(graph)), count, variables, folds=folds, wholes=ends)


def complete(text: str) -> Layouts:
    return complete_layouts(ask(text))


@pytest.mark.parametrize("text", cases("layouts"))
def test_each_value_has_the_layout_that_is_said_of_it(text: str) -> None:
    found, graph, said = complete(text), read(text), remarks(text)
    lines = [line for line in textwrap.dedent(text).splitlines() if line.startswith("%")]
    for op, line in zip(graph.ops, lines, strict=True):
        crossing = [f"{each.value} {each.kind}" for each in found.reshards.get(op.index, ())]
        got = ", ".join([*(str(found.layout(value)) for value in op.values), *crossing])
        expected = line.partition("=>")[2].strip() or got
        assert f"%{op.index} {op.type} => {got}" == f"%{op.index} {op.type} => {expected}"
    assert ", ".join(f"{each.value} {each.kind}" for each in found.collectives) == said.get("crosses", "")
    assert found.together == set(map(int, said.get("together", "").split()))
    assert "; ".join(found.notes) == said.get("notes", "")


def test_what_crosses_has_its_bytes() -> None:
    (pair, *_) = (case.values[0] for case in cases("layouts"))
    assert [each.nbytes for each in complete(pair).collectives] == [count_bytes("all-reduce", 32 * 16 * 4, 2)] * 2


@pytest.mark.parametrize("text", cases("layouts"))
def test_what_a_change_concerns_is_visited_again(text: str) -> None:
    """Nothing is divided first, then all that is, one variable after the other."""
    question = ask(text)
    run = Completion.start(replace(question, variables={}))
    for variable, layout in question.variables.items():
        run = run.follow(Step({variable: layout}, {}))
    assert run.list_layouts() == Completion.start(question).list_layouts()

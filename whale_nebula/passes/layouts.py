"""Complete layouts: from what a few variables are split along to the layout of every tensor of a stage.

Ops are visited in an order in which everything that an op reads comes before it: forward, backward, update
(`passes.completion`). Variables of which nothing was said follow: one that is only ever read, or written, in pieces is
held in pieces, and what that changes is completed anew until nothing changes.

What no rule knows is run whole on every device, and a note says at which op.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from whale_nebula.ir.layout import WHOLE_LAYOUT, Layouts
from whale_nebula.passes.completion import Completion, Question
from whale_nebula.passes.pieces import Step, find_pieces, find_wanted

_NUMBERS = 64
"""Bytes that may cross in addition, of norms and the like, where something is made in pieces instead of whole."""


def complete_layouts(question: Question) -> Layouts:
    """The layouts of all values. Variables of which nothing was said are held in the pieces that some reader or writer
    takes, and what is made to be cut is made in pieces, where no more bytes cross then: all of it that can be, else one
    after the other, until nothing changes.
    """
    found = _follow_pieces(question)
    apart = _follow_pieces(replace(question, row_ends=())) if question.row_ends else found
    return min(apart, found, key=lambda each: each.nbytes)


def _follow_pieces(question: Question) -> Layouts:
    run = Completion.start(question)
    while True:
        steps = list(_list_steps(run))
        for step in [Step.join(steps), *steps] if len(steps) > 1 else steps:
            other = run.follow(step)
            if other.nbytes <= run.nbytes + (_NUMBERS if step.wanted else 0):
                run = other
                break
        else:
            return run.list_layouts()


def _list_steps(run: Completion) -> Iterator[Step]:
    """What could be held, or made, in pieces beside what is already."""
    known = {*run.question.settled, *run.variables}
    for variable, layout in find_pieces(run.question.graph, run.every).items():
        if variable not in known:
            yield Step({variable: layout}, {})
    for step in find_wanted(run.question.facts, run.every, known, lambda value: run.layout(value) == WHOLE_LAYOUT):
        if not step.wanted.keys() <= run.wanted.keys():
            yield step

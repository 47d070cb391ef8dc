"""Notes of a plan on codecs with state for each pair of workers."""

from __future__ import annotations

import pytest

from tests.unit.passes.examples import DESCENT, TWO_STAGES
from tests.unit.passes.programs import apart, cut
from whale_nebula.ir.cut import Worker
from whale_nebula.passes.codec_options import lane_notes

ALONE = (Worker("a/0", "a", (0,)), Worker("b/0", "b", (1,)))
SEVERAL = (*ALONE, Worker("b/1", "b", (1,)))


def notes(codecs: str, workers: tuple[Worker, ...]) -> list[str]:
    text = f"codecs {codecs}\nmicro 2\n" + TWO_STAGES.replace("@a\n%6", "@a compress=0\n%6") + DESCENT
    plan = cut(text, apart)
    return list(lane_notes(plan.program, plan.boundaries, workers))


@pytest.mark.parametrize("codec", ["none", "int8", "topk(0.5)", "fp16"])
def test_what_remembers_nothing_needs_no_note(codec: str) -> None:
    assert notes(f"{codec} {codec}", SEVERAL) == []


def test_a_basis_is_that_of_two_workers() -> None:
    assert notes("rank(4) none", ALONE) == []
    assert notes("rank(4) none", SEVERAL) == [
        "b0: each pair of workers has a basis of its own, so results depend on how many workers there are"
    ]


def test_it_is_said_once_of_both_directions() -> None:
    assert len(notes("rank(4) rank(4)", SEVERAL)) == 1

"""Plans as text and as a flowchart, against golden files; the plans themselves are those of real traces."""

import difflib
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import whale_nebula as nb
from tests.unit.ir.traced import PLANS

GOLDEN = Path(__file__).parents[2] / "golden" / "plans"


@cache
def plan(name: str) -> nb.Plan:
    return PLANS[name]()


def check(name: str, text: str) -> None:
    path = GOLDEN / name
    golden = path.read_text("utf-8").splitlines() if path.exists() else []
    assert text.splitlines() == golden, f"{name}\n" + "\n".join(difflib.ndiff(golden, text.splitlines()))


def without_digests(text: str) -> str:
    """Digests name the versions, and programs change with those."""
    return re.sub(r"\b[0-9a-f]{12}\b", "0" * 12, text)


@pytest.mark.parametrize("name", PLANS)
def test_the_text_is_the_golden_one(name: str) -> None:
    check(f"{name}.txt", without_digests(plan(name).to_text()))


@pytest.mark.parametrize("name", ["skipping", "adversaries"])
def test_the_flowchart_is_the_golden_one(name: str) -> None:
    check(f"{name}.mmd", plan(name).to_mermaid())


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(PLANS)


@pytest.mark.parametrize("name", PLANS)
def test_the_text_fits_a_page(name: str) -> None:
    assert max(map(len, plan(name).to_text().splitlines())) <= 110


def test_many_micro_batches_are_drawn_in_part() -> None:
    drawn = replace(plan("skipping"), micro_batch=40, rows=(1,) * 40).to_text()
    assert "40 micro-batches of 1 row (40 in the example)" in drawn
    assert "(the first 12 of 40 micro-batches)" in drawn


def test_fewer_rows_than_micro_batches_are_said() -> None:
    assert "1 micro-batch (of 8 asked for) of 1 row," in replace(plan("tied"), micro_batch=8, rows=(1,)).to_text()


def test_many_inputs_are_shortened() -> None:
    wide = plan("inference")
    stages = {name: replace(stage, inputs=tuple("abcdefg")) for name, stage in wide.stages.items()}
    assert "  a, b, c, d, 3 more  " in replace(wide, stages=stages).to_text()


def test_what_only_a_step_knows_is_said_so() -> None:
    given = plan("inference")
    ragged = replace(given.boundaries[0], shape=(None, None), bytes=None)
    assert "as many bytes as it has" in replace(given, boundaries=(ragged,)).to_text()


def test_notes_and_limits_are_said() -> None:
    text = replace(plan("inference"), notes=("rows are coupled",), in_flight=3).to_text()
    assert "notes\n  rows are coupled\n" in text
    assert "schedule eager-1f1b, at most 3 in flight" in text


def test_names_that_mermaid_would_misread_are_spelled_out() -> None:
    given = plan("inference")
    stage = replace(given.stages["gpu"], name="a-b", cluster='say "x"')
    chart = replace(given, stages={"a-b": stage}, boundaries=()).to_mermaid()
    assert 'stage_a_2d_b["stage a-b<br/>' in chart
    assert '["cluster say #quot;x#quot;"]' in chart

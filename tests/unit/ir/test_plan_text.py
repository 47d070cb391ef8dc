"""Plans as text and as a flowchart, against golden files; the plans themselves are those of real traces."""

import re
from dataclasses import replace
from functools import cache

import pytest

import whale_nebula as nb
from tests.golden.files import FOLDER, check_golden
from tests.unit.ir.traced import PLANS


@cache
def plan(name: str) -> nb.Plan:
    return PLANS[name]()


def without_digests(text: str) -> str:
    """Digests name the versions, and programs change with those."""
    return re.sub(r"\b[0-9a-f]{12}\b", "0" * 12, text)


@pytest.mark.parametrize("name", PLANS)
def test_the_text_is_the_golden_one(name: str, request: pytest.FixtureRequest) -> None:
    check_golden(request, f"plans/{name}.txt", without_digests(plan(name).to_text()))


@pytest.mark.parametrize("name", ["skipping", "adversaries", "divided"])
def test_the_flowchart_is_the_golden_one(name: str, request: pytest.FixtureRequest) -> None:
    check_golden(request, f"plans/{name}.mmd", plan(name).to_mermaid())


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in (FOLDER / "plans").iterdir()} == set(PLANS)


@pytest.mark.parametrize("name", PLANS)
def test_the_text_fits_a_page(name: str) -> None:
    assert max(map(len, plan(name).to_text().splitlines())) <= 110


def test_its_repr_is_a_line() -> None:
    said = re.sub(r"\b[0-9a-f]{12}\b", "", repr(plan("tied")))
    assert re.fullmatch(r"<plan  of \w+: \d stages? and \d boundar(y|ies); print\(\) tells it>", said), said


def test_many_micro_batches_are_drawn_in_part() -> None:
    drawn = replace(plan("skipping"), micro_batch=40, rows=(1,) * 40).to_text()
    assert "40 micro-batches of 1 row (40 in the example)" in drawn
    assert "(the first 12 of 40 micro-batches)" in drawn


def test_fewer_rows_than_micro_batches_are_said() -> None:
    assert "1 micro-batch (of 8 asked for) of 1 row," in replace(plan("tied"), micro_batch=8, rows=(1,)).to_text()


def over_a_line(name: str) -> nb.Plan:
    """The plan as it would be over lines of 60 Mbit/s and 20 ms."""
    given = plan(name)
    links = {key: replace(link, line="60mbit, 20ms", rate=60e6, delay=0.02) for key, link in given.links.items()}
    return replace(given, links=links, exchange_seconds=0.02)


def test_the_busiest_line_is_said_in_one_reading() -> None:
    text = over_a_line("tied").to_text()
    held = {name: link.seconds for name, link in over_a_line("tied").links.items()}
    busiest = max(held, key=held.__getitem__)
    assert re.search(rf"{busiest} is the busiest line: a step holds it for \S+ .s, and cannot be shorter than", text)
    assert re.search(r"in less time waits for the line:\n    \w+ above \S+ .FLOP/s, \w+ above \S+ .FLOP/s\n", text)


@pytest.mark.parametrize("name", PLANS)
def test_over_a_line_every_message_is_drawn_and_the_page_is_kept_to(name: str) -> None:
    given = over_a_line(name)
    text = given.to_text()
    assert max(map(len, text.splitlines())) <= 110
    drawn = text[text.index("\nschedule\n") :]
    crossing = [(each.source, name) for each in given.boundaries for name in each.destinations]
    for key in {"->".join(given.stages[name].cluster for name in pair) for pair in crossing} & given.links.keys():
        rows = "".join(re.findall(rf"^ +{key} +\|(.*)\|$", drawn, re.MULTILINE))
        assert all(str(number) in rows for number in range(len(given.rows))), (key, drawn)


def test_of_a_line_that_may_carry_less_nothing_is_concluded() -> None:
    given = over_a_line("tied")
    text = replace(given, links={name: replace(link, at_most=True) for name, link in given.links.items()}).to_text()
    assert re.search(r"is the busiest line: a step holds it for at most \S+ .s\n", text)
    assert "cannot be shorter" not in text and "FLOP/s," not in text[text.index("\nlinks") : text.index("\nschedule")]


def test_how_a_boundary_crosses_is_said_beneath_in_lines_of_a_page() -> None:
    given = plan("skipping")
    way = "rank(8) >> int4, from step 100, ramp fp16 int8 below 0.05, mask, zstd"
    (first, *rest) = given.boundaries
    text = replace(given, boundaries=(replace(first, codec=way, backward_codec="int8, mask"), *rest)).to_text()
    assert "at most 320 B as rank(8) >> int4" in text
    assert "b0: from step 100 on, first fp16, then int8, each until the next one loses at most 5 %" in text
    assert "b0: its gradient only marked rows" in text
    assert max(len(line) for line in text.splitlines() if "b0: " in line or "zstd" in line) <= 110


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

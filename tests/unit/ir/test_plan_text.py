"""Plans as text and as a flowchart, against golden files; the plans themselves are those of real traces."""

import difflib
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

import whale_nebula as nb
from tests.golden.files import FOLDER, check_golden
from tests.unit.ir.traced import PLANS, plan


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
    assert re.fullmatch(r"<plan  of \w+: \d stages? and \d boundar(y|ies); print\(\) shows it>", said), said


def over_a_line(name: str) -> nb.Plan:
    """The plan as it would be over lines of 60 Mbit/s and 20 ms."""
    given = plan(name)
    links = {key: replace(link, line="60mbit, 20ms", rate=60e6, delay=0.02) for key, link in given.links.items()}
    return replace(given, links=links, exchange_seconds=0.02)


def variants() -> Iterator[tuple[str, nb.Plan, nb.Plan]]:
    """Plans as they are, and with something in them that no trace has."""
    skipping, tied, alone = plan("skipping"), plan("tied"), plan("inference")
    yield "many micro-batches are drawn in part", skipping, replace(skipping, micro_batch=40, rows=(1,) * 40)
    yield "fewer rows than micro-batches", tied, replace(tied, micro_batch=8, rows=(1,))
    line = over_a_line("tied")
    yield "over a line: the busiest", tied, line
    at_most = {name: replace(link, at_most=True) for name, link in line.links.items()}
    yield "of a line that may carry less nothing is concluded", line, replace(line, links=at_most)
    way = "rank(8) >> int4, from step 100, ramp fp16 int8 below 0.05, mask, zstd"
    coded = replace(skipping.boundaries[0], codec=way, backward_codec="int8, mask")
    yield "how a boundary crosses", skipping, replace(skipping, boundaries=(coded, *skipping.boundaries[1:]))
    wide = {name: replace(stage, inputs=tuple("abcdefg")) for name, stage in alone.stages.items()}
    yield "many inputs are shortened", alone, replace(alone, stages=wide)
    ragged = replace(alone.boundaries[0], shape=(None, None), bytes=None)
    yield "what only a step knows", alone, replace(alone, boundaries=(ragged,))
    yield "a note and a limit", alone, replace(alone, notes=("rows are coupled",), in_flight=3)


def test_what_is_said_of_variants_is_golden(request: pytest.FixtureRequest) -> None:
    said = ["# Texts of plans: the lines in which a variant differs from its plan."]
    for title, before, after in variants():
        texts = [without_digests(each.to_text()).splitlines() for each in (before, after)]
        changed = [each for each in difflib.ndiff(*texts) if each[0] in "-+"]
        said += ["", f"== {title}", *(each.rstrip() for each in changed)]
    check_golden(request, "plan_variants.txt", "\n".join(said) + "\n")


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


def test_names_that_mermaid_would_misread_are_spelled_out() -> None:
    given = plan("inference")
    stage = replace(given.stages["gpu"], name="a-b", cluster='say "x"')
    chart = replace(given, stages={"a-b": stage}, boundaries=()).to_mermaid()
    assert 'stage_a_2d_b["stage a-b<br/>' in chart
    assert '["cluster say #quot;x#quot;"]' in chart

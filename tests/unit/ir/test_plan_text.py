"""Plans as text, as a flowchart and as a page; the plans themselves are those of real traces.

The text and the flowchart are held against golden files. The page is complete, well-formed, safe, small, and without
overlaps.
"""

import difflib
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

import whale_nebula as nb
from tests.golden.files import FOLDER, check_golden
from tests.unit.ir.example_plans import PLANS, plan
from whale_nebula.plan.html.graph import WIDTH, layout
from whale_nebula.plan.records import PlanLayer, PlanStage, PlanTied

VOID_ELEMENTS = {"meta", "input", "br", "link"}


def mask_digests(text: str) -> str:
    """Replace digests by zeros, as they depend on versions."""
    return re.sub(r"\b[0-9a-f]{12}\b", "0" * 12, text)


@pytest.mark.parametrize("name", PLANS)
def test_plan_text_matches_the_golden_file(name: str, request: pytest.FixtureRequest) -> None:
    check_golden(request, f"plans/{name}.txt", mask_digests(plan(name).to_text()))


@pytest.mark.parametrize("name", ["skipping", "adversaries", "divided"])
def test_flowchart_matches_the_golden_file(name: str, request: pytest.FixtureRequest) -> None:
    check_golden(request, f"plans/{name}.mmd", plan(name).to_mermaid())


def test_plan_golden_files_all_belong_to_a_plan() -> None:
    assert {path.stem for path in (FOLDER / "plans").iterdir()} == set(PLANS)


@pytest.mark.parametrize("name", PLANS)
def test_plan_text_has_at_most_110_columns(name: str) -> None:
    assert max(map(len, plan(name).to_text().splitlines())) <= 110


def test_plan_repr_is_one_line() -> None:
    text = re.sub(r"\b[0-9a-f]{12}\b", "", repr(plan("tied")))
    assert re.fullmatch(r"<plan  of \w+: \d stages? and \d boundar(y|ies); print\(\) shows it>", text), text


def assume_slow_links(name: str) -> nb.Plan:
    """Return a plan with links of 60 Mbit/s and 20 ms."""
    given = plan(name)
    links = {key: replace(link, line="60mbit, 20ms", rate=60e6, delay=0.02) for key, link in given.links.items()}
    return replace(given, links=links, exchange_seconds=0.02)


def list_variants() -> Iterator[tuple[str, nb.Plan, nb.Plan]]:
    """List plans, each with a variant that no trace has."""
    skipping, tied, alone = plan("skipping"), plan("tied"), plan("inference")
    yield "many micro-batches are drawn in part", skipping, replace(skipping, micro_batch=40, rows=(1,) * 40)
    yield "fewer rows than micro-batches", tied, replace(tied, micro_batch=8, rows=(1,))
    line = assume_slow_links("tied")
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


def test_plan_texts_of_variants_match_the_golden_file(request: pytest.FixtureRequest) -> None:
    lines = ["# Texts of plans: the lines in which a variant differs from its plan."]
    for title, before, after in list_variants():
        texts = [mask_digests(each.to_text()).splitlines() for each in (before, after)]
        changed = [each for each in difflib.ndiff(*texts) if each[0] in "-+"]
        lines += ["", f"== {title}", *(each.rstrip() for each in changed)]
    check_golden(request, "plan_variants.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("name", PLANS)
def test_schedule_over_a_slow_link_draws_all_messages(name: str) -> None:
    given = assume_slow_links(name)
    text = given.to_text()
    assert max(map(len, text.splitlines())) <= 110
    drawn = text[text.index("\nschedule\n") :]
    crossing = [(each.source, name) for each in given.boundaries for name in each.destinations]
    for key in {"->".join(given.stages[name].cluster for name in pair) for pair in crossing} & given.links.keys():
        rows = "".join(re.findall(rf"^ +{key} +\|(.*)\|$", drawn, re.MULTILINE))
        assert all(str(number) in rows for number in range(len(given.rows))), (key, drawn)


def test_flowchart_escapes_names() -> None:
    given = plan("inference")
    stage = replace(given.stages["gpu"], name="a-b", cluster='say "x"')
    chart = replace(given, stages={"a-b": stage}, boundaries=()).to_mermaid()
    assert 'stage_a_2d_b["stage a-b<br/>' in chart
    assert '["cluster say #quot;x#quot;"]' in chart


# ------------------------------------------------------------------ the page
class Page(HTMLParser):
    """A parsed page: checks that elements are closed in order, and collects their content."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID_ELEMENTS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.mark.parametrize("name", PLANS)
def test_html_is_well_formed_and_complete(name: str) -> None:
    given = plan(name)
    page = Page(given.to_html())
    assert len(page.ids) == len(set(page.ids))
    for number, stage in enumerate(given.stages.values()):
        assert f"panel-stage-{number}" in page.ids
        assert stage.name in page.words and f"{stage.parameters:,}" in page.words
    for boundary in given.boundaries:
        assert boundary.name in page.words
    assert given.digest[:12] in page.words
    assert all(
        text in page.words for text in ("Schedule", "Work per step and memory", "Once per step")[: 2 + bool(given.once)]
    )


@pytest.mark.parametrize("name", PLANS)
def test_html_marks_gradients_of_weights(name: str) -> None:
    page = Page(plan(name).to_html())
    found = ("class", "w") in page.attributes, "gradients of weights" in page.words
    assert found == (name == "parted",) * 2


@pytest.mark.parametrize("name", PLANS)
def test_html_is_self_contained(name: str) -> None:
    text = plan(name).to_html()
    page = Page(text)
    assert not {"img", "link", "iframe", "object"} & set(page.tags)
    fetched = [value for key, value in page.attributes if key in ("src", "href", "xlink:href", "action", "data")]
    assert fetched == []
    assert re.findall(r"https?://|@import|url\((?!#)", text) == []
    assert "default-src 'none'" in text


def test_html_escapes_names() -> None:
    given = plan("inference")
    evil = '</script><script>alert("1")</script>'
    stage = replace(given.stages["gpu"], name=evil, cluster=evil, inputs=(evil,), layers=(PlanLayer(evil),))
    text = replace(given, name=evil, notes=(evil,), boundaries=(), stages={evil: stage}).to_html()
    page = Page(text)
    assert page.tags.count("script") == 1
    assert "alert(" in page.words


def test_html_marks_the_stage_whose_name_is_a_number() -> None:
    given = plan("inference")
    text = replace(given, boundaries=(), stages={"0": replace(given.stages["gpu"], name="0")}).to_html()
    assert re.search(r'<td[^>]*>0</td><td[^>]*><b class="dot c0">0</b></td>', text)


def test_drawing_is_accessible() -> None:
    """Stages and arrows can be focused, and have a role and a label."""
    text = plan("skipping").to_html()
    for kind in ("stage", "arrow"):
        for element in re.findall(rf'<g class="{kind}[^>]*>', text):
            assert 'tabindex="0"' in element and 'role="button"' in element and 'aria-label="' in element


def test_html_lists_layers_as_a_tree() -> None:
    given = plan("inference")
    layers = (PlanLayer("block", flops=5), PlanLayer("block/dense", parameters=1234), PlanLayer("", forward_ops=3))
    stages = {"gpu": replace(given.stages["gpu"], layers=layers)}
    text = replace(given, stages=stages, boundaries=()).to_html()
    assert "<details><summary" in text
    page = Page(text)
    assert all(words in page.words for words in ("block", "dense", "1,234", "the rest", "outside layers"))


def make_large_plan(blocks: int, stages: int) -> nb.Plan:
    """Make a plan of the size of a transformer with `blocks` blocks in `stages` stages."""
    given = plan("inference")
    parts = ("attention_norm", "attention/query", "attention/key", "attention/value", "attention", "wide", "narrow")
    made: dict[str, PlanStage] = {}
    for number in range(stages):
        own = range(number * blocks // stages, (number + 1) * blocks // stages)
        layers = tuple(PlanLayer(f"block{b}/{part}", 21, 78, 4160, 25_493_504, 65_536) for b in own for part in parts)
        made[f"part{number}"] = replace(
            given.stages["gpu"], name=f"part{number}", cluster=("gpu", "npu")[number % 2], runs=("FB",), layers=layers,
            inputs=("x",) if not number else (f"b{number - 1}",), outputs=(f"b{number}",), forward_flops=number + 1,
        )  # fmt: skip
    boundaries = tuple(
        replace(given.boundaries[0], name=f"b{n}", source=f"part{n}", destinations=(f"part{n + 1}",), backward=True)
        for n in range(stages - 1)
    )
    return replace(given, stages=made, boundaries=boundaries, micro_batch=64, rows=(1,) * 64)


@pytest.mark.parametrize(("blocks", "stages"), [(100, 2), (100, 100)])
def test_html_of_a_large_plan_is_under_two_megabytes(blocks: int, stages: int) -> None:
    assert len(make_large_plan(blocks, stages).to_html().encode()) < 2_000_000


# ---------------------------------------------------------------------- layout
@pytest.mark.parametrize("name", [*PLANS, "large"])
def test_layout_has_no_overlaps(name: str) -> None:
    found = layout(make_large_plan(20, 20) if name == "large" else plan(name))
    for a, b in combinations(found.nodes, 2):
        assert abs(a.x - b.x) >= WIDTH or abs(a.y - b.y) >= found.card_height
    for a, b in combinations(found.boxes, 2):
        apart_x = a.x + a.width <= b.x or b.x + b.width <= a.x
        assert apart_x or a.y + a.height <= b.y or b.y + b.height <= a.y
    assert all(node.x + WIDTH <= found.width and node.y + found.card_height <= found.height for node in found.nodes)


@pytest.mark.parametrize("name", PLANS)
def test_layout_places_stages_in_clusters_and_in_order(name: str) -> None:
    given = plan(name)
    found = layout(given)
    boxes = {box.cluster: box for box in found.boxes}
    for node, stage in zip(found.nodes, given.stages.values(), strict=True):
        box = boxes[stage.cluster]
        assert box.x <= node.x and node.x + WIDTH <= box.x + box.width
        assert box.y <= node.y and node.y + found.card_height <= box.y + box.height
    assert all(found.nodes[arrow.source].x < found.nodes[arrow.destination].x for arrow in found.arrows)


def test_layout_routes_skip_connections_above_stages() -> None:
    found = layout(plan("skipping"))
    passing = [arrow for arrow in found.arrows if arrow.channel is not None]
    assert [(arrow.source, arrow.destination) for arrow in passing] == [(0, 2)]
    assert passing[0].channel is not None and 40 < passing[0].channel < found.nodes[1].y


def test_layout_draws_ties_below_stages() -> None:
    given = plan("tied")
    more = PlanTied("other", "float32", (2,), ("embed", "mix"), 8)
    found = layout(replace(given, tied=(*given.tied, more)))
    assert [tie.stages for tie in found.ties] == [(0, 2), (0, 1)]
    assert found.ties[0].channel < found.ties[1].channel < found.height
    assert all(tie.channel > node.y + found.card_height for tie in found.ties for node in found.nodes)


def test_style_and_script_are_package_data() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))
    assert {"*.css", "*.js"} <= set(project["tool"]["setuptools"]["package-data"]["*"])


# -------------------- The graph as a picture: one self-contained SVG with scoped style
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", PLANS)
def test_svg_is_well_formed_and_names_all_stages(name: str) -> None:
    drawn: nb.Plan = plan(name)
    root = ElementTree.fromstring(drawn.to_svg())
    text = "".join(root.itertext())
    assert root.tag == f"{SVG}svg" and float(root.get("width")) > 0
    assert all(stage in text for stage in drawn.stages)
    assert drawn._repr_svg_() == drawn.to_svg()


def test_svg_style_is_scoped() -> None:
    style = ElementTree.fromstring(plan(next(iter(PLANS))).to_svg()).find(f"{SVG}style").text
    style = re.sub(r"/\*.*?\*/", "", style, flags=re.S)
    depth = 0
    for place, letter in enumerate(style):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        assert depth > 0 or style[place:].strip() in ("", "}") or style[: place + 1].strip() in "#graph {"
    assert depth == 0 and "url(http" not in style

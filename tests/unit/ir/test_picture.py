"""The graph as a picture: one self-contained SVG with scoped style."""

import re
from xml.etree import ElementTree

import pytest

import whale_nebula as nb
from tests.unit.ir.traced import PLANS, plan

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", PLANS)
def test_it_is_well_formed_and_names_every_stage(name: str) -> None:
    drawn: nb.Plan = plan(name)
    root = ElementTree.fromstring(drawn.to_svg())
    said = "".join(root.itertext())
    assert root.tag == f"{SVG}svg" and float(root.get("width")) > 0
    assert all(stage in said for stage in drawn.stages)
    assert drawn._repr_svg_() == drawn.to_svg()


def test_every_rule_of_its_style_lies_inside_it() -> None:
    style = ElementTree.fromstring(plan(next(iter(PLANS))).to_svg()).find(f"{SVG}style").text
    style = re.sub(r"/\*.*?\*/", "", style, flags=re.S)
    depth = 0
    for place, letter in enumerate(style):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        assert depth > 0 or style[place:].strip() in ("", "}") or style[: place + 1].strip() in "#graph {"
    assert depth == 0 and "url(http" not in style

"""How one direction crosses: its text is that way again, and what its words mean."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import whale_nebula as nb
from whale_nebula.codec import FP16, INT4, SVD, Codec
from whale_nebula.codec.way import NONFINITE, parse_way, ways
from whale_nebula.errors import OptionError

STRUCTURES: list[dict[str, Any]] = [{}, {"svd": 0.6}, {"rank": 96}, {"topk": 0.1}, {"rank": 8, "basis": "learned"}]
INTEGERS: list[dict[str, Any]] = [{f"int{bits}": True} for bits in (8, 4)]
PRECISIONS: list[dict[str, Any]] = [{}, {"fp16": True}, {"bf16": True}, *INTEGERS]
BACKWARD = ["default", None, "int8", "int4", "bf16", FP16(), SVD(0.5) >> INT4()]


@st.composite
def written(draw: st.DrawFn) -> dict[str, Any]:
    """Options of a compress scope, as a user may write them."""
    flags = draw(st.sampled_from(STRUCTURES)) | draw(st.sampled_from(PRECISIONS))
    auto = not flags and draw(st.booleans())
    differences = flags in INTEGERS and draw(st.booleans())
    return {
        **flags,
        "codec": "auto" if auto else None,
        "backward": draw(st.sampled_from(BACKWARD)),
        "start_step": draw(st.integers(0, 10**9)),
        "ramp": draw(st.none() | st.booleans() | st.floats(0.001, 0.9) | st.just(("fp16", "int8"))),
        "delta": "ids" if differences else None,
        "mask": draw(st.sampled_from([None, True, False, "tokens"])) or (None if flags or auto else True),
        "forward": draw(st.sampled_from([None, "none", "int8"])),
        "zstd": draw(st.booleans()),
        "nonfinite": draw(st.sampled_from(NONFINITE)),
    }


@given(written(), st.booleans())
def test_the_text_of_a_way_is_that_way(given: dict[str, Any], training: bool) -> None:
    options = nb.compress(**given).options
    for way in ways(options, training=training):
        assert parse_way(str(way)) == way
        assert str(parse_way(str(way))) == str(way)


@pytest.mark.parametrize(
    ("text", "plain", "cast", "coded"),
    [
        ("none", True, None, False),
        ("fp16", False, "fp16", False),
        ("bf16", False, "bf16", False),
        ("fp16, from step 3", False, None, True),
        ("none, mask", False, None, True),
        ("none, zstd", False, None, True),
        ("int8", False, None, True),
        ("bits", False, None, True),
        ("auto", False, None, True),
    ],
)
def test_what_takes_more_than_a_cast(text: str, plain: bool, cast: str | None, coded: bool) -> None:
    way = parse_way(text)
    assert (way.plain, way.cast, way.coded) == (plain, cast, coded)


@pytest.mark.parametrize(
    ("text", "rungs"),
    [
        ("int4", ["int4"]),
        ("int4, ramp fp16 int8 below 0.05", ["fp16", "int8", "int4"]),
        ("svd(0.6) >> int4, ramp none fp16 below 0.1", ["svd(0.6)", "svd(0.6) >> fp16", "svd(0.6) >> int4"]),
        ("auto", ["None", "fp16", "int8", "int4"]),
        ("none, mask", ["None"]),
    ],
)
def test_a_ladder_changes_precisions_and_keeps_the_structure(text: str, rungs: list[str]) -> None:
    assert [str(codec) for codec in parse_way(text).rungs] == rungs


@pytest.mark.parametrize(
    "text", ["int9", "int8, sometimes", "int8, from step x", "int8, ramp fp16", "int8, ramp fp16 below x", "", ","]
)
def test_texts_that_are_no_way_say_so(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_way(text)
    assert caught.value.mend


def test_a_codec_may_have_commas() -> None:
    codec: Codec | None = parse_way("rank(8, learned) >> int8, zstd").codec
    assert str(codec) == "rank(8, learned) >> int8"

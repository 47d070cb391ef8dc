"""The encoding of one direction: its options, its text, and the numbers of codecs in frames."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import whale_nebula as nb
from whale_nebula.codec import FP16, INT4, INT8, SVD, Codec, TopK, from_flags
from whale_nebula.codec.encoding import NONFINITE, Encoding, derive_encodings, parse_encoding
from whale_nebula.errors import OptionError

STRUCTURES: list[dict[str, Any]] = [{}, {"svd": 0.6}, {"rank": 96}, {"topk": 0.1}, {"rank": 8, "basis": "learned"}]
INTEGERS: list[dict[str, Any]] = [{f"int{bits}": True} for bits in (8, 4)]
PRECISIONS: list[dict[str, Any]] = [{}, {"fp16": True}, {"bf16": True}, *INTEGERS]
BACKWARD = ["default", None, "int8", "int4", "bf16", FP16(), SVD(0.5) >> INT4()]


@st.composite
def compress_options(draw: st.DrawFn) -> dict[str, Any]:
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


@given(compress_options(), st.booleans())
def test_encoding_text_round_trip(given: dict[str, Any], training: bool) -> None:
    options = nb.compress(**given).options
    for encoding in derive_encodings(options, training=training):
        assert parse_encoding(str(encoding)) == encoding
        assert str(parse_encoding(str(encoding))) == str(encoding)


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
def test_encoding_is_plain_cast_or_coded(text: str, plain: bool, cast: str | None, coded: bool) -> None:
    encoding = parse_encoding(text)
    assert (encoding.plain, encoding.cast, encoding.coded) == (plain, cast, coded)


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
def test_ladder_changes_the_precision_and_keeps_the_structure(text: str, rungs: list[str]) -> None:
    assert [str(codec) for codec in parse_encoding(text).rungs] == rungs


@pytest.mark.parametrize(
    "text", ["int9", "int8, sometimes", "int8, from step x", "int8, ramp fp16", "int8, ramp fp16 below x", "", ","]
)
def test_parse_encoding_refuses_invalid_text(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_encoding(text)
    assert caught.value.mend


def test_parse_encoding_accepts_commas_in_a_codec() -> None:
    codec: Codec | None = parse_encoding("rank(8, learned) >> int8, zstd").codec
    assert str(codec) == "rank(8, learned) >> int8"


def describe_directions(training: bool = True, codec: Any = None, **options: Any) -> tuple[str, str]:
    """Forward and backward of `nb.compress(codec, **options)`."""
    there, back = derive_encodings(nb.compress(codec, **options).options, training=training)
    return str(there), str(back)


OPTIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"fp16": True}, "fp16", "int8"),
    ({"fp16": True, "backward": None}, "fp16", "none"),
    ({"fp16": True, "backward": "none"}, "fp16", "none"),
    ({"int4": True, "backward": "int4"}, "int4", "int4"),
    ({"int4": True, "backward": INT4()}, "int4", "int4"),
    ({"svd": 0.6, "fp16": True}, "svd(0.6) >> fp16", "int8"),
    ({"svd": 0.6}, "svd(0.6)", "int8"),
    ({"int8": True, "backward": SVD(0.5) >> FP16()}, "int8", "svd(0.5) >> fp16"),
    # what returns, returns: `backward` is the precision of what is left, an object replaces all of it
    ({"rank": 96, "int4": True}, "rank(96) >> int4", "rank(96) >> int8"),
    ({"rank": 96, "int4": True, "backward": None}, "rank(96) >> int4", "rank(96)"),
    ({"rank": 96, "int4": True, "backward": "int4"}, "rank(96) >> int4", "rank(96) >> int4"),
    ({"rank": 96, "int4": True, "backward": INT4()}, "rank(96) >> int4", "int4"),
    ({"topk": 0.1, "int8": True, "backward": TopK(0.1) >> FP16()}, "topk(0.1) >> int8", "topk(0.1) >> fp16"),
    # a learned basis is in the model: what is left to cross is its precision
    ({"rank": 96, "basis": "learned", "int8": True}, "int8", "int8"),
    ({"rank": 96, "basis": "learned"}, "none", "int8"),
    # options
    ({"int8": True, "start_step": 7}, "int8, from step 7", "int8, from step 7"),
    ({"int4": True, "ramp": True}, "int4, ramp fp16 int8 below 0.05", "int8, ramp fp16 below 0.05"),
    ({"int4": True, "ramp": 0.2, "backward": None}, "int4, ramp fp16 int8 below 0.2", "none"),
    ({"int4": True, "ramp": ["bf16"]}, "int4, ramp bf16 below 0.05", "int8, ramp bf16 below 0.05"),
    ({"fp16": True, "ramp": True}, "fp16", "int8, ramp fp16 below 0.05"),
    ({"int8": True, "delta": "ids"}, "int8, delta ids", "int8"),
    ({"mask": True}, "none, mask", "none, mask"),
    ({"mask": "tokens", "int8": True}, "int8, mask tokens", "int8, mask tokens"),
    ({"mask": False, "int8": True}, "int8", "int8"),
    ({"zstd": True}, "none, zstd", "none, zstd"),
    ({"int8": True, "nonfinite": "skip"}, "int8, nonfinite skip", "int8, nonfinite skip"),
    ({"codec": "auto"}, "auto", "auto"),
    ({"codec": "auto", "backward": None}, "auto", "none"),
    ({"codec": "auto", "backward": "int8"}, "auto", "int8"),
]


@pytest.mark.parametrize(("options", "there", "back"), OPTIONS, ids=str)
def test_encodings_follow_the_scope_options(options: dict[str, Any], there: str, back: str) -> None:
    assert describe_directions(**options) == (there, back)


@pytest.mark.parametrize(
    ("options", "there"),
    [
        ({"int4": True}, "int4"),
        ({"int4": True, "forward": "none"}, "none"),
        ({"int4": True, "forward": INT8()}, "int8"),
        ({"int4": True, "forward": "svd(0.6) >> fp16", "start_step": 9, "ramp": True, "zstd": True},
         "svd(0.6) >> fp16, zstd"),
        ({"int4": True, "start_step": 9}, "int4, from step 9"),
        ({"int4": True, "delta": "ids"}, "int4"),
        ({"codec": "auto", "forward": "fp16"}, "fp16"),
    ],
    ids=str,
)  # fmt: skip
def test_encoding_without_gradient_uses_the_forward_option(options: dict[str, Any], there: str) -> None:
    assert describe_directions(training=False, **options)[0] == there


@pytest.mark.parametrize(
    ("flags", "what", "mend"),
    [
        ({"svd": 2}, "svd=2 is out of range", "svd=0.6"),
        ({"topk": 2}, "topk=2 is out of range", "topk=0.1"),
        ({"rank": 0, "basis": "learned"}, "rank=0 is not a positive integer", "rank=96"),
    ],
)
def test_invalid_flag_is_reported_by_name(flags: dict[str, Any], what: str, mend: str) -> None:
    with pytest.raises(OptionError) as caught:
        from_flags(**flags)
    assert (caught.value.what, caught.value.mend) == (what, mend)
    name, _, value = mend.partition("=")
    assert from_flags(**flags | {name: float(value) if "." in value else int(value)}) is not None


TEXTS = [
    "int8",
    "int4, ramp fp16 int8 below 0.05",
    "svd(0.6) >> int4, ramp none fp16 below 0.05",
    "none, mask",
    "bits",
    "auto",
]


@pytest.mark.parametrize("text", TEXTS)
def test_possible_codecs_have_unique_numbers(text: str) -> None:
    encoding = parse_encoding(text)
    for codec in (*encoding.rungs, None):
        assert encoding.by_number[encoding.numbers[codec]] == codec
    assert all(0 < each < 1 << 16 for each in encoding.by_number)


def find_clashing_encoding() -> Encoding:
    """An encoding of which two codecs have texts with the same sixteen bits."""
    for rank in range(1, 200_000):
        texts = ("none", "int8", f"rank({rank}) >> int8")
        if len({zlib.crc32(text.encode()) % 0xFFFF for text in texts}) < len(texts):
            return parse_encoding(texts[-1])
    raise AssertionError("there is none")


def test_equal_hashes_give_different_numbers() -> None:
    encoding = find_clashing_encoding()
    assert len(encoding.by_number) == 3
    assert len({encoding.numbers[codec] for codec in (*encoding.rungs, encoding.precision, None)}) == 3

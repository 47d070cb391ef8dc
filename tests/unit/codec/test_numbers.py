"""The numbers that frames name codecs by: each has its own, and both sides know it from the way alone."""

import zlib

import pytest

from whale_nebula.codec.way import Way, parse_way

TEXTS = [
    "int8",
    "int4, ramp fp16 int8 below 0.05",
    "svd(0.6) >> int4, ramp none fp16 below 0.05",
    "none, mask",
    "bits",
    "auto",
]


@pytest.mark.parametrize("text", TEXTS)
def test_every_codec_that_may_come_has_a_number_of_its_own(text: str) -> None:
    way = parse_way(text)
    for codec in (*way.rungs, None):
        assert way.by_number[way.numbers[codec]] == codec
    assert all(0 < each < 1 << 16 for each in way.by_number)


def clashing() -> Way:
    """A way of which two codecs have texts with the same sixteen bits."""
    for rank in range(1, 200_000):
        texts = ("none", "int8", f"rank({rank}) >> int8")
        if len({zlib.crc32(text.encode()) % 0xFFFF for text in texts}) < len(texts):
            return parse_way(texts[-1])
    raise AssertionError("there is none")


def test_two_texts_with_the_same_bits_have_two_numbers() -> None:
    way = clashing()
    assert len(way.by_number) == 3
    assert len({way.numbers[codec] for codec in (*way.rungs, way.precision, None)}) == 3

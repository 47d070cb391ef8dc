"""What a user writes, and how both directions then cross."""

from typing import Any

import pytest

import whale_nebula as nb
from whale_nebula.codec import FP16, INT4, INT8, SVD, TopK
from whale_nebula.codec.way import check_delta, ways
from whale_nebula.errors import OptionError


def crossing(training: bool = True, codec: Any = None, **options: Any) -> tuple[str, str]:
    """Forward and backward of `nb.compress(codec, **options)`."""
    there, back = ways(nb.compress(codec, **options).options, training=training)
    return str(there), str(back)


WRITTEN: list[tuple[dict[str, Any], str, str]] = [
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


@pytest.mark.parametrize(("options", "there", "back"), WRITTEN, ids=str)
def test_what_a_scope_says(options: dict[str, Any], there: str, back: str) -> None:
    assert crossing(**options) == (there, back)


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
def test_steps_without_a_gradient_use_the_same_unless_told_otherwise(options: dict[str, Any], there: str) -> None:
    assert crossing(training=False, **options)[0] == there


@pytest.mark.parametrize("codec", [None, FP16(), TopK(0.1) >> INT8()], ids=str)
def test_differences_are_of_integers(codec: Any) -> None:
    with pytest.raises(OptionError, match="goes with integers"):
        check_delta("ids", codec)
    check_delta(None, codec)

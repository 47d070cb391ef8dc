"""Flags are sugar: they stand for one codec."""

from typing import Any

import pytest

from whale_nebula.codec import from_flags
from whale_nebula.errors import OptionError


@pytest.mark.parametrize(
    ("flags", "what", "mend"),
    [
        ({"svd": 2}, "svd=2 cannot be", "svd=0.6"),
        ({"topk": 2}, "topk=2 cannot be", "topk=0.1"),
        ({"rank": 0, "basis": "learned"}, "rank=0 is no rank", "rank=96"),
    ],
)
def test_what_is_wrong_is_told_of_the_flag_that_was_written(flags: dict[str, Any], what: str, mend: str) -> None:
    with pytest.raises(OptionError) as caught:
        from_flags(**flags)
    assert (caught.value.what, caught.value.mend) == (what, mend)
    name, _, value = mend.partition("=")
    assert from_flags(**flags | {name: float(value) if "." in value else int(value)}) is not None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"fp16": True, "int8": True}, "fp16 and int8 exclude each other"),
        ({"svd": 0.5, "rank": 8}, "svd and rank exclude each other"),
        ({"fp16": "yes"}, "neither True nor False"),
        ({"fp16": 1}, "neither True nor False"),
        ({"svd": 2.0}, "share"),
        ({"rank": 0}, "rank"),
        ({"basis": "learned"}, "without a rank"),
        ({"rank": 8, "basis": "lerned"}, "did you mean 'learned'"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        from_flags(**flags)

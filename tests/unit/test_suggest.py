"""Did you mean ...?"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.errors.text import Named, closest, did_you_mean

WORDS = ["micro_batch", "schedule", "in_flight", "recompute", "coupled"]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("micro_batchs", "micro_batch"),
        ("Schedule", "schedule"),
        ("inflight", "in_flight"),
        ("xyz", None),
        (3, None),
    ],
)
def test_the_nearest_word_is_found(word: object, meant: str | None) -> None:
    assert closest(word, WORDS) == meant


@given(st.sampled_from(WORDS), st.integers(0, 7))
def test_one_letter_less_is_still_found(word: str, place: int) -> None:
    assert closest(word[:place] + word[place + 1 :], WORDS) == word


def test_a_mend_is_given_always() -> None:
    assert did_you_mean("shedule", WORDS) == "did you mean 'schedule'?"
    assert did_you_mean("zzz", WORDS) == "choose one of " + ", ".join(map(repr, WORDS))
    assert did_you_mean("zzz", {"a": 1}) == "choose one of 'a'"
    assert "leave it out" in did_you_mean("zzz", [])


def test_a_name_that_there_is_not_is_told_with_those_that_there_are() -> None:
    stages = Named({"gpu": 1, "npu": 2})
    assert stages == {"gpu": 1, "npu": 2} and stages.get("zz") is None and "zz" not in stages
    with pytest.raises(KeyError, match="there is no 'zz' here: choose one of 'gpu', 'npu'"):
        stages["zz"]

"""Inputs by cluster: each side of a text is read in its own cluster, and no word of it is sent to the other."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import whale_nebula as nb
from tests.processes.running import SEED, Ended, run
from tests.processes.sides import INPUTS, course
from tests.processes.telling import bits

TRAINED = ["arrays", "generator", "dataset", "evaluate", "batch", "weights"]


@pytest.fixture(scope="module")
def pair() -> Ended:
    found = run("sides", 2)
    found.result.check()
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """One process that reads everything."""
    nb.shutdown()
    keras.utils.set_random_seed(SEED)
    with nb.init({"inputs": INPUTS}, links="10gbit,0ms"):
        return course("both")


@pytest.mark.parametrize("part", TRAINED)
def test_each_side_by_itself_comes_to_what_one_process_comes_to(pair: Ended, alone: dict[str, Any], part: str) -> None:
    assert pair.same(part) == alone[part]


def test_numbers_of_one_side_go_everywhere_and_tensors_stay(pair: Ended, alone: dict[str, Any]) -> None:
    whole = {name: bits([np.asarray(value)]) for name, value in alone["function"].items()}
    first, second = pair.all("function")
    assert second == whole
    assert first == {**whole, "each": "this result is on c1/0, not in this process"}
    assert pair.all("predict")[1] == bits([alone["predict"]])


def test_no_word_of_a_side_is_sent(pair: Ended) -> None:
    for told in pair.told.values():
        assert told["the look works"] == [1, 1]
        assert told["seen"]["tensors"] > 20 and told["seen"]["messages"] > 10
        assert (told["seen"]["source"], told["seen"]["target"]) == (0, 0)


def test_not_even_a_checksum_of_a_side_is_sent(pair: Ended) -> None:
    said = [value for told in pair.told.values() for name, value in told.items() if name.startswith("inputs ")]
    assert said and all(names == [] for names in said)

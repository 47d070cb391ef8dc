"""`results: owner`: numbers go everywhere, tensors stay in the cluster that makes them."""

from __future__ import annotations

from typing import Any

import keras
import pytest

import whale_nebula as nb
from tests.processes.lesson import X, Y, fit, hexed, measured, taught
from tests.processes.running import SEED, Ended, run
from tests.processes.telling import bits

ELSEWHERE = "this result is on {}, not in this process"


@pytest.fixture(scope="module")
def pair() -> Ended:
    found = run("owner", 2)
    found.result.check()
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    nb.shutdown()
    keras.utils.set_random_seed(SEED)
    with nb.init(links="10gbit,0ms"):
        model = taught()
        found: dict[str, Any] = {"history": fit(model, epochs=1)}
        found["evaluate"] = hexed(model.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True))
        found["predict"] = bits([model.predict(X, batch_size=12, verbose=0)])
        found["one batch"] = bits([model.predict_on_batch(X[:4])])
        found["function"] = {name: bits([value]) for name, value in measured(X[:7]).items()}
    return found


@pytest.mark.parametrize("part", ["history", "evaluate"])
def test_numbers_go_everywhere(pair: Ended, alone: dict[str, Any], part: str) -> None:
    assert pair.same(part) == alone[part]


@pytest.mark.parametrize("part", ["predict", "one batch"])
def test_a_prediction_stays_with_the_last_stage(pair: Ended, alone: dict[str, Any], part: str) -> None:
    first, second = pair.all(part)
    assert first == ELSEWHERE.format("c1/0")
    assert second == alone[part]


def test_each_tensor_of_a_function_stays_where_it_is_made(pair: Ended, alone: dict[str, Any]) -> None:
    first, second = pair.all("function")
    assert first == {**alone["function"], "high": ELSEWHERE.format("c1/0")}
    assert second == {**alone["function"], "doubled": ELSEWHERE.format("c0/0")}
    assert pair.all("said")[0]["high"] == "<float32[?] on c1/0>"


def test_no_prediction_crosses_the_line(pair: Ended) -> None:
    assert [sent.get("c1->c0", 0) for sent in pair.all("sent")] == [0, 0]

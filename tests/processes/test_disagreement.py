"""Two processes that do not do the same stop: both, soon, before anything is updated, and each says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.processes.running import Ended, run

SOON = 20.0  # a tenth of a second on an idle machine; what must not happen is a wait for the patience of 120 s


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run("scenarios", 2, "disagreement", Path(tmp_path_factory.mktemp("pair")))


def errors(pair: Ended, scenario: str) -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = pair.all(scenario)
    assert max(first["seconds"], second["seconds"]) < SOON
    return first, second


def test_unlike_seeds_are_refused(pair: Ended) -> None:
    for error in errors(pair, "seeds"):
        assert error["type"] == "ConfigError"
        assert "c0/0: 1, c1/0: 2" in error["text"]


def test_rows_in_another_order(pair: Ended) -> None:
    for error in errors(pair, "order"):
        assert error["type"] == "InputMismatchError", error["text"]
        assert "input 'x' differs" in error["text"]
        assert "c0/0" in error["text"] and "c1/0" in error["text"]
        assert "shuffle" in error["text"]
        assert error["untouched"]


def test_another_number_of_rows(pair: Ended) -> None:
    for error in errors(pair, "rows"):
        assert error["type"] == "InputMismatchError", error["text"]


def test_another_layer_width(pair: Ended) -> None:
    for error in errors(pair, "width"):
        assert error["type"] == "PlanMismatchError", error["text"]
        assert "'taught.train_step'" in error["text"]
        assert "8" in error["text"] and "9" in error["text"]


def test_a_callback_that_stops_one_process(pair: Ended) -> None:
    """The one reads, the other trains on: both hear it, with the lines of the script."""
    for error in errors(pair, "stopped and read"):
        assert error["type"] == "PlanMismatchError", error["text"]
        assert "c0/0" in error["text"] and "c1/0" in error["text"]
        assert "step 2 of 'taught.train_step'" in error["text"]
        assert "a read of" in error["text"]
        assert error["text"].count("scenarios.py:") + error["text"].count("lesson.py:") == 2


def test_a_process_that_stops_and_leaves(pair: Ended) -> None:
    stays, leaves = errors(pair, "stopped and left")
    assert leaves["type"] == ""
    assert stays["type"] == "LinkClosedError", stays["text"]
    assert "worker 'c1/0' has closed its link" in stays["text"]
    assert "c0/0 is at step 2 of 'taught.train_step'" in stays["text"]


def test_what_a_stage_asserts(pair: Ended) -> None:
    there, here = errors(pair, "asserting")
    assert here["type"] == "StageFailedError", here["text"]
    assert there["type"] == "RemoteFailureError", there["text"]
    assert "worker 'c1/0' failed" in there["text"]
    for error in (there, here):
        assert "the hidden values exploded" in error["text"]
        assert "stage 'c1'" in error["text"]
        assert "start all workers again" in error["text"]
        assert error["untouched"]


def test_only_the_ids_are_compared(pair: Ended) -> None:
    assert pair.same("ids alike") == 2.0 * (0 + 1 + 2 + 3)
    for error in errors(pair, "ids unlike"):
        assert error["type"] == "InputMismatchError", error["text"]
        assert "input 'names' differs" in error["text"]


def test_unlike_configs_are_refused(pair: Ended) -> None:
    for error in errors(pair, "configs"):
        assert error["type"] == "ConfigError", error["text"]
        assert "'weights': c0/0: everywhere; c1/0: own" in error["text"]


def test_an_input_that_is_not_where_it_is_read(pair: Ended) -> None:
    """It is known before anything runs: which input, who reads it and where, and what to do."""
    there, here = errors(pair, "absent")
    assert here["type"] == "AbsentInputError", here["text"]
    assert there["type"] == "RemoteFailureError", there["text"]
    for error in (there, here):
        assert "input 'y' is None in this process, and stage 'c1' of cluster 'c1' here reads it" in error["text"]
        assert "yield 'y' in this cluster as well" in error["text"]
        assert error["untouched"]
    assert "lesson.py:" in here["text"]


def test_an_input_that_is_no_longer_where_it_is_read(pair: Ended) -> None:
    assert pair.same("absent and given") == [2.0 * (0 + 1 + 2 + 3)] * 3
    there, here = errors(pair, "absent later")
    assert here["type"] == "AbsentInputError", here["text"]
    assert "input 'names' is None" in here["text"] and "scenarios.py:" in here["text"]
    assert there["type"] == "RemoteFailureError", there["text"]


def test_what_a_script_raises_reaches_the_other(pair: Ended) -> None:
    error = pair.told["c0/0"]["uncaught"]
    assert error["seconds"] < SOON
    assert error["type"] == "RemoteFailureError", error["text"]
    assert "worker 'c1/0' failed: RuntimeError: no data on this site" in error["text"]
    assert pair.result.culprit == "c1/0"
    assert pair.result.codes == {"c0/0": 0, "c1/0": 1}

"""Processes that read parts of one batch detect parts of different ones."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.unit.runtime.sessions import sessions
from whale_nebula.errors import InputMismatchError, OptionError
from whale_nebula.feed.checks import refuse_unshared

WORKERS = ("a/0", "a/1", "b/0")
MATES = {"a/0": ["a/1"], "a/1": ["a/0"], "b/0": []}


def told(
    inputs: dict[str, Any], marks: dict[str, int], readers: dict[str, set[str]] | None = None
) -> list[dict[str, Any]]:
    """All announce a step and check it; what each heard of the others."""
    found = sessions(WORKERS)

    def one(worker: str) -> Any:
        session = found[worker]
        own_inputs = {"x": inputs.get(worker, [1, 2])}
        sheet = {"program": 1, "name": "step", "step": 3, "rows": 4, "inputs": own_inputs, "alike": {"a/0, a/1": 7}}
        session.start_step(sheet, marks[worker], MATES[worker], readers or {})
        return session.check_step(sheet, marks[worker])

    with ThreadPoolExecutor(len(WORKERS)) as pool:
        return [future.result() for future in [pool.submit(one, worker) for worker in WORKERS]]


def test_parts_of_the_same_batch_go_together() -> None:
    parts = {"a/0": [7, None], "a/1": [None, 8], "b/0": [7, 8]}
    heard = told(parts, {"a/0": 5, "a/1": 5, "b/0": 5})
    assert heard[0]["a/1"]["mark"] == 5 and heard[0]["a/1"]["inputs"] == {"x": [None, 8]}


def test_no_other_cluster_is_told_which_rows_there_are() -> None:
    heard = told({}, {"a/0": 5, "a/1": 5, "b/0": 9})
    assert "mark" not in heard[2]["a/0"] and "mark" not in heard[0]["b/0"]


def test_mates_that_share_no_row_notice_another_order() -> None:
    with pytest.raises(InputMismatchError, match=r"the order of rows differs between a/. and a/. at step 3"):
        told({"a/0": [7, None], "a/1": [None, 8]}, {"a/0": 5, "a/1": 6, "b/0": 5})


def test_who_reads_the_same_rows_notices_other_values() -> None:
    with pytest.raises(InputMismatchError, match=r"input 'x' differs between ./. and ./. at step 3"):
        told({"a/0": [7, None], "b/0": [9, 8], "a/1": [None, 8]}, {"a/0": 5, "a/1": 5, "b/0": 5})


def test_a_process_without_such_a_dataset_says_nothing_of_its_order() -> None:
    assert len(told({}, {"a/0": 5, "a/1": 0, "b/0": 0})) == 3


@pytest.mark.parametrize("readers", [{"a/0", "a/1"}, {"a/1", "b/0"}, {"b/0"}, set(WORKERS), set()])
def test_a_fingerprint_goes_to_readers_alone(readers: set[str]) -> None:
    heard = zip(WORKERS, told({}, dict.fromkeys(WORKERS, 0), {"x": readers}), strict=True)
    for worker, sheets in heard:
        assert [bool(sheet["inputs"]) for sheet in sheets.values()] == [worker in readers] * len(sheets)


def test_a_checksum_of_variables_goes_to_mates_alone() -> None:
    heard = told({}, dict.fromkeys(WORKERS, 0))
    assert heard[0]["a/1"]["alike"] and "alike" not in heard[2]["a/0"] and "alike" not in heard[0]["b/0"]


CLUSTERS = {"a/0": "a", "a/1": "a", "b/0": "b"}
UNSHARED = [({"a/0", "a/1"}, CLUSTERS, True), (set(), CLUSTERS, True), ({"a/0", "b/0"}, CLUSTERS, False)]
UNSHARED += [({"a/0"}, {"a/0": "a", "a/1": "a"}, False)]  # clusters that train apart compare nothing


@pytest.mark.parametrize(("readers", "clusters", "refused"), UNSHARED)
def test_ids_that_no_two_clusters_would_compare_are_refused(
    readers: set[str], clusters: dict[str, str], refused: bool
) -> None:
    with pytest.raises(OptionError, match="keeps to the workers") if refused else contextlib.nullcontext():
        refuse_unshared(["id"], {"id": readers, "x": {"a/0"}}, clusters)

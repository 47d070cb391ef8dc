"""Exchanged measurements of a step: round trips, and invalid ones are ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from whale_nebula.report.records import Elsewhere, LinkReport, StageReport, WorkerReport
from whale_nebula.runtime.step.distributed import hear, tell

STAGES = {"npu": StageReport(0.25, 0.125, "npu", 2), "cpu": StageReport(0.5, 0.0, "npu")}
LINKS = {"npu->gpu": LinkReport(100, 120, 200, 3, 0.0625)}
WORKERS = {"npu/0": WorkerReport(4096, 1 << 30)}


def test_it_arrives_as_it_was_told() -> None:
    sheet = json.loads(json.dumps({"step": 3, "seen": tell(STAGES, LINKS, WORKERS)}))
    assert hear([sheet]) == Elsewhere(STAGES, LINKS, WORKERS)


def test_several_tell_of_their_own() -> None:
    other = tell({"tpu": StageReport(1.0, 2.0, "tpu", 1)}, LINKS, {"tpu/0": WorkerReport(1, 2)})
    found = hear([{"seen": tell(STAGES, {}, WORKERS)}, {"seen": other}])
    assert (list(found.stages), list(found.links)) == (["npu", "cpu", "tpu"], ["npu->gpu"])
    assert list(found.workers) == ["npu/0", "tpu/0"]


@pytest.mark.parametrize(
    "seen",
    [
        None,
        [],
        "stages",
        {"stages": []},
        {"stages": {"npu": None}},
        {"stages": {"npu": [1]}},
        {"links": {"a->b": 3}},
        {"workers": {"npu/0": [1, 2, 3]}},
    ],
    ids=str,
)
def test_what_is_no_such_thing_is_left_out(seen: Any) -> None:
    assert hear([{"seen": seen}]) == Elsewhere()


def test_words_in_the_place_of_numbers_are_no_numbers() -> None:
    found = hear([{"seen": {"stages": {"npu": ["fast", None, "many", 7]}, "links": {"a->b": ["x"] * 5}}}])
    assert found == Elsewhere({"npu": StageReport(None, None, "7", None)}, {"a->b": LinkReport()})


def test_what_several_workers_of_a_cluster_send_is_added_up() -> None:
    sheets = [{"seen": tell({}, {"gpu->npu": LinkReport(size, size, size, 1, 0.5)}, {})} for size in (8, 2)]
    assert hear(sheets).links == {"gpu->npu": LinkReport(10, 10, 10, 2, 1.0)}

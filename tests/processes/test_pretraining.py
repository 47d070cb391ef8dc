"""Pretraining between processes, each with its own text: the bits of one process, and the exact bytes that cross."""

from __future__ import annotations

import math
from functools import partial

import pytest

from tests.processes.worker_runs import FinishedRun, run_in_this_process, run_workers, run_workers_and_reference
from tests.processes.workers.pretrain import LARGE, THREE, WIDE, train_networks
from tests.unit.models.pretraining.small_pretraining import HOW
from whale_nebula.models.pretraining import DISCRIMINATOR

DEADLINE = 180.0


@pytest.fixture(scope="module")
def step_run() -> FinishedRun:
    """The reports of a generator and a discriminator on a step with many rows."""
    found = run_workers(
        "pretrain", {"all/0": "all", "discriminator/0": DISCRIMINATOR}, "train_large_step", deadline=DEADLINE
    )
    found.result.check()
    return found


@pytest.mark.grid
@pytest.mark.parametrize("names", [THREE[:2], THREE], ids=["two", "three"])
def test_networks_end_with_the_bits_of_one_process(names: tuple[str, ...]) -> None:
    workers = {f"{name}/0": name for name in (*names, DISCRIMINATOR)}
    alone_by = partial(run_in_this_process, partial(train_networks, names))
    ended, alone = run_workers_and_reference("pretrain", workers, "train_all", alone=alone_by, deadline=DEADLINE)
    ended.result.check()
    assert ended.get_common("losses") == alone["losses"]
    for name in (*names, DISCRIMINATOR):
        assert ended.reports[f"{name}/0"][name] == alone[name]
        assert set(ended.reports[f"{name}/0"]) & {*names, DISCRIMINATOR} == {name}


def test_sent_bytes_match_the_information_content(step_run: FinishedRun) -> None:
    count, word = HOW.count(WIDE.length), math.log2(WIDE.vocabulary)
    due = LARGE * (WIDE.length * (word + 1) + count * word) / 8
    assert abs(step_run.reports["all/0"]["bytes"] / due - 1) < 0.01


def test_only_ids_originals_and_masks_are_sent(step_run: FinishedRun) -> None:
    length, count = WIDE.length, HOW.count(WIDE.length)
    assert step_run.reports["all/0"]["frames"] == {
        f"BOUNDARY int32 coded [{LARGE}, {length}]": 1,
        f"BOUNDARY int32 coded [{LARGE}, {count}]": 1,
        f"BOUNDARY bool coded [{LARGE}, {length}]": 1,
    }
    assert step_run.reports["discriminator/0"]["frames"] == {}
    assert step_run.get_common("loss")


def test_frames_contain_no_row_of_the_text(step_run: FinishedRun) -> None:
    assert step_run.reports["all/0"]["found"] == []

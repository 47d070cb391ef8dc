"""Pretraining between processes, each with its own text: the bits of one process, and the exact bytes that cross."""

from __future__ import annotations

import math
from functools import partial

import pytest

from tests.processes.worker_runs import Ended, beside, run, told_alone
from tests.processes.workers.pretrain import LARGE, THREE, WIDE, train
from tests.unit.models.pretraining.small_pretraining import HOW
from whale_nebula.models.pretraining import DISCRIMINATOR

DEADLINE = 180.0


@pytest.fixture(scope="module")
def two() -> Ended:
    """What a generator and a discriminator told of a step with many rows."""
    found = run("pretrain", {"all/0": "all", "discriminator/0": DISCRIMINATOR}, "look", deadline=DEADLINE)
    found.result.check()
    return found


@pytest.mark.grid
@pytest.mark.parametrize("names", [THREE[:2], THREE], ids=["two", "three"])
def test_generators_and_a_discriminator_end_with_the_bits_of_one_process(names: tuple[str, ...]) -> None:
    workers = {f"{name}/0": name for name in (*names, DISCRIMINATOR)}
    alone_by = partial(told_alone, partial(train, names))
    ended, alone = beside("pretrain", workers, "learn", alone=alone_by, deadline=DEADLINE)
    ended.result.check()
    assert ended.same("losses") == alone["losses"]
    for name in (*names, DISCRIMINATOR):
        assert ended.told[f"{name}/0"][name] == alone[name]
        assert set(ended.told[f"{name}/0"]) & {*names, DISCRIMINATOR} == {name}


def test_ids_marks_and_hidden_originals_cross_in_the_bits_that_they_need(two: Ended) -> None:
    count, word = HOW.count(WIDE.length), math.log2(WIDE.vocabulary)
    due = LARGE * (WIDE.length * (word + 1) + count * word) / 8
    assert abs(two.told["all/0"]["bytes"] / due - 1) < 0.01


def test_nothing_else_crosses_and_nothing_comes_back(two: Ended) -> None:
    length, count = WIDE.length, HOW.count(WIDE.length)
    assert two.told["all/0"]["frames"] == {
        f"BOUNDARY int32 coded [{LARGE}, {length}]": 1,
        f"BOUNDARY int32 coded [{LARGE}, {count}]": 1,
        f"BOUNDARY bool coded [{LARGE}, {length}]": 1,
    }
    assert two.told["discriminator/0"]["frames"] == {}
    assert two.same("loss")


def test_no_row_of_the_text_is_in_a_frame_as_numbers_of_whole_bytes(two: Ended) -> None:
    assert two.told["all/0"]["found"] == []

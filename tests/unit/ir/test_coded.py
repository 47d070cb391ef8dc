"""The stages of a plan to which codec times are charged."""

from dataclasses import replace

import pytest

import whale_nebula as nb
from tests.unit.ir.test_timing import plan, stage
from whale_nebula.plan.timing import Coding, assumptions_of, coding, step_text, times

TAKEN = {"codec_seconds": 0.8, "encode_seconds": 0.6, "backward_codec_seconds": 0.4, "backward_encode_seconds": 0.1}


def coded(given: nb.Plan, **more: object) -> nb.Plan:
    return replace(given, boundaries=(replace(given.boundaries[0], **TAKEN, **more),))


def near(found: Coding) -> object:
    return pytest.approx(tuple(found))


def test_who_sends_encodes_and_who_reads_decodes_both_ways() -> None:
    found = coding(coded(plan(8e6)), ["a", "b"])
    assert found["a"] == near(Coding(0.15, 0.075))
    assert found["b"] == near(Coding(0.05, 0.025))


def test_two_clusters_decode_apart_and_two_stages_of_one_once() -> None:
    given = coded(plan(8e6), destinations=("b", "c", "d"))
    stages = {**given.stages, "c": stage("c"), "d": replace(stage("d"), cluster="b")}
    found = coding(replace(given, stages=stages), list(stages))
    assert found["b"] == near(Coding(0.025, 0.025 / 3)) and found["c"] == near(found["b"])
    assert found["d"] == near(Coding(0.0, 0.025 / 3))
    assert sum(each.forward for each in found.values()) == pytest.approx(0.2)
    assert sum(each.backward for each in found.values()) == pytest.approx(0.1)


def test_nothing_is_encoded_within_a_cluster_nor_for_a_stage_that_takes_no_part() -> None:
    given = coded(plan(8e6))
    same = replace(given, stages={"a": stage("a"), "b": replace(stage("b"), cluster="a")})
    assert not any(map(any, coding(same, ["a", "b"]).values()))
    assert coding(given, ["a"]) == {"a": Coding()}
    assert not any(map(any, coding(plan(8e6), ["a", "b"]).values()))


def test_the_drawing_and_the_step_count_it_where_lines_take_time() -> None:
    slow, free = plan(8e6), plan(None)
    (before,), (after,) = times(slow).phases, times(coded(slow)).phases
    assert after.timeline.busy(0) == pytest.approx(before.timeline.busy(0) + 4 * (0.15 + 0.075))
    assert after.timeline.busy(1) == pytest.approx(before.timeline.busy(1) + 4 * (0.05 + 0.025))
    assert times(coded(slow)).seconds > times(slow).seconds
    assert ", with codecs; " in step_text(coded(slow)) and "codecs" not in step_text(slow)
    assert times(coded(free)).seconds == times(free).seconds and not assumptions_of(free).timed
    assert " with codecs, " in step_text(replace(coded(slow), exchange_seconds=0.1))

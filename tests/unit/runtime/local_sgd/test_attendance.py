"""Meetings that a lost cluster misses, compared with local SGD in NumPy of the clusters that take part."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.unit.runtime.local_sgd.test_parts import draw_moves, numbers
from whale_nebula.codec.encoding import parse_encoding
from whale_nebula.config import load
from whale_nebula.errors import LinkClosedError, PlanMismatchError, RemoteProtocolError
from whale_nebula.ir.outer_optimizer import Average, Nesterov, Outer
from whale_nebula.ir.program import ASYNC, LocalSgd
from whale_nebula.launch.attach import Attachment
from whale_nebula.runtime.local_sgd.attendance import DecidedEnds, Decision, decode_decision, encode_decision
from whale_nebula.runtime.local_sgd.sync_rounds import Rounds
from whale_nebula.runtime.local_sgd.topology import Attendance, Differences, FlatVariables, choose_attendance
from whale_nebula.runtime.run import Run
from whale_nebula.runtime.session.absences import Absences
from whale_nebula.schedule.rounds import GRAIN, Timetable
from whale_nebula.transport import MemoryNetwork

SHARES = {"a": 0.5, "b": 0.25, "c": 0.25}
SIZE = 2 * GRAIN + 100


class DecidedClusters:
    """Clusters a, b and c in one process, of which b and c may be lost; `absent` ones are missing from the start."""

    def __init__(self, table: Timetable, outer: Outer, absent: tuple[str, ...] = (), patience: float = 10.0) -> None:
        network, self.rounds, self.noted = MemoryNetwork(), {}, dict[str, list[Any]]()
        lead_workers = {name: f"{name}/0" for name in SHARES if name not in absent}
        for name, worker in lead_workers.items():
            links = {
                peer: network.link(worker, peer, name, other) for other, peer in lead_workers.items() if other != name
            }
            ends = DecidedEnds(
                worker, name, lead_workers, links, patience, order=tuple(SHARES), decider="a",
                absences=Absences(frozenset({"b", "c"})), away=set(absent),
            )  # fmt: skip
            self.noted[name] = []
            flat = FlatVariables([tf.Variable(numbers(SIZE))])
            self.rounds[name] = Rounds(
                flat, ends, Differences(parse_encoding("none")), table=table, outer=outer, shares=SHARES,
                note_absent=self.noted[name].append,
            )  # fmt: skip
            self.rounds[name].begin()

    def step(self, number: int) -> None:
        moves = dict(zip(SHARES, draw_moves(number, SIZE), strict=True))
        for name, each in self.rounds.items():
            each.flat.add((0, SIZE), moves[name])
        self.send()
        for each in self.rounds.values():
            each.apply_due()

    def send(self) -> None:
        for each in self.rounds.values():
            each.send_due()

    def lose(self, name: str) -> None:
        lost = self.rounds.pop(name)
        for link in lost.ends.links.values():
            link.fail({"what": "killed"})
        lost.close()

    def settle(self) -> None:
        for each in self.rounds.values():
            each.send_remaining()
        for each in self.rounds.values():
            each.receive_remaining()

    @property
    def held(self) -> dict[str, bytes]:
        return {name: each.flat.read((0, SIZE)).tobytes() for name, each in self.rounds.items()}


@pytest.fixture
def made() -> Iterator[list[DecidedClusters]]:
    found: list[DecidedClusters] = []
    yield found
    for clusters in found:
        for each in clusters.rounds.values():
            each.close()


def simulate(steps: int, every: int, outer: Outer, lost: Mapping[str, range]) -> np.ndarray:
    """The shared weights after these steps in NumPy. Each `lost` cluster trains nothing in a range of steps, and
    returns with the shared weights.
    """
    shared, state = numbers(SIZE), outer.init(numbers(SIZE))
    own = {name: shared.copy() for name in SHARES}
    for step in range(steps):
        present = [name for name in SHARES if step not in lost.get(name, range(0))]
        moves = dict(zip(SHARES, draw_moves(step, SIZE), strict=True))
        for name in present:
            own[name] = shared.copy() if step == lost.get(name, range(0)).stop else own[name]
            own[name] = own[name] + moves[name]
        if (step + 1) % every == 0:
            whole, mean = sum(SHARES[name] for name in present), np.zeros(SIZE, np.float32)
            for name in present:
                mean += np.float32(SHARES[name] / whole) * (shared - own[name])
            shared, state = outer.update(shared, mean, state)
            own = {name: shared.copy() for name in SHARES}
    return shared


@pytest.mark.parametrize("outer", [Average(), Nesterov()], ids=["average", "nesterov"])
def test_meetings_without_lost_clusters_and_with_returned_ones_match_numpy(
    made: list[DecidedClusters], outer: Outer
) -> None:
    table = Timetable(2, 1, 0)
    made.append(DecidedClusters(table, outer))
    for step in range(8):
        if step == 3:
            made[0].lose("b")  # in the middle of an interval: its step 2 is lost, too
        if step == 6:
            made[0].lose("c")
        made[0].step(step)
    state = made[0].rounds["a"].capture()()
    made.append(DecidedClusters(table, outer, absent=("c",)))
    for name, each in made[1].rounds.items():
        each.flat.write((0, SIZE), made[0].rounds["a"].shared)
        each.restart()
        (each.resume if name == "a" else each.join)(state)
    for step in range(8, 12):
        made[1].step(step)
    expected = simulate(12, 2, outer, {"b": range(2, 8), "c": range(6, 12)})
    assert set(made[1].held.values()) == {expected.tobytes()}
    assert made[0].noted["a"] == [(), ("b",), ("b",), ("b", "c")] and made[1].noted["b"] == [("c",)] * 2
    assert made[1].rounds["b"].missed == {"b": 3.0, "c": 3.0}


def test_results_in_flight_are_kept_when_a_cluster_is_lost_and_when_it_joins(made: list[DecidedClusters]) -> None:
    table = Timetable(4, 2, 1)
    made.append(DecidedClusters(table, Average()))
    for step in range(6):
        made[0].step(step)
    made[0].lose("b")
    for step in range(6, 12):
        made[0].step(step)
        assert made[0].rounds["a"].digest() == made[0].rounds["c"].digest()
    states = {name: each.capture()() for name, each in made[0].rounds.items()}
    assert states["a"]["sent"], "nothing is in flight"
    made.append(DecidedClusters(table, Average()))
    for name, each in made[1].rounds.items():
        each.flat.write((0, SIZE), made[0].rounds["a"].shared)
        each.restart()
        if name == "b":
            each.join(states["a"])
        else:
            each.resume(states[name])
            each.flat.write((0, SIZE), made[0].rounds[name].flat.read((0, SIZE)))
    for step in range(12, 15):
        made[1].step(step)
        assert len({each.digest() for each in made[1].rounds.values()}) == 1
    made[1].settle()
    assert len(set(made[1].held.values())) == 1


def test_cluster_that_may_not_miss_a_meeting_ends_the_others(made: list[DecidedClusters]) -> None:
    made.append(DecidedClusters(Timetable(1, 1, 0), Average()))
    made[0].lose("a")
    for name in ("b", "c"):
        with pytest.raises(Exception, match="worker 'a/0' failed: killed"):
            made[0].rounds[name].send_due()
            made[0].rounds[name].apply_due()


def test_different_shared_weights_are_refused(made: list[DecidedClusters]) -> None:
    made.append(DecidedClusters(Timetable(1, 1, 0), Average()))
    made[0].rounds["b"].flat.add((0, 1), np.float32([1.0]))
    made[0].rounds["b"].restart()
    with pytest.raises(PlanMismatchError, match="b/0 and a/0 no longer have the same shared weights, in exchange 1"):
        made[0].step(0)


def test_unreachable_member_is_tolerated_for_the_patience() -> None:
    for patience, refused in ((60.0, False), (0.0, True)):
        absences = Absences(frozenset({"b"}))
        with absences.tolerate("b/1"):
            raise LinkClosedError("worker 'b/1' is gone")
        absences.check_members(["a", "c"], patience)
        if refused:
            with pytest.raises(LinkClosedError):
                absences.check_members(["a", "b"], patience)
        else:
            absences.check_members(["a", "b"], patience)


def test_of_two_members_that_cannot_reach_each_other_the_later_one_ends(made: list[DecidedClusters]) -> None:
    made.append(DecidedClusters(Timetable(1, 1, 0), Average(), patience=0.05))
    for name, other in (("b", "c"), ("c", "b")):
        absences = made[0].rounds[name].ends.absences
        with absences.tolerate(f"{other}/0"):
            raise LinkClosedError(f"worker '{other}/0' is gone")
    time.sleep(0.2)
    made[0].send()
    made[0].rounds["b"].apply_due()
    with pytest.raises(LinkClosedError, match="worker 'b/0' is gone"):
        made[0].rounds["c"].apply_due()


def test_decider_that_is_late_may_wait_for_a_lost_cluster_too(made: list[DecidedClusters]) -> None:
    """The others wait for its decision, not only for the patience from their own step."""
    made.append(DecidedClusters(Timetable(1, 1, 0), Average(), patience=1.5))
    made[0].rounds["c"].send_due()
    time.sleep(0.5)
    made[0].rounds["a"].send_due()  # b is silent
    for name in ("a", "c"):
        made[0].rounds[name].apply_due()
        assert made[0].noted[name] == [("b",)]


def test_silent_clusters_cost_one_patience_together(made: list[DecidedClusters]) -> None:
    made.append(DecidedClusters(Timetable(1, 1, 0), Average(), patience=1.0))
    began = time.monotonic()
    made[0].rounds["a"].send_due()
    made[0].rounds["a"].apply_due()
    assert time.monotonic() - began < 1.9 and made[0].noted["a"] == [("b", "c")]


@pytest.mark.parametrize("size", [0, 6, 8])
def test_decision_of_another_size_is_refused(size: int) -> None:
    assert encode_decision(Decision(("a",), 1), ("a", "b", "c")).size == 7
    with pytest.raises(RemoteProtocolError, match="as the decision on 3 clusters"):
        decode_decision(np.zeros(size, np.uint8), ("a", "b", "c"))


GPU = Attachment("gpu/0", "gpu", {"npu/0": "npu"}, {"npu/0": "127.0.0.1:1"}, "r", 1, listen="127.0.0.1:2")
RULES = [
    ({"npu": {"min": 0}}, {}, {}, Attendance("gpu", frozenset({"npu"}))),
    ({"gpu": {"min": 0}}, {}, {}, Attendance("npu", frozenset({"gpu"}))),
    ({"npu": {"min": 1}}, {}, {}, Attendance()),
    ({}, {}, {}, Attendance()),
    ({"npu": {"min": 0}, "gpu": {"min": 0}}, {}, {}, "none always takes part"),
    ({"npu": {"min": 0}}, {"mode": ASYNC}, {}, "mode='async' has a server"),
    ({"npu": {"min": 0}}, {"exchange": "1bit"}, {}, "momenta are exchanged after each step"),
    ({"npu": {"min": 0}}, {"chosen": "an exchange takes 1 s"}, {}, 'sync_every is "auto"'),
    ({"npu": {"min": 0}}, {}, {"checkpoints": None}, "the run has no checkpoint"),
    (
        {"npu": {"min": 0}},
        {},
        {"attachment": replace(GPU, has_one_launcher=True)},
        Attendance("gpu", frozenset({"npu"}), restarts_together=True),
    ),
]


@pytest.mark.parametrize(("elastic", "options", "changes", "expected"), RULES, ids=[str(n) for n in range(len(RULES))])
def test_rule_on_absence(
    elastic: dict[str, Any], options: dict[str, Any], changes: dict[str, Any], expected: Attendance | str
) -> None:
    clusters = {name: {"workers": [f"127.0.0.1:{port}"]} for port, name in enumerate(("gpu", "npu"), 1)}
    config = load({"clusters": clusters, "elastic": elastic})
    run = replace(Run(config, config.links, attachment=GPU, checkpoints=object()), **changes)
    found = choose_attendance(LocalSgd(every=4, **options), run, ("gpu", "npu"))
    if isinstance(expected, str):
        assert not found.decider and found.why_none.startswith(expected)
    else:
        assert found == expected


def test_first_cluster_that_is_always_present_decides() -> None:
    clusters = {name: {"workers": [f"127.0.0.1:{port}"]} for port, name in enumerate(("gpu", "npu", "tpu", "xpu"), 1)}
    config = load({"clusters": clusters, "elastic": {"gpu": {"min": 0}, "tpu": {"min": 0}}})
    run = Run(config, config.links, attachment=GPU, checkpoints=object())
    found = choose_attendance(LocalSgd(every=4), run, tuple(clusters))
    assert found == Attendance("npu", frozenset({"gpu", "tpu"}))

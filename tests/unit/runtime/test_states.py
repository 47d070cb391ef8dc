"""States of both ends of a channel: versions that differ are detected and dropped on all sides."""

from dataclasses import replace

import numpy as np

from tests.unit.passes.examples import SKIP
from tests.unit.passes.programs import apart, cut
from whale_nebula.ir.routing import Routing
from whale_nebula.runtime.exchange.crossing import Crossings
from whale_nebula.runtime.exchange.state import AT, ChannelState, States

CHANNEL = "gpu->npu float32[?,4] 1"
FULL = f"model 0: {CHANNEL}"


def side(version: int, end: str = "gpu/0") -> States:
    made = States()
    made.put(f"{CHANNEL}{AT}{end}", ChannelState(steps=3, version=version, structure=np.ones(2)))
    return made


def agree(*sides: States, ends: tuple[str, ...] = (CHANNEL,)) -> list[list[str]]:
    """What each drops once all have told their versions."""
    sheets = {str(number): each.versions(ends) for number, each in enumerate(sides)}
    return [
        each.drop({name: sheet for name, sheet in sheets.items() if name != str(number)}, ends)
        for number, each in enumerate(sides)
    ]


def test_sides_that_are_alike_keep_what_they_have() -> None:
    here, there = side(4), side(4, "npu/0, incoming")
    assert agree(here, there) == [[], []]
    assert here.versions() == there.versions() == {FULL: 4}


def test_unlike_versions_are_dropped_on_both_sides() -> None:
    here, there = side(4), side(5, "npu/0, incoming")
    assert agree(here, there) == [[FULL], [FULL]]
    assert here.held == there.held == {}


def test_a_side_that_remembers_nothing_has_another_version() -> None:
    """It was started again: what the other side remembers is of no use any more."""
    here, there = side(4), States()
    assert agree(here, there) == [[FULL], [FULL]]
    assert here.held == {}


def test_a_side_whose_state_was_never_told_is_as_one_without() -> None:
    here, there = side(4), side(0, "npu/0, incoming")
    assert agree(here, there) == [[FULL], [FULL]]
    assert agree(side(0), States()) == [[], []]


def test_who_has_no_end_of_a_channel_does_not_matter() -> None:
    here, there, elsewhere = side(4), side(4, "npu/0, incoming"), States()
    sheets = {"here": here.versions([CHANNEL]), "there": there.versions([CHANNEL]), "elsewhere": elsewhere.versions()}
    assert here.drop({name: sheets[name] for name in ("there", "elsewhere")}, [CHANNEL]) == []
    assert elsewhere.drop({name: sheets[name] for name in ("here", "there")}) == []


def test_channels_of_another_model_are_left_alone() -> None:
    here = side(4)
    here.model = 1
    assert here.drop({"there": {f"model 1: {CHANNEL}": 3}}, [CHANNEL]) == [f"model 1: {CHANNEL}"]
    assert list(here.held) == [f"{FULL}{AT}gpu/0"]


def test_the_ends_of_a_program_are_those_that_take_more_than_a_cast() -> None:
    found = cut(SKIP, apart)
    ways = ("rank(2) >> int8", "fp16")
    boundaries = tuple(replace(b, codec=ways[b.slot], backward_codec="int8") for b in found.boundaries)
    crossings = Crossings(replace(found, boundaries=boundaries), Routing.plain(worker.name for worker in found.workers))
    of = {host: crossings.ends(host.__eq__) for (host,) in crossings.routing.hosts}
    everything = set(crossings.ends(lambda host: True))
    assert set().union(*of.values()) == everything
    for name in everything:
        assert sum(name in ends for ends in of.values()) >= 2, "each channel has an end at both sides"
    coded = [each for each in crossings.of_boundaries if each.way.coded]
    assert len(everything) == len(coded) < len(crossings.of_boundaries)
    assert crossings.ends(lambda host: False) == ()
    together = Crossings(crossings.cut, Routing.plain(["one"] * len(crossings.routing.hosts)))
    assert together.ends(lambda host: True) == (), "within a host nothing crosses"

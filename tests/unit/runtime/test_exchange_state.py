"""States of both ends of a channel: versions that differ are detected and dropped on all sides."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.unit.passes.examples import DESCENT, SKIP, TWO_STAGES
from tests.unit.passes.programs import apart, cut
from whale_nebula.codec import INT8, Rank, parse
from whale_nebula.codec.encoding import Encoding, parse_encoding
from whale_nebula.codec.precisions import Bits
from whale_nebula.errors import DeadlineError
from whale_nebula.ir.routing import Routing
from whale_nebula.report.records import BoundaryReport
from whale_nebula.runtime.exchange.crossing import Channels, Crossings
from whale_nebula.runtime.exchange.post import Post
from whale_nebula.runtime.exchange.state import AT, ChannelState, States, Tally, note_changes
from whale_nebula.transport import MemoryNetwork

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


# -------------------- Statistics of a step's channels: sums, both ends in one process, and changes
NAME = "b0 gpu->npu"
SENT = BoundaryReport("int8", 400, 100, 120, 1, 0.5, 0.0, 0.01)


def test_what_both_ends_tell_counts_once() -> None:
    tally = Tally()
    for _ in range(2):
        tally.add(NAME, SENT)
        tally.took(NAME, BoundaryReport("int8", 400, 100, 120, 1, decode_seconds=0.25))
    found = tally.reports()[NAME]
    assert found == BoundaryReport("int8", 800, 200, 240, 2, 1.0, 0.5, 0.01)


def test_what_is_only_taken_in_here_is_told_as_it_came() -> None:
    tally = Tally()
    tally.took(NAME, BoundaryReport("int8", 400, 100, 120, 1, decode_seconds=0.25))
    assert tally.reports() == {NAME: BoundaryReport("int8", 400, 100, 120, 1, decode_seconds=0.25)}


def test_a_change_that_both_ends_see_is_said_once_and_is_a_note_of_its_boundary() -> None:
    tally = Tally()
    tally.add(NAME, SENT)
    for _ in range(2):
        tally.note_change(NAME, "fp16 -> int8")
    assert tally.changes() == (f"{NAME}: fp16 -> int8",)
    assert tally.reports()[NAME].notes == ("fp16 -> int8",)
    assert tally.notes() == ()


def test_a_note_that_stays_is_said_once_in_a_step() -> None:
    tally = Tally()
    for _ in range(3):
        tally.add(NAME, BoundaryReport(notes=("it is so",)))
    tally.took(NAME, BoundaryReport(notes=("it is so",)))
    assert tally.notes() == (f"{NAME}: it is so",)
    assert tally.reports()[NAME].notes == ("it is so",)


def test_the_first_reason_to_leave_a_step_out_stays() -> None:
    tally = Tally()
    assert tally.left_out == ""
    tally.leave_out("one")
    tally.leave_out("two")
    assert tally.left_out == "one"


@pytest.mark.parametrize(
    ("way", "before", "codec", "expected"),
    [
        ("int8", "", "int8", []),
        ("int8", "int8", "int8", []),
        ("int8, from step 3", "none", "int8", ["none -> int8"]),
        ("int8, ramp fp16 below 0.05", "fp16", "int8", ["fp16 -> int8"]),
        ("auto", "", "int4", ["none -> int4"]),
        ("auto", "", None, []),
        ("int8", "int8", None, ["int8 -> none"]),
    ],
)
def test_a_codec_that_is_another_than_before_is_told(
    way: str, before: str, codec: str | None, expected: list[str]
) -> None:
    tally, state = Tally(), ChannelState(codec=before, error=0.5)
    found = note_changes(tally, NAME, parse_encoding(way), state, state, codec and parse(codec))
    assert tally.changes() == tuple(f"{NAME}: {what}" for what in expected)
    assert found.codec == str(codec or "none")
    known = before or ("none" if way == "auto" else "")
    assert found.error == (0.5 if known == found.codec else None)


def test_a_basis_that_crosses_is_told() -> None:
    tally, state, codec = Tally(), ChannelState(codec="rank(4) >> int8", version=1), Rank(4) >> INT8()
    note_changes(tally, NAME, Encoding(codec), state, replace(state, version=2), codec)
    assert tally.changes() == (f"{NAME}: basis 1 -> 2",)


def test_whole_numbers_that_cross_as_they_are_have_not_changed() -> None:
    tally, state = Tally(), ChannelState()
    for codec in (Bits(), None, Bits()):
        state = note_changes(tally, NAME, Encoding(Bits()), state, state, codec)
    assert tally.changes() == () and state.error == 0.0


# -------------------- Replicas of one process encode in the order of micro-batches, whichever is ready first
PLAN = cut("codecs int8 none\nmicro 2\n" + TWO_STAGES.replace("@a\n%6", "@a compress=0\n%6") + DESCENT, apart)
VALUE = PLAN.boundaries[0].value
HERE, THERE = (PLAN.routing.first(stage) for stage in (0, 1))


def posted(patience: float = 20.0) -> Post:
    network = MemoryNetwork({})
    links = {pair: network.link(*pair, *pair) for pair in ((HERE, THERE), (THERE, HERE))}
    channels = Channels(PLAN, PLAN.routing, States())
    return Post(channels, links, 0, 0, patience, slices=((), ()))


def tensor(micro_batch: int) -> Any:
    return tf.random.stateless_normal((32, 64), (micro_batch, 0))


def put(post: Post, micro_batch: int) -> None:
    post.put(VALUE, micro_batch, tensor(micro_batch))


def test_the_second_waits_for_the_first() -> None:
    post, sent = posted(), []
    send = post._send
    post._send = lambda slot, home, host, m, data, raw: (sent.append(m), send(slot, home, host, m, data, raw))[1]  # type: ignore[method-assign]
    late = threading.Thread(target=put, args=(post, 1))
    late.start()
    late.join(0.1)
    put(post, 0)
    late.join(20.0)
    assert not late.is_alive()
    assert sent == [0, 1]
    got = [post.get(VALUE, m, 1) for m in (0, 1)]
    assert all(float(tf.reduce_max(tf.abs(x - tensor(m)))) < 0.05 for m, x in enumerate(got))


def test_the_first_never_comes() -> None:
    with pytest.raises(DeadlineError, match="micro-batch 0"):
        put(posted(patience=0.05), 1)


def test_a_failed_stage_ends_the_waiting() -> None:
    post = posted()
    post.abort(ValueError("a stage failed"))
    with pytest.raises(ValueError, match="a stage failed"):
        put(post, 1)

"""States of both ends of a channel: versions that differ are detected and dropped on all sides."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.unit.passes.examples import DESCENT, SKIP, TWO_STAGES
from tests.unit.passes.programs import assign_worker_per_stage, compile_text
from whale_nebula.codec import INT8, Rank, parse
from whale_nebula.codec.encoding import Encoding, parse_encoding
from whale_nebula.codec.precisions import Bits
from whale_nebula.errors import DeadlineError
from whale_nebula.ir.routing import Routing, Seat
from whale_nebula.report.records import BoundaryReport
from whale_nebula.runtime.exchange.crossing import Channels, Crossings
from whale_nebula.runtime.exchange.link_exchange import LinkExchange
from whale_nebula.runtime.exchange.state import HOST_SEPARATOR, ChannelState, States, Tally, note_changes
from whale_nebula.runtime.step.clock import StageClock
from whale_nebula.transport import MemoryNetwork

CHANNEL = "gpu->npu float32[?,4] 1"
FULL = f"model 0: {CHANNEL}"


def make_states(version: int, end: str = "gpu/0") -> States:
    made = States()
    made.put(f"{CHANNEL}{HOST_SEPARATOR}{end}", ChannelState(steps=3, version=version, structure=np.ones(2)))
    return made


def drop_different_versions(*sides: States, ends: tuple[str, ...] = (CHANNEL,)) -> list[list[str]]:
    """What each end drops once all have sent their versions."""
    sheets = {str(number): each.versions(ends) for number, each in enumerate(sides)}
    return [
        each.drop({name: sheet for name, sheet in sheets.items() if name != str(number)}, ends)
        for number, each in enumerate(sides)
    ]


def test_equal_versions_are_kept() -> None:
    here, there = make_states(4), make_states(4, "npu/0, incoming")
    assert drop_different_versions(here, there) == [[], []]
    assert here.versions() == there.versions() == {FULL: 4}


def test_different_versions_are_dropped_at_both_ends() -> None:
    here, there = make_states(4), make_states(5, "npu/0, incoming")
    assert drop_different_versions(here, there) == [[FULL], [FULL]]
    assert here.states_by_name == there.states_by_name == {}


def test_state_is_dropped_when_the_other_end_has_none() -> None:
    """It was started again: what the other side remembers is of no use any more."""
    here, there = make_states(4), States()
    assert drop_different_versions(here, there) == [[FULL], [FULL]]
    assert here.states_by_name == {}


def test_version_0_counts_as_no_state() -> None:
    here, there = make_states(4), make_states(0, "npu/0, incoming")
    assert drop_different_versions(here, there) == [[FULL], [FULL]]
    assert drop_different_versions(make_states(0), States()) == [[], []]


def test_workers_without_an_end_of_the_channel_are_ignored() -> None:
    here, there, elsewhere = make_states(4), make_states(4, "npu/0, incoming"), States()
    sheets = {"here": here.versions([CHANNEL]), "there": there.versions([CHANNEL]), "elsewhere": elsewhere.versions()}
    assert here.drop({name: sheets[name] for name in ("there", "elsewhere")}, [CHANNEL]) == []
    assert elsewhere.drop({name: sheets[name] for name in ("here", "there")}) == []


def test_channels_of_another_model_are_kept() -> None:
    here = make_states(4)
    here.model = 1
    assert here.drop({"there": {f"model 1: {CHANNEL}": 3}}, [CHANNEL]) == [f"model 1: {CHANNEL}"]
    assert list(here.states_by_name) == [f"{FULL}{HOST_SEPARATOR}gpu/0"]


def test_ends_are_those_of_coded_channels() -> None:
    found = compile_text(SKIP, assign_worker_per_stage)
    ways = ("rank(2) >> int8", "fp16")
    boundaries = tuple(replace(b, codec=ways[b.slot], backward_codec="int8") for b in found.boundaries)
    crossings = Crossings(
        replace(found, boundaries=boundaries), Routing.from_hosts(worker.name for worker in found.workers)
    )
    of = {host: crossings.list_ends(host.__eq__) for (host,) in crossings.routing.hosts}
    everything = set(crossings.list_ends(lambda host: True))
    assert set().union(*of.values()) == everything
    for name in everything:
        assert sum(name in ends for ends in of.values()) >= 2, "each channel has an end at both sides"
    coded = [each for each in crossings.boundary_crossings if each.encoding.coded]
    assert len(everything) == len(coded) < len(crossings.boundary_crossings)
    assert crossings.list_ends(lambda host: False) == ()
    together = Crossings(crossings.cut, Routing.from_hosts(["one"] * len(crossings.routing.hosts)))
    assert together.list_ends(lambda host: True) == (), "within a host nothing crosses"


# -------------------- Statistics of a step's channels: sums, both ends in one process, and changes
NAME = "b0 gpu->npu"
SENT = BoundaryReport("int8", 400, 100, 120, 1, 0.5, 0.0, 0.01)


def test_reports_of_both_ends_count_once() -> None:
    tally = Tally()
    for _ in range(2):
        tally.add(NAME, SENT)
        tally.add_received(NAME, BoundaryReport("int8", 400, 100, 120, 1, decode_seconds=0.25))
    found = tally.reports()[NAME]
    assert found == BoundaryReport("int8", 800, 200, 240, 2, 1.0, 0.5, 0.01)


def test_report_of_an_incoming_end_alone_is_used() -> None:
    tally = Tally()
    tally.add_received(NAME, BoundaryReport("int8", 400, 100, 120, 1, decode_seconds=0.25))
    assert tally.reports() == {NAME: BoundaryReport("int8", 400, 100, 120, 1, decode_seconds=0.25)}


def test_change_seen_by_both_ends_is_noted_once() -> None:
    tally = Tally()
    tally.add(NAME, SENT)
    for _ in range(2):
        tally.note_change(NAME, "fp16 -> int8")
    assert tally.changes() == (f"{NAME}: fp16 -> int8",)
    assert tally.reports()[NAME].notes == ("fp16 -> int8",)
    assert tally.notes() == ()


def test_repeated_note_is_reported_once_a_step() -> None:
    tally = Tally()
    for _ in range(3):
        tally.add(NAME, BoundaryReport(notes=("it is so",)))
    tally.add_received(NAME, BoundaryReport(notes=("it is so",)))
    assert tally.notes() == (f"{NAME}: it is so",)
    assert tally.reports()[NAME].notes == ("it is so",)


def test_first_reason_to_skip_a_step_is_kept() -> None:
    tally = Tally()
    assert tally.skip_reason == ""
    tally.skip_step("one")
    tally.skip_step("two")
    assert tally.skip_reason == "one"


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
def test_changed_codec_is_noted(way: str, before: str, codec: str | None, expected: list[str]) -> None:
    tally, state = Tally(), ChannelState(codec=before, error=0.5)
    found = note_changes(tally, NAME, parse_encoding(way), state, state, codec and parse(codec))
    assert tally.changes() == tuple(f"{NAME}: {what}" for what in expected)
    assert found.codec == str(codec or "none")
    known = before or ("none" if way == "auto" else "")
    assert found.error == (0.5 if known == found.codec else None)


def test_new_basis_is_noted() -> None:
    tally, state, codec = Tally(), ChannelState(codec="rank(4) >> int8", version=1), Rank(4) >> INT8()
    note_changes(tally, NAME, Encoding(codec), state, replace(state, version=2), codec)
    assert tally.changes() == (f"{NAME}: basis 1 -> 2",)


def test_uncompressed_integers_are_not_noted_as_a_change() -> None:
    tally, state = Tally(), ChannelState()
    for codec in (Bits(), None, Bits()):
        state = note_changes(tally, NAME, Encoding(Bits()), state, state, codec)
    assert tally.changes() == () and state.error == 0.0


# -------------------- Replicas of one process encode in the order of micro-batches, whichever is ready first
PLAN = compile_text(
    "codecs int8 none\nmicro 2\n" + TWO_STAGES.replace("@a\n%6", "@a compress=0\n%6") + DESCENT, assign_worker_per_stage
)
VALUE = PLAN.boundaries[0].value
HERE, THERE = (PLAN.routing.first(stage) for stage in (0, 1))


def make_post(patience: float = 20.0) -> LinkExchange:
    network = MemoryNetwork({})
    links = {pair: network.link(*pair, *pair) for pair in ((HERE, THERE), (THERE, HERE))}
    channels = Channels(PLAN, PLAN.routing, States())
    return LinkExchange(channels, links, 0, 0, patience, slices=((), ()))


def make_tensor(micro_batch: int) -> Any:
    return tf.random.stateless_normal((32, 64), (micro_batch, 0))


def put(post: LinkExchange, micro_batch: int) -> None:
    post.put(VALUE, micro_batch, make_tensor(micro_batch))


def test_second_micro_batch_waits_for_the_first() -> None:
    post, sent = make_post(), []
    post.clocks = {Seat(0): StageClock()}
    send = post._send
    post._send = lambda slot, home, host, m, data, raw: (sent.append(m), send(slot, home, host, m, data, raw))[1]  # type: ignore[method-assign]
    late = threading.Thread(target=put, args=(post, 1))
    late.start()
    late.join(0.1)
    put(post, 0)
    late.join(20.0)
    assert not late.is_alive()
    assert sent == [0, 1]
    first, second = post.clocks[Seat(0)].spans
    assert first.what == "encode forward 0" and second.start >= first.end, "a wait for the turn is no time of the codec"
    got = [post.get(VALUE, m, 1) for m in (0, 1)]
    assert all(float(tf.reduce_max(tf.abs(x - make_tensor(m)))) < 0.05 for m, x in enumerate(got))


def test_missing_first_micro_batch_raises_deadline_error() -> None:
    with pytest.raises(DeadlineError, match="micro-batch 0"):
        put(make_post(patience=0.05), 1)


def test_failed_stage_ends_the_wait_for_a_micro_batch() -> None:
    post = make_post()
    post.abort(ValueError("a stage failed"))
    with pytest.raises(ValueError, match="a stage failed"):
        put(post, 1)

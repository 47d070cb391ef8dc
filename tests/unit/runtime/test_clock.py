"""Clocks of a step: stages, lines, the parts that run once, and their names in TensorFlow's profiles."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.capture.step import capture, signature
from whale_nebula.report.records import ONCE, LinkReport, RemoteMeasurements, Span
from whale_nebula.runtime.step.clock import Clocks, LineClock, StageClock, StepOutcome, count_in_flight
from whale_nebula.runtime.step.engine import Engine, make_engine
from whale_nebula.transport import MemoryNetwork
from whale_nebula.transport.protocol import Key
from whale_nebula.wire.frame import count_wire_bytes


def make_spans(words: str, phase: int = 0) -> list[Span]:
    """Spans from "F0 F1 B0": forward 0, forward 1, backward 0."""
    kinds = {"F": "forward", "B": "backward", "X": "fused"}
    return [Span("s", f"{kinds[w[0]]} {w[1:]}", 0.0, 0.0, int(w[1:]), phase) for w in words.split()]


def test_overlapping_messages_occupy_a_line_once() -> None:
    times = [
        ("gpu->npu", 3.0, 4.0),
        ("gpu->npu", 1.0, 2.0),
        ("gpu->npu", 1.5, 2.5),
        ("gpu->npu", 1.6, 1.7),
        ("x", 0.0, 1.0),
    ]
    clock = LineClock(0, 0, 0.0, [Span(lane, "forward 0", start, end) for lane, start, end in times])
    assert clock.seconds() == pytest.approx({"gpu->npu": 2.5, "x": 1.0})


def test_bytes_of_a_link_are_added_over_the_workers_of_a_cluster() -> None:
    others = RemoteMeasurements(links={"gpu->npu": LinkReport(bytes=20), "npu->gpu": LinkReport(bytes=3)})
    outcome = StepOutcome([], 1.0, (1,), links={"gpu->npu": LinkReport(bytes=100)}, elsewhere=others)
    assert outcome.summed_links == {"gpu->npu": LinkReport(bytes=120), "npu->gpu": LinkReport(bytes=3)}


@pytest.mark.parametrize(
    ("words", "most"),
    [
        ("", 0),
        ("F0 F1 F2", 1),  # inference keeps nothing
        ("X0 X1", 1),
        ("F0 B0 F1 B1", 1),
        ("F0 F1 F2 B0 B1 B2", 3),
        ("F0 F1 B0 F2 B1 F3 B2 B3", 2),
    ],
)
def test_count_in_flight(words: str, most: int) -> None:
    assert count_in_flight(make_spans(words)) == most


def test_count_in_flight_separates_phases() -> None:
    assert count_in_flight([*make_spans("F0 F1"), *make_spans("F0 F1 B0 B1", phase=1)]) == 2


def test_stage_clock_records_computing_waiting_and_activity() -> None:
    clock = StageClock("gpu", 0.0, "c0")
    with clock.time_wait():
        assert clock.doing == "waits"
    with clock.time_computing("forward", 2, 1):
        assert clock.doing == "forward 2"
    assert clock.doing == ""
    (span,) = clock.spans
    assert (span.lane, span.what, span.micro_batch, span.phase) == ("gpu", "forward 2", 2, 1)
    found = clock.report()
    assert found.compute_seconds == pytest.approx(span.end - span.start)
    assert (found.cluster, found.in_flight, found.wait_seconds) == ("c0", 1, clock.wait_seconds)


def test_codec_time_is_neither_computing_nor_waiting() -> None:
    clock, began = StageClock("gpu", 0.0, "c0"), time.perf_counter()
    with clock.time_wait(), clock.time_codec("decode", "forward", 2, 1):
        assert clock.doing == "decodes 2"
        time.sleep(0.002)
    passed = time.perf_counter() - began
    assert clock.doing == "waits"
    with clock.time_computing("forward", 2, 1):
        pass
    with clock.time_codec("encode", "forward", 2, 1):
        pass
    found = clock.report()
    assert [span.what for span in clock.spans] == ["decode forward 2", "forward 2", "encode forward 2"]
    assert found.codec_seconds == pytest.approx(sum(s.end - s.start for s in clock.spans if "code" in s.what))
    decoding = clock.spans[0].end - clock.spans[0].start
    assert decoding >= 0.002
    assert found.wait_seconds is not None and 0.0 <= found.wait_seconds <= passed - decoding + 1e-4
    assert found.in_flight == 1


def test_codec_spans_do_not_count_as_in_flight() -> None:
    whats = ["forward 0", "encode forward 0", "decode backward 0", "backward 0", "encode backward 0", "forward 1"]
    assert count_in_flight([Span("s", what, 0.0, 0.0, int(what[-1])) for what in whats]) == 1


def test_line_clock_records_only_its_step_and_program() -> None:
    link = MemoryNetwork().link("a", "b", "a", "b")
    clock = LineClock.start(1, 5, [("a->b", link)])
    keys = [Key("forward", program, step, 0, 3, program + step, "a", "b") for program in (1, 2) for step in (4, 5)]
    for key in keys:
        link.send(key, np.zeros(10, np.uint8))
    link.send(Key("scalar", 1, 5, 1, -1, 9, "a", "b"), np.zeros((), np.float32))
    message, scalar = clock.spans
    assert (message.lane, message.what, message.micro_batch, message.bytes) == (
        "a->b",
        "forward 3",
        3,
        count_wire_bytes(10),
    )
    assert (scalar.what, scalar.micro_batch, scalar.phase) == ("scalar", None, 1)


def test_clocks_collect_spans_of_stages_links_and_once() -> None:
    lines = LineClock(1, 0, 0.0, [Span("a->b", "forward 0", 0.0, 0.5), Span("a->b", "forward 1", 0.5, 0.75)])
    clocks = Clocks({0: StageClock("gpu", 0.0)}, StageClock(ONCE, 0.0), lines)
    with clocks.stages[0].time_computing("forward", 0):
        assert clocks.doing() == {"gpu": "forward 0"}
    with clocks.whole_batch.time_computing("update", phase=1):
        pass
    assert [span.lane for span in clocks.spans()] == ["gpu", ONCE, "a->b", "a->b"]
    assert lines.seconds() == {"a->b": 0.75}


# -------------------- The pieces of a step that XLA compiles, by their functions' attributes
def run_step(middle_stage: Any, jit: bool = True, links: str | None = None) -> Engine:
    """A training step of two stages with `middle_stage` in the second, run once."""
    if links is not None:
        nb.init(links=links)
    weight = tf.Variable(tf.ones([4, 4]) * 0.1)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster():
            with nb.stage(cluster="a"):
                hidden = tf.tanh(x @ weight)
            with nb.stage(cluster="b"):
                loss = tf.reduce_mean(middle_stage(hidden))
        weight.assign_sub(tape.gradient(loss, weight))
        return loss

    layout, tensors = signature([("x", tf.ones([8, 4]))])

    def call(given: Any) -> Any:
        return step(*given)

    made = make_engine(capture(call, layout), call, layout, "step", jit=jit)
    made.run(tensors)
    return made


def list_compiled_fragments(made: Engine) -> set[str]:
    """The kinds of fragments that XLA compiles, with their stages."""
    bound = made.runner.compiled._bound_functions.values()
    return {
        f"{piece.fragment.kind} {piece.fragment.stage}"
        for piece in bound
        if "_XlaMustCompile" in piece.function.concrete.function_def.attr
    }


@pytest.mark.parametrize("links", [None, "1gbit,0ms"])
def test_xla_compiles_forward_and_backward_but_not_the_update(links: str | None) -> None:
    made = run_step(tf.square, links=links)
    assert list_compiled_fragments(made) == {"forward 0", "backward 0", "fused 1"}
    assert made.xla is not None
    assert made.xla.notes == []


def test_xla_compiles_nothing_without_jit() -> None:
    assert list_compiled_fragments(run_step(tf.square, jit=False)) == set()


@pytest.mark.parametrize(
    ("middle_stage", "unsupported_op"),
    [
        pytest.param(
            lambda h: tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, tf.sin(h)), [0, h])[1],
            "While",
            marks=pytest.mark.grid,
        ),
        (lambda h: tf.cond(tf.reduce_sum(h) > 0, lambda: h, lambda: -h), "If"),
        (lambda h: tf.ensure_shape(tf.py_function(tf.identity, [h], tf.float32), h.shape), "EagerPyFunc"),
        (lambda h: h + 0.0 * tf.cast(tf.strings.length(tf.strings.as_string(h)), tf.float32), "AsString"),
        pytest.param(
            lambda h: tf.function(lambda t: tf.py_function(tf.identity, [t], tf.float32))(h),
            "EagerPyFunc",
            marks=pytest.mark.grid,
        ),
    ],
)
def test_stage_with_unsupported_ops_is_not_compiled_and_noted(middle_stage: Any, unsupported_op: str) -> None:
    made = run_step(middle_stage)
    assert list_compiled_fragments(made) == {"forward 0", "backward 0"}
    assert made.xla is not None
    (note,) = made.xla.notes
    assert note.startswith("stage 'b' is not compiled by XLA: it contains ")
    assert unsupported_op in note


def test_stage_with_assertions_is_not_compiled() -> None:
    def assert_and_return(h: Any) -> Any:
        tf.debugging.assert_less(h, 100.0)
        return h

    assert list_compiled_fragments(run_step(assert_and_return)) == {"forward 0", "backward 0"}

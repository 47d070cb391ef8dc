"""Decoded tensors must have the rows of their micro-batch; others are refused before memory is allocated."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.unit.passes.examples import DESCENT, TWO_STAGES
from tests.unit.passes.programs import apart, cut, program_of
from whale_nebula.codec import packing
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.passes.batch import entries_per_row
from whale_nebula.runtime.exchange.crossing import Channels
from whale_nebula.runtime.exchange.post import Post
from whale_nebula.runtime.exchange.state import States
from whale_nebula.spec import Value
from whale_nebula.transport.protocol import Packed

ROWS = (4, 3)
MEBIBYTE = 1 << 20


def begun(micro_batches: int) -> tuple[Post, Value]:
    """The exchange of a step whose one boundary has 8 columns, and as many rows as the batch."""
    head = f"codecs int8 none\nmicro {micro_batches}\n"
    plan = cut(head + TWO_STAGES.replace("@a\n%6", "@a compress=0\n%6") + DESCENT, apart)
    channels = Channels(plan, plan.routing, States())
    return Post(channels, {}, 0, 0, 1.0, rows=ROWS[:micro_batches]), plan.boundaries[0].value


def sent(post: Post, value: Value, rows: int, micro_batch: int) -> Any:
    crossing = post.crossings.by_value[value]
    lane = post.crossings.lane(crossing, micro_batch)._replace(before=None)
    return post._pack(crossing, lane, micro_batch, tf.ones((rows, 8)), None)


def taken(post: Post, value: Value, came: Any, micro_batch: int) -> Any:
    crossing = post.crossings.by_value[value]
    return post._unpack(
        crossing, post.crossings.lane(crossing, micro_batch)._replace(before=None), ("b/0", value, micro_batch), 1, came
    )


@pytest.mark.parametrize(("micro_batches", "micro_batch"), [(1, 0), (2, 0), (2, 1)])
def test_as_many_rows_as_there_are_come_through(micro_batches: int, micro_batch: int) -> None:
    post, value = begun(micro_batches)
    rows = ROWS[micro_batch]
    came = taken(post, value, sent(post, value, rows, micro_batch), micro_batch)
    assert came.shape == (rows, 8)


@pytest.mark.parametrize("rows", [0, 1, 5, 1 << 24])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_any_others_are_refused_before_they_are_allocated(micro_batches: int, rows: int) -> None:
    post, value = begun(micro_batches)
    packed = sent(post, value, ROWS[0], 0)
    tracemalloc.start()
    with pytest.raises(RemoteProtocolError, match=f"came with {rows} rows, where 4 are due"):
        taken(post, value, packed._replace(dims=(rows, 8)), 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MEBIBYTE


def test_integers_that_are_all_the_same_are_refused_too() -> None:
    post, value = begun(1)
    data = np.concatenate([np.zeros(4, np.uint8), packing.pack(np.zeros(1 << 20, np.int64))])
    with pytest.raises(RemoteProtocolError, match="where 4 are due"):
        taken(post, value, Packed(data, 1, 0, "int64", (1 << 27, 8)), 0)


SHAPES = """
stages a b
%0 = input x int32[?,6]
%1 = input y int32[?,?]
%2 = Const {value=(-1,)} int32[1]
%3 = Neg(%0) int32[?,6] @a
%4 = Reshape(%0, %2) int32[?] @a
%5 = Reshape(%1, %2) int32[?] @a
%6 = Const {value=(0, 1)} int32[2]
%7 = Sum(%0, %6) int32[] @a
returns %7
"""


def test_the_entries_of_a_row_are_known_where_a_shape_says_so() -> None:
    values = [Value(number) for number in (0, 3, 4, 5, 7)]
    found = {value.op: count for value, count in entries_per_row(program_of(SHAPES), values).items()}
    assert {number: found.get(number) for number in (0, 3, 4, 7)} == {0: 1, 3: 1, 4: 6, 7: None}
    assert found.get(5) is None, "sentences have as many words as they have"

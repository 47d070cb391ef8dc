"""Replicas of one process encode in the order of micro-batches, whichever is ready first."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import tensorflow as tf

from tests.unit.passes.examples import DESCENT, TWO_STAGES
from tests.unit.passes.programs import apart, cut
from whale_nebula.errors import DeadlineError
from whale_nebula.runtime.exchange.crossing import Channels
from whale_nebula.runtime.exchange.post import Post
from whale_nebula.runtime.exchange.state import States
from whale_nebula.transport import MemoryNetwork

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

"""Admission of tensors: every tensor of the plan within its bound, and nothing else."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from tests.unit.passes.examples import DESCENT, EXAMPLES, GLOBAL_NORM, TWO_STAGES
from tests.unit.passes.programs import assign_worker_per_stage, compile_text
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.feed.checks import MissingInput
from whale_nebula.ir.program import Leaf
from whale_nebula.runtime.exchange.admission import ANY_SIZE, Admission, count_known_rows, list_slots
from whale_nebula.spec import Spec
from whale_nebula.transport.protocol import Key
from whale_nebula.wire.buffers import Bound

PLAN = compile_text(
    "codecs fp16 none\nmicro 2\n" + TWO_STAGES.replace("@a\n%6", "@a compress=0\n%6") + DESCENT, assign_worker_per_stage
)
FORWARD = Key("forward", 3, step=5, phase=0, micro_batch=1, slot=0, source="a/0", destination="b/0")


def make_expected() -> Admission:
    made = Admission()
    made.add(3, PLAN)
    return made


def test_boundary_is_admitted_with_its_codec_dtype_and_planned_sizes() -> None:
    bound = make_expected()(FORWARD)
    assert bound == Bound("float16", (ANY_SIZE, 8), due=0)
    assert bound.admits("float16", (4, 8)) and not bound.admits("float16", (4, 9))
    assert not bound.admits("float32", (4, 8))


def test_gradient_is_admitted_in_the_other_direction() -> None:
    back = dataclasses.replace(FORWARD, kind="backward", source="b/0", destination="a/0")
    assert make_expected()(back) == Bound("float32", (ANY_SIZE, 8), due=0)


def test_due_bytes_follow_from_the_rows_of_the_started_step() -> None:
    made = make_expected()
    back = dataclasses.replace(FORWARD, kind="backward", source="b/0", destination="a/0")
    loss = Key("scalar", 3, step=5, phase=0, micro_batch=-1, slot=0, source="b/0", destination="a/0")
    assert [made(each).due for each in (FORWARD, back, loss)] == [0, 0, 0]
    made.begin_step(3, 5, [4, 3])
    assert [made(each).due for each in (FORWARD, back, loss)] == [3 * 8 * 2, 3 * 8 * 4, math.inf]
    assert made(dataclasses.replace(FORWARD, micro_batch=0)).due == 4 * 8 * 2
    assert made(dataclasses.replace(FORWARD, step=6)).due == 0


X, Y, TABLE = (
    Leaf(op, name, Spec("float32", (None,)), batched)
    for op, (name, batched) in enumerate((("x", True), ("y", True), ("table", False)))
)


@pytest.mark.parametrize(
    ("tensors", "counts", "known"),
    [
        ((np.zeros(7), np.zeros(7), np.zeros(9)), [4, 3], [4, 3]),
        ((np.zeros(7), MissingInput("y", None), np.zeros(9)), [4, 3], [4, 3]),
        ((np.zeros(7), np.zeros(7), np.zeros(9)), [7], [7]),
        ((np.zeros(7), np.zeros(8), np.zeros(9)), [7], []),
        ((np.zeros(7), MissingInput("y", None), np.zeros(9)), [7], []),
    ],
)
def test_rows_are_unknown_when_inputs_of_one_micro_batch_differ(
    tensors: tuple[Any, ...], counts: list[int], known: list[int]
) -> None:
    """Then nobody knows how many rows a boundary has: it may have any, and is held for none."""
    assert list(count_known_rows((X, Y, TABLE), tensors, counts)) == known
    made = make_expected()
    made.begin_step(3, 5, known)
    assert (made(FORWARD).due == math.inf) == (len(known) < 2)


def test_unknown_length_allows_any_size() -> None:
    made = Admission()
    made.add(3, compile_text("micro 2\n" + TWO_STAGES.replace("[?,8]", "[?,?]") + DESCENT, assign_worker_per_stage))
    made.begin_step(3, 5, [4, 3])
    assert made(FORWARD).due == math.inf


@pytest.mark.parametrize(
    "change",
    [
        {"slot": 1},
        {"phase": 1},
        {"program": 4},
        {"micro_batch": 2},
        {"micro_batch": -1},
        {"kind": "scalar"},
        {"source": "b/0", "destination": "a/0"},
    ],
    ids=str,
)
def test_tensor_outside_the_plan_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError, match="received "):
        make_expected()(dataclasses.replace(FORWARD, **change))


def test_result_is_admitted_without_a_micro_batch_only() -> None:
    loss = Key("scalar", 3, step=5, phase=0, micro_batch=-1, slot=0, source="b/0", destination="a/0")
    assert make_expected()(loss) == Bound("float32", (), due=0)
    with pytest.raises(RemoteProtocolError, match="0 micro-batches"):
        make_expected()(dataclasses.replace(loss, micro_batch=0))


def test_variable_values_are_admitted_until_received() -> None:
    """Before they are sent, and until they were received."""
    value = Key("control", 0, step=1, phase=0, micro_batch=-1, slot=9, source="b/0", destination="a/0")
    made = make_expected()
    made.add_value(value, "float32", (None, 8))
    assert made(value) == Bound("float32", (ANY_SIZE, 8))
    with pytest.raises(RemoteProtocolError, match="not in any plan of this run"):
        made(dataclasses.replace(value, slot=8))
    made.drop_value(value)
    with pytest.raises(RemoteProtocolError, match="not in any plan of this run"):
        made(value)


@pytest.mark.parametrize("name", [*EXAMPLES, "norm"])
def test_every_planned_exchange_has_a_slot(name: str) -> None:
    plan = compile_text(EXAMPLES.get(name, TWO_STAGES + GLOBAL_NORM), assign_worker_per_stage)
    found = dict(list_slots(plan))
    names = {worker.cluster: worker.name for worker in plan.workers}
    for each in plan.exchanges:
        ends = names[each.source], names[each.destination]
        assert any((s.kind, s.phase, s.source, s.destination) == (each.kind, each.phase, *ends) for s in found)
    for boundary in plan.boundaries:
        assert any(s.kind == "forward" and s.number == boundary.slot for s in found)

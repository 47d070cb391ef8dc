"""What replicas add up on the way is the whole's; what is no part of a sum is refused."""

import pytest

from whale_nebula.ir.text import from_text
from whale_nebula.passes.rules import Fold, fold
from whale_nebula.spec import Value

GRAPH = """
    %0 = input x float32[?,4]
    %1 = capture w float32[4,4]
    %2 = MatMul(%0, %1) float32[?,4]
    %3 = Const {value=(0,)} int32[1]
    %4 = Sum(%2, %3) float32[4]
    %5 = Mean(%2, %3) float32[4]
    %6 = Const {constant=(1,)} int32[]
    %7 = ReplicaSum(%READ) float32[4]
    %8 = Sqrt(%7) float32[4]
"""


def folded(read: int) -> Fold:
    graph = from_text("\n".join(line.strip() for line in GRAPH.replace("READ", str(read)).strip().splitlines()))
    return fold(graph, {0: 0}).of(Value(8))


def test_a_sum_over_the_batch_is_the_same_in_every_micro_batch() -> None:
    assert str(folded(4)) == "whole"


@pytest.mark.parametrize(("read", "said"), [(5, "a mean"), (2, "rows"), (1, "the same in every micro-batch")])
def test_all_else_would_be_added_up_wrongly(read: int, said: str) -> None:
    found = folded(read)
    assert found.kind == "coupled" and said in found.reason

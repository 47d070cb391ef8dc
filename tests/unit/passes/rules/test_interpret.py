"""Ops that are left out of a walk, and shapes of model outputs that are replaced by those of inputs."""

import pytest

from tests.unit.passes.rules.fold_texts import fold_text, list_batched_inputs, parse_graph
from whale_nebula.passes.rules import Edge, fold
from whale_nebula.passes.rules.interpret import Recount
from whale_nebula.spec import Value


def test_skipped_ops_are_whole() -> None:
    text = """
        %0 = input x float32[?]
        %1 = Const {value=(0)} int32[1]
        %2 = Sum(%0, %1) float32[]
        %3 = Exp(%2) float32[]
        %4 = Exp(%3) float32[]
    """
    found = fold_text(text, skip=[3])
    assert [str(found.fold_of(Value(op))) for op in (3, 4)] == ["whole", "whole"]


SHAPED_BY_MODEL = """
    %0 = input mask float32[?,1]
    %1 = input z float32[?,4]
    %2 = capture w float32[4,4]
    %3 = MatMul(%1, %2) float32[?,4]
    %4 = Shape(%3) int32[2]
    %5 = Const {value=(1,)} float32[]
    %6 = Fill(%4, %5) float32[?,4]
    %7 = Mul(%0, %6) float32[?,4]
    %8 = Const {value=(0, 1)} int32[2]
    %9 = Sum(%7, %8) float32[]
    %10 = Mul(%3, %7) float32[?,4]
    %11 = Sum(%10, %8) float32[]
    %12 = RealDiv(%11, %9) float32[]
"""


def test_tensor_shaped_by_the_model_is_recounted_by_an_input() -> None:
    graph = parse_graph(SHAPED_BY_MODEL)
    found = fold(graph, list_batched_inputs(graph), targets=[Value(12)], recounting=True)
    assert found.recounts == (Recount(Edge(6, 0, Value(4)), Value(0), 0, (None, 4)),)
    assert found.wholes == (Value(9),)
    assert fold(graph, list_batched_inputs(graph), targets=[Value(12)]).recounts == ()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("%9 = Sum(%7, %8)", "%9 = Mean(%6, %8)"),  # a mean of ones alone: it meets no input
        ("%3 = MatMul(%1, %2) float32[?,4]", "%3 = MatMul(%1, %2) float32[?,?]"),  # not all sizes are known
    ],
)
def test_unknown_or_useless_recounts_are_not_made(before: str, after: str) -> None:
    graph = parse_graph(SHAPED_BY_MODEL.replace(before, after))
    assert fold(graph, list_batched_inputs(graph), targets=[Value(12)], recounting=True).recounts == ()

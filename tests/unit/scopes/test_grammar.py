"""Nesting of scopes, and the errors of violations."""

import contextlib
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest

import whale_nebula as nb
from tests.unit.scopes.scope_trees import record_scopes
from whale_nebula.errors import NestingError
from whale_nebula.scopes.frames import open_frames

SCOPES: dict[str, Callable[[], Any]] = {
    "cluster": nb.cluster,
    "replica": nb.replica,
    "pipeline": nb.pipeline,
    "stage": nb.stage,
    "split": nb.split,
    "compress": lambda: nb.compress(fp16=True),
}
LEVELS = ["cluster", "replica", "pipeline", "stage", "split"]
PAIRS = list(itertools.product(SCOPES, SCOPES))


def is_allowed(outer: str, inner: str) -> bool:
    """The rule as DESIGN says it, written another way than in the code."""
    if inner == "compress":
        return True
    if outer == "compress":
        return inner != "cluster"
    if {outer, inner} == {"pipeline", "replica"}:
        return True
    return inner in LEVELS[LEVELS.index(outer) + 1 :]


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_nesting_of_each_pair_of_scopes(outer: str, inner: str) -> None:
    with record_scopes(), SCOPES[outer]():
        if is_allowed(outer, inner):
            with SCOPES[inner]() as frame:
                assert frame.kind == inner
        else:
            with pytest.raises(NestingError):
                SCOPES[inner]().__enter__()


@pytest.mark.parametrize("between", [[], ["compress"], ["pipeline", "stage", "compress"]])
def test_violation_is_detected_across_scopes_in_between(between: list[str]) -> None:
    with record_scopes(), nb.replica(), contextlib.ExitStack() as stack:
        opened = [stack.enter_context(SCOPES[kind]()) for kind in between]
        assert open_frames()[1:] == tuple(opened)
        with pytest.raises(NestingError, match=r"nb\.replica inside nb\.replica"):
            nb.replica().__enter__()


@pytest.mark.parametrize("order", [["replica", "pipeline", "replica"], ["pipeline", "replica", "pipeline"]])
def test_replica_and_pipeline_occur_once_in_either_order(order: list[str]) -> None:
    with (
        record_scopes(),
        SCOPES[order[0]](),
        SCOPES[order[1]](),
        pytest.raises(NestingError, match=f"inside nb.{order[2]}"),
    ):
        SCOPES[order[2]]().__enter__()


def current_line() -> int:
    caller = inspect.currentframe().f_back  # type: ignore[union-attr]
    return caller.f_lineno  # type: ignore[union-attr]


def test_nesting_error_names_both_scopes_rule_and_fix() -> None:
    with record_scopes(), nb.stage(name="encoder"):
        outer = current_line() - 1
        with pytest.raises(NestingError) as caught, nb.pipeline(4):
            pass
        inner = current_line() - 2
    assert str(caught.value) == (
        f"NB-101 nb.pipeline inside nb.stage at {__file__}:{outer} ({__file__}:{inner})\n"
        "  why: the order from outside to inside is cluster > replica > pipeline > stage > split\n"
        "  mend: swap them:\n"
        "        with nb.pipeline(...):\n"
        "            with nb.stage(...):"
    )


@pytest.mark.parametrize(
    ("outer", "inner", "part"),
    [("stage", "stage", "stages follow one another, and cannot be nested"), ("compress", "cluster", "swap them")],
)
def test_nesting_error_text_depends_on_the_scopes(outer: str, inner: str, part: str) -> None:
    with record_scopes(), SCOPES[outer](), pytest.raises(NestingError, match=part), SCOPES[inner]():
        pass


def test_closed_scope_can_be_entered_again() -> None:
    cluster = nb.cluster()
    with record_scopes() as tree:
        with cluster as first:
            pass
        with cluster as second, pytest.raises(NestingError), cluster:
            pass
    assert first is not second
    assert str(tree) == "cluster\ncluster\n"


def test_closing_an_unopened_scope_is_refused() -> None:
    with pytest.raises(NestingError):
        nb.cluster().__exit__(None, None, None)


def test_repr_of_a_scope_is_its_call() -> None:
    assert repr(nb.cluster(["gpu"], name="gpu")) == "nb.cluster(layout=('gpu',), name='gpu')"

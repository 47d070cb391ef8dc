"""A cond that applies gradients of two clusters is decomposed by cluster."""

from dataclasses import replace

import pytest

from whale_nebula.ir.text import from_text
from whale_nebula.passes.branches import NO_OWNER, Branch, BranchSplit, split_branches
from whale_nebula.spec import Value

A, B = frozenset({"a"}), frozenset({"b"})
CAPTURE_NAMES = {0: "ga", 1: "gb", 2: "va", 3: "vb", 4: "count"}
OWNERS = {"ga": A, "gb": B, "va": A, "vb": B}
ARGUMENTS = """
%0 = Placeholder float32[64,64]
%1 = Placeholder float32[64,64]
%2 = Placeholder resource[]
%3 = Placeholder resource[]
%4 = Placeholder resource[]
"""
SHARED_READ = """
%5 = ReadVariableOp(%4) float32[] stateful
%6 = Mul(%0, %5) float32[64,64]
%7 = AssignSubVariableOp(%2, %6) stateful
%8 = Mul(%1, %5) float32[64,64]
%9 = AssignSubVariableOp(%3, %8) stateful
%10 = Const float32[]
%11 = AssignAddVariableOp(%4, %10) stateful ^%5
"""
NORM = """
%5 = L2Loss(%0) float32[]
%6 = L2Loss(%1) float32[]
%7 = AddV2(%5, %6) float32[]
%8 = Mul(%0, %7) float32[64,64]
%9 = AssignSubVariableOp(%2, %8) stateful
%10 = Mul(%1, %7) float32[64,64]
%11 = AssignSubVariableOp(%3, %10) stateful
"""
FOREIGN_VALUE = """
%5 = L2Loss(%1) float32[]
%6 = AssignAddVariableOp(%2, %5) stateful
"""
READ_AFTER_WRITE = """
%5 = Const float32[]
%6 = AssignAddVariableOp(%4, %5) stateful
%7 = ReadVariableOp(%4) float32[] stateful ^%6
%8 = Mul(%0, %7) float32[64,64]
%9 = AssignSubVariableOp(%2, %8) stateful
%10 = Mul(%1, %7) float32[64,64]
%11 = AssignSubVariableOp(%3, %10) stateful
"""
NORM_AFTER_WRITE = """
%5 = AssignSubVariableOp(%2, %0) stateful
%6 = ReadVariableOp(%2) float32[64,64] stateful ^%5
%7 = L2Loss(%6) float32[]
%8 = L2Loss(%1) float32[]
%9 = AddV2(%7, %8) float32[]
%10 = Mul(%1, %9) float32[64,64]
%11 = AssignSubVariableOp(%3, %10) stateful
"""


def split(text: str, owners: dict[str, frozenset[str]] = OWNERS) -> tuple[list[frozenset[str]], BranchSplit] | None:
    branches = [Branch(from_text(ARGUMENTS + text), CAPTURE_NAMES), Branch(from_text("%0 = NoOp\n"), {})]
    found = split_branches(branches, dict(owners))
    return None if found is None else (found[0], found[1][0])


@pytest.mark.parametrize(
    ("text", "out", "groups"),
    [
        pytest.param(SHARED_READ, {5}, {A: {6, 7}, B: {8, 9}, NO_OWNER: {10, 11}}, id="what all read is taken out"),
        pytest.param(NORM, {5, 6, 7}, {A: {8, 9}, B: {10, 11}}, id="a norm is taken out with what it is made of"),
        pytest.param(FOREIGN_VALUE, {5}, {A: {6}}, id="a small value of another cluster is taken out"),
        pytest.param(
            READ_AFTER_WRITE, set(), {NO_OWNER: {5, 6}, A: {7, 8, 9}, B: {7, 10, 11}}, id="a write comes first"
        ),
    ],
)
def test_branch_is_split_into_effects_by_cluster(
    text: str, out: set[int], groups: dict[frozenset[str], set[int]]
) -> None:
    found = split(text)
    assert found is not None
    keys, branch = found
    assert (branch.removed_ops, branch.groups) == (out, groups)
    if text == READ_AFTER_WRITE:
        assert keys[0] == NO_OWNER


def test_norm_of_a_tied_variable_is_taken_out() -> None:
    found = split(NORM, OWNERS | {"gb": A | B, "vb": A | B})
    assert found is not None
    assert (found[1].removed_ops, found[1].groups) == ({5, 6, 7}, {A: {8, 9}, A | B: {10, 11}})


def test_bundle_of_small_gradients_is_not_taken_out() -> None:
    """Each of its outputs is one of its inputs, so it mixes no clusters."""
    text = """
%5 = ReadVariableOp(%2) float32[] stateful
%6 = ReadVariableOp(%3) float32[] stateful
%7 = IdentityN(%5, %6) float32[], float32[]
%8 = AssignSubVariableOp(%2, %7:0) stateful
%9 = AssignSubVariableOp(%3, %7:1) stateful
"""
    found = split(text)
    assert found is not None
    assert (found[1].removed_ops, found[1].groups.keys()) == (set(), {A, B})


EFFECTS = "%5 = AssignSubVariableOp(%2, %0) stateful\n%6 = AssignSubVariableOp(%3, %1) stateful\n"


@pytest.mark.parametrize(
    ("result", "found"),
    [
        pytest.param("%7 = ReadVariableOp(%2) float32[] stateful ^%5", True, id="after the last write"),
        pytest.param("%7 = RandomUniform(%4) float32[] stateful", False, id="a draw"),
    ],
)
def test_results_of_a_branch_follow_its_effects(result: str, found: bool) -> None:
    graph = replace(from_text(ARGUMENTS + EFFECTS + result + "\n"), returns=(Value(7),))
    splits = split_branches([Branch(graph, CAPTURE_NAMES)], dict(OWNERS))
    assert [each.results for each in splits[1]] == [{7}] if splits and found else splits is None


def test_result_read_before_a_write_is_not_split() -> None:
    text = "%5 = ReadVariableOp(%2) float32[] stateful\n%6 = AssignSubVariableOp(%2, %0) stateful ^%5\n"
    graph = from_text(ARGUMENTS + text + "%7 = AssignSubVariableOp(%3, %1) stateful\n")
    assert split_branches([Branch(replace(graph, returns=(Value(5),)), CAPTURE_NAMES)], dict(OWNERS)) is None


def test_slot_is_owned_by_the_cluster_that_writes_it() -> None:
    owners = dict(OWNERS)
    graph = from_text(ARGUMENTS + "%5 = AssignVariableOp(%4, %0) stateful\n%6 = AssignVariableOp(%3, %1) stateful\n")
    assert split_branches([Branch(graph, CAPTURE_NAMES)], owners) is not None
    assert owners["count"] == A


@pytest.mark.parametrize("text", [NORM_AFTER_WRITE, "%5 = AssignSubVariableOp(%2, %0) stateful\n"])
def test_branch_with_norm_after_write_or_one_cluster_is_not_split(text: str) -> None:
    assert split(text) is None

"""A cond that applies gradients of two clusters, taken apart by cluster."""

from whale_nebula.ir.text import from_text
from whale_nebula.passes.branches import NOBODY, Branch, Split, split_branches

A, B = frozenset({"a"}), frozenset({"b"})
GIVEN = {0: "ga", 1: "gb", 2: "va", 3: "vb", 4: "count"}
OWNERS = {"ga": A, "gb": B, "va": A, "vb": B}
ARGUMENTS = """
%0 = Placeholder float32[64,64]
%1 = Placeholder float32[64,64]
%2 = Placeholder resource[]
%3 = Placeholder resource[]
%4 = Placeholder resource[]
"""
PLAIN = """
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
NOTHING = "%0 = NoOp\n"


def split(text: str) -> tuple[list[frozenset[str]], Split] | None:
    branches = [Branch(from_text(ARGUMENTS + text), GIVEN), Branch(from_text(NOTHING), {})]
    found = split_branches(branches, dict(OWNERS))
    return None if found is None else (found[0], found[1][0])


def test_each_cluster_gets_its_own_effects() -> None:
    found = split(PLAIN)
    assert found is not None
    _, branch = found
    assert branch.groups == {A: {6, 7}, B: {8, 9}, NOBODY: {10, 11}}


def test_what_all_read_is_taken_out() -> None:
    found = split(PLAIN)
    assert found is not None
    assert found[1].out == {5}


def test_a_norm_over_clusters_is_taken_out_with_what_it_is_made_of() -> None:
    found = split(NORM)
    assert found is not None
    _, branch = found
    assert branch.out == {5, 6, 7}
    assert branch.groups == {A: {8, 9}, B: {10, 11}}


def test_a_write_comes_after_the_reads_before_it() -> None:
    """The counter is written, and then read by both clusters."""
    found = split("""
%5 = Const float32[]
%6 = AssignAddVariableOp(%4, %5) stateful
%7 = ReadVariableOp(%4) float32[] stateful ^%6
%8 = Mul(%0, %7) float32[64,64]
%9 = AssignSubVariableOp(%2, %8) stateful
%10 = Mul(%1, %7) float32[64,64]
%11 = AssignSubVariableOp(%3, %10) stateful
""")
    assert found is not None
    keys, branch = found
    assert keys[0] == NOBODY
    assert branch.out == frozenset()


def test_a_slot_goes_to_the_cluster_that_writes_it() -> None:
    owners = dict(OWNERS)
    graph = from_text(ARGUMENTS + "%5 = AssignVariableOp(%4, %0) stateful\n%6 = AssignVariableOp(%3, %1) stateful\n")
    assert split_branches([Branch(graph, GIVEN)], owners) is not None
    assert owners["count"] == A


def test_a_norm_that_is_read_after_a_write_stays_where_it_is() -> None:
    found = split("""
%5 = AssignSubVariableOp(%2, %0) stateful
%6 = ReadVariableOp(%2) float32[64,64] stateful ^%5
%7 = L2Loss(%6) float32[]
%8 = L2Loss(%1) float32[]
%9 = AddV2(%7, %8) float32[]
%10 = Mul(%1, %9) float32[64,64]
%11 = AssignSubVariableOp(%3, %10) stateful
""")
    assert found is None


def test_one_cluster_alone_is_left_as_it_is() -> None:
    assert split("%5 = AssignSubVariableOp(%2, %0) stateful\n") is None

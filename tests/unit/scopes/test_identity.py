"""The stage of an entry, its cluster, and the effect of `nb.place` on both."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

import whale_nebula as nb
from tests.unit.scopes.scope_trees import record_scopes
from whale_nebula.errors import NestingError, OptionError, StageIdentityError
from whale_nebula.scopes.frames import Frame, begin_step, open_frames, reenter
from whale_nebula.scopes.identity import set_clusters
from whale_nebula.scopes.placement import parse_placement


@pytest.fixture(autouse=True)
def record_only() -> Iterator[None]:
    with record_scopes():
        yield


@pytest.fixture
def two_clusters() -> Iterator[None]:
    set_clusters({"gpu": 1, "npu": 2})
    yield
    set_clusters({})


def enter_stage(cluster: str | None = None, name: str | None = None) -> Frame:
    with nb.stage(cluster=cluster, name=name) as frame:
        return frame


def enter_stages(*entries: dict[str, str]) -> list[tuple[str | None, str | None]]:
    return [(frame.key, frame.cluster) for frame in (enter_stage(**entry) for entry in entries)]


def test_stage_key_is_its_name_cluster_or_number() -> None:
    with nb.cluster():
        found = enter_stages({"cluster": "gpu", "name": "encoder"}, {"cluster": "npu"}, {"name": "head"}, {})
    assert found == [("encoder", "gpu"), ("npu", "npu"), ("head", "local"), ("stage3", "local")]


def test_reentering_a_key_continues_the_stage() -> None:
    with nb.cluster(["gpu", "npu"]):
        found = enter_stages({"cluster": "gpu"}, {"name": "b"}, {"cluster": "gpu"}, {"name": "b"})
    assert found == [("gpu", "gpu"), ("b", "npu"), ("gpu", "gpu"), ("b", "npu")]


def test_stage_numbers_restart_in_each_run_of_a_block() -> None:
    for _ in range(2):
        with nb.cluster():
            assert [key for key, _ in enter_stages({}, {}, {})] == ["stage0", "stage1", "stage2"]


@pytest.mark.parametrize("outer", [nb.replica, nb.pipeline])
def test_outermost_scope_is_the_block_without_a_cluster(outer: object) -> None:
    for _ in range(2):
        with outer():  # type: ignore[operator]
            assert [key for key, _ in enter_stages({}, {})] == ["stage0", "stage1"]


def test_inner_scopes_share_the_stage_numbers_of_the_block() -> None:
    with nb.cluster():
        for expected in ("stage0", "stage1"):
            with nb.replica(), nb.pipeline(2):
                assert enter_stage().key == expected


def test_stages_outside_a_block_are_numbered_per_step() -> None:
    assert [key for key, _ in enter_stages({}, {})] == ["stage0", "stage1"]
    for _ in range(2):
        with begin_step():
            assert [key for key, _ in enter_stages({}, {})] == ["stage0", "stage1"]
    assert enter_stage().key == "stage2"


def test_cluster_name_of_a_block_applies_to_its_stages() -> None:
    with nb.cluster(name="gpu"):
        assert enter_stages({}, {"name": "b"}, {"cluster": "npu"}) == [("stage0", "gpu"), ("b", "gpu"), ("npu", "npu")]


def test_stages_are_assigned_to_the_layout_in_order() -> None:
    with nb.cluster(["gpu", "npu"]):
        assert [home for _, home in enter_stages({}, {}, {})] == ["gpu", "npu", "gpu"]
    with nb.cluster({"npu", "gpu"}):
        assert [home for _, home in enter_stages({}, {})] == ["gpu", "npu"]


def test_stages_are_assigned_to_configured_clusters(two_clusters: None) -> None:
    with nb.cluster():
        assert [home for _, home in enter_stages({}, {})] == ["gpu", "npu"]
    with nb.cluster(["npu"]):
        assert enter_stage().cluster == "npu"
    with nb.cluster(name="x"):
        assert enter_stage().cluster == "x"


def test_stage_on_two_clusters_is_refused() -> None:
    with nb.cluster(), pytest.raises(StageIdentityError) as caught:
        enter_stages({"name": "a", "cluster": "gpu"}, {"name": "a", "cluster": "npu"})
    error = caught.value
    assert "stage 'a' is on cluster 'npu'" in error.what and "on 'gpu' at" in error.what
    assert error.mend == "give the second one its own name: nb.stage(cluster='npu', name='a_2')"


@pytest.mark.parametrize(
    ("layout", "stages", "message"),
    [
        ("all", [{"cluster": "gpu"}, {"name": "gpu", "cluster": "npu"}], "stage 'gpu' is on cluster 'npu'"),
        ("all", [{"name": "stage1"}, {}], "would get the name 'stage1'"),
        (["gpu", "npu"], [{"cluster": "gpuu"}], "did you mean 'gpu'"),
    ],
    ids=["a name that is another stage's cluster", "a number that is taken", "a cluster outside the layout"],
)
def test_conflicting_stage_key_is_refused(layout: Any, stages: list[dict[str, str]], message: str) -> None:
    with nb.cluster(layout), pytest.raises(StageIdentityError, match=message):
        enter_stages(*stages)


def test_stages_outside_a_block_may_reuse_names() -> None:
    found = enter_stages({"name": "a", "cluster": "gpu"}, {"name": "a", "cluster": "npu"})
    assert found == [("a", "gpu"), ("a", "npu")]


def test_unnamed_stage_in_a_reentered_layer_is_refused() -> None:
    with nb.cluster() as block:
        pass
    with reenter([block]):
        assert enter_stage(name="inner").key == "inner"
        with pytest.raises(StageIdentityError, match="how often the model is traced"):
            enter_stage()


def list_rules(mapping: Any) -> list[tuple[str, str, str]]:
    return [(rule.pattern.pattern, rule.key, rule.cluster) for rule in parse_placement(mapping).rules]


def test_placement_by_cluster_names_the_stage_after_it() -> None:
    assert list_rules({"encoder/.*": "gpu", "head": "npu"}) == [("encoder/.*", "gpu", "gpu"), ("head", "npu", "npu")]


def test_placement_accepts_stage_objects() -> None:
    with nb.cluster(["gpu", "npu"]):
        assert list_rules({"a": nb.stage(cluster="npu", name="first"), "b": nb.stage(name="second")}) == [
            ("a", "first", "npu"),
            ("b", "second", "npu"),
        ]


def test_placement_records_open_scopes_and_site() -> None:
    with nb.cluster(), nb.pipeline(2):
        made = parse_placement({"a": "gpu"})
        assert made.frames == open_frames()
    assert made.site.file == __file__
    frame = made.frame(made.rules[0], "a")
    assert (frame.kind, frame.key, frame.cluster, frame.options["layer"]) == ("stage", "gpu", "gpu", "a")


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        (None, "takes a dict, not None"),
        ("gpu", "takes a dict"),
        ({3: "gpu"}, "3 is not a pattern"),
        ({"a(": "gpu"}, "is not a valid regular expression"),
        ({"a": 3}, "'a' is assigned to 3"),
        ({"a": None}, "'a' is assigned to None"),
        ({"a": nb.stage()}, "'a' is assigned to nb.stage"),
        ({"a": nb.pipeline(2)}, "'a' is assigned to nb.pipeline"),
        ({"a": "g pu"}, "is not a valid name"),
    ],
)
def test_invalid_placement_is_refused_at_the_users_line(mapping: Any, words: str) -> None:
    with pytest.raises(OptionError, match=re.escape(words)) as caught:
        parse_placement(mapping)
    assert caught.value.where.startswith(f"{__file__}:")
    assert caught.value.mend


def test_placement_of_a_name_on_two_clusters_is_refused() -> None:
    with pytest.raises(StageIdentityError, match="stage 'a' is on cluster 'npu'"):
        parse_placement({"x": nb.stage(name="a", cluster="gpu"), "y": nb.stage(name="a", cluster="npu")})


def test_placement_outside_the_layout_is_refused() -> None:
    with nb.cluster(["gpu"]), pytest.raises(StageIdentityError, match="does not include"):
        parse_placement({"x": "npu"})


@pytest.mark.filterwarnings("ignore::whale_nebula.errors.NebulaWarning")
def test_placement_inside_a_stage_is_refused() -> None:
    with nb.cluster(), nb.stage(cluster="gpu"), pytest.raises(NestingError, match=r"nb.place is called inside nb"):
        parse_placement({"x": "npu"})

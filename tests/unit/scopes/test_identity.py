"""The stage of an entry, its cluster, and the effect of `nb.place` on both."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

import whale_nebula as nb
from tests.unit.scopes.scope_trees import parsing
from whale_nebula.errors import NestingError, OptionError, StageIdentityError
from whale_nebula.scopes.frames import Frame, begin_step, open_frames, reenter
from whale_nebula.scopes.identity import deal_to
from whale_nebula.scopes.placement import placement


@pytest.fixture(autouse=True)
def only_parsed() -> Iterator[None]:
    with parsing():
        yield


@pytest.fixture
def dealt() -> Iterator[None]:
    deal_to({"gpu": 1, "npu": 2})
    yield
    deal_to({})


def enter(cluster: str | None = None, name: str | None = None) -> Frame:
    with nb.stage(cluster=cluster, name=name) as frame:
        return frame


def keys(*entries: dict[str, str]) -> list[tuple[str | None, str | None]]:
    return [(frame.key, frame.cluster) for frame in (enter(**entry) for entry in entries)]


def test_the_key_is_the_name_else_the_cluster_else_the_number() -> None:
    with nb.cluster():
        found = keys({"cluster": "gpu", "name": "encoder"}, {"cluster": "npu"}, {"name": "head"}, {})
    assert found == [("encoder", "gpu"), ("npu", "npu"), ("head", "local"), ("stage3", "local")]


def test_entering_a_key_again_continues_the_stage() -> None:
    with nb.cluster(["gpu", "npu"]):
        found = keys({"cluster": "gpu"}, {"name": "b"}, {"cluster": "gpu"}, {"name": "b"})
    assert found == [("gpu", "gpu"), ("b", "npu"), ("gpu", "gpu"), ("b", "npu")]


def test_each_run_of_a_block_numbers_anew() -> None:
    for _ in range(2):
        with nb.cluster():
            assert [key for key, _ in keys({}, {}, {})] == ["stage0", "stage1", "stage2"]


@pytest.mark.parametrize("outer", [nb.replica, nb.pipeline])
def test_the_outermost_scope_is_the_block_where_there_is_no_cluster(outer: object) -> None:
    for _ in range(2):
        with outer():  # type: ignore[operator]
            assert [key for key, _ in keys({}, {})] == ["stage0", "stage1"]


def test_scopes_inside_a_block_share_its_numbers() -> None:
    with nb.cluster():
        for expected in ("stage0", "stage1"):
            with nb.replica(), nb.pipeline(2):
                assert enter().key == expected


def test_stages_in_no_block_count_on_until_numbering_begins_anew() -> None:
    assert [key for key, _ in keys({}, {})] == ["stage0", "stage1"]
    for _ in range(2):
        with begin_step():
            assert [key for key, _ in keys({}, {})] == ["stage0", "stage1"]
    assert enter().key == "stage2"


def test_a_cluster_block_names_the_cluster_of_stages_that_name_none() -> None:
    with nb.cluster(name="gpu"):
        assert keys({}, {"name": "b"}, {"cluster": "npu"}) == [("stage0", "gpu"), ("b", "gpu"), ("npu", "npu")]


def test_stages_are_dealt_to_a_layout_in_order() -> None:
    with nb.cluster(["gpu", "npu"]):
        assert [home for _, home in keys({}, {}, {})] == ["gpu", "npu", "gpu"]
    with nb.cluster({"npu", "gpu"}):
        assert [home for _, home in keys({}, {})] == ["gpu", "npu"]


def test_stages_are_dealt_to_the_configs_clusters(dealt: None) -> None:
    with nb.cluster():
        assert [home for _, home in keys({}, {})] == ["gpu", "npu"]
    with nb.cluster(["npu"]):
        assert enter().cluster == "npu"
    with nb.cluster(name="x"):
        assert enter().cluster == "x"


def test_one_stage_runs_on_one_cluster() -> None:
    with nb.cluster(), pytest.raises(StageIdentityError) as caught:
        keys({"name": "a", "cluster": "gpu"}, {"name": "a", "cluster": "npu"})
    error = caught.value
    assert "stage 'a' is on cluster 'npu'" in error.what and "on 'gpu' at" in error.what
    assert error.mend == "give the second one its own name: nb.stage(cluster='npu', name='a_2')"


@pytest.mark.parametrize(
    ("layout", "stages", "said"),
    [
        ("all", [{"cluster": "gpu"}, {"name": "gpu", "cluster": "npu"}], "stage 'gpu' is on cluster 'npu'"),
        ("all", [{"name": "stage1"}, {}], "would get the name 'stage1'"),
        (["gpu", "npu"], [{"cluster": "gpuu"}], "did you mean 'gpu'"),
    ],
    ids=["a name that is another stage's cluster", "a number that is taken", "a cluster outside the layout"],
)
def test_a_key_that_cannot_be_is_refused(layout: Any, stages: list[dict[str, str]], said: str) -> None:
    with nb.cluster(layout), pytest.raises(StageIdentityError, match=said):
        keys(*stages)


def test_programs_outside_a_block_do_not_disturb_each_other() -> None:
    found = keys({"name": "a", "cluster": "gpu"}, {"name": "a", "cluster": "npu"})
    assert found == [("a", "gpu"), ("a", "npu")]


def test_a_numbered_stage_in_a_replayed_layer_needs_a_name() -> None:
    with nb.cluster() as block:
        pass
    with reenter([block]):
        assert enter(name="inner").key == "inner"
        with pytest.raises(StageIdentityError, match="how often the model is traced"):
            enter()


def said(mapping: Any) -> list[tuple[str, str, str]]:
    return [(rule.pattern.pattern, rule.key, rule.cluster) for rule in placement(mapping).rules]


def test_a_cluster_gives_its_stage_its_name() -> None:
    assert said({"encoder/.*": "gpu", "head": "npu"}) == [("encoder/.*", "gpu", "gpu"), ("head", "npu", "npu")]


def test_a_stage_may_be_given_in_its_place() -> None:
    with nb.cluster(["gpu", "npu"]):
        assert said({"a": nb.stage(cluster="npu", name="first"), "b": nb.stage(name="second")}) == [
            ("a", "first", "npu"),
            ("b", "second", "npu"),
        ]


def test_it_takes_the_open_scopes_with_it_and_where_it_stands() -> None:
    with nb.cluster(), nb.pipeline(2):
        made = placement({"a": "gpu"})
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
def test_what_it_cannot_say_is_refused_where_it_is_written(mapping: Any, words: str) -> None:
    with pytest.raises(OptionError, match=re.escape(words)) as caught:
        placement(mapping)
    assert caught.value.where.startswith(f"{__file__}:")
    assert caught.value.mend


def test_one_name_is_not_given_to_two_clusters() -> None:
    with pytest.raises(StageIdentityError, match="stage 'a' is on cluster 'npu'"):
        placement({"x": nb.stage(name="a", cluster="gpu"), "y": nb.stage(name="a", cluster="npu")})


def test_a_cluster_that_the_block_leaves_out_is_refused() -> None:
    with nb.cluster(["gpu"]), pytest.raises(StageIdentityError, match="does not include"):
        placement({"x": "npu"})


@pytest.mark.filterwarnings("ignore::whale_nebula.errors.NebulaWarning")
def test_it_stands_in_no_stage() -> None:
    with nb.cluster(), nb.stage(cluster="gpu"), pytest.raises(NestingError, match=r"nb.place is called inside nb"):
        placement({"x": "npu"})

"""The map of `nb.place` as it is written: patterns, clusters, stages, and where it may stand."""

import re
from typing import Any

import pytest

import whale_nebula as nb
from whale_nebula.errors import NestingError, OptionError, StageIdentityError
from whale_nebula.scopes import open_frames
from whale_nebula.scopes.placing import placement


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
        (None, "are a dict, not None"),
        ("gpu", "are a dict"),
        ({3: "gpu"}, "3 is no pattern"),
        ({"a(": "gpu"}, "no regular expression"),
        ({"a": 3}, "'a' is given to 3"),
        ({"a": None}, "'a' is given to None"),
        ({"a": nb.stage()}, "'a' is given to nb.stage"),
        ({"a": nb.pipeline(2)}, "'a' is given to nb.pipeline"),
        ({"a": "g pu"}, "is no name"),
    ],
)
def test_what_it_cannot_say_is_refused_where_it_is_written(mapping: Any, words: str) -> None:
    with pytest.raises(OptionError, match=re.escape(words)) as caught:
        placement(mapping)
    assert caught.value.where.startswith(f"{__file__}:")
    assert caught.value.mend


@pytest.mark.parametrize(
    ("pattern", "meant"), [("a(", r"'a\\('"), ("*dense*", "'.*dense.*'"), ("enc/[0", r"'enc/\\[0'"), ("a**", "'a*.*'")]
)
def test_a_regex_is_mended_where_it_is_wrong(pattern: str, meant: str) -> None:
    with pytest.raises(OptionError) as caught:
        placement({pattern: "gpu"})
    assert caught.value.mend == meant


def test_one_name_is_not_given_to_two_clusters() -> None:
    with pytest.raises(StageIdentityError, match="stage 'a' is on cluster 'npu'"):
        placement({"x": nb.stage(name="a", cluster="gpu"), "y": nb.stage(name="a", cluster="npu")})


def test_a_cluster_that_the_block_leaves_out_is_refused() -> None:
    with nb.cluster(["gpu"]), pytest.raises(StageIdentityError, match="leaves out"):
        placement({"x": "npu"})


@pytest.mark.filterwarnings("ignore::whale_nebula.errors.NebulaWarning")
def test_it_stands_in_no_stage() -> None:
    with nb.cluster(), nb.stage(cluster="gpu"), pytest.raises(NestingError, match=r"nb.place stands inside nb.stage"):
        placement({"x": "npu"})

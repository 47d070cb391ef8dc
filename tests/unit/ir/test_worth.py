"""Warnings about a codec that costs more than it saves: by the sizes of the papers, and in a plan of a real trace."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras
import pytest

import whale_nebula as nb
from tests.golden.files import check_golden
from whale_nebula.codec.objects import CALL
from whale_nebula.config.schema import parse_links
from whale_nebula.plan.overview import Direction, judge_codecs, max_known
from whale_nebula.plan.timing import duration, predict_times
from whale_nebula.spec import Spec

PAPERS = Spec("float32", (None, 64, 768))
LINE = "60mbit,20ms"


def directions(
    codec: str, backward: str = "int8", *, spec: Spec = PAPERS, line: str = LINE, rows: Sequence[int] = (128,)
) -> tuple[Direction, Direction]:
    there = Direction(spec, codec, rows, [("gpu", "npu")], links=parse_links(line))
    return there, replace(there, way=backward, lines=[("npu", "gpu")], forward=codec)


def told(codec: str, backward: str = "int8", **given: Any) -> list[str]:
    found = judge_codecs(directions(codec, backward, **given), one_after_the_other)
    return [] if found is None else [found.text(["b0, gpu to npu"], "train.py:12")]


def one_after_the_other(ways: Sequence[Direction]) -> float:
    """A step of one micro-batch in which nothing computes but codecs."""
    return sum((way.seconds or 0.0) + (way.cost.seconds if way.cost else 0.0) for way in ways)


CASES: list[tuple[str, str, dict[str, Any]]] = [
    # what the papers' own table has: 2.10 s a step, where fp16 alone takes 1.60 s
    ("svd(0.9) >> fp16", "int8", {}),
    # each micro-batch is decomposed anew, whatever it has of rows
    ("svd(0.6) >> fp16", "int8", {"rows": [16] * 8}),
    *((codec, "int8", {}) for codec in ("svd(0.6) >> fp16", "svd(0.2)", "fp16", "int8", "int4", "rank(96) >> int8")),
    # on a fast line no codec is worth it; of gigabits a cast pays
    ("int8", "int8", {"line": "10gbit,1ms"}),
    *(("fp16", backward, {"line": "5gbit,1ms"}) for backward in ("int8", "fp16", "none")),
    ("fp16", "int8", {"line": "1000gbit,1ms"}),
    # a structure without a precision is compared with the tensor itself
    ("svd(0.95)", "none", {"line": "1gbit,1ms"}),
    # of so few columns the precision alone is used, and that is worth it
    ("topk(0.5) >> int8", "int8", {"spec": Spec("float32", (None, 64, 2)), "rows": [2**16]}),
    # where nothing is known nothing is said
    ("svd(0.9) >> fp16", "none", {"line": "free"}),
    ("svd(0.9) >> fp16", "none", {"spec": Spec("float32", None)}),
    ("auto", "auto", {}),
    ("none", "none", {}),
]


def test_what_is_warned_of_is_golden(request: pytest.FixtureRequest) -> None:
    said = ["# Codecs that cost more than they save, and those that do not."]
    for codec, backward, given in CASES:
        where = "".join(f", {name} {value}" for name, value in given.items())
        said += ["", f"== {codec}, back {backward}{where}", *told(codec, backward, **given)]
    check_golden(request, "codec_advice.txt", "\n".join(said))


@pytest.mark.parametrize("codec", ["none, mask", "int8, mask tokens", "int8, zstd"])
def test_what_may_save_more_than_sizes_tell_is_not_warned_of(codec: str) -> None:
    assert told(codec, codec, line="10gbit,1ms") == []
    assert told(f"svd(0.9) >> fp16{codec.partition(',')[1]}{codec.partition(',')[2]}", codec) != []


def test_what_stays_in_a_cluster_costs_nothing() -> None:
    there, _ = directions("svd(0.9)")
    inside = replace(there, lines=[])
    assert inside.cost is None and inside.codec_seconds is None and inside.encode_seconds is None
    assert judge_codecs([inside], one_after_the_other) is None


def test_who_sends_encodes_once_and_every_reader_decodes() -> None:
    there, back = directions("int8")
    two = replace(there, lines=[("gpu", "npu"), ("gpu", "tpu")])
    shares = replace(back, lines=[("npu", "gpu"), ("tpu", "gpu")])
    one, other = there.cost, two.cost
    assert one and other and other == (one.encode, 2 * one.decode)
    first, both = back.cost, shares.cost
    assert first and both and both == (2 * first.encode, 2 * first.decode)


def test_the_slowest_is_of_those_that_are_known() -> None:
    assert max_known([None, 2.0, 3.0]) == 3.0
    assert max_known([None]) is max_known([]) is None


# ---------------------------------------------------------------------- plans
@functools.cache
def planned(micro_batch: int = 1, line: str = LINE, masked: bool = False, **options: Any) -> nb.Plan:
    keras.utils.clear_session(free_memory=False)
    inputs = keras.Input((64, 768))
    with nb.cluster(), nb.pipeline(micro_batch):
        with nb.stage(cluster="gpu"), nb.compress(**options):
            marked = keras.layers.Masking()(inputs) if masked else inputs
            hidden = keras.layers.Dense(768, name="first")(marked)
        with nb.stage(cluster="npu"):
            outputs = keras.layers.Dense(1, name="second")(hidden)
    model = keras.Model(inputs, outputs, name="papers")
    model.compile("sgd", "mse")
    nb.shutdown()
    with nb.init(links=line):
        return nb.plan(model, keras.KerasTensor((128, 64, 768)), keras.KerasTensor((128, 64, 1)))


def test_a_plan_warns_with_the_line_to_change_and_says_what_codecs_take() -> None:
    given = planned(svd=0.9, fp16=True)
    (boundary,) = given.boundaries
    assert boundary.bytes == 4 + 2 * 631 * (8192 + 768)
    assert boundary.codec_seconds and boundary.codec_seconds > 0.1
    assert boundary.backward_codec_seconds and boundary.backward_codec_seconds < boundary.codec_seconds
    (warning,) = [note for note in given.notes if note.startswith("warning: ")]
    assert " without svd; " in warning and f"remove it at {__file__}:" in warning
    text = given.to_text()
    assert warning in text and "as svd(0.9) >> fp16" in text and "as int8" in text
    assert "b0: encoding and decoding take about 289 ms + 31.4 ms per step on one core" in text
    assert "svd(0.9)" in given.to_html() and "on one core" in given.to_html()
    assert '"float32[?,64,768] as svd(0.9) #gt;#gt; fp16"' in given.to_mermaid()


def foretold(**options: Any) -> tuple[float, list[str]]:
    """Seconds of a step as the plan draws it, and its warnings."""
    found = planned(**options)
    return predict_times(found).seconds, [note for note in found.notes if note.startswith("warning: ")]


@pytest.mark.parametrize(
    ("micro_batch", "line", "worth"),
    [(1, LINE, False), (8, LINE, True), pytest.param(8, "600mbit,20ms", False, marks=pytest.mark.grid)],
)
def test_it_is_warned_of_just_where_the_step_that_is_foretold_gets_longer(
    micro_batch: int, line: str, worth: bool
) -> None:
    """In one micro-batch nothing computes beside the line; in eight a slow line hides eight decompositions, which are
    more seconds than they save of it, and a fast one does not.
    """
    alone, _ = foretold(micro_batch=micro_batch, line=line, fp16=True)
    both, warnings = foretold(micro_batch=micro_batch, line=line, svd=0.9, fp16=True)
    assert (both < alone) is worth
    assert len(warnings) == (not worth)
    for warning in warnings:
        assert f"a step takes {duration(both)}, or {duration(alone)} without svd; remove it at " in warning


def test_one_line_of_code_is_warned_of_once() -> None:
    keras.utils.clear_session(free_memory=False)
    inputs = keras.Input((64, 768))
    with nb.cluster():
        with nb.stage(cluster="gpu"), nb.compress(int8=True):
            left, right = (keras.layers.Dense(768)(inputs) for _ in range(2))
        with nb.stage(cluster="npu"):
            outputs = keras.layers.Dense(1)(left * right)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    nb.shutdown()
    with nb.init(links="100gbit,1ms"):
        given = nb.plan(model, keras.KerasTensor((16, 64, 768)), keras.KerasTensor((16, 64, 1)))
    (warning,) = [note for note in given.notes if note.startswith("warning: ")]
    assert (
        warning.endswith((" (also for b1)", " (also for b0)"))
        and f" without nb.compress; remove it at {__file__}:" in warning
    )


def test_a_mask_reads_well() -> None:
    given = planned(masked=True, int8=True, mask=True)
    text = given.to_text()
    assert "as none" not in text
    assert "at most 6.2 MiB as int8" in text and "at most 12.4 MiB" in text
    assert "b1: in both directions only marked rows" in text
    assert all(link.at_most for link in given.links.values())
    assert "at most 6.2 MiB" in given.to_svg() and given.to_html().count("at most 12.4 MiB") == 2


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        (True, 'mask=True, but Keras computed no mask for it; mask="x/mask" uses an input'),
        ("x", "'x' is float32[?,64,768], which does not have one value per row of float32[?,64,768]"),
    ],
)
def test_what_no_mask_marks_crosses_whole_and_the_plan_says_so(mask: bool | str, why: str) -> None:
    given, plain = planned(int8=True, mask=mask), planned(int8=True)
    assert given.notes[0] == f"b0: all rows are sent: {why}"
    assert given.boundaries[0].codec == "int8" and given.links == plain.links


def test_a_basis_is_renewed_once_a_step_and_differences_are_kept_of_the_tensor_alone() -> None:
    one, four = (directions("rank(96) >> int8", rows=rows) for rows in ([128], [32] * 4))
    costs = [each.cost for each in (one[0], four[0])]
    assert costs[0] and costs[1]
    calls = 3 * 4 * CALL  # of a structure and a precision, on both sides
    assert costs[1].seconds == pytest.approx(costs[0].seconds + calls)
    plain, kept = (directions(codec, "int8") for codec in ("int8", "int8, delta ids"))
    assert plain[0].cost and kept[0].cost and kept[0].cost.seconds > 5 * plain[0].cost.seconds
    assert kept[1].cost == plain[1].cost


def test_a_ramp_tells_its_ladder_with_what_each_rung_takes() -> None:
    given = planned(int4=True, backward="int8", ramp=True)
    (boundary,) = given.boundaries
    whole = 128 * 64 * 768
    assert boundary.rungs == (4 + 2 * whole, 4 + whole + 2 * whole // 64)
    assert boundary.backward_rungs == boundary.rungs[:1]
    text = " ".join(given.to_text().split())
    assert "at first" not in text and "b0: first 12.0 MiB as fp16, then 6.2 MiB as int8, each until" in text
    assert "then int4 (the size shown)" in text and "gradient first 12.0 MiB as fp16, each until" in text
    assert planned(int4=True).boundaries[0].rungs == ()
    assert directions("int4, ramp fp16 below 0.05", spec=Spec("float32", None))[0].rungs == ()

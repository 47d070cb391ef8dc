"""Warnings about a codec that costs more than it saves: by the sizes of the papers, and in a plan of a real trace."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras
import pytest

import whale_nebula as nb
from tests.golden.files import check_golden
from whale_nebula.codec.objects import CALL_SECONDS
from whale_nebula.config.schema import parse_links
from whale_nebula.plan.overview import Direction, judge_codecs, max_known
from whale_nebula.plan.timing import duration, predict_times
from whale_nebula.spec import Spec

PAPER_TENSOR = Spec("float32", (None, 64, 768))
LINK = "60mbit,20ms"


def make_directions(
    codec: str, backward: str = "int8", *, spec: Spec = PAPER_TENSOR, line: str = LINK, rows: Sequence[int] = (128,)
) -> tuple[Direction, Direction]:
    there = Direction(spec, codec, rows, [("gpu", "npu")], links=parse_links(line))
    return there, replace(there, encoding=backward, lines=[("npu", "gpu")], forward=codec)


def list_advice(codec: str, backward: str = "int8", **given: Any) -> list[str]:
    found = judge_codecs(make_directions(codec, backward, **given), add_codec_seconds)
    return [] if found is None else [found.text(["b0, gpu to npu"], "train.py:12")]


def add_codec_seconds(ways: Sequence[Direction]) -> float:
    """Return the seconds of a step of one micro-batch in which only codecs compute."""
    return sum((way.seconds or 0.0) + (way.cost.seconds if way.cost else 0.0) for way in ways)


CASES: list[tuple[str, str, dict[str, Any]]] = [
    # from the table of the papers: 2.10 s per step; fp16 alone takes 1.60 s
    ("svd(0.9) >> fp16", "int8", {}),
    # each micro-batch is decomposed separately, whatever its number of rows
    ("svd(0.6) >> fp16", "int8", {"rows": [16] * 8}),
    *((codec, "int8", {}) for codec in ("svd(0.6) >> fp16", "svd(0.2)", "fp16", "int8", "int4", "rank(96) >> int8")),
    # on a fast link no codec pays; at some gigabits a cast does
    ("int8", "int8", {"line": "10gbit,1ms"}),
    *(("fp16", backward, {"line": "5gbit,1ms"}) for backward in ("int8", "fp16", "none")),
    ("fp16", "int8", {"line": "1000gbit,1ms"}),
    # a structure without a precision is compared with the tensor itself
    ("svd(0.95)", "none", {"line": "1gbit,1ms"}),
    # with so few columns only the precision is used, which pays
    ("topk(0.5) >> int8", "int8", {"spec": Spec("float32", (None, 64, 2)), "rows": [2**16]}),
    # no warning without known times or sizes
    ("svd(0.9) >> fp16", "none", {"line": "free"}),
    ("svd(0.9) >> fp16", "none", {"spec": Spec("float32", None)}),
    ("auto", "auto", {}),
    ("none", "none", {}),
]


def test_codec_warnings_match_the_golden_file(request: pytest.FixtureRequest) -> None:
    lines = ["# Codecs that cost more than they save, and those that do not."]
    for codec, backward, given in CASES:
        where = "".join(f", {name} {value}" for name, value in given.items())
        lines += ["", f"== {codec}, back {backward}{where}", *list_advice(codec, backward, **given)]
    check_golden(request, "codec_advice.txt", "\n".join(lines))


@pytest.mark.parametrize("codec", ["none, mask", "int8, mask tokens", "int8, zstd"])
def test_mask_and_zstd_suppress_the_codec_warning(codec: str) -> None:
    assert list_advice(codec, codec, line="10gbit,1ms") == []
    assert list_advice(f"svd(0.9) >> fp16{codec.partition(',')[1]}{codec.partition(',')[2]}", codec) != []


def test_codec_inside_a_cluster_has_no_cost() -> None:
    there, _ = make_directions("svd(0.9)")
    inside = replace(there, lines=[])
    assert inside.cost is None and inside.codec_seconds is None and inside.encode_seconds is None
    assert judge_codecs([inside], add_codec_seconds) is None


def test_codec_cost_counts_one_encoding_and_a_decoding_per_reader() -> None:
    there, back = make_directions("int8")
    two = replace(there, lines=[("gpu", "npu"), ("gpu", "tpu")])
    shares = replace(back, lines=[("npu", "gpu"), ("tpu", "gpu")])
    one, other = there.cost, two.cost
    assert one and other and other == (one.encode, 2 * one.decode)
    first, both = back.cost, shares.cost
    assert first and both and both == (2 * first.encode, 2 * first.decode)


def test_slowest_ignores_unknown_times() -> None:
    assert max_known([None, 2.0, 3.0]) == 3.0
    assert max_known([None]) is max_known([]) is None


# ---------------------------------------------------------------------- plans
@functools.cache
def make_plan(micro_batch: int = 1, line: str = LINK, masked: bool = False, **options: Any) -> nb.Plan:
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


def test_plan_warning_has_the_line_and_codec_seconds() -> None:
    plan = make_plan(svd=0.9, fp16=True)
    (boundary,) = plan.boundaries
    assert boundary.bytes == 4 + 2 * 631 * (8192 + 768)
    assert boundary.codec_seconds and boundary.codec_seconds > 0.1
    assert boundary.backward_codec_seconds and boundary.backward_codec_seconds < boundary.codec_seconds
    (warning,) = [note for note in plan.notes if note.startswith("warning: ")]
    assert " without svd; " in warning and f"remove it at {__file__}:" in warning
    text = plan.to_text()
    assert warning in text and "as svd(0.9) >> fp16" in text and "as int8" in text
    assert "b0: encoding and decoding take about 289 ms + 31.4 ms per step on one core" in text
    assert "svd(0.9)" in plan.to_html() and "on one core" in plan.to_html()
    assert '"float32[?,64,768] as svd(0.9) #gt;#gt; fp16"' in plan.to_mermaid()


def predict_step(**options: Any) -> tuple[float, list[str]]:
    """Return the seconds of a planned step, and the warnings of the plan."""
    found = make_plan(**options)
    return predict_times(found).seconds, [note for note in found.notes if note.startswith("warning: ")]


@pytest.mark.parametrize(
    ("micro_batch", "line", "worth"),
    [(1, LINK, False), (8, LINK, True), pytest.param(8, "600mbit,20ms", False, marks=pytest.mark.grid)],
)
def test_codec_warning_appears_only_if_the_predicted_step_is_longer(micro_batch: int, line: str, worth: bool) -> None:
    """With one micro-batch no computation overlaps with the link. With eight, a slow link hides the decompositions,
    which take longer than the time they save, and a fast link does not.
    """
    alone, _ = predict_step(micro_batch=micro_batch, line=line, fp16=True)
    both, warnings = predict_step(micro_batch=micro_batch, line=line, svd=0.9, fp16=True)
    assert (both < alone) is worth
    assert len(warnings) == (not worth)
    for warning in warnings:
        assert f"a step takes {duration(both)}, or {duration(alone)} without svd; remove it at " in warning


def test_codec_warning_appears_once_per_source_line_on_the_boundary_with_the_largest_loss() -> None:
    keras.utils.clear_session(free_memory=False)
    inputs = keras.Input((64, 768))
    with nb.cluster():
        with nb.stage(cluster="gpu"), nb.compress(int8=True):
            sizes = [keras.layers.Dense(units)(inputs) for units in (96, 768, 192)]
        with nb.stage(cluster="npu"):
            outputs = keras.layers.Dense(1)(keras.layers.concatenate(sizes))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    nb.shutdown()
    with nb.init(links="100gbit,1ms"):
        plan = nb.plan(model, keras.KerasTensor((16, 64, 768)), keras.KerasTensor((16, 64, 1)))
    (warning,) = [note for note in plan.notes if note.startswith("warning: ")]
    largest, middle, smallest = sorted(plan.boundaries, key=lambda each: -each.bytes)
    assert f" without nb.compress; remove it at {__file__}:" in warning
    assert warning.startswith(f"warning: {largest.name}, ")
    assert warning.endswith(f" (also for {middle.name}, {smallest.name})")


def test_texts_of_a_masked_boundary() -> None:
    plan = make_plan(masked=True, int8=True, mask=True)
    text = plan.to_text()
    assert "as none" not in text
    assert "at most 6.2 MiB as int8" in text and "at most 12.4 MiB" in text
    assert "b1: in both directions only marked rows" in text
    assert all(link.at_most for link in plan.links.values())
    assert "at most 6.2 MiB" in plan.to_svg() and plan.to_html().count("at most 12.4 MiB") == 2


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        (True, 'mask=True, but Keras computed no mask for it; mask="x/mask" uses an input'),
        pytest.param(
            "x",
            "'x' is float32[?,64,768], which does not have one value per row of float32[?,64,768]",
            marks=pytest.mark.grid,
        ),
    ],
)
def test_unusable_mask_is_noted_and_all_rows_are_sent(mask: bool | str, why: str) -> None:
    plan, plain = make_plan(int8=True, mask=mask), make_plan(int8=True)
    assert plan.notes[0] == f"b0: all rows are sent: {why}"
    assert plan.boundaries[0].codec == "int8" and plan.links == plain.links


def test_codec_costs_of_a_basis_per_step_and_of_delta() -> None:
    one, four = (make_directions("rank(96) >> int8", rows=rows) for rows in ([128], [32] * 4))
    costs = [each.cost for each in (one[0], four[0])]
    assert costs[0] and costs[1]
    calls = 3 * 4 * CALL_SECONDS  # of a structure and a precision, on both sides
    assert costs[1].seconds == pytest.approx(costs[0].seconds + calls)
    plain, deltas = (make_directions(codec, "int8") for codec in ("int8", "int8, delta ids"))
    assert plain[0].cost and deltas[0].cost and deltas[0].cost.seconds > 5 * plain[0].cost.seconds
    assert deltas[1].cost == plain[1].cost


def test_ramp_lists_the_bytes_of_each_rung() -> None:
    plan = make_plan(int4=True, backward="int8", ramp=True)
    (boundary,) = plan.boundaries
    whole = 128 * 64 * 768
    assert boundary.rungs == (4 + 2 * whole, 4 + whole + 2 * whole // 64)
    assert boundary.backward_rungs == boundary.rungs[:1]
    text = " ".join(plan.to_text().split())
    assert "at first" not in text and "b0: first 12.0 MiB as fp16, then 6.2 MiB as int8, each until" in text
    assert "then int4 (the size shown)" in text and "gradient first 12.0 MiB as fp16, each until" in text
    assert make_plan(int4=True).boundaries[0].rungs == ()
    assert make_directions("int4, ramp fp16 below 0.05", spec=Spec("float32", None))[0].rungs == ()

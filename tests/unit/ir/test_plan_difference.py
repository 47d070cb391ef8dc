"""The first difference of two plans in one sentence: the cause before its consequences."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import pytest

import whale_nebula as nb

layers = keras.layers
X, Y = keras.KerasTensor((8, 4)), keras.KerasTensor((8, 1))


def plan(
    *,
    width: int = 6,
    inputs: int = 4,
    activation: str = "relu",
    epsilon: float = 1e-3,
    twice: bool = False,
    places: Any = None,
    loss: str = "mse",
    metrics: Any = (),
    clip: float | None = None,
    **pipeline: Any,
) -> nb.Plan:
    """The plan of a small model in which one thing may be otherwise."""
    nb.shutdown()
    keras.utils.clear_session(free_memory=False)
    first = keras.Input((inputs,))
    hidden = layers.Dense(width, activation=activation, name="a")(first)
    hidden = layers.LayerNormalization(epsilon=epsilon, name="norm")(hidden)
    model = keras.Model(first, layers.Dense(1, name="b")(hidden * 2.0 if twice else hidden), name="small")
    model.compile(keras.optimizers.SGD(0.1, clipnorm=clip, name="sgd"), loss, metrics=list(metrics))
    fp16 = pipeline.pop("fp16", False)
    with nb.cluster(), nb.pipeline(**pipeline):
        if fp16:
            with nb.compress(fp16=True):
                nb.place(model, places or {"a": "gpu", "b": "npu"})
        else:
            nb.place(model, places or {"a": "gpu", "b": "npu"})
    return nb.plan(model, keras.KerasTensor((8, inputs)), Y)


@pytest.fixture(scope="module")
def base() -> nb.Plan:
    return plan()


EXACTLY = [
    (
        {"places": {"a": "gpu", "b": nb.stage(cluster="tpu", name="npu")}},
        "stage 'npu' is on cluster 'npu' here, on cluster 'tpu' there",
    ),
    ({"places": {"a": "npu", "b": "gpu"}}, "the order of the stages is gpu, npu here, npu, gpu there"),
    ({"places": {"a|norm|b": "gpu"}}, "stage 'npu' exists here, but not there"),
    ({"micro_batch": 2}, "micro_batch is 1 here, 2 there"),
    ({"inputs": 5}, "input x is float32[?,4] batched here, float32[?,5] batched there"),
    ({"width": 7}, "boundary b0, from gpu to npu, is float32[?,6] here, float32[?,7] there"),
    ({"fp16": True}, "the codec of boundary b0, from gpu to npu, is none here, fp16 there"),
    ({"metrics": ["mae"]}, "variable mean_absolute_error/count exists there, but not here"),
]
OPS = [
    ({"activation": "tanh"}, "Relu", "Tanh"),
    ({"epsilon": 0.25}, "0.0010000000474974513", "0.25"),
]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        pytest.param(*each, marks=pytest.mark.grid if {*each[0]} & {"inputs", "width", "metrics"} else ())
        for each in EXACTLY
    ],
    ids=[" ".join(other) for other, _ in EXACTLY],
)
def test_the_first_difference_is_told(base: nb.Plan, other: dict[str, Any], said: str) -> None:
    given = plan(**other)
    assert base.difference(given) == said
    assert given.program_digest != base.program_digest


def test_a_cut_at_another_layer_is_told_by_the_layers() -> None:
    before, after = (plan(places={first: "gpu", second: "npu"}) for first, second in (("a|norm", "b"), ("a", "norm|b")))
    assert (before.difference(after) or "").startswith("boundary b0 is produced by 'norm' here, 'a' there; op ")


@pytest.mark.parametrize(("other", "ours", "theirs"), OPS, ids=[" ".join(each[0]) for each in OPS])
def test_the_first_line_of_the_program_that_differs_is_told(
    base: nb.Plan, other: dict[str, Any], ours: str, theirs: str
) -> None:
    found = base.difference(plan(**other)) or ""
    assert re.fullmatch(rf"op \d+: .*{re.escape(ours)}.* here.*{re.escape(theirs)}.* there", found), found


def test_the_same_plan_has_no_difference_wherever_it_was_made(base: nb.Plan, tmp_path: Path) -> None:
    base.save(tmp_path / "plan.json")
    assert base.difference(nb.Plan.load(tmp_path / "plan.json")) is None
    assert base.difference(plan()) is None
    assert base.difference(replace(base, rows=(3,), notes=("other",))) is None


def test_versions_threads_and_workers(base: nb.Plan) -> None:
    other = replace(base, versions={**base.versions, "tensorflow": "2.21.9"})
    assert f"the version of tensorflow is {base.versions['tensorflow']} here, 2.21.9 there" == base.difference(other)
    other = replace(base, threads={**base.threads, "intra_op": 77})
    assert "the number of threads intra_op" in (base.difference(other) or "")
    apart = replace(base, stages={name: replace(s, worker=f"{name}/0") for name, s in base.stages.items()})
    moved = replace(base, stages={name: replace(s, worker=f"{name}/1") for name, s in base.stages.items()})
    assert base.difference(apart) is None
    assert apart.difference(moved) == "the worker of stage 'gpu' is gpu/0 here, gpu/1 there"
    found = base.difference(replace(base, in_flight=None, lines=(base.lines[0], "%9 = ???")), ("now", "then"))
    assert found is not None and found.endswith(" exists now, but not then")

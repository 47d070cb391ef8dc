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


def make_plan(
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
    """Make the plan of a small model, with one change."""
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
def base_plan() -> nb.Plan:
    return make_plan()


FIELD_CHANGES = [
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
OP_CHANGES = [
    ({"activation": "tanh"}, "Relu", "Tanh"),
    ({"epsilon": 0.25}, "0.0010000000474974513", "0.25"),
]


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        pytest.param(*each, marks=pytest.mark.grid if {*each[0]} & {"inputs", "width", "metrics"} else ())
        for each in FIELD_CHANGES
    ],
    ids=[" ".join(other) for other, _ in FIELD_CHANGES],
)
def test_difference_describes_the_first_changed_field(
    base_plan: nb.Plan, other: dict[str, Any], difference: str
) -> None:
    changed = make_plan(**other)
    assert base_plan.difference(changed) == difference
    assert changed.program_digest != base_plan.program_digest


def test_difference_names_the_layers_of_a_moved_boundary() -> None:
    before, after = (
        make_plan(places={first: "gpu", second: "npu"}) for first, second in (("a|norm", "b"), ("a", "norm|b"))
    )
    assert before.difference(after) == "boundary b0 is produced by 'norm' here, 'a' there"


@pytest.mark.parametrize(("other", "ours", "theirs"), OP_CHANGES, ids=[" ".join(each[0]) for each in OP_CHANGES])
def test_difference_quotes_the_first_changed_op(
    base_plan: nb.Plan, other: dict[str, Any], ours: str, theirs: str
) -> None:
    found = base_plan.difference(make_plan(**other)) or ""
    assert re.fullmatch(rf"op \d+: .*{re.escape(ours)}.* here.*{re.escape(theirs)}.* there", found), found


def test_equal_plans_have_no_difference(base_plan: nb.Plan, tmp_path: Path) -> None:
    base_plan.save(tmp_path / "plan.json")
    assert base_plan.difference(nb.Plan.load(tmp_path / "plan.json")) is None
    assert base_plan.difference(make_plan()) is None
    assert base_plan.difference(replace(base_plan, rows=(3,), notes=("other",))) is None


def test_difference_of_versions_threads_and_workers(base_plan: nb.Plan) -> None:
    other = replace(base_plan, versions={**base_plan.versions, "tensorflow": "2.21.9"})
    assert (
        f"the version of tensorflow is {base_plan.versions['tensorflow']} here, 2.21.9 there"
        == base_plan.difference(other)
    )
    other = replace(base_plan, threads={**base_plan.threads, "intra_op": 77})
    assert "the number of threads intra_op" in (base_plan.difference(other) or "")
    apart = replace(base_plan, stages={name: replace(s, worker=f"{name}/0") for name, s in base_plan.stages.items()})
    moved = replace(base_plan, stages={name: replace(s, worker=f"{name}/1") for name, s in base_plan.stages.items()})
    assert base_plan.difference(apart) is None
    assert apart.difference(moved) == "the worker of stage 'gpu' is gpu/0 here, gpu/1 there"
    found = base_plan.difference(
        replace(base_plan, in_flight=None, lines=(base_plan.lines[0], "%9 = ???")), ("now", "then")
    )
    assert found is not None and found.endswith(" exists now, but not then")

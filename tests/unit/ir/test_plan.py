"""`nb.plan`: its arguments, its lack of effects, its refusals; and plans in files."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.unit.ir.example_plans import inference, skipping
from whale_nebula.errors import OptionError, PlanError, StateError

ROWS = 12


def make_model(*, scopes: bool = True, compiled: bool = True) -> Any:
    keras.utils.clear_session(free_memory=False)
    inputs = keras.Input((4,))
    if scopes:
        with nb.cluster(), nb.stage(cluster="gpu"):
            hidden = keras.layers.Dense(3)(inputs)
        with nb.cluster(), nb.stage(cluster="npu"):
            outputs = keras.layers.Dense(1)(hidden)
    else:
        outputs = keras.layers.Dense(1)(inputs)
    made = keras.Model(inputs, outputs, name="small")
    if compiled:
        made.compile("sgd", "mse")
    return made


def make_arrays() -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((ROWS, 4), "float32"), np.zeros((ROWS, 1), "float32")


@pytest.mark.parametrize(
    "example",
    [
        pytest.param((np.zeros((ROWS, 4)), np.zeros((ROWS, 1))), marks=pytest.mark.grid),
        tuple(map(tf.constant, make_arrays())),
        (tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1])),
        pytest.param((tf.TensorSpec([ROWS, 4]), tf.TensorSpec([ROWS, 1])), marks=pytest.mark.grid),
        (keras.KerasTensor((None, 4)), keras.KerasTensor((None, 1))),
        (tf.data.Dataset.from_tensor_slices(make_arrays()).batch(ROWS),),
    ],
    ids=["doubles", "tensors", "specs", "whole specs", "keras tensors", "dataset"],
)
def test_plan_depends_only_on_the_form_of_the_example(example: tuple[Any, ...]) -> None:
    assert nb.plan(make_model(), *example).digest == digest_of_arrays()


@functools.cache
def digest_of_arrays() -> str:
    return nb.plan(make_model(), *make_arrays()).digest


def test_plan_changes_no_variable() -> None:
    given = make_model()
    before = [np.array(weight) for weight in given.weights]
    nb.plan(given, np.ones((ROWS, 4)), np.ones((ROWS, 1)))
    assert all(np.array_equal(a, b) for a, b in zip(before, given.weights, strict=True))
    assert int(given.optimizer.iterations) == 0
    given.fit(np.ones((ROWS, 4)), np.ones((ROWS, 1)), verbose=0)
    assert not all(np.array_equal(a, b) for a, b in zip(before, given.weights, strict=True))


def test_planned_stages_and_bytes_match_the_report_of_a_step() -> None:
    given = make_model()
    planned = nb.plan(given, *make_arrays())
    given.fit(*make_arrays(), batch_size=ROWS, verbose=0)
    report = nb.last_report()
    assert list(planned.stages) == list(report.stages)
    assert {name: link.bytes for name, link in planned.links.items()} == {
        name: link.payload_bytes for name, link in report.links.items()
    }


def test_plan_fields_of_a_small_model() -> None:
    planned = nb.plan(make_model(), *make_arrays())
    gpu, npu = planned.stages.values()
    assert (gpu.cluster, gpu.worker, gpu.inputs, gpu.outputs) == ("gpu", "local/0", ("x",), ("b0",))
    assert (gpu.variables, gpu.parameters) == (("dense/kernel", "dense/bias"), 15)
    assert (npu.parameters, "loss" in npu.outputs) == (4, True)
    (boundary,) = planned.boundaries
    assert (boundary.source, boundary.destinations, boundary.shape) == ("gpu", ("npu",), (None, 3))
    assert (boundary.bytes, boundary.backward, boundary.backward_bytes) == (ROWS * 12, True, ROWS * 12)
    assert planned.links["gpu->npu"].bytes == ROWS * 12


def test_plan_of_an_uncompiled_model_is_its_predict_step() -> None:
    planned = nb.plan(make_model(compiled=False), make_arrays()[0])
    assert planned.name == "small.predict_step"
    assert [stage.runs for stage in planned.stages.values()] == [("F",), ("F",)]


def test_plan_of_a_method() -> None:
    class Trainer:
        weight = 2.0

        @nb.function
        def step(self, x: Any) -> Any:
            with nb.stage(cluster="gpu"):
                return x * self.weight

    assert list(nb.plan(Trainer().step, np.zeros(3, "float32")).stages) == ["gpu"]


@pytest.mark.parametrize(
    "make",
    [lambda: (make_model(scopes=False), *make_arrays()), lambda: (nb.function(lambda x: x + 1), make_arrays()[0])],
)
def test_plan_without_scopes_is_refused(make: Any) -> None:
    with pytest.raises(PlanError) as caught:
        nb.plan(*make())
    assert "has no scopes" in caught.value.what
    assert "nb.stage(cluster=" in caught.value.mend


# ---------------------------------------------------------------------- digests, files, graphs
def test_plan_digest_covers_more_than_the_program_digest() -> None:
    given = inference()
    moved = {name: replace(stage, worker="elsewhere/0") for name, stage in given.stages.items()}
    coded = tuple(replace(boundary, codec="fp16") for boundary in given.boundaries)
    others = [
        replace(given, stages=moved),
        replace(given, boundaries=coded),
        replace(given, versions={**given.versions, "keras": "0"}),
        replace(given, threads={"intra_op": 7}),
    ]
    assert {other.program_digest for other in others} == {given.program_digest}
    assert len({given.digest, *(other.digest for other in others)}) == 5


def test_saved_plan_loads_equal(tmp_path: Path) -> None:
    given = skipping()
    given.save(tmp_path / "plan.json")
    found = nb.Plan.load(tmp_path / "plan.json")
    assert found == given
    assert (found.digest, found.to_text()) == (given.digest, given.to_text())


def test_loaded_plan_has_no_graphs(tmp_path: Path) -> None:
    inference().save(tmp_path / "plan.json")
    with pytest.raises(StateError):
        nb.Plan.load(tmp_path / "plan.json").graph_def("gpu")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "whale_nebula plan 0"}', '{"format": 1}'])
def test_file_of_another_format_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError) as caught:
        nb.Plan.load(tmp_path / "plan.json")
    assert caught.value.where == str(tmp_path / "plan.json")


def test_modified_plan_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    inference().save(path)
    document = json.loads(path.read_text())
    document["threads"]["intra_op"] = 99
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError) as caught:
        nb.Plan.load(path)
    assert "modified after it was saved" in caught.value.what


def test_graph_def_of_a_stage() -> None:
    given = inference()
    operations = {node.op for node in given.graph_def("gpu").node}
    assert "MatMul" in operations and "Softmax" not in operations
    with pytest.raises(OptionError) as caught:
        given.graph_def("gpuu")
    assert caught.value.mend == "did you mean 'gpu'?"

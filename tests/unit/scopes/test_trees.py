"""Programs open the scopes of their golden trees."""

# ruff: noqa: SIM117 - the programs are written as their papers write them

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import whale_nebula as nb
from tests.unit.scopes.scope_trees import record_scopes
from whale_nebula.scopes.frames import open_frames

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "scopes"
Program = Callable[[], Any]


def model(*inputs: Any) -> str:
    """Stands for a part of a model: a tree is of scopes only."""
    return "tensor"


def whale_case_1_data_parallel() -> None:
    with nb.cluster():
        with nb.replica():
            model()


def whale_case_2_large_classification() -> None:
    cluster = nb.cluster(layout={"all"})
    with cluster:
        with nb.replica():
            features = model("inputs")
        with nb.split():
            logits = model(features)
            model(logits)


def whale_case_3_model_parallel() -> None:
    with nb.cluster():
        with nb.stage():
            out = model()
        with nb.stage():
            out = model(out)


def whale_case_4_pipeline_and_data_parallel() -> None:
    with nb.cluster():
        with nb.replica():
            with nb.pipeline(micro_batch=4):
                with nb.stage():
                    out = model("embedding")
                with nb.stage():
                    out = model(out)
                with nb.stage():
                    out = model(out)


def whale_case_5_auto_parallel() -> None:
    nb.auto_parallel()
    model()


def nebula_two_clusters() -> None:
    with nb.cluster():
        with nb.stage(cluster="gpu"):
            hidden = model("inputs")
        with nb.stage(cluster="npu"), nb.compress(svd=0.6, fp16=True):
            model(hidden)


def nebula_one_line() -> None:
    nb.auto_parallel(memory="16GiB")
    model()


def everything() -> None:
    with nb.cluster(["gpu", "npu"], name="npu"), nb.replica(2):
        with nb.pipeline(8, schedule="1f1b", in_flight=3, recompute=True, coupled="allow"):
            with nb.compress(nb.codec.BF16()):
                with nb.stage(cluster="gpu", name="encoder"), nb.split(4, axis=0):
                    model()
                with nb.stage(), nb.compress("auto"):
                    model()
                with nb.stage(cluster="gpu", name="encoder"):
                    model()


RUNNABLE = [
    whale_case_1_data_parallel,
    whale_case_2_large_classification,
    whale_case_3_model_parallel,
    whale_case_4_pipeline_and_data_parallel,
    nebula_two_clusters,
    everything,
]
WITHOUT_SCOPES = [whale_case_5_auto_parallel, nebula_one_line]


@pytest.fixture(autouse=True)
def isolate_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensors here: whether another test has loaded TensorFlow must make no difference."""
    monkeypatch.setattr("whale_nebula.scopes.hints.find_code_kind", lambda: None)
    monkeypatch.setattr("whale_nebula.scopes.auto._current", None)


@pytest.mark.parametrize("program", RUNNABLE, ids=lambda program: program.__name__)
def test_program_is_recorded_as_its_golden_tree(program: Program) -> None:
    with record_scopes() as tree:
        program()
    assert str(tree) == (GOLDEN / f"{program.__name__}.txt").read_text("utf-8")


def test_golden_trees_have_programs() -> None:
    names = {program.__name__ for program in RUNNABLE}
    assert {path.stem for path in GOLDEN.glob("*.txt")} == names


@pytest.mark.parametrize("program", [*RUNNABLE, *WITHOUT_SCOPES], ids=lambda program: program.__name__)
def test_scopes_of_program_run(program: Program) -> None:
    program()


def test_recording_does_not_affect_open_scopes() -> None:
    with nb.cluster(), nb.stage():
        outside = open_frames()
        with record_scopes() as tree:
            whale_case_3_model_parallel()
        assert open_frames() == outside
    assert str(tree).count("stage") == 4

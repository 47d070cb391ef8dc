"""Reports of a Keras model in a chain of three clusters: of every program, each with its bottleneck."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest

import whale_nebula as nb
from whale_nebula.errors import StateError
from whale_nebula.report.report import read
from whale_nebula.report.saved import group_programs, summary_text

ROWS, WIDTH = 8, 4


@pytest.fixture(autouse=True)
def closed_run() -> None:
    """The tests of this module look at one run."""


def chain() -> keras.Model:
    keras.utils.clear_session(free_memory=False)
    hidden = inputs = keras.Input((WIDTH,))
    with nb.cluster():
        for name in "abc":
            with nb.stage(cluster=name):
                hidden = keras.layers.Dense(WIDTH)(hidden)
    model = keras.Model(inputs, hidden, name="chain")
    model.compile("sgd", "mse", metrics=["mae"])
    return model


@pytest.fixture(scope="module")
def metrics_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two epochs with a validation after each, and a prediction."""
    nb.shutdown()
    path = tmp_path_factory.mktemp("metrics") / "run.jsonl"
    x = np.ones((3 * ROWS, WIDTH), "float32")
    nb.init(links="1gbit,2ms", metrics=str(path))
    model = chain()
    model.fit(x, x, batch_size=ROWS, epochs=2, verbose=0, validation_data=(x, x))
    model.predict(x, batch_size=ROWS, verbose=0)
    yield path
    nb.shutdown()


def test_training_report_is_available_after_validation(metrics_file: Path) -> None:
    assert nb.last_report().program == "chain.predict_step"
    assert (nb.last_report("train_step").step, nb.last_report("test_step").program) == (6, "chain.test_step")
    with pytest.raises(StateError, match=r"'chain.train_step', 'chain.test_step', 'chain.predict_step'"):
        nb.last_report("training")


@pytest.mark.parametrize("program", ["train_step", "test_step", "predict_step"])
def test_report_text_has_a_bottleneck(metrics_file: Path, program: str) -> None:
    assert "bottleneck: " in str(nb.last_report(program))


def test_forward_only_steps_exchange_no_gradients(metrics_file: Path) -> None:
    for program in ("test_step", "predict_step"):
        (exchange, *_) = nb.last_report(program).basis.exchange
        assert not any("gradients" in word for one in exchange for word in one.what)
    (exchange,) = nb.last_report("predict_step").basis.exchange
    assert {one.what for one in exchange} == {("results",)}


def test_metrics_file_equals_the_reports(metrics_file: Path) -> None:
    reports = read(metrics_file)[0]
    assert [(each.program, len(each.reports)) for each in group_programs(reports)] == [
        ("chain.train_step", 6), ("chain.test_step", 6), ("chain.predict_step", 3)
    ]  # fmt: skip
    assert summary_text(reports).count("bottleneck: ") == 3
    exchanges = {report.program: report.basis.exchange for report in reports if report.basis is not None}
    assert exchanges == {name: nb.last_report(name).basis.exchange for name in exchanges}

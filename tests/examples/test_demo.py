"""`examples/demo.py` with less data and one block less: it shows plan, progress, report, and parity."""

import contextlib
import importlib.util
import io
import itertools
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

import whale_nebula as nb

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ROWS, module.EPOCHS = 128, 2
    module.SIZES = replace(module.SIZES, blocks=3)
    return module


pytestmark = pytest.mark.grid  # `make demo` is examples/translate.py now


class DemoRun(NamedTuple):
    """What the demo gave, said, and reported last."""

    code: int
    said: str
    report: nb.Report


@pytest.fixture(scope="module")
def demo_run(demo: ModuleType) -> DemoRun:
    """The whole of it, once."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = demo.main()
    return DemoRun(code, said.getvalue(), nb.last_report())


def test_demo_prints_plan_progress_report_and_verdict(demo_run: DemoRun) -> None:
    code, said, report = demo_run
    assert code == 0
    assert "stages" in said
    assert "eager-1f1b" in said
    assert said.count("Epoch 2/2") == 2
    assert said.count("link gpu->npu") == 1
    assert said.rstrip().endswith("the same model")
    assert report.run.steps == 4


def test_demo_link_bytes_match_activations_and_loss(demo: ModuleType, demo_run: DemoRun) -> None:
    activations = 4 * demo.BATCH * demo.SIZES.length * demo.SIZES.width
    loss = 4  # what fit returns goes to every cluster
    assert {name: link.payload_bytes for name, link in demo_run.report.links.items()} == {
        "gpu->npu": activations,
        "npu->gpu": activations + loss,
    }


def test_demo_fails_when_losses_differ(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    losses = itertools.count(1.0, 0.01)
    report = nb.Report("fit", 1, 0.1, 4, {}, {})
    monkeypatch.setattr(demo, "train", lambda model: next(losses))
    monkeypatch.setattr(demo, "language_model", lambda *, cut: None)
    monkeypatch.setattr(demo.nb, "plan", lambda model, *batch: SimpleNamespace(to_text=str))
    monkeypatch.setattr(demo.nb, "last_report", lambda: report)
    assert demo.main() == 1
    assert "NOT the same model" in capsys.readouterr().out


def test_demo_rows_continue_by_their_stride(demo: ModuleType) -> None:
    x, y = demo.progressions(50)
    assert np.array_equal(x[:, 1:], y[:, :-1])
    strides = (y - x) % demo.SIZES.vocabulary
    assert (strides == strides[:, :1]).all()
    assert set(strides[:, 0]) == set(range(1, 9))


def test_demo_example_is_below_its_line_limit() -> None:
    assert len(DEMO.read_text("utf-8").splitlines()) < 100

"""`examples/place.py` shows a plan, trains across the line, and is refused with another placement."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

PLACE = Path(__file__).resolve().parents[2] / "examples" / "place.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("place", PLACE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROWS", module.BATCH)
    return module


@pytest.mark.grid  # `tests/scripts/place` trains such models
def test_place_example_plans_trains_and_pins(example: ModuleType, capsys: pytest.CaptureFixture) -> None:
    assert example.main() == 0
    said = capsys.readouterr().out
    assert "plan of mobilenet" in said
    assert "trained over a link of 60mbit,20ms: loss" in said
    assert "gpu->npu: 66 kB per step" in said
    assert said.rstrip().splitlines()[-1].startswith("refused: ")
    assert "in the pinned plan" in said


def test_place_images_are_stripes_in_four_directions(example: ModuleType) -> None:
    x, y = example.stripes()
    assert x.shape == (example.ROWS, 32, 32, 3)
    assert set(y) == {0, 1, 2, 3}
    upright = x[y == 0]
    assert np.allclose(upright, upright[:, :1])


def test_place_example_is_below_its_line_limit() -> None:
    assert len(PLACE.read_text("utf-8").splitlines()) < 90

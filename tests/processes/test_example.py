"""The example of docs/several-processes.md starts itself twice, with the results of one process in both."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import keras
import pytest

import whale_nebula as nb

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "two_processes.py"


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("two_processes", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.grid
def test_two_processes_print_what_one_prints(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.DEADLINE = 90.0
    example.start()
    apart = capsys.readouterr().out.splitlines()
    nb.shutdown()
    keras.utils.set_random_seed(1)
    with nb.init(links="10gbit,0ms"):
        example.train()
    alone = capsys.readouterr().out.splitlines()
    assert sorted(line for line in apart if "loss" in line) == [f"gpu/0: {alone[0]}", f"npu/0: {alone[0]}"]
    assert "1153 weights" in alone[0]
    assert sum("gpu->npu" in line for line in apart) == sum("npu->gpu" in line for line in apart) == 1
    assert [line for line in apart if "lead" in line] == [f"npu/0: {alone[-1]}"]


def test_page_refers_to_the_example() -> None:
    page = (ROOT / "docs" / "several-processes.md").read_text("utf-8")
    assert "examples/two_processes.py" in page
    assert len(EXAMPLE.read_text("utf-8").splitlines()) < 60

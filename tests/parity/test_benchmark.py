"""The models that `benchmarks/parity` lists by name exist."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "parity" / "run.py"


def test_models_of_the_parity_benchmark_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # it puts its own folders there
    spec = importlib.util.spec_from_file_location("parity_run", BENCHMARK)
    run = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "parity_run", run)
    spec.loader.exec_module(run)
    names = list(run.list_cases())
    assert len(names) == len(set(names)) >= 24

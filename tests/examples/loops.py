"""What a custom loop among the examples prints last, with its scope lines and without."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.examples.test_plain import Without, run, source


def same_numbers(name: str, folder: Path) -> tuple[str, list[float]]:
    """Run an example as it is and as plain TensorFlow; gives what it said, and the numbers of its last line."""
    text = source(name)
    said = run(folder, text)
    plain = ast.unparse(Without().visit(ast.parse(text)))
    numbers = _numbers(said)
    assert numbers == pytest.approx(_numbers(run(folder, plain)), rel=2e-3)
    return said, numbers


def _numbers(said: str) -> list[float]:
    return [float(found) for found in re.findall(r"\d+\.\d+", said.splitlines()[-1])]

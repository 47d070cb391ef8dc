"""The fixtures that isolate all other tests work."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
LEAKING_TESTS = """
import subprocess, sys

def test_left():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

def test_ending():
    subprocess.Popen([sys.executable, "-c", "pass"])
"""


def test_left_running_process_fails_the_test(tmp_path: Path) -> None:
    """Tests that start a process and forget it, run under a copy of our conftest."""
    conftest = CONFTEST.read_text().replace("GRACE_SECONDS = 2.0", "GRACE_SECONDS = 1.0")
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_it.py").write_text(LEAKING_TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout.count("Failed: left running by this test:") == 2  # where it fails, and in the summary
    assert "ERROR test_it.py::test_left" in done.stdout and "time.sleep(60)" in done.stdout


DRAWN: set[tuple[float, float]] = set()


@pytest.mark.parametrize("turn", [1, 2])
def test_random_numbers_are_the_same_in_each_test(turn: int) -> None:
    DRAWN.add((random.random(), np.random.rand()))
    assert len(DRAWN) == 1

"""The fixtures that guard every other test do their work."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
LEAKS = "import subprocess, sys\ndef test_it():\n    subprocess.Popen([sys.executable, '-c', {code!r}])\n"


def run_pytest_on(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A test that starts a process and forgets it, run under a copy of our conftest."""
    conftest = CONFTEST.read_text().replace("GRACE_SECONDS = 2.0", "GRACE_SECONDS = 1.0")
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_it.py").write_text(LEAKS.format(code=code))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=60)


def test_a_process_left_running_is_blamed_and_stopped(tmp_path: Path) -> None:
    done = run_pytest_on("import time; time.sleep(60)", tmp_path)
    assert done.returncode == 1
    assert "left running by this test" in done.stdout
    assert "time.sleep(60)" in done.stdout


def test_a_process_about_to_end_is_given_a_moment(tmp_path: Path) -> None:
    assert run_pytest_on("pass", tmp_path).returncode == 0


DRAWN: set[tuple[float, float]] = set()


@pytest.mark.parametrize("turn", [1, 2])
def test_every_test_draws_the_same_numbers(turn: int) -> None:
    DRAWN.add((random.random(), np.random.rand()))
    assert len(DRAWN) == 1

"""The example whose workers are killed ends with the result of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import zygote

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "survive.py"
RUN = ("-m", "whale_nebula.cli.main", "run", "--all", "--clusters", "gpu,npu", "--restarts", "3")


def last_line(*words: object, command: tuple[str, ...] = ()) -> str:
    done = zygote.run(*command, str(EXAMPLE), *map(str, words), timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def undisturbed() -> str:
    return last_line()


def test_survive_example_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    assert last_line("--folder", tmp_path) == last_line("--folder", tmp_path)


@pytest.mark.grid
def test_survive_example_with_killed_workers_is_bit_identical(undisturbed: str, tmp_path: Path) -> None:
    assert last_line("--kills", 2, "--folder", tmp_path, command=RUN) == undisturbed

"""The one-bit example at reduced size: in one process, and in one for each cluster."""

from pathlib import Path

import pytest

from tests.examples.reduced import write_reduced_example
from tests.processes import zygote

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "one_bit.py"
REDUCED_OPTIONS = ["--steps", "5", "--warm-up", "3"]
DEADLINE = 240


@pytest.mark.parametrize(
    ("before", "words"),
    [
        pytest.param([], [], marks=pytest.mark.grid),
        pytest.param(["-m", "whale_nebula", "run", "--all", "--clusters", "gpu,npu"], [], marks=pytest.mark.grid),
        pytest.param([], ["--optimizer", "adam"], marks=pytest.mark.grid),
    ],
    ids=["one process", "two processes", "adam"],
)
def test_one_bit_example_sends_fewer_bytes_after_the_warm_up(
    tmp_path: Path, before: list[str], words: list[str]
) -> None:
    example = write_reduced_example("one_bit", tmp_path, blocks=1)
    result = zygote.run(
        *before, str(example), *REDUCED_OPTIONS, *words, cwd=tmp_path, timeout=DEADLINE, env={"COLUMNS": "100"}
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    lines = [line.partition("] ")[2] or line for line in result.stdout.splitlines()]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[:2] for row in rows[:2]] == [["in float32", "3"], ["at one bit per number", "2"]]
    assert float(rows[0][3]) / float(rows[1][3]) > 24
    assert "loss on held-out rows: " in result.stdout


def test_one_bit_example_reports_an_invalid_warm_up(tmp_path: Path) -> None:
    result = zygote.run(str(EXAMPLE), "--warm-up", "0", cwd=tmp_path)
    assert result.returncode == 2 and "one_bit.py: error: --warm-up: freeze_step=0" in result.stderr

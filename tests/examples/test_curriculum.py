"""The curriculum example at reduced size: in one process, and in one for each cluster."""

from pathlib import Path

import pytest

from tests.examples.reduced import assert_option_error, write_reduced_example
from tests.processes import zygote

REDUCED_OPTIONS = ["--start", "16", "--end", "48", "--grow", "4", "--steps", "7"]
DEADLINE = 240


@pytest.mark.parametrize(
    ("before", "words"),
    [
        pytest.param([], [], marks=pytest.mark.grid),
        pytest.param(["-m", "whale_nebula", "run", "--all", "--clusters", "gpu,npu"], [], marks=pytest.mark.grid),
        pytest.param([], ["--mode", "pack", "--pace", "root"], marks=pytest.mark.grid),
        pytest.param(
            ["-m", "whale_nebula", "run", "--all", "--clusters", "gpu,npu"],
            ["--micro-batches", "auto"],
            marks=pytest.mark.grid,
        ),
    ],
    ids=["one process", "two processes", "packed", "two processes that choose micro-batches"],
)
def test_curriculum_lengths_and_link_bytes_grow(tmp_path: Path, before: list[str], words: list[str]) -> None:
    example = write_reduced_example("curriculum", tmp_path, blocks=3)
    result = zygote.run(
        *before, str(example), *REDUCED_OPTIONS, *words, cwd=tmp_path, timeout=DEADLINE, env={"COLUMNS": "100"}
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    lines = [line.partition("] ")[2] or line for line in result.stdout.splitlines()]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [(row[0], row[1]) for row in rows][-1] == ("48", "3")
    if not words:
        assert [row[0] for row in rows] == ["16", "32", "48"]
        crossed = [float(row[3]) for row in rows]
        assert crossed[0] < 0.4 * crossed[-1] and crossed[1] < 0.75 * crossed[-1]
    assert "loss on full rows that were held back: " in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--start", "0"], "start=0 of a curriculum"), (["--start", "99", "--end", "48"], "a curriculum from length 99")],
)
def test_curriculum_example_reports_invalid_options_without_traceback(
    tmp_path: Path, words: list[str], message: str
) -> None:
    assert_option_error("curriculum", words, message, tmp_path)

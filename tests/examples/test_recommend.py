"""The recommender example at reduced size: in one process, and in one for each cluster."""

import re
from pathlib import Path

import pytest

from tests.examples.reduced import assert_option_error
from tests.processes import zygote

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "recommend.py"
REDUCED_OPTIONS = ["--rows", "5000", "--batch", "250"]
DEADLINE = 240


def run_example(folder: Path, *words: str, before: tuple[str, ...] = ()) -> tuple[float, list[float]]:
    """The AUC that is printed, and the kB of a step each way."""
    result = zygote.run(
        *before, str(EXAMPLE), *REDUCED_OPTIONS, *words, cwd=folder, timeout=DEADLINE, env={"COLUMNS": "100"}
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    lines = [line.partition("] ")[2] or line for line in result.stdout.splitlines()]
    (row,) = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    found = re.search(r"AUC on held-out rows: (0\.\d+) \(maximum 0\.\d+\)", result.stdout)
    assert found is not None
    assert row[0] == "40"
    return float(found[1]), [float(each) for each in row[2:]]


@pytest.mark.grid
def test_hot_and_distinct_rows_give_the_auc_of_vectors(tmp_path: Path) -> None:
    whole, most = run_example(tmp_path, "--look-up", "vectors")
    found, crossed = run_example(tmp_path, "--hot", "500", "--tables", "2")
    assert found == whole > 0.54
    assert all(one < 0.5 * other for one, other in zip(crossed, most, strict=True))


@pytest.mark.grid
@pytest.mark.parametrize("network", ["dlrm", "wide_and_deep", "multi_view"])
def test_recommend_example_gives_the_same_auc_in_two_processes(tmp_path: Path, network: str) -> None:
    words = ("--network", network)
    found, crossed = run_example(
        tmp_path, *words, before=("-m", "whale_nebula", "run", "--all", "--clusters", "cpu,gpu")
    )
    alone, most = run_example(tmp_path, *words)
    assert found == pytest.approx(alone, abs=1e-4)
    assert crossed == pytest.approx(most, abs=3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tables", "0"], "tables=0 is less than 1"),
        (["--criteo", "none.txt"], "none.txt cannot be read; No such file"),
    ],
)
def test_recommend_example_reports_invalid_options_without_traceback(
    tmp_path: Path, words: list[str], message: str
) -> None:
    assert_option_error("recommend", words, message, tmp_path)

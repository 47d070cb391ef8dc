"""`make demo` at reduced size: trainings, a table, a plot; in two processes each side reads only its own text."""

from pathlib import Path

import pytest

from tests.processes import zygote

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE, CONFIG = ROOT / "examples" / "translate.py", ROOT / "examples" / "translate.yaml"
CLI = ("-m", "whale_nebula")
REDUCED_OPTIONS = ["--pairs", "128", "--pretrain", "2", "--steps", "10"]
REDUCED_COUNTS = {"8000, forms=FORMS": "800, forms=FORMS", '("test", 128)': '("test", 32)'}
"""Sentences of each side's own text, and pairs that are translated and scored."""
DEADLINE = 240


def run_example(folder: Path, *words: str) -> str:
    """What a run on little prints."""
    result = zygote.run(
        *words, *REDUCED_OPTIONS, "--out", str(folder), cwd=folder, timeout=DEADLINE,
        env={"COLUMNS": "160", "PYTHONPATH": str(EXAMPLE.parent)},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A copy of the example that reads a tenth of the text."""
    source = EXAMPLE.read_text("utf-8")
    for count, reduced in REDUCED_COUNTS.items():
        assert source.count(count) == 1
        source = source.replace(count, reduced)
    (tmp_path / EXAMPLE.name).write_text(source, "utf-8")
    (tmp_path / CONFIG.name).write_text(CONFIG.read_text("utf-8"), "utf-8")
    return tmp_path / EXAMPLE.name


def find_table_row(said: str, codec: str) -> list[str]:
    """The cells of a codec's line in the table."""
    found = next(line for line in said.splitlines() if line.startswith("│") and line.split("│")[1].strip() == codec)
    return [cell.strip() for cell in found.split("│")[1:-1]]


@pytest.mark.parametrize("codecs", [["ours"], pytest.param(["none", "ours"], marks=pytest.mark.grid)], ids=len)
def test_translate_example_compares_codecs_after_one_pretraining(
    example: Path, tmp_path: Path, codecs: list[str]
) -> None:
    said = run_example(tmp_path, str(example), "--codecs", *codecs)
    assert said.count("a language model learns") == 2
    ratios = [find_table_row(said, codec)[4] for codec in codecs]
    assert ratios[0] == "1.0 x"
    assert all(float(ratio.split()[0]) > 8 for ratio in ratios[1:])
    assert "nrefs:1|case:lc|eff:no|tok:13a" in said
    assert (tmp_path / "translate.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.grid
def test_translate_example_runs_in_two_processes(example: Path, tmp_path: Path) -> None:
    said = run_example(
        tmp_path, *CLI, "run", "--all", "--config", str(CONFIG), str(example), "--codecs", "none", "ours"
    )
    assert said.count("a language model learns") == 2
    assert said.count("┃ codec") == 1 and "nrefs:1|case:lc|eff:no|tok:13a" in said


def test_translate_example_reports_a_missing_file_without_traceback(tmp_path: Path) -> None:
    (tmp_path / "train.en").write_text("a cat\n")
    result = zygote.run(str(EXAMPLE), "--text", str(tmp_path), "--languages", "fr", "en", cwd=tmp_path)
    assert result.returncode == 1
    assert "NB-220 split 'train' does not exist in 'fr', the source side" in result.stderr
    assert "Traceback" not in result.stderr


def test_translate_example_is_below_its_line_limit() -> None:
    assert len(EXAMPLE.read_text("utf-8").splitlines()) < 200

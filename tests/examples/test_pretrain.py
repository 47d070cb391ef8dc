"""The pretraining example at reduced size: in one process, in one for each cluster, and on files; saves a BERT and a
table.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.processes import zygote
from whale_nebula.models import load_bert, text

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE, EXAMPLES = ROOT / "examples" / "pretrain.py", ROOT / "examples"
CLI = ("-m", "whale_nebula", "run", "--all", "--config")
FAMILIES = ("--families", "germanic=en,de", "romance=es,fr")
DEADLINE = 240


def run_example(folder: Path, *words: str) -> str:
    """What a quick run prints."""
    result = zygote.run(*words, "--quick", cwd=folder, timeout=DEADLINE, env={"COLUMNS": "160"})
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


def check_output(folder: Path, said: str, pairs: list[str]) -> None:
    """What every run leaves."""
    assert said.count("bits per token were sent") == 1
    head = next(line for line in said.splitlines() if line.startswith("┃"))
    assert [cell.split(":")[0].strip() for cell in head.split("┃")[2:-1]] == pairs
    assert "│ pretrained " in said and "│ not pretrained " in said
    bert = load_bert(folder / "build" / "pretrain")
    assert bert.sizes.vocabulary == len(text.read_vocabulary(folder / "build" / "pretrain"))


def find_losses(said: str) -> list[str]:
    """The losses that a run prints, without the seconds."""
    found = [line.split(" s: ")[1] for line in said.splitlines() if line.startswith("  step ")]
    assert len(found) == 4
    return found


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--objectives", "mrtd", "clm"), marks=pytest.mark.grid),
        pytest.param(("--discriminators", "2"), marks=pytest.mark.grid),
        pytest.param(("--families", "a=en", "b=de,es", "c=fr"), marks=pytest.mark.grid),
    ],
    ids=["one", "replicas", "three generators"],
)
def test_pretrain_example_saves_a_bert_and_prints_scores(tmp_path: Path, words: tuple[str, ...]) -> None:
    said = run_example(tmp_path, str(EXAMPLE), *words)
    check_output(tmp_path, said, ["en-de", "en-es", "en-fr", "de-es", "de-fr", "es-fr"])


@pytest.mark.grid
@pytest.mark.parametrize(("config", "words"), [("pretrain_families", FAMILIES), ("pretrain", ())])
def test_pretrain_example_with_a_process_per_cluster_saves_the_bits_of_one_process(
    tmp_path: Path, config: str, words: tuple[str, ...]
) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    said = run_example(tmp_path, *CLI, str(EXAMPLES / f"{config}.yaml"), str(EXAMPLE), *words)
    check_output(tmp_path, said, ["en-de", "en-es", "en-fr", "de-es", "de-fr", "es-fr"])
    assert find_losses(run_example(alone, str(EXAMPLE), *words)) == find_losses(said)
    found, wanted = (load_bert(folder / "build" / "pretrain").get_weights() for folder in (tmp_path, alone))
    assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.grid
def test_pretrain_example_reads_a_text_folder(tmp_path: Path) -> None:
    for split, count in (("train", 200), ("val", 16)):
        for language, lines in text.aligned("train", count, languages=["en", "de", "fr"]).items():
            (tmp_path / f"{split}.{language}").write_text("\n".join(lines) + "\n", "utf-8")
    said = run_example(tmp_path, str(EXAMPLE), "--text", str(tmp_path), "--languages", "en", "de", "fr")
    check_output(tmp_path, said, ["en-de", "en-fr", "de-fr"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--families", "a=en,de", "b=es"],
            "NB-104 the families contain en, de, es, but the languages are en, de, es, fr",
        ),
        (["--objectives", "clm"], "--objectives clm requires mrtd or trtd"),
    ],
)
def test_pretrain_example_reports_invalid_options_without_traceback(
    tmp_path: Path, words: list[str], said: str
) -> None:
    result = zygote.run(str(EXAMPLE), *words, cwd=tmp_path)
    assert result.returncode != 0
    assert said in result.stderr and "Traceback" not in result.stderr

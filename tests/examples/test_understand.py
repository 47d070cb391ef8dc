"""Split fine-tuning at reduced size: a table, in one process and in two, of which one has no sentences or labels."""

import json
from pathlib import Path

import pytest

from tests.examples.reduced import write_reduced_example
from tests.processes import zygote
from whale_nebula.models import Bert, BertSizes, save_bert, text

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "understand.py"
CLI = ("-m", "whale_nebula")
REDUCED_OPTIONS = ["--rows", "64", "--test", "32", "--epochs", "1", "--pretrain", "2"]
DEADLINE = 240


def run_example(folder: Path, *words: str) -> str:
    """What a run on little prints."""
    result = zygote.run(*words, *REDUCED_OPTIONS, cwd=folder, timeout=DEADLINE, env={"COLUMNS": "160"})
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


def find_table_row(said: str, codec: str) -> list[str]:
    """The cells of a codec's line in the table."""
    found = next(line for line in said.splitlines() if line.startswith("│") and line.split("│")[1].strip() == codec)
    return [cell.strip() for cell in found.split("│")[1:-1]]


@pytest.mark.parametrize(
    ("words", "scores"),
    [
        pytest.param(["--codecs", "none", "rank", "--cut", "0"], 1, marks=pytest.mark.grid),
        pytest.param(
            ["--task", "answer", "--codecs", "none", "rank+int4", "--labels", "away", "--cut", "0"],
            2,
            marks=pytest.mark.grid,
        ),
    ],
)
def test_understand_example_trains_each_codec_after_one_pretraining(
    tmp_path: Path, words: list[str], scores: int
) -> None:
    said = run_example(tmp_path, str(write_reduced_example("understand", tmp_path, layers=2)), *words)
    assert said.count("a language model learns") == 1
    cells = find_table_row(said, "rank" if "rank" in words else "rank+int4")
    assert float(cells[3].split()[0]) > 10 and len(cells) == 5 + scores


@pytest.mark.grid
@pytest.mark.parametrize(
    ("config", "words"), [("understand", []), ("understand_three", ["--middle", "away", "far"])], ids=["two", "three"]
)
def test_understand_example_with_a_process_per_cluster_prints_the_scores_of_one_process(
    tmp_path: Path, config: str, words: list[str]
) -> None:
    path, words = EXAMPLE.with_name(f"{config}.yaml"), ["--codecs", "none", "rank", *words]
    said = run_example(tmp_path, *CLI, "run", "--all", "--config", str(path), str(EXAMPLE), *words)
    assert said.count("┃ codec") == 1
    assert float(find_table_row(said, "rank")[3].split()[0]) > 8
    alone = run_example(tmp_path, str(EXAMPLE), *words)
    for codec in ("none", "rank"):  # the cells of the loss and of the score
        assert find_table_row(said, codec)[4:] == find_table_row(alone, codec)[4:]


@pytest.fixture
def published_files(tmp_path: Path) -> Path:
    """A folder with a BERT, and with small files in the formats of GLUE and SQuAD: 64 rows to train, 32 to test."""
    words = text.learn_vocabulary(["anna has two red cups ."], 64, fill=True)
    save_bert(Bert(BertSizes(vocabulary=64, length=32, width=24, heads=2, layers=2, inner=24)), tmp_path, words)
    for split, count in (("train", 64), ("dev_matched", 32)):
        lines = ["anna has two cups\tanna has cups\tentailment", "anna has cups\tanna has two\tneutral"] * (count // 2)
        (tmp_path / f"{split}.tsv").write_text("\n".join(["sentence1\tsentence2\tgold_label", *lines]))
        questions = [{"question": "who has two cups", "answers": [{"answer_start": 0, "text": "anna"}]}] * count
        data = {"data": [{"paragraphs": [{"context": "anna has two red cups", "qas": questions}]}]}
        (tmp_path / f"{split.removesuffix('_matched')}-v1.1.json").write_text(json.dumps(data))
    return tmp_path


@pytest.mark.grid
@pytest.mark.parametrize("words", [["--glue", ".", "--task", "mnli"], ["--squad", "."]], ids=["mnli", "squad"])
def test_understand_example_reads_published_files(published_files: Path, words: list[str]) -> None:
    options = ["--bert", ".", *words, "--cut", "0", "--rank", "4", "--codecs", "rank"]
    said = run_example(published_files, str(EXAMPLE), *options)
    assert len(find_table_row(said, "rank")) == 5 + (2 if "--squad" in words else 1)
    refused = zygote.run(str(EXAMPLE), *options, *REDUCED_OPTIONS, "--test", "48", cwd=published_files)
    assert "--test 48: the split dev has 32 rows, so use --test 32" in refused.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--task", "opinions"],
            "--task opinions: without --glue use opinion, grammar, follows, similar, answer",
        ),
        (["--glue", ".", "--task", "rte"], "--glue requires --bert FOLDER"),
        (["--squad", ".", "--task", "rte"], "--squad FOLDER excludes --glue and other tasks than answer"),
        (["--middle", "home"], "--middle home: must be distinct clusters other than home"),
        (["--middle", *"abcde"], "--middle a b c d e: too many for a BERT with 4 layers"),
        (["--rate", "nan"], "--rate nan: must be a positive number"),
        (["--cut", "3"], "--cut 3: this BERT can be cut after layer 0 to 2"),
    ],
)
def test_understand_example_reports_invalid_options_without_traceback(
    tmp_path: Path, words: list[str], said: str
) -> None:
    result = zygote.run(str(EXAMPLE), *words, "--pretrain", "2", cwd=tmp_path)
    assert (
        result.returncode in (1, 2)
        and said in result.stderr
        and EXAMPLE.name not in result.stderr.replace("usage: understand.py", "").replace("understand.py: error", "")
    )

"""Small files in the formats of GLUE and SQuAD; and errors for invalid ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whale_nebula.errors import DataError, OptionError
from whale_nebula.models.understanding import Examples, read_glue, read_squad

FILES = {
    "cola": ("CoLA/train.tsv", "gj04\t1\t\tOur friends won't.\ngj04\t0\t*\tThem won.\n"),
    "sst-2": ("SST-2/train.tsv", 'sentence\tlabel\nhide "new \t0\na joy \t1\n'),
    "mrpc": ("MRPC/train.tsv", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tone a\tone b\n"),
    "qqp": ("QQP/train.tsv", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\twhy?\twhy not?\t0\n"),
    "sts-b": (
        "STS-B/train.tsv",
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
        "0\tm\tf\t2012\t1\tn\tn\ta plane\tan air plane\t5.000\r\n",
    ),
    "qnli": (
        "QNLI/train.tsv",
        "index\tquestion\tsentence\tlabel\n0\twhen?\tthen.\tentailment\n1\ta\tb\tnot_entailment\n",
    ),
    "rte": ("RTE/train.tsv", "index\tsentence1\tsentence2\tlabel\n0\tone\ttwo\tnot_entailment\n"),
    "mnli": ("MNLI/train.tsv", "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\tone\ttwo\tneutral\tneutral\n"),
    "wnli": ("WNLI/train.tsv", "index\tsentence1\tsentence2\tlabel\n0\tone\ttwo\t1\n"),
}
EXPECTED = {
    "cola": Examples(["Our friends won't.", "Them won."], [1.0, 0.0]),
    "sst-2": Examples(['hide "new', "a joy"], [0.0, 1.0]),
    "mrpc": Examples(["one a"], [1.0], ["one b"]),
    "qqp": Examples(["why?"], [0.0], ["why not?"]),
    "sts-b": Examples(["a plane"], [5.0], ["an air plane"]),
    "qnli": Examples(["when?", "a"], [0.0, 1.0], ["then.", "b"]),
    "rte": Examples(["one"], [1.0], ["two"]),
    "mnli": Examples(["one"], [2.0], ["two"]),
    "wnli": Examples(["one"], [1.0], ["two"]),
}


@pytest.mark.parametrize("task", FILES)
@pytest.mark.parametrize("inner", [True, False], ids=["archive", "folder"])
def test_glue_file_is_read(tmp_path: Path, task: str, inner: bool) -> None:
    name, content = FILES[task]
    path = tmp_path / (name if inner else Path(name).name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(content, "utf-8")
    assert read_glue(tmp_path, task) == EXPECTED[task]


@pytest.mark.parametrize(
    ("content", "what", "where"),
    [
        ("sentence\n", "train.tsv has no column 'label'", ":1"),
        ("sentence\tlabel\n", "train.tsv has no rows", "train.tsv"),
        ("sentence\tlabel\na\t1\nb\n", "the row has 1 columns, at least 2 are required", ":3"),
        ("sentence\tlabel\na\t2\n", "the label '2' is not '0' or '1'", ":2"),
    ],
)
def test_damaged_glue_file_is_refused(tmp_path: Path, content: str, what: str, where: str) -> None:
    (tmp_path / "train.tsv").write_text(content)
    with pytest.raises(DataError) as raised:
        read_glue(tmp_path, "sst-2")
    assert raised.value.what == what and where in (raised.value.where or "")


def test_missing_task_or_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no dev.tsv"):
        read_glue(tmp_path, "rte", "dev")
    with pytest.raises(OptionError, match="there is no GLUE task 'sst2'"):
        read_glue(tmp_path, "sst2")
    with pytest.raises(DataError, match=r"dev.json cannot be read"):
        read_squad(tmp_path / "dev.json")
    with pytest.raises(DataError) as raised:
        read_squad(tmp_path)
    assert raised.value.mend == f"read_squad('{tmp_path}/train-v1.1.json')"
    with pytest.raises(OptionError, match="unanswered='drop' is not a valid value"):
        read_squad(tmp_path / "dev.json", unanswered="drop")


CONTEXT = "Denver beat Carolina 24–10 at Levi's Stadium."


def squad(*questions: Any) -> str:
    return json.dumps(
        {"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": CONTEXT, "qas": questions}]}]}
    )


def make_squad_question(*answers: tuple[int, str]) -> dict[str, Any]:
    return {"id": "q", "question": "Where?", "answers": [{"answer_start": at, "text": text} for at, text in answers]}


def test_squad_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "dev-v1.1.json"
    path.write_text(squad(make_squad_question((30, "Levi's Stadium"), (27, "at Levi's Stadium"))), "utf-8")
    (found,) = read_squad(path)
    assert (found.text, found.context, found.name) == ("Where?", CONTEXT, "q")
    assert found.answers == ((30, "Levi's Stadium"), (27, "at Levi's Stadium"))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "dev.json is not JSON"),
        ("[]", "dev.json is not in SQuAD's format"),
        ('{"data": [{}]}', "dev.json is not in SQuAD's format"),
        ('{"data": []}', "dev.json has no question with an answer"),
        (
            squad(make_squad_question((3, "Levi's Stadium"))),
            'the answer "Levi\'s Stadium" is not at character 3 of its text',
        ),
        (squad(make_squad_question()), "the question 'Where?' has no answer"),
    ],
)
def test_damaged_squad_file_is_refused(tmp_path: Path, content: str, what: str) -> None:
    (tmp_path / "dev.json").write_text(content, "utf-8")
    with pytest.raises(DataError) as raised:
        read_squad(tmp_path / "dev.json")
    assert raised.value.what == what


def test_unanswered_questions_can_be_skipped(tmp_path: Path) -> None:
    (tmp_path / "train-v2.0.json").write_text(squad(make_squad_question(), make_squad_question((0, "Denver"))), "utf-8")
    assert len(read_squad(tmp_path / "train-v2.0.json", unanswered="skip")) == 1

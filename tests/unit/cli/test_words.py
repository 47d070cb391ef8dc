"""Which words of a command line are ours, and which are the script's."""

from __future__ import annotations

import pytest

from whale_nebula.cli.arguments import Parser, misspelt, split

OPTIONS = {"--json": (None, ""), "--links": ("LINE", ""), "--html": ("FILE", "")}


@pytest.mark.parametrize(
    ("line", "options", "script", "arguments"),
    [
        ("train.py", "", "train.py", ""),
        ("--json train.py", "--json", "train.py", ""),
        ("train.py --json", "--json", "train.py", ""),
        ("train.py --epochs 3 -v data.csv", "", "train.py", "--epochs 3 -v data.csv"),
        ("train.py 1 --links 10mbit 2", "--links 10mbit", "train.py", "1 2"),
        ("--links=10mbit train.py", "--links=10mbit", "train.py", ""),
        ("train.py -- --json --", "", "train.py", "--json --"),
        ("-- train.py --json", "", "train.py", "--json"),
        ("--jsn train.py", "--jsn", "train.py", ""),
        ("train.py --html", "--html", "train.py", ""),
        ("", "", None, ""),
    ],
)
def test_splitting(line: str, options: str, script: str | None, arguments: str) -> None:
    found = split(line.split(), OPTIONS)
    assert found == (options.split(), script, arguments.split())


@pytest.mark.parametrize(("word", "meant"), [("--jsn", "--json"), ("--link", "--links")])
def test_a_misspelt_option_is_told_and_nothing_is_abbreviated(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        Parser("it", "", OPTIONS).read([word, "10mbit"])
    assert ended.value.code == 2
    assert f"there is no option '{word}'; did you mean '{meant}'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train.py --htlm a.html", [("--htlm", "--html")]),
        ("train.py --link=10mbit", [("--link", "--links")]),
        ("train.py --epochs 3 --lr 0.1 -v --link-rate 3", []),
        ("train.py --html a.html", []),
        ("train.py -- --htlm a.html", []),
        ("train.py data.htlm", []),
    ],
)
def test_what_goes_to_the_script_and_looks_like_ours(line: str, said: list[tuple[str, str]]) -> None:
    argv = line.split()
    assert misspelt(argv, split(argv, OPTIONS), ["--html", "--json", "--links", "--steps"]) == said

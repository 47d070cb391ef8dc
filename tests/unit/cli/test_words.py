"""Which words of a command line are ours, and which are the script's."""

from __future__ import annotations

import pytest

from whale_nebula.cli.arguments import Parser, misspelt, split

FLAGS, VALUED = {"--json", "-h"}, {"--links", "--html"}


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
    found = split(line.split(), FLAGS, VALUED)
    assert found == (options.split(), script, arguments.split())


def test_a_misspelt_option_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="it", description="")
    parser.option("--json", "")
    with pytest.raises(SystemExit) as ended:
        parser.read(["--jsn"])
    assert ended.value.code == 2
    assert "there is no option '--jsn'; did you mean '--json'?" in capsys.readouterr().err


def test_nothing_is_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="it", description="")
    parser.option("--links", "", "LINE")
    with pytest.raises(SystemExit):
        parser.read(["--link", "10mbit"])
    assert "did you mean '--links'?" in capsys.readouterr().err


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
    assert misspelt(argv, split(argv, FLAGS, VALUED), ["--html", "--json", "--links", "--steps"]) == said

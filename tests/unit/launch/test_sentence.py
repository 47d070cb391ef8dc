"""What a worker says last is found again in what it wrote, and compared with what others say."""

import pytest

from whale_nebula.errors import ConfigError, RemoteFailureError, StateError
from whale_nebula.launch.last_error import Kept, ends_by, last_sentence, last_word, same_cause


def test_the_last_word_of_an_error_is_its_first_line_with_a_code() -> None:
    told = "Traceback:\n  File x\nwhale_nebula.errors.ConfigError: NB-500 no (a.yaml)\n  why: a\n  mend: b\nlater\n"
    assert last_word(told) == "NB-500 no (a.yaml)"
    assert last_word("  \n") == ""


def test_the_last_sentence_is_an_error_as_a_whole() -> None:
    error = "NB-500 no process runs cluster 'beta' (s.py:1)\n  why: they are a, b\n       and c\n  mend: write this"
    trace = "Traceback ...\n  File x\nwhale_nebula.errors.ConfigError: "
    assert last_sentence(f"NB-500 older\n  mend: no\n{trace}{error}\nat last\n") == error
    assert last_sentence("Traceback ...\n  File x\nValueError: no\n") == "ValueError: no"


def test_all_of_an_error_is_kept_back_and_nothing_besides() -> None:
    error = ConfigError("no", where="a.yaml", why="so\nit is", mend="write\n    this\n    that")
    said = [ends_by("gpu/0"), "Traceback", f"whale_nebula.errors.ConfigError: {error}", "a line at exit", "  why: not"]
    kept = Kept("gpu/0")
    assert [line for line in "\n".join(said).splitlines() if kept.keeps(line)] == said[2].splitlines()


@pytest.mark.parametrize(
    "lines",
    [
        ["whale_nebula.errors.StateError: NB-305 printed before", "  mend: x"],
        [ends_by("gpu/0"), "ValueError: no", "  why: what the user wrote"],
        [ends_by("gpu/0"), "  raise errors.StateError('NB-305 x')"],
    ],
)
def test_lines_that_are_handed_on(lines: list[str]) -> None:
    kept = Kept("gpu/0")
    assert not any(map(kept.keeps, lines))


def test_who_heard_of_an_error_says_the_same() -> None:
    told = f"Traceback\nwhale_nebula.errors.StateError: {StateError('not now', where='a.py:3')}\n"
    heard = RemoteFailureError("worker 'gpu/0' failed: not now", where="a.py:3")
    assert same_cause(told, f"whale_nebula.errors.RemoteFailureError: {heard}\n")
    assert not same_cause(told, f"whale_nebula.errors.StateError: {StateError('too late')}\n")


def test_only_our_errors_are_compared() -> None:
    assert not same_cause("ValueError: no\n", "ValueError: no\n")
    assert not same_cause("", "ValueError: no\n")

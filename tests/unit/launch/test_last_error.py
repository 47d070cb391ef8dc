"""The last error of a worker: its traceback, the launcher's filter, and repetitions by other workers."""

import runpy
import textwrap
from pathlib import Path

import pytest

from whale_nebula.errors import ConfigError
from whale_nebula.launch.worker_exit import Kept, ends_by, is_same_cause, last_sentence, select_own_lines

OURS = "import whale_nebula.errors as errors\n"


@pytest.fixture
def told(tmp_path: Path):
    """What is said of the error of a script."""

    def run(code: str) -> list[str]:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(code), "utf-8")
        with pytest.raises(BaseException) as raised:
            runpy.run_path(str(path), run_name="__main__")
        error = raised.value
        return select_own_lines(
            error.with_traceback(error.__traceback__.tb_next), str(path)
        ).splitlines()  # without run

    return run


def files(lines: list[str]) -> list[str]:
    return [line.split('"')[1].rpartition("/")[2] for line in lines if line.startswith("  File ")]


def test_the_users_own_error_keeps_the_lines_of_libraries(told) -> None:
    assert files(told("import json\njson.loads('{')\n"))[:2] == ["train.py", "__init__.py"]


def test_our_error_shows_only_what_the_user_wrote(told) -> None:
    code = """
    import json
    from whale_nebula.errors import StateError
    def refuse(pairs):
        raise StateError("not now", mend="wait")
    json.loads("{}", object_pairs_hook=refuse)
    """
    lines = told(code)
    assert files(lines) == ["train.py", "train.py"]
    assert lines[-2:] == ["whale_nebula.errors.StateError: NB-305 not now", "  mend: wait"]


def test_what_our_error_comes_from_is_not_shown(told) -> None:
    code = """
    from whale_nebula.errors import StateError
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise StateError("not now") from error
    """
    assert "ZeroDivisionError" not in "\n".join(told(code))


def test_what_the_users_own_error_comes_from_is_shown(told) -> None:
    code = "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('no') from error\n"
    assert "ZeroDivisionError: division by zero" in told(code)


def test_a_script_that_does_not_compile_has_no_other_lines(told) -> None:
    lines = told("def f(:\n")
    assert files(lines) == ["train.py"]
    assert lines[-1].startswith("SyntaxError")


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


def test_only_our_errors_are_compared() -> None:
    assert not is_same_cause("ValueError: no\n", "ValueError: no\n")
    assert not is_same_cause("", "ValueError: no\n")

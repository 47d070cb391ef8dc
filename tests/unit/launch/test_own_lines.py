"""Tracebacks of scripts: the script's lines, and those of libraries where they say something."""

import runpy
import textwrap
from pathlib import Path

import pytest

from whale_nebula.launch.last_error import own_lines

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
        return own_lines(error.with_traceback(error.__traceback__.tb_next), str(path)).splitlines()  # without run

    return run


def files(lines: list[str]) -> list[str]:
    return [line.split('"')[1].rpartition("/")[2] for line in lines if line.startswith("  File ")]


def test_it_begins_with_the_script(told) -> None:
    lines = told("def f():\n    raise ValueError('no')\nf()\n")
    assert files(lines) == ["train.py", "train.py"]
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "ValueError: no")


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

"""The last error of a worker: its traceback, the launcher's filter, and repetitions by other workers."""

import runpy
import textwrap
from pathlib import Path

import pytest

from whale_nebula.errors import ConfigError
from whale_nebula.launch.worker_exit import (
    LastErrorFilter,
    find_last_message,
    format_failure_line,
    is_same_cause,
    select_own_lines,
)

OURS = "import whale_nebula.errors as errors\n"


@pytest.fixture
def format_error_lines(tmp_path: Path):
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


def list_files(lines: list[str]) -> list[str]:
    return [line.split('"')[1].rpartition("/")[2] for line in lines if line.startswith("  File ")]


def test_user_error_keeps_library_frames(format_error_lines) -> None:
    assert list_files(format_error_lines("import json\njson.loads('{')\n"))[:2] == ["train.py", "__init__.py"]


def test_nebula_error_keeps_only_user_frames(format_error_lines) -> None:
    code = """
    import json
    from whale_nebula.errors import StateError
    def refuse(pairs):
        raise StateError("not now", mend="wait")
    json.loads("{}", object_pairs_hook=refuse)
    """
    lines = format_error_lines(code)
    assert list_files(lines) == ["train.py", "train.py"]
    assert lines[-2:] == ["whale_nebula.errors.StateError: NB-305 not now", "  mend: wait"]


def test_cause_of_nebula_error_is_hidden(format_error_lines) -> None:
    code = """
    from whale_nebula.errors import StateError
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise StateError("not now") from error
    """
    assert "ZeroDivisionError" not in "\n".join(format_error_lines(code))


def test_cause_of_user_error_is_shown(format_error_lines) -> None:
    code = "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('no') from error\n"
    assert "ZeroDivisionError: division by zero" in format_error_lines(code)


def test_syntax_error_has_only_the_script_frame(format_error_lines) -> None:
    lines = format_error_lines("def f(:\n")
    assert list_files(lines) == ["train.py"]
    assert lines[-1].startswith("SyntaxError")


def test_last_message_has_reason_and_fix() -> None:
    error = "NB-500 no process runs cluster 'beta' (s.py:1)\n  why: they are a, b\n       and c\n  mend: write this"
    trace = "Traceback ...\n  File x\nwhale_nebula.errors.ConfigError: "
    assert find_last_message(f"NB-500 older\n  mend: no\n{trace}{error}\nat last\n") == error
    assert find_last_message("Traceback ...\n  File x\nValueError: no\n") == "ValueError: no"


def test_filter_holds_back_the_whole_error() -> None:
    error = ConfigError("no", where="a.yaml", why="so\nit is", mend="write\n    this\n    that")
    lines = [
        format_failure_line("gpu/0"),
        "Traceback",
        f"whale_nebula.errors.ConfigError: {error}",
        "a line at exit",
        "  why: not",
    ]
    kept = LastErrorFilter("gpu/0")
    assert [line for line in "\n".join(lines).splitlines() if kept.holds_back(line)] == lines[2].splitlines()


@pytest.mark.parametrize(
    "lines",
    [
        ["whale_nebula.errors.StateError: NB-305 printed before", "  mend: x"],
        [format_failure_line("gpu/0"), "ValueError: no", "  why: what the user wrote"],
        [format_failure_line("gpu/0"), "  raise errors.StateError('NB-305 x')"],
    ],
)
def test_filter_passes_other_lines(lines: list[str]) -> None:
    kept = LastErrorFilter("gpu/0")
    assert not any(map(kept.holds_back, lines))


def test_is_same_cause_ignores_foreign_errors() -> None:
    assert not is_same_cause("ValueError: no\n", "ValueError: no\n")
    assert not is_same_cause("", "ValueError: no\n")

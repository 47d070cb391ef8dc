"""Running a script as `python script.py` does, but with someone who looks at its steps instead of running them."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from whale_nebula.errors import PlanError
from whale_nebula.launch.own_lines import own_lines
from whale_nebula.scopes.observer import Observer, PlanShown, observed_by

_SCRIPTS = (".py", ".pyc", ".pyz")
_INSTEAD = {
    ".html": "whale-nebula show train.py --html {path} writes such a page, and a browser opens it",
    ".jsonl": "whale-nebula show --report {path}",
    ".ipynb": "jupyter nbconvert --to script {path}, then whale-nebula show with what that wrote",
}
"""What was probably meant, by the end of a file's name."""


@dataclass(frozen=True)
class Ending:
    """How a script ended: `stopped` by us, by the error it raised, or by itself with an exit status."""

    stopped: bool = False
    error: BaseException | None = None
    status: int = 0


def check(path: str) -> None:
    """Refuse a file that is no script. One that ends in .py is one: Python says best what is wrong with it."""
    if path.endswith(_SCRIPTS) or (not path.endswith(tuple(_INSTEAD)) and _compiles(path)):
        return
    ending = os.path.splitext(path)[1]
    mend = _INSTEAD.get(ending, "whale-nebula show train.py").format(path=path)
    raise PlanError(f"{path} is no script: it holds no Python", mend=mend)


def _compiles(path: str) -> bool:
    try:
        compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def run(path: str, arguments: Sequence[str], observer: Observer) -> Ending:
    """Run a script; what it prints goes to stderr, so that stdout is ours."""
    with _as_main(path, arguments), _output_aside(), observed_by(observer):
        try:
            runpy.run_path(path, run_name="__main__")
        except PlanShown:
            return Ending(stopped=True)
        except SystemExit as end:
            return Ending(status=_status(end.code))
        except BaseException as error:
            print(own_lines(error, path), end="", file=sys.stderr)
            return Ending(error=error)
    return Ending()


def _status(code: object) -> int:
    """What a process that ends so gives its parent; a message is printed."""
    if code is None or isinstance(code, int):
        return int(code or 0)
    print(code, file=sys.stderr)
    return 1


@contextlib.contextmanager
def _as_main(path: str, arguments: Sequence[str]) -> Iterator[None]:
    """The arguments and the folder of the script, where a script finds them."""
    argv, first = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [path, *arguments], os.path.dirname(os.path.abspath(path))
    try:
        yield
    finally:
        sys.argv, sys.path[0] = argv, first


@contextlib.contextmanager
def _output_aside() -> Iterator[None]:
    """Send what is written to stdout to stderr, by Python, by TensorFlow and by processes that the script starts."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 1)
        os.close(kept)

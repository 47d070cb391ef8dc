"""Run a script up to its first steps, which are planned and not trained; and read the reports of finished runs."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whale_nebula.errors import PlanError
from whale_nebula.launch.last_error import own_lines
from whale_nebula.plan.plan import Plan
from whale_nebula.report.records import LinkReport, StageReport
from whale_nebula.report.report import Report, read
from whale_nebula.report.summary import summary_document, summary_text
from whale_nebula.scopes.observer import Observer, PlanShown, observed_by

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan
    from whale_nebula.runtime.show import Shown


@dataclass
class Onlooker:
    """Plans the first `wanted` steps that differ; `config` and `links` stand for what the script opens its run with.

    Steps beyond the first are reached by answering those before with zeros; so a script that is about to save what
    it has "trained" is ended, too. `ended` says why, where it is not that all was seen.
    """

    wanted: float = 1
    config: str | None = None
    links: str | None = None
    ended: str = ""

    @cached_property
    def shown(self) -> Shown:
        """The plans so far. TensorFlow is there by now: the script has made a step of it."""
        from whale_nebula.runtime.show import Shown

        return Shown(self.wanted > 1, self._about_to_save)

    @property
    def plans(self) -> list[Plan]:
        """The plans that were made."""
        return self.shown.plans if "shown" in self.__dict__ else []

    def close(self) -> None:
        """Let savers save again."""
        if "shown" in self.__dict__:
            self.shown.guarded.close()

    def instead(self, config: Any, links: Any) -> tuple[Any, Any]:
        """What the command line says goes before what the script says."""
        if self.config is not None:
            return self.config, self.links
        return config, links if self.links is None else self.links

    def begins(self) -> None:
        """Leave the script's callbacks out: they write files, of a training that there is not."""
        self.shown.without_callbacks()

    def look(self, step: Any, layout: Any, tensors: Any, unpack: Any) -> Any:
        """Plan a step, and give zeros for its results."""
        found = self.shown.look(step, layout, tensors, unpack)
        if found is None:
            return None
        if not found.scoped:
            if found.trains:
                self.plain(step.name, "train")
            return None
        if len(self.plans) >= self.wanted:
            raise PlanShown
        return (self.shown.zeros(found, tensors),)

    def report(self) -> Any:
        """What stands for the report of a step that was not run."""
        return unrun(self.plans)

    def plain(self, name: str, kind: str) -> None:
        """Let a model without scopes predict, but not train: that would be for real."""
        if kind == "train":
            self.ended = f"{name} has no scopes, and was about to be trained"
            raise PlanShown

    def _about_to_save(self, what: str) -> None:
        self.ended = f"the script was about to save by {what}, with nothing trained"
        raise PlanShown


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


def show_report(path: str | os.PathLike[str], *, as_json: bool = False) -> int:
    """Print the summary of a file that `Report.save` or `nb.init(metrics=...)` wrote; gives the exit code.

    What cannot be read raises a `StateError`, as everywhere.
    """
    reports, broken = read(path)
    if as_json:
        print(json.dumps(summary_document(reports, broken), allow_nan=False))
    else:
        print(summary_text(reports, broken))
    return 0


class UnrunReport(Report):
    """The report of a step that was planned and not run. It prints, and writes no file."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Nothing is written: nothing was measured."""

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Nothing is written: nothing was measured."""

    def __str__(self) -> str:
        return "no report: the script is only shown, and no step was run"


def unrun(plans: Sequence[Plan]) -> UnrunReport:
    """The report of the last of these plans.

    >>> print(unrun([]))
    no report: the script is only shown, and no step was run
    """
    plan = plans[-1] if plans else None
    return UnrunReport(
        program=plan.name if plan is not None else "",
        step=0,
        step_seconds=0.0,
        micro_batches=plan.micro_batch if plan is not None else 1,
        stages={name: StageReport(0.0, 0.0, each.cluster) for name, each in plan.stages.items()} if plan else {},
        links={name: LinkReport() for name in plan.links} if plan else {},
    )

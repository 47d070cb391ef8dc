"""Run a script up to its step and print the plan; or print the reports of a file."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whale_nebula.cli import arguments as exits
from whale_nebula.cli.arguments import Words, print_error, remark
from whale_nebula.config import load, parse_links
from whale_nebula.errors import ConfigError, NebulaError, PlanError, StateError
from whale_nebula.launch.worker_exit import select_own_lines
from whale_nebula.plan.plan import Plan
from whale_nebula.report.records import LinkReport, StageReport
from whale_nebula.report.report import Report, read
from whale_nebula.report.saved import summary_document, summary_text
from whale_nebula.scopes.observer import Observer, PlanShown, use_observer

if TYPE_CHECKING:
    from whale_nebula.runtime.show import ShownPlans

PLANS = "whale_nebula shown plans 1"


def show_report(path: str, *, as_json: bool) -> int:
    """Show the reports in a file of a run."""
    if not os.path.exists(path):
        return _report_missing_file(path, as_json, _NO_REPORT)
    reports, broken = read(path)
    if as_json:
        print(json.dumps(summary_document(reports, broken), allow_nan=False))
    else:
        print(summary_text(reports, broken))
    return exits.DONE


def show_script(args: argparse.Namespace, words: Words, command: str = "show") -> int:
    """Show the plan of a script, or of a saved plan, for `whale-nebula show` or `whale-nebula plan`."""
    path = words.script or ""
    if not os.path.isfile(path):
        return _report_missing_file(path, args.json, f"whale-nebula {command} path/to/train.py")
    if path.endswith(".json"):
        _print([Plan.load(path)], args)
        return exits.DONE
    collector = PlanCollector(math.inf if args.all else int(args.steps or 1), args.config, args.links)
    ending = collect_plans(path, words.arguments, collector)
    if collector.plans:
        _print(collector.plans, args, explained=command == "plan")
        return exits.DONE
    return report_nothing(path, ending, collector, args.json, command)


def collect_plans(path: str, arguments: Sequence[str], collector: PlanCollector) -> ScriptEnd:
    """Run a script, and plan its steps by the collector; returns how the script ended."""
    check_script(path)
    if collector.config is not None:  # report its faults before a long run of the script
        load(collector.config)
    if collector.links is not None:
        parse_links(collector.links)
    with contextlib.closing(collector):
        ending = _run_script(path, arguments, collector)
    if collector.plans and collector.end_reason:
        remark(f"{collector.end_reason}: stopped here")
    return ending


def report_nothing(path: str, ending: ScriptEnd, collector: PlanCollector, as_json: bool, command: str) -> int:
    """Report to a command (show, plan or approve) that the script ended without a plan; returns the exit status."""
    kind = "step with scopes" if command == "show" else "step"
    if isinstance(ending.error, KeyboardInterrupt):
        return exits.INTERRUPTED
    if ending.error is not None or ending.status:
        _report_failed(path, ending, as_json, kind)
        return exits.FAILED
    what = f"{path} ran no {kind}, so there is nothing to {command}"
    why = collector.end_reason or "a step is model.fit, evaluate, predict, train_on_batch, or a call of an nb.function"
    mend = 'put "with nb.cluster(), nb.stage(cluster=...):" around the layers of each stage'
    mend = mend if command == "show" else "call model.fit(x, y) in it, or decorate your own step with @nb.function"
    return print_error(PlanError(what, where=path, why=why, mend=mend), as_json=as_json, code=exits.NOTHING)


def _report_failed(path: str, ending: ScriptEnd, as_json: bool, kind: str) -> None:
    """Report that the script failed; its traceback or message is on stderr already."""
    how = f"exited with status {ending.status}" if ending.error is None else f"raised {type(ending.error).__name__}"
    what = f"{path} {how} before its first {kind}"
    if not as_json:
        remark(what)
    elif isinstance(ending.error, NebulaError):
        print_error(ending.error, as_json=True)
    else:
        why = None if ending.error is None else str(ending.error)
        print_error(PlanError(what, where=path, why=why, mend="see its messages on stderr"), as_json=True)


def _report_missing_file(path: str, as_json: bool, mend: str = "whale-nebula show path/to/train.py") -> int:
    kind = StateError if mend == _NO_REPORT else ConfigError
    return print_error(kind(f"file {path!r} does not exist", mend=mend), as_json=as_json, code=exits.NO_FILE)


_NO_REPORT = (
    "whale-nebula show --report FILE reads a file of a run, written by "
    'nb.last_report().save("step.json"), or nb.init(metrics="run.jsonl")'
)


# ---------------------------------------------------------------------- output
def _print(plans: Sequence[Plan], args: argparse.Namespace, *, explained: bool = False) -> None:
    for number, plan in enumerate(plans):
        if args.html is not None:
            path, text = _numbered_path(args.html, number), plan.to_html()
            try:
                Path(path).write_text(text, "utf-8")
            except OSError as error:
                raise PlanError(f"{path} cannot be written", why=error.strerror, mend="--html plan.html") from None
            remark(f"wrote {path} ({len(text.encode()) / 1024:.0f} KiB)")
        if args.save is not None:
            plan.save(_numbered_path(args.save, number))
            remark(f"saved {_numbered_path(args.save, number)}")
    silent = args.html is not None or args.save is not None
    if args.json and (args.all or int(args.steps or 1) > 1):
        print(json.dumps({"format": PLANS, "plans": [json.loads(plan.to_json()) for plan in plans]}, indent=1))
    elif args.json:
        print(plans[0].to_json())
    elif args.after is not None:
        print("\n\n".join(plan.text_after(args.after) for plan in plans))
    elif args.mermaid:
        print("\n".join(plan.to_mermaid() for plan in plans))
    elif args.text or not silent:
        for decision in (plan.decision for plan in plans if explained and plan.decision is not None):
            for line in decision.list_lines():
                print(line, flush=True)  # before the next one is known: its search may take long
            print()
        print("\n\n".join(plan.to_text() for plan in plans))


def _numbered_path(path: str, number: int) -> str:
    """The path of one of several plans: plan.html, plan-2.html ...

    >>> _numbered_path("out/plan.html", 0), _numbered_path("out/plan.html", 1)
    ('out/plan.html', 'out/plan-2.html')
    """
    stem, dot = os.path.splitext(path)
    return f"{stem}-{number + 1}{dot}" if number else path


# ---------------------------------------------------------------------- running the script up to its steps
@dataclass
class PlanCollector:
    """An observer that plans the first `most_plans` distinct steps of a script; `config` and `links` replace those of
    the script's `init`.

    Steps return zeros, so that later ones are reached; a script that is about to save the untrained model is therefore
    stopped. `end_reason` is the reason if not all steps were reached.
    """

    most_plans: float = 1
    config: str | None = None
    links: str | None = None
    end_reason: str = ""

    @cached_property
    def shown(self) -> ShownPlans:
        """The plans so far. TensorFlow is loaded at this point, as the script has created a step."""
        from whale_nebula.runtime.show import ShownPlans

        def stop(what: str) -> None:
            self.end_reason = f"the script was about to save with {what}, although nothing is trained"
            raise PlanShown

        return ShownPlans(self.most_plans > 1, stop)

    @property
    def plans(self) -> list[Plan]:
        """The plans so far."""
        return self.shown.plans if "shown" in self.__dict__ else []

    def close(self) -> None:
        """Restore the functions that save models, which stop the script while it runs."""
        if "shown" in self.__dict__:
            self.shown.open_patches.close()

    def replace_config(self, config: Any, links: Any) -> tuple[Any, Any]:
        """The configuration and links: the command line overrides the script."""
        if self.config is not None:
            return self.config, self.links
        return config, links if self.links is None else self.links

    def begin_training(self) -> None:
        """Drop the script's callbacks, which would write files although nothing is trained."""
        self.shown.suppress_callbacks()

    def observe_step(self, step: Any, layout: Any, tensors: Any, unpack: Any) -> Any:
        """Plan a step; returns zeros for its results, as the only element of a tuple. None if the step must run, as it
        has no scopes and does not train.
        """
        found = self.shown.observe_step(step, layout, tensors, unpack)
        if not found.program.has_scopes:
            if found.program.requests:
                self.observe_unscoped(step.name, "train")
            return None
        if len(self.plans) >= self.most_plans:
            raise PlanShown
        return (self.shown.make_zeros(found, tensors),)

    def create_report(self) -> Any:
        """A placeholder for the report of a step that was not run."""
        return create_unrun_report(self.plans)

    def observe_unscoped(self, name: str, kind: str) -> None:
        """Let a model without scopes predict, but refuse to train it, as that would not be simulated."""
        if kind == "train":
            self.end_reason = f"{name} has no scopes and was about to be trained"
            raise PlanShown


_SCRIPTS = (".py", ".pyc", ".pyz")


_SUGGESTED_COMMANDS = {
    ".html": "whale-nebula show train.py --html {path} creates such a page; open it in a browser",
    ".jsonl": "whale-nebula show --report {path}",
    ".ipynb": "jupyter nbconvert --to script {path}, then whale-nebula show with the resulting script",
}
"""The suggested command, by the extension of a file."""


@dataclass(frozen=True)
class ScriptEnd:
    """How a script ended: the error it raised, or its exit status."""

    error: BaseException | None = None
    status: int = 0


def check_script(path: str) -> None:
    """Refuse a file that is not a script. One that ends in .py is accepted, as Python reports syntax errors itself."""
    if path.endswith(_SCRIPTS):
        return
    ending = os.path.splitext(path)[1]
    if ending not in _SUGGESTED_COMMANDS:
        with contextlib.suppress(SyntaxError, ValueError):
            compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
            return
    mend = _SUGGESTED_COMMANDS.get(ending, "whale-nebula show train.py").format(path=path)
    raise PlanError(f"{path} is not a script: it contains no Python code", mend=mend)


def _run_script(path: str, arguments: Sequence[str], observer: Observer) -> ScriptEnd:
    """Run a script with this observer, and its output redirected to stderr, as stdout is for the answer."""
    argv, first = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [path, *arguments], os.path.dirname(os.path.abspath(path))
    with _redirect_output(), use_observer(observer):
        try:
            runpy.run_path(path, run_name="__main__")
        except PlanShown:
            pass
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                return ScriptEnd(status=end.code or 0)
            print(end.code, file=sys.stderr)
            return ScriptEnd(status=1)
        except BaseException as error:
            print(select_own_lines(error, path), end="", file=sys.stderr)
            return ScriptEnd(error=error)
        finally:
            sys.argv, sys.path[0] = argv, first
    return ScriptEnd()


@contextlib.contextmanager
def _redirect_output() -> Iterator[None]:
    """Redirect stdout to stderr, for Python, TensorFlow and child processes."""
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


class UnrunReport(Report):
    """The report of a step that was planned and not run. It can be printed, but writes no file."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write nothing, as nothing was measured."""

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write nothing, as nothing was measured."""

    def __str__(self) -> str:
        return "no report: the script is only shown, and no step was run"


def create_unrun_report(plans: Sequence[Plan]) -> UnrunReport:
    """The report of the last of these plans.

    >>> print(create_unrun_report([]))
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

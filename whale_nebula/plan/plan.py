"""The public Plan: immutable data that can be read, printed, saved and compared."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from whale_nebula.config.schema import Forbid
from whale_nebula.errors import OptionError, PlanError, StateError
from whale_nebula.errors.text import Named, did_you_mean
from whale_nebula.ir.canonical import OTHER_SIDE, OWN_SIDE, SideNames, describe_first_difference, digest_lines
from whale_nebula.ir.cut import InputCrossing
from whale_nebula.plain import from_plain, to_plain
from whale_nebula.plan.records import (
    Considered,
    PlanBoundary,
    PlanCollective,
    PlanLink,
    PlanOnce,
    PlanStage,
    PlanTied,
    Predicted,
)
from whale_nebula.plan.text import plan_mermaid, plan_text
from whale_nebula.plan.timing import describe_assumptions, predict_times
from whale_nebula.spec import Spec

_ALONE = "local/0"
"""The worker of all stages if one process runs every cluster; then placement is not compared."""


FORMAT = "whale_nebula plan 1"
SHOWN = "whale_nebula shown plan 1"
"""The format of printed plans: without the program's text, so they cannot be loaded and compared."""


_MEND = "write one with nb.plan(model, *example).save(path) or whale-nebula show train.py --save plan.json"
_ANEW = "nb.plan(model, ...)"


@dataclass(frozen=True)
class Plan:
    """A step mapped to clusters: its stages, the boundaries between them, and their order.

    `stages` and `links` are keyed by name, like those of a report. `rows` are the rows of each micro-batch of the
    example; `lines` is the canonical text of the program, whose hash is `program_digest`; `exchange_seconds` is how
    long clusters wait, once per step, for the values that their updates need from each other. For split stages,
    `layouts` are the layouts of tensors on the devices by name, and `collectives` those between devices. `crossings`
    are all values that go from cluster to cluster, with the inputs on which they depend, and how; `protected` are the
    inputs that the config's `inputs` and `forbid` name. For a plan that the planner has chosen, `considered` are the
    best candidates, the chosen one first. A file does not contain `definition` (for `graph_def`), `passes` (for
    `text_after`) and `decision` (for `explain`).

    >>> import json
    >>> import tensorflow as tf
    >>> import whale_nebula as nb
    >>> @nb.function
    ... def double(x):
    ...     with nb.stage(cluster="gpu"):
    ...         return 2.0 * x
    >>> plan = nb.plan(double, tf.TensorSpec([None, 4]))
    >>> plan.to_svg()[:40], plan.to_html().splitlines()[0], json.loads(plan.to_json())["stages"]["gpu"]["cluster"]
    ('<svg xmlns="http://www.w3.org/2000/svg" ', '<!doctype html>', 'gpu')
    >>> print(plan.text_after("cut").splitlines()[2])
    forward of gpu on local/0
    """

    name: str
    stages: Mapping[str, PlanStage]
    boundaries: tuple[PlanBoundary, ...]
    links: Mapping[str, PlanLink]
    once: tuple[PlanOnce, ...]
    tied: tuple[PlanTied, ...]
    micro_batch: int
    rows: tuple[int, ...]
    schedule: str
    in_flight: int | None
    versions: Mapping[str, str]
    threads: Mapping[str, int]
    notes: tuple[str, ...]
    lines: tuple[str, ...] = field(repr=False)
    definition: Callable[[str], Any] | None = field(default=None, repr=False, compare=False)
    exchange_seconds: float = 0.0
    layouts: Mapping[str, str] = field(default_factory=dict)
    collectives: tuple[PlanCollective, ...] = ()
    recompute: bool = False
    passes: Callable[[str], str] | None = field(default=None, repr=False, compare=False)
    decision: Any = field(default=None, repr=False, compare=False)
    considered: tuple[Considered, ...] = field(default=(), repr=False, compare=False)
    crossings: tuple[InputCrossing, ...] = ()
    forbid: tuple[Forbid, ...] = ()
    protected: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("stages", "links"):
            object.__setattr__(self, name, Named(getattr(self, name)))

    def __repr__(self) -> str:
        stages, boundaries = len(self.stages), len(self.boundaries)
        parts = f"{stages} stage{'s' * (stages != 1)} and {boundaries} boundar{'y' if boundaries == 1 else 'ies'}"
        return f"<plan {self.digest[:12]} of {self.name}: {parts}; print() shows it>"

    @cached_property
    def program_digest(self) -> str:
        """Digest of the computation: equal in every process that traces the same step, on any machine."""
        return digest_lines(self.lines)

    @cached_property
    def digest(self) -> str:
        """Digest of the computation, its placement, codecs, versions and numbers of threads."""
        return digest_lines(self._digest_lines())

    def _digest_lines(self) -> Iterator[str]:
        yield f"program {self.program_digest}"
        for stage in self.stages.values():
            copies = "" if stage.replicas == 1 else f" replicas={stage.replicas}"
            order = f" order={','.join(map(str, stage.order))}" if stage.order else ""
            yield f"stage {stage.name} {stage.cluster} {stage.worker}{copies}{order}"
        for each in self.boundaries:
            yield f"boundary {each.name} {each.codec}, backward {each.backward_codec}"
        yield from (f"version {name} {version}" for name, version in sorted(self.versions.items()))
        yield from (f"threads {name} {count}" for name, count in sorted(self.threads.items()))

    def difference(self, other: Plan, words: SideNames = (OWN_SIDE, OTHER_SIDE)) -> str | None:
        """The first difference between this plan ("here") and another ("there") in words, causes before consequences;
        None if they are equal.

        Properties of the place where a plan was made are not compared: rows of its example, rates of links, and workers
        if one of the plans is of a single process.

        >>> import tensorflow as tf
        >>> import whale_nebula as nb
        >>> def planned(width):
        ...     @nb.function
        ...     def double(x):
        ...         with nb.stage(cluster="gpu"):
        ...             return 2.0 * x
        ...     return nb.plan(double, tf.TensorSpec([None, width]))
        >>> planned(4).difference(planned(5))
        'input x is float32[?,4] batched here, float32[?,5] batched there'
        >>> planned(4).difference(planned(4)) is None
        True
        """
        alone = any(stage.worker == _ALONE for plan in (self, other) for stage in plan.stages.values())
        for own, theirs in zip(*(_list_facts(plan, workers=not alone) for plan in (self, other)), strict=True):
            for name in dict.fromkeys([*own, *theirs]):
                if name not in own or name not in theirs:
                    there, not_there = words if name in own else words[::-1]
                    return f"{name} exists {there}, but not {not_there}"
                if own[name] != theirs[name]:
                    return f"{name} is {own[name]} {words[0]}, {theirs[name]} {words[1]}"
        found = describe_first_difference(self.lines, other.lines, words)
        for one, two in zip(self.boundaries, other.boundaries, strict=True):
            if found and one.maker != two.maker:  # a different name alone is ignored, as Keras numbers models
                return f"boundary {one.name} is produced by {one.maker!r} {words[0]}, {two.maker!r} {words[1]}"
        return found or None

    def to_text(self) -> str:
        """The plan as text, about 100 columns wide."""
        return plan_text(self)

    def text_after(self, name: str) -> str:
        """The program as text after the pass of this name ("capture": before the first): what `show --after` prints."""
        if self.passes is None:
            raise StateError(
                "this plan was loaded from a file, which does not contain the program between passes", mend=_ANEW
            )
        return self.passes(name)

    @property
    def predicted(self) -> Predicted | None:
        """The planner's predictions for a step: seconds, memory, bytes; None unless it has chosen this plan."""
        return self.considered[0].predicted if self.considered else None

    def explain(self) -> str:
        """The reasons for the planner's choice of this plan: the alternatives, and what would change the choice."""
        if self.decision is None and self.considered:
            raise StateError("this plan was loaded from a file, which does not contain an explanation", mend=_ANEW)
        if self.decision is None:
            raise StateError("this plan was not chosen by the planner", mend="nb.auto_parallel() before nb.plan(...)")
        return str(self.decision.explain())

    def to_mermaid(self) -> str:
        """The plan as a Mermaid flowchart: clusters, stages, and boundaries."""
        return plan_mermaid(self)

    def to_html(self) -> str:
        """The plan as one self-contained HTML file: a graph with pan and zoom, the schedule, tables."""
        from whale_nebula.plan.html.page import plan_html  # used by few runs

        return plan_html(self)

    def to_svg(self) -> str:
        """The plan's graph as a self-contained SVG picture, which notebooks display for a plan."""
        from whale_nebula.plan.html.graph import plan_svg

        return plan_svg(self)

    _repr_svg_ = to_svg

    def to_json(self) -> str:
        """The plan as JSON for other programs: without the program's text, which is long, and with derived numbers."""
        document = _document(self, SHOWN)
        del document["lines"]
        for name, stage in self.stages.items():
            document["stages"][name]["memory_bytes"] = stage.memory_bytes
        for name, link in self.links.items():
            document["links"][name]["seconds"] = link.seconds
        drawn = predict_times(self)
        seconds = drawn.seconds + self.exchange_seconds if drawn.timed else None
        document["predicted"] = {"assuming": describe_assumptions(drawn.timed), "seconds": seconds}
        if self.predicted is not None:
            document["predicted"] = {"assuming": "the planner's cost model", **to_plain(self.predicted)}
        return json.dumps(document, indent=1)

    def to_file(self) -> str:
        """The text of the file that `save` writes."""
        return json.dumps(_document(self, FORMAT), indent=1) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, to be loaded and compared later."""
        Path(path).write_text(self.to_file(), encoding="utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a file of `save`. It has everything but the graphs."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise PlanError(
                "this file is not a saved plan", where=str(path), why=_explain_error(error), mend=_MEND
            ) from None
        return parse_plan(text, str(path))

    def graph_def(self, stage: str) -> Any:
        """The TensorFlow GraphDef of a stage's forward, with its backward if the two are one function."""
        if stage not in self.stages:
            raise OptionError(f"no stage is called {stage!r}", mend=did_you_mean(stage, self.stages))
        if self.definition is None:
            raise StateError("this plan was loaded from a file, which does not contain graphs", mend=_ANEW)
        return self.definition(stage)

    def __str__(self) -> str:
        return self.to_text()


def _list_facts(plan: Plan, *, workers: bool) -> list[dict[str, str]]:
    """The facts of a plan that `difference` compares, by name; causes before consequences."""
    stages: dict[str, str] = {}
    crossing: dict[str, str] = {}
    for stage in plan.stages.values():
        order = f", in the order {' '.join(map(str, stage.order))}" if stage.order else ""
        copies = f", in {stage.replicas} replicas{order}" if stage.replicas > 1 else ""
        stages[f"stage {stage.name!r}"] = f"on cluster {stage.cluster!r}{copies}"
    for each in plan.boundaries:
        name = f"boundary {each.name}, from {each.source} to {' and '.join(each.destinations)},"
        crossing |= {name: str(Spec(each.dtype, each.shape)), f"the codec of {name}": each.codec}
        crossing[f"the backward codec of {name}"] = each.backward_codec
    declarations = [line.split(" ", 2) for line in plan.lines if line.startswith(("input ", "variable "))]
    return [
        {**stages, "the order of the stages": ", ".join(plan.stages)},
        dict(word.split("=", 1) for line in plan.lines[:1] for word in line.split()[1:]),
        {f"the version of {name}": version for name, version in plan.versions.items()},
        {f"input {name}": rest for kind, name, rest in declarations if kind == "input"},
        crossing,
        {f"variable {name}": rest for kind, name, rest in declarations if kind == "variable"},
        {f"the worker of stage {name!r}": stage.worker for name, stage in plan.stages.items() if workers},
        {f"the number of threads {name}": str(count) for name, count in plan.threads.items()},
    ]


def _document(plan: Plan, form: str) -> dict[str, Any]:
    """A plan as a JSON object, without its functions."""
    without = {"definition", "passes", "decision", *["considered"] * (not plan.considered)}
    names = (name for name in plan.__dataclass_fields__ if name not in without)
    digests = {"digest": plan.digest, "program_digest": plan.program_digest}
    return {"format": form, **digests, **{name: to_plain(getattr(plan, name)) for name in names}}


def parse_plan(text: str | bytes, where: str) -> Plan:
    """The plan in the text of a file, whose digest is verified."""
    try:
        document = json.loads(text)
        if (found := document.pop("format")) == SHOWN:
            raise ValueError("it is the output of show --json, which does not contain the program")
        if found != FORMAT:
            raise ValueError(f"the format is not {FORMAT!r}")
        plan, digest = from_plain(Plan, document), document["digest"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PlanError("this file is not a saved plan", where=where, why=_explain_error(error), mend=_MEND) from None
    if plan.digest != digest:
        raise PlanError("this plan was modified after it was saved", where=where, mend=_MEND)
    return plan


def _explain_error(error: Exception) -> str:
    """The reason why a file is invalid, in words.

    >>> _explain_error(KeyError("format")), _explain_error(json.JSONDecodeError("Expecting value", "plan", 0))
    ("it has no 'format'", 'it is not JSON: Expecting value: line 1 column 1 (char 0)')
    """
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON: {error}"
    return str(error) if isinstance(error, ValueError) else "its structure is not that of a plan"

"""The public Plan: immutable data that can be read, printed, saved and compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from whale_nebula.config.schema import Forbid
from whale_nebula.errors import OptionError, StateError
from whale_nebula.errors.text import Named, did_you_mean
from whale_nebula.ir.canonical import digest_lines
from whale_nebula.ir.cut import InputCrossing
from whale_nebula.plan import file
from whale_nebula.plan.file import plan_difference
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

_ANEW = "nb.plan(model, ...)"


@dataclass(frozen=True)
class Plan:
    """A step mapped to clusters: its stages, the boundaries between them, and their order.

    `stages` and `links` are keyed by name, like those of a report. `rows` are the rows of each micro-batch of
    the example; `lines` is the canonical text of the program, whose hash is `program_digest`;
    `exchange_seconds` is how long clusters wait, once a step, for the values that their updates need from each other.
    For split stages, `layouts` are the layouts of tensors on the devices by name, and `collectives` those between
    devices. `crossings` are all values that go from cluster to cluster, with the inputs on which they depend, and how;
    `protected` are the inputs that the config's `inputs` and `forbid` name.
    For a plan that the planner has chosen, `considered` are the best candidates, the chosen one first.

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
        return f"<plan {self.digest[:12]} of {self.name}: {parts}; print() tells it>"

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

    def difference(self, other: Plan) -> str | None:
        """The first difference between this plan ("here") and another ("there") in words, or None.

        Properties of the place where it was made are not compared: rows of the example, rates of links, single workers.

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
        return plan_difference(self, other)

    def to_text(self) -> str:
        """The plan as text, about 100 columns wide."""
        return plan_text(self)

    def text_after(self, name: str) -> str:
        """The program as text after the pass of this name ("capture": before the first): what `show --after` prints."""
        if self.passes is None:
            raise StateError("this plan comes from a file, which holds no program between passes", mend=_ANEW)
        return self.passes(name)

    @property
    def predicted(self) -> Predicted | None:
        """The planner's predictions for a step: seconds, memory, bytes; None unless it has chosen this plan."""
        return self.considered[0].predicted if self.considered else None

    def explain(self) -> str:
        """The reasons for the planner's choice of this plan: the alternatives, and what would change the choice."""
        if self.decision is None and self.considered:
            raise StateError("this plan comes from a file, which holds no explanation of it", mend=_ANEW)
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
        """The plan as JSON: the content of `save` without the program's text, which is long."""
        return file.to_json(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, to be loaded and compared later."""
        file.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a file of `save`. It has everything but the graphs."""
        return file.load(Plan, path)

    def graph_def(self, stage: str) -> Any:
        """The TensorFlow GraphDef of a stage's forward, with its backward if the two are one function."""
        if stage not in self.stages:
            raise OptionError(f"no stage is called {stage!r}", mend=did_you_mean(stage, self.stages))
        if self.definition is None:
            raise StateError("this plan comes from a file, which holds no graphs", mend=_ANEW)
        return self.definition(stage)

    def __str__(self) -> str:
        return self.to_text()

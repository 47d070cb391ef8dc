"""A user's step: captured on its first call with each form of batch, planned, and run."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from whale_nebula import scopes
from whale_nebula.capture.arguments import Declared, alive
from whale_nebula.capture.placed import changes
from whale_nebula.capture.step import Signature, capture, signature
from whale_nebula.capture.surroundings import check_surroundings
from whale_nebula.errors import CaptureError, StageFailedError
from whale_nebula.feed.batch import micro_batches
from whale_nebula.runtime.apart.reads import meet_before_reads
from whale_nebula.runtime.collective import make_all_collective
from whale_nebula.runtime.engine import Engine, engine
from whale_nebula.runtime.first_batch import Shapes, changed, shapes_of
from whale_nebula.runtime.models_met import models_met, models_of
from whale_nebula.runtime.pinning import check_pinned
from whale_nebula.runtime.run import Run, current_run
from whale_nebula.runtime.widening import takes, widened
from whale_nebula.scopes import hints as unentered
from whale_nebula.scopes.observer import observer

Arguments = Sequence[tuple[str, Any]]
Unpack = Callable[[list[Any]], tuple[Sequence[Any], Mapping[str, Any]]]
"""From the values of the arguments to what `fn` is called with."""


def positional(values: list[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Call with the values in their order."""
    return values, {}


def declared() -> Declared:
    """The forms that the config of the run gives to inputs."""
    run = current_run()
    return Declared(run.config.inputs, run.alone)


class Planned(NamedTuple):
    """What a step keeps of what it has planned: see there."""

    engines: dict[Any, Engine]
    forms: list[Signature]
    first: Shapes


@dataclass
class Step:
    """Calls of `fn`, run by a plan. One engine is kept for each form of the arguments, and for the scopes around.

    A step that `widens` has one engine for all forms that differ in sizes alone, from the second on.
    """

    fn: Callable[..., Any]
    name: str
    paths: Callable[[], Mapping[int, str]] = dict
    metrics: Callable[[], Mapping[int, str]] = dict
    whole: frozenset[str] = frozenset()
    jit: bool = False
    lazy: bool = False
    notes: tuple[str, ...] = ()
    widens: bool = False
    engines: dict[Any, Engine] = field(default_factory=dict)
    forms: list[Signature] = field(default_factory=list)
    last: Engine | None = None
    first: Shapes = ()
    placed: int = -1
    run_of_plans: weakref.ref[Run] | None = None
    around: Any = ()
    elsewhere: dict[Any, Planned] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def owner(self) -> Any:
        """The model whose step it is, if it is a method of one."""
        return getattr(self.fn, "__self__", None)

    def run(self, arguments: Arguments, unpack: Unpack = positional) -> Any:
        """Run one step on the given arguments (name and value each)."""
        check_surroundings()
        scopes.hold_something()
        with self._lock:
            layout, tensors = signature(arguments, self.whole, declared())
            looked = self._looked_at(layout, tensors, unpack)
            if looked is not None:
                return looked[0]
            self.last = self._engine(layout, unpack, tensors)
            unentered.tell_beside(self.name)
            return self._run(self.last, layout, tensors)

    def _run(self, last: Engine, layout: Signature, tensors: list[Any]) -> Any:
        """Run the step; one that fails on a batch that is shaped unlike the first says so."""
        try:
            results = last.run(tensors)
        except StageFailedError as failure:
            other = changed(layout.names, tensors, self.first)
            failure.why = "\n".join(filter(None, [failure.why, other]))
            raise
        self.first = self.first or shapes_of(tensors)
        return results

    def plan(self, arguments: Arguments, unpack: Unpack = positional) -> Engine:
        """Capture and plan for the given arguments without running."""
        with self._lock:
            layout, tensors = signature(arguments, self.whole, declared())
            self._looked_at(layout, tensors, unpack)
            return self._engine(layout, unpack)

    def _looked_at(self, layout: Signature, tensors: list[Any], unpack: Unpack) -> tuple[Any] | None:
        """What stands for the results where the script is only shown; None where the step is to run."""
        watching = observer()
        return None if watching is None else watching.look(self, layout, tensors, unpack)

    def _engine(self, layout: Signature, unpack: Unpack, tensors: Sequence[Any] | None = None) -> Engine:
        """The engine for such arguments; of the first `tensors` it is looked at whether they are a batch at all."""
        self._forget_others()
        self._stand_in(scopes.around())
        if layout.key not in self.engines:
            found = self._taking(layout) or self._widened(layout, unpack) or self._made(layout, unpack, tensors)
            self.engines[layout.key] = found
        return self.engines[layout.key]

    def _forget_others(self) -> None:
        """What was planned for another run, or before `nb.place` was called, does not count."""
        run, placed = current_run(), changes()
        if self.run_of_plans is None or self.run_of_plans() is not run or self.placed != placed:
            self.run_of_plans, self.placed = weakref.ref(run), placed
            self.engines.clear()
            self.forms.clear()
            self.elsewhere.clear()
            self.first = ()

    def _stand_in(self, around: Any) -> None:
        """What was planned inside other scopes than those around this call waits for another call inside them."""
        if around != self.around:
            self.elsewhere[self.around] = Planned(self.engines, self.forms, self.first)
            self.engines, self.forms, self.first = self.elsewhere.pop(around, Planned({}, [], ()))
            self.around = around

    def _taking(self, layout: Signature) -> Engine | None:
        """The engine of a form with free axes that takes this one, too."""
        return next((self.engines[form.key] for form in self.forms if takes(form, layout)), None)

    def _widened(self, layout: Signature, unpack: Unpack) -> Engine | None:
        """An engine with free axes in the place of one more for every size; None where the step needs to know them."""
        form = widened(layout, self.forms) if self.widens else None
        if form is None:
            return None
        try:
            return self._made(form, unpack)
        except (CaptureError, TypeError, ValueError):
            self.widens = False
            return None

    def _made(self, layout: Signature, unpack: Unpack, tensors: Sequence[Any] | None = None) -> Engine:
        self.engines = {key: kept for key, kept in self.engines.items() if alive(key[-1])}
        self.forms = [form for form in self.forms if form.key in self.engines]

        def call(given: Sequence[Any]) -> Any:
            args, kwargs = unpack(list(given))
            return self.fn(*args, **kwargs)

        later = not current_run().alone
        with models_met() as met:
            captured = capture(call, layout, paths=self.paths, metrics=self.metrics, later=later, owner=self.owner)
        try:
            current_run().check_ids([leaf.name for leaf in captured.program.leaves])
            if tensors is not None:
                micro_batches(captured.program.leaves, tensors, captured.program.pipeline.micro_batch)
            check_pinned(self.name, captured, layout)
            notes = (*self.notes, *captured.projected)
            models = [*met, *models_of(self.fn)]
            found = engine(captured, call, layout, self.name, jit=self.jit, lazy=self.lazy, notes=notes, models=models)
        finally:
            captured.begin(lambda variable: True)  # nothing, unless the step was refused
        make_all_collective(models, current_run())
        meet_before_reads(models, current_run())
        self.engines[layout.key] = found
        self.forms.append(layout)
        return found

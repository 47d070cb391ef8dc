"""A user's step: captured and planned on its first call with each signature, then executed."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import keras
import tensorflow as tf

from whale_nebula.capture.arguments import DeclaredInputs, are_alive
from whale_nebula.capture.layer_placement import count_changes
from whale_nebula.capture.step import Captured, Signature, capture, signature
from whale_nebula.capture.tracing import check_context
from whale_nebula.errors import CaptureError, StageFailedError
from whale_nebula.feed.inputs import count_micro_batch_rows
from whale_nebula.runtime.plan_step import check_pinned, plan_capture
from whale_nebula.runtime.run import Run, current_run
from whale_nebula.runtime.step.background import BackgroundTrace, Prepared, prepare
from whale_nebula.runtime.step.engine import Engine, forget_states, make_engine
from whale_nebula.runtime.variables.reads import make_all_collective
from whale_nebula.scopes import hints
from whale_nebula.scopes.auto import get_current_limits
from whale_nebula.scopes.frames import mark_open_frames
from whale_nebula.scopes.observer import observer
from whale_nebula.scopes.step_options import current_step_options, describe_surroundings, replace_options
from whale_nebula.site import script_site
from whale_nebula.spec import Spec
from whale_nebula.tf import private as tf_private
from whale_nebula.tf.patch import Patch
from whale_nebula.tf.threads import keeps_losses

Shapes = tuple[tuple[int | None, ...] | None, ...]


def _find_shape(tensor: Any) -> tuple[int | None, ...] | None:
    shape = getattr(tensor, "shape", None)
    return None if shape is None or getattr(shape, "rank", 0) is None else tuple(shape)


def describe_shape_change(names: Sequence[str], tensors: Sequence[Any], first: Shapes) -> str:
    """Describe the first input whose rows differ in shape from those of the `first` batch; "" if there is none.

    >>> import numpy as np
    >>> describe_shape_change(["x"], [np.ones((32, 5), "float32")], ((64, 8),))
    "input 'x' is float32[32,5] in this batch, but was [64,8] in the first"
    """
    for name, tensor, before in zip(names, tensors, first, strict=False):
        now = _find_shape(tensor)
        if before is not None and now is not None and (len(now) != len(before) or now[1:] != before[1:]):
            dtype = getattr(tensor.dtype, "name", str(tensor.dtype))
            text = str(Spec("", before)).replace(" ", "")
            return f"input {name!r} is {Spec(dtype, now)} in this batch, but was {text} in the first"
    return ""


def accepts_call(wide: Signature, layout: Signature) -> bool:
    """Whether a program that was traced for the signature `wide` accepts a call with the signature `layout`."""
    pairs = zip(wide.specs, layout.specs, strict=True)
    return _find_kind(wide) == _find_kind(layout) and all(_fits(free, spec.shape) for free, spec in pairs)


def widen_signature(layout: Signature, known: Iterable[Signature]) -> Signature | None:
    """The signature that accepts `layout` and every known signature that differs from it only in sizes; None if none is
    known.
    """
    alike = [other for other in known if _find_kind(other) == _find_kind(layout)]
    if not alike:
        return None
    specs = layout.specs
    for other in alike:
        specs = tuple(_merge_specs(a, b) for a, b in zip(specs, other.specs, strict=True))
    return _replace_specs(layout, specs)


def replace_sizes(layout: Signature, shapes: Sequence[tuple[int | None, ...]]) -> Signature | None:
    """The signature `layout` with these sizes; None if the number of axes differs."""
    if [len(shape) for shape in shapes] != [spec.shape.rank for spec in layout.specs]:
        return None
    return _replace_specs(layout, [tf.TensorSpec(s, spec.dtype) for s, spec in zip(shapes, layout.specs, strict=True)])


def _replace_specs(layout: Signature, specs: Iterable[tf.TensorSpec]) -> Signature:
    specs = tuple(specs)
    return replace(layout, specs=specs, key=(layout.key[0], specs, *layout.key[2:]))


def _find_kind(layout: Signature) -> Any:
    """The part of a signature that two signatures must share for one trace: everything but the sizes."""
    return layout.key[0], tuple((spec.dtype, spec.shape.rank) for spec in layout.specs), *layout.key[2:]


def _fits(free: tf.TensorSpec, shape: tf.TensorShape) -> bool:
    return all(size is None or size == own for size, own in zip(free.shape, shape, strict=True))


def _merge_specs(a: tf.TensorSpec, b: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec([x if x == y else None for x, y in zip(a.shape, b.shape, strict=True)], a.dtype)


def _name_traces(step: str) -> str:
    """The name under which a checkpoint has the traces of a step with the present options."""
    text = current_step_options().text
    return f"{step} with {text}" if text else step


_LOCAL = threading.local()


@functools.wraps(tf_private.KerasLayer.__call__)  # AutoGraph does not convert functions of Keras's module
def _note_call(model: Any, *args: Any, **kwargs: Any) -> Any:
    met: list[Any] | None = getattr(_LOCAL, "met", None)
    if met is not None and all(model is not known for known in met):
        met.append(model)
    return tf_private.KerasLayer.__call__(model, *args, **kwargs)


_CALLS = Patch(keras.Model, "__call__", _note_call)


@contextlib.contextmanager
def collect_models() -> Iterator[list[Any]]:
    """Collect the models that this thread calls inside the context, each once."""
    before, _LOCAL.met = getattr(_LOCAL, "met", None), []
    try:
        with _CALLS.apply():
            yield _LOCAL.met
    finally:
        _LOCAL.met = before


def find_models(fn: Callable[..., Any]) -> list[Any]:
    """The models that a function refers to by name, or that the object of a method holds.

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> [found is model for found in find_models(lambda x: model(x))]
    [True]
    """
    owner = getattr(fn, "__self__", None)
    fn = inspect.unwrap(getattr(fn, "__func__", fn))
    code: CodeType | None = getattr(fn, "__code__", None)
    held = [owner, *_list_attributes(owner)]
    if code is not None:
        held += [fn.__globals__.get(name) for name in _list_names(code)]
        for cell in fn.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell that is not assigned yet
                held += [cell.cell_contents, *_list_attributes(cell.cell_contents)]
    return [each for each in held if isinstance(each, keras.Model)]


def _list_names(code: CodeType) -> list[str]:
    """The names that a function and its inner functions read."""
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in _list_names(each)]
    return [*code.co_names, *inner]


def _list_attributes(thing: Any) -> list[Any]:
    """The attributes of an object of a user's class, such as one that holds models and the training loop."""
    whole = thing is None or isinstance(thing, keras.Model | type)
    return [] if whole else list(getattr(thing, "__dict__", {}).values())


Arguments = Sequence[tuple[str, Any]]
Unpack = Callable[[list[Any]], tuple[Sequence[Any], Mapping[str, Any]]]
"""A function from the values of the arguments to the arguments of `fn`."""


def unpack_positional(values: list[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Call with the values as positional arguments, in order."""
    return values, {}


def find_declared_inputs() -> DeclaredInputs:
    """The shapes that the run's config declares for inputs."""
    run = current_run()
    return DeclaredInputs(run.config.inputs, run.alone)


@dataclass
class Step:
    """Calls of `fn`, run with a plan, with one engine for each signature of the arguments and each set of enclosing
    scopes. A step that `widens` has one engine for all signatures that differ only in sizes, from the second one on.
    `steps` counts the steps of all engines, including those of replaced plans. `trains`: it is Keras's own train step
    of a model. `paths` returns the names of variables and `metrics` the metrics that some belong to, by the id of their
    handle; `owned_variables` returns all variables of the model that it trains, by name, whether or not it reads them.
    """

    fn: Callable[..., Any]
    name: str
    paths: Callable[[], Mapping[int, str]] = dict
    metrics: Callable[[], Mapping[int, str]] = dict
    owned_variables: Callable[[], Mapping[str, Any]] = dict
    whole: frozenset[str] = frozenset()
    jit: bool = False
    lazy: bool = False
    notes: tuple[str, ...] = ()
    widens: bool = False
    trains: bool = False
    engines: dict[tuple[Any, Any], Engine] = field(default_factory=dict)
    forms: list[tuple[Any, Signature]] = field(default_factory=list)
    last: Engine | None = None
    first_shapes: Shapes = ()
    placement_count: int = -1
    steps: int = 0
    run_of_plans: weakref.ref[Run] | None = None
    keeps_losses: bool = False
    background: tuple[tuple[Any, Any], BackgroundTrace] | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def owner(self) -> Any:
        """The model whose method the step is, if any."""
        return getattr(self.fn, "__self__", None)

    def run(self, arguments: Arguments, unpack: Unpack = unpack_positional) -> Any:
        """Run one step on the given arguments (name and value each)."""
        check_context()
        mark_open_frames()
        options = current_step_options()
        if options.choose is not None:
            with replace_options(None):  # the planner traces the step with the options of its scopes
                chosen = options.choose(self, arguments, unpack)
            with replace_options(chosen):
                return self.run(arguments, unpack)
        with self._lock:
            layout, tensors = signature(arguments, self.whole, find_declared_inputs())
            watching = observer()
            shown = None if watching is None else watching.observe_step(self, layout, tensors, unpack)
            if shown is not None:
                return shown[0]
            self.last = self._find_engine(layout, unpack, tensors)
            hints.warn_missing_scope(self.name)
            results = self._run(self.last, layout, tensors)
            if options.after_step is not None:
                options.after_step(self, layout, unpack)
            return results

    def _run(self, last: Engine, layout: Signature, tensors: list[Any]) -> Any:
        """Run the step; an error on a batch whose shape differs from the first one mentions this."""
        try:
            last.count_from(self.steps)
            results = last.run(tensors)
        except StageFailedError as failure:
            other = describe_shape_change(layout.names, tensors, self.first_shapes)
            failure.why = "\n".join(filter(None, [failure.why, other]))
            raise
        self.steps = last.steps
        self.first_shapes = self.first_shapes or tuple(map(_find_shape, tensors))
        return results

    def call(self, unpack: Unpack, tensors: Sequence[Any]) -> Any:
        """Call the user's function with these values of its arguments."""
        args, kwargs = unpack(list(tensors))
        return self.fn(*args, **kwargs)

    def find_capture(self, layout: Signature) -> Captured | None:
        """The capture for calls with this signature, if one has run; None if a planner decided its stages."""
        with self._lock:
            self._drop_stale_engines()
            kept = self.engines.get((describe_surroundings(), layout.key))
            return None if kept is None or kept.captured.decision is not None else kept.captured

    def data(self, unpack: Unpack) -> Callable[[Sequence[Any]], Any] | None:
        """The function that selects the batch among the arguments of Keras's own train step; None for another step."""
        return (lambda given: unpack(list(given))[0][0]) if self.trains else None

    def plan(self, arguments: Arguments, unpack: Unpack = unpack_positional) -> Engine:
        """The engine for the given arguments, captured and planned without running a step."""
        with self._lock:
            layout, tensors = signature(arguments, self.whole, find_declared_inputs())
            if (watching := observer()) is not None:
                watching.observe_step(self, layout, tensors, unpack)
            return self._find_engine(layout, unpack, tensors, checked=False)

    def _find_engine(
        self, layout: Signature, unpack: Unpack, tensors: Sequence[Any] | None = None, *, checked: bool = True
    ) -> Engine:
        """The engine for these arguments and the scopes around this call, planned for the rows of the first `tensors`;
        with `checked`, verify that they are a batch.
        """
        self._drop_stale_engines()
        around = describe_surroundings()
        if (around, layout.key) not in self.engines:
            known = self._find_accepting_form(around, layout)
            wide = self._widen_engine(layout, unpack, around) if known is None else self.engines[around, known.key]
            made = wide or self._make_engine(layout, unpack, tensors, checked)
            self.engines[around, layout.key] = made
        return self.engines[around, layout.key]

    def _find_accepting_form(self, around: Any, layout: Signature) -> Signature | None:
        """The signature of a program, traced in these surroundings, that accepts calls with the signature `layout`."""
        forms = (form for scope, form in self.forms if scope == around)
        return next((form for form in forms if accepts_call(form, layout)), None)

    def trace_ahead(self, layout: Signature, unpack: Unpack, rows: int) -> None:
        """Trace in the background for calls with the signature `layout` and the present options, if there is no program
        for them; the first of these calls uses the trace.

        A model whose layers add losses is not traced ahead: each call of it, in any thread, clears them.
        """
        with self._lock:
            self._drop_stale_engines()
            around = describe_surroundings()
            busy = self.background is not None and self.background[1].is_running
            if busy or self.keeps_losses or get_current_limits() is not None or observer() is not None:
                return
            if (around, layout.key) in self.engines or self._find_accepting_form(around, layout) is not None:
                return
            form = self._choose_form(layout, around) or layout
            run = current_run()
            trace = BackgroundTrace(functools.partial(self._prepare, form, unpack, rows, run), script_site())
            self.background = (around, form.key), trace
            run.traces[:] = [each for each in run.traces if each.is_running] + [trace]

    def _capture(self, layout: Signature, unpack: Unpack) -> tuple[Captured, Sequence[Any]]:
        """A capture of the step, and the models that it calls."""
        with collect_models() as met:
            captured = capture(
                functools.partial(self.call, unpack), layout, **self._make_capture_options(unpack, current_run())
            )
        self.keeps_losses = self.keeps_losses or any(keeps_losses(tf_private.list_layers(model)) for model in met)
        return captured, met

    def _make_capture_options(self, unpack: Unpack, run: Run) -> dict[str, Any]:
        return {
            "paths": self.paths, "metrics": self.metrics, "later": not run.alone, "owner": self.owner,
            "data": self.data(unpack),
        }  # fmt: skip

    def _prepare(self, layout: Signature, unpack: Unpack, rows: int, run: Run) -> Prepared:
        captured, models = self._capture(layout, unpack)
        call = functools.partial(self.call, unpack)
        return Prepared(captured, models) if self.jit else prepare(captured, models, call, layout, rows, run)

    def _take_prepared(self, layout: Signature) -> Prepared | None:
        """What was traced ahead for the signature `layout` and the present surroundings, once it is complete."""
        key = (describe_surroundings(), layout.key)
        if self.background is None or self.background[0] != key:
            return None
        trace, self.background = self.background[1], None
        return trace.wait()

    def _drop_stale_engines(self) -> None:
        """Drop engines that were planned for another run, or before `nb.place` was called."""
        run, placed = current_run(), count_changes()
        if self.run_of_plans is None or self.run_of_plans() is not run or self.placement_count != placed:
            self.run_of_plans, self.placement_count = weakref.ref(run), placed
            self.engines.clear()
            self.forms.clear()
            self.first_shapes = ()
            self.background = None
        for key, kept in list(self.engines.items()):
            decision = kept.captured.decision
            if decision is not None and not decision.is_current(run.decisions):
                self._replace_engine(key, kept)

    def _replace_engine(self, key: tuple[Any, Any], kept: Engine) -> None:
        """Register the engine of a better plan, which counts the following steps."""
        del self.engines[key]
        self.forms = [(around, form) for around, form in self.forms if (around, form.key) in self.engines]
        kept.runner.close()
        forget_states(kept.captured, current_run())

    def _choose_form(self, layout: Signature, around: Any) -> Signature | None:
        """The signature with free axes that a program for `layout` and earlier calls has; None for `layout` itself."""
        if not self.widens:
            return None
        forms = [form for scope, form in self.forms if scope == around]
        return self._find_saved_form(layout) or widen_signature(layout, forms)

    def _widen_engine(self, layout: Signature, unpack: Unpack, around: Any) -> Engine | None:
        """An engine with free axes, instead of one for every size; None if the step depends on sizes."""
        form = self._choose_form(layout, around)
        if form is None:
            return None
        try:
            return self._make_engine(form, unpack)
        except (CaptureError, TypeError, ValueError):
            self.widens = False
            return None

    def _find_saved_form(self, layout: Signature) -> Signature | None:
        """The signature that the resumed run had traced for calls with the signature `layout`; None for `layout`
        itself.
        """
        checkpoints = current_run().checkpoints
        saved = () if checkpoints is None else checkpoints.forms.get(_name_traces(self.name), ())
        found = (replace_sizes(layout, shapes) for shapes in saved)
        form = next((form for form in found if form is not None and accepts_call(form, layout)), None)
        return None if form is None or form.key == layout.key else form

    def _make_engine(
        self, layout: Signature, unpack: Unpack, tensors: Sequence[Any] | None = None, checked: bool = True
    ) -> Engine:
        self.engines = {key: kept for key, kept in self.engines.items() if are_alive(key[1][-1])}
        self.forms = [(around, form) for around, form in self.forms if (around, form.key) in self.engines]
        call = functools.partial(self.call, unpack)
        run, prepared = current_run(), self._take_prepared(layout)
        captured, met = self._capture(layout, unpack) if prepared is None else (prepared.captured, prepared.models)
        captured = plan_capture(self.name, captured, call, layout, tensors, **self._make_capture_options(unpack, run))
        try:
            leaves = captured.program.leaves
            run.check_ids([leaf.name for leaf in leaves])
            if tensors is not None and checked:
                count_micro_batch_rows(leaves, tensors, captured.program.pipeline.micro_batch)
            check_pinned(self.name, captured, layout)
            notes = (*self.notes, *captured.projected, *filter(None, [current_step_options().description]))
            models = [*met, *find_models(self.fn)]
            found = make_engine(
                captured, call, layout, self.name, jit=self.jit, lazy=self.lazy, notes=notes, models=models,
                prepared=prepared,
            )  # fmt: skip
        finally:
            captured.initialize_variables(lambda variable: True)  # no effect, unless the step was refused
        make_all_collective(models, run)
        if run.checkpoints is not None:
            read = {id(variable.handle) for variable in captured.variables.values()}
            found.unread = {name: each for name, each in self.owned_variables().items() if id(each.handle) not in read}
            run.checkpoints.register_program(found)
            if self.widens and all(spec.shape.rank is not None for spec in layout.specs):
                run.checkpoints.record_form(_name_traces(self.name), tuple(tuple(spec.shape) for spec in layout.specs))
        self.engines[describe_surroundings(), layout.key] = found
        self.forms.append((describe_surroundings(), layout))
        return found

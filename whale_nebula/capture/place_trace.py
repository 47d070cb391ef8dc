"""Find the stage of a layer's call during one trace, from the maps given to `nb.place`."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from whale_nebula import scopes
from whale_nebula.capture import placed
from whale_nebula.capture.placed import Home, homes_of, placed_models
from whale_nebula.capture.tracing import Tracing, current
from whale_nebula.ir.graph import LAYER
from whale_nebula.scopes import Frame, Placement, Rule
from whale_nebula.tf import private as tf_private


@dataclass
class Places:
    """The homes of all layers as one trace finds them, and what it has called.

    Layers are held, not only numbered: a number would be given again to another one.
    """

    graph: Any = None
    homes: dict[int, list[Home]] = field(default_factory=dict)
    models: dict[int, tuple[Any, Placement]] = field(default_factory=dict)
    met: set[Placement] = field(default_factory=set)
    strangers: dict[int, Any] = field(default_factory=dict)
    running: list[Any] = field(default_factory=list)

    @contextlib.contextmanager
    def around(self, trace: Tracing, layer: Any) -> Iterator[None]:
        """Around one call of a layer."""
        if self.graph is not trace.graph:
            self._begin(trace.graph)
        homes = self.homes.get(id(layer), [])
        self.met.update(home.placement for home in homes)
        if id(layer) in self.models:
            self.met.add(self.models[id(layer)][1])
        if not homes and id(layer) not in self.models:
            self.strangers[id(layer)] = layer
        self.running.append(layer)
        try:
            with self._stage(trace, layer, homes):
                yield
        finally:
            self.running.pop()

    def _begin(self, graph: Any) -> None:
        """TensorFlow traces twice where variables are made on the way: by the second time all layers are there."""
        self.__dict__.update(Places(graph).__dict__)
        for model, placement in placed_models():
            self.models[id(model)] = model, placement
            for home in homes_of(model, placement).homes:
                self.homes.setdefault(id(home.spot.layer), []).append(home)

    def _stage(self, trace: Tracing, layer: Any, homes: list[Home]) -> contextlib.AbstractContextManager[None]:
        opened = scopes.stage_of(scopes.open_frames())
        if opened is not None:
            _check_inside(opened, homes)
            return contextlib.nullcontext()
        home = self._choose_home(layer, homes)
        if home is None or home.rule is None:
            return contextlib.nullcontext()
        if tf.compat.v1.get_default_graph() is not trace.graph:
            raise placed.in_body(home.spot.path, home.rule, home.placement)
        return _enter_rule(trace.graph, home.spot.path, home.rule, home.placement)

    def _choose_home(self, layer: Any, homes: list[Home]) -> Home | None:
        """The home that this call is about, if a rule holds there; two maps may not be at odds."""
        placements = dict.fromkeys(home.placement for home in homes)
        chosen = [self._of_one(layer, [home for home in homes if home.placement is each]) for each in placements]
        found = [home for home in chosen if home is not None and home.rule is not None]
        if len({home.rule and home.rule.key for home in found}) > 1:
            raise placed.two_maps([(home.spot.path, home.rule, home.placement) for home in found])
        return next(iter(found), None)

    def _of_one(self, layer: Any, homes: list[Home]) -> Home | None:
        """The home in one map: a shared layer goes with the layer that calls it."""
        if len({home.rule and home.rule.key for home in homes}) <= 1:
            return homes[0]
        for parent in reversed(self.running[:-1]):
            found = next((home for home in homes if home.spot.parent is parent), None)
            if found is not None:
                return found
        raise placed.undecided_error(layer, [(home.spot.path, home.rule, home.placement) for home in homes])

    def check(self) -> None:
        """At the end, when all layers are there: every pattern of a model that ran has matched one, in time."""
        for model, placement in self.models.values():
            if placement not in self.met:
                continue
            found = homes_of(model, placement)
            if found.unmatched:
                raise placed.no_match(model, placement, found.unmatched[0])
            for home in found.homes:
                if home.rule is not None and id(home.spot.layer) in self.strangers:
                    raise placed.too_late(home.spot.path, home.rule, placement)


def _check_inside(opened: Frame, homes: list[Home]) -> None:
    """A layer that is called inside a stage runs there; that stage must be one that `nb.place` gave it."""
    fits = any(home.rule is None or home.rule.key == opened.key for home in homes)
    for home in homes:
        if home.rule is not None and not (fits and "layer" in opened.options):
            raise placed.two_stages(home.spot.path, home.rule, home.placement, opened)


@contextlib.contextmanager
def _enter_rule(graph: Any, path: str, rule: Rule, placement: Placement) -> Iterator[None]:
    frames = _outer(path, placement)
    said = f"layer {path!r} to {rule.cluster!r} by {rule.pattern.pattern!r}"
    with scopes.impose_frames((*frames, placement.frame(rule, path))), tf_private.stamp_ops(graph, {LAYER: said}):
        yield


def _outer(path: str, placement: Placement) -> list[Frame]:
    """The scopes around a placed layer: those that its call stands in, and those that `nb.place` stood in."""
    found = list(scopes.open_frames())
    for own in placement.frames:
        same = [frame for frame in found if frame.kind == own.kind != "compress" and frame is not own]
        if same:
            raise placed.two_scopes(path, placement, own, same[0])
        found += [own] * (own not in found)
    return found


_LOCAL = threading.local()
_call = tf_private.KerasLayer.__call__


@functools.wraps(_call)  # AutoGraph goes by its module: it leaves Keras's own functions as they are
def call_placed(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `Layer.__call__`: a layer that `nb.place` was given runs in its stage."""
    trace, places = current(), getattr(_LOCAL, "places", None)
    if trace is None or trace.graph is None or trace.busy or places is None or tf_private.in_symbolic_scope():
        return _call(layer, *args, **kwargs)  # in a symbolic scope Keras builds the model, in a graph of its own
    with places.around(trace, layer):
        return _call(layer, *args, **kwargs)


@contextlib.contextmanager
def placing() -> Iterator[None]:
    """Around a trace: follow the calls of layers, if a model is placed, and check in the end that all were met."""
    if not any(True for _ in placed_models()):
        yield
        return
    before, places = getattr(_LOCAL, "places", None), Places()
    _LOCAL.places = places
    try:
        yield
        places.check()
    finally:
        _LOCAL.places = before

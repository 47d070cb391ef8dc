"""Find the stage of a layer's call during one trace, from the maps given to `nb.place`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from whale_nebula.capture.placed import Home, homes_of, no_match, placed_models
from whale_nebula.capture.tracing import Tracing, current
from whale_nebula.errors import BoundaryInBodyError, PlacementError
from whale_nebula.ir.graph import LAYER
from whale_nebula.scopes.frames import Frame, impose_frames, open_frames, split_of, stage_of
from whale_nebula.scopes.placing import Placement
from whale_nebula.tf import private as tf_private


@dataclass
class Places:
    """Homes of all layers during one trace, and the layers that it has called.

    Layers are referenced, not only their ids: an id could be reused for another layer.
    """

    homes: dict[int, list[Home]] = field(default_factory=dict)
    models: dict[int, tuple[Any, Placement]] = field(default_factory=dict)
    met: set[Placement] = field(default_factory=set)
    strangers: dict[int, Any] = field(default_factory=dict)
    running: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        for model, placement in placed_models():
            self.models[id(model)] = model, placement
            for home in homes_of(model, placement).homes:
                self.homes.setdefault(id(home.spot.layer), []).append(home)

    @contextlib.contextmanager
    def around(self, trace: Tracing, layer: Any) -> Iterator[None]:
        """Context around one call of a layer."""
        homes = self.homes.get(id(layer), [])
        self.met.update(home.placement for home in homes)
        if id(layer) in self.models:
            self.met.add(self.models[id(layer)][1])
        elif not homes:
            self.strangers[id(layer)] = layer
        self.running.append(layer)
        try:
            with self._enter_stage(trace, layer, homes), _enter_split(homes):
                yield
        finally:
            self.running.pop()

    def _enter_stage(self, trace: Tracing, layer: Any, homes: list[Home]) -> contextlib.AbstractContextManager[None]:
        opened = stage_of(open_frames())
        if opened is not None:
            _check_inside(opened, homes)
            return contextlib.nullcontext()
        home = self._choose_home(layer, homes)
        if home is None or home.rule is None:
            return contextlib.nullcontext()
        if tf.compat.v1.get_default_graph() is not trace.graph:
            around = home.spot.around
            raise BoundaryInBodyError(
                f"nb.place: layer {home.spot.path!r}, which comes under {home.rule}, is called inside a loop, a branch "
                "or a nested tf.function",
                where=str(home.placement.site),
                why="TensorFlow runs such a body as one op, so no boundary can lie inside it",
                mend=f"place what is around it: {around!r}" if around else "place layers that are called outside of it",
            )
        return _enter_rule(trace.graph, home)

    def _choose_home(self, layer: Any, homes: list[Home]) -> Home | None:
        """The home of this call, if a rule applies there; two maps that conflict raise an error."""
        placements = dict.fromkeys(home.placement for home in homes)
        chosen = [self._choose_in_map(layer, [home for home in homes if home.placement is each]) for each in placements]
        found = [home for home in chosen if home.rule is not None]
        if len({home.key for home in found}) > 1:
            said = [f"as {home.spot.path!r} under {home.rule} at {home.placement.site}" for home in found]
            raise PlacementError(
                f"nb.place: one layer comes {' and '.join(said)}",
                where=str(found[-1].placement.site),
                why="a layer belongs to one stage",
                mend="take one of the maps away: nb.place(model, {})",
            )
        return next(iter(found), None)

    def _choose_in_map(self, layer: Any, homes: list[Home]) -> Home:
        """The home in one map: a shared layer goes with the layer that calls it."""
        if len({home.key for home in homes}) <= 1:
            return homes[0]
        for parent in reversed(self.running[:-1]):
            found = next((home for home in homes if home.spot.parent is parent), None)
            if found is not None:
                return found
        said = [f"{h.spot.path!r} ({f'under {h.rule}' if h.rule else 'under no pattern'})" for h in homes]
        raise PlacementError(
            f"nb.place: layer {layer.name!r} stands at {' and at '.join(said)}",
            where=str(homes[0].placement.site),
            why="it is called by none of the layers that hold it, so nothing says which of them is meant",
            mend="give both to the same stage",
        )

    def check(self) -> None:
        """At the end of a trace: check that every pattern of a model that ran has matched a layer
        before it was called.
        """
        for model, placement in self.models.values():
            if placement not in self.met:
                continue
            found = homes_of(model, placement)
            if found.unmatched:
                raise no_match(model, placement, found.unmatched[0])
            for home in found.homes:
                if home.rule is not None and id(home.spot.layer) in self.strangers:
                    raise PlacementError(
                        f"nb.place: layer {home.spot.path!r}, which comes under {home.rule}, was made "
                        "while the step was traced",
                        where=str(placement.site),
                        why="it ran before it could be placed",
                        mend="build the model first: model.build(shape), or call it once",
                    )


def _enter_split(homes: list[Home]) -> contextlib.AbstractContextManager[None]:
    """Enter the split scope that a map gives a layer, unless its own code or its surroundings have one."""
    frames = open_frames()
    pairs = ((home, rule) for home in homes for rule in home.placement.splits)
    found = next((rule for home, rule in pairs if rule.pattern.fullmatch(home.spot.path)), None)
    if found is None or split_of(frames) is not None:
        return contextlib.nullcontext()
    return impose_frames((*frames, found.frame))


def _check_inside(opened: Frame, homes: list[Home]) -> None:
    """Check that a layer called inside a stage may run there; the stage must come from `nb.place`."""
    outer = opened.options.get("layer")
    if "layer" in opened.options and any(home.rule is None or home.key == opened.key for home in homes):
        return
    home = next((home for home in homes if home.rule is not None), None)
    if home is None or home.rule is None:
        return
    around = f"inside nb.stage at {opened.site}"
    mend = f"take that scope out of the model's code, or leave {home.rule.pattern.pattern!r} out"
    if outer is not None:
        around = f"inside layer {outer!r}, which comes under {opened.options['rule']}"
        mend = f"give both to the same stage, or leave {home.rule.pattern.pattern!r} out"
    raise PlacementError(
        f"nb.place: layer {home.spot.path!r}, which comes under {home.rule}, is called {around}",
        where=str(home.placement.site),
        why="stages follow one another, they do not nest",
        mend=mend,
    )


@contextlib.contextmanager
def _enter_rule(graph: Any, home: Home) -> Iterator[None]:
    """Enter the scopes of a placed layer, and those around the call of `nb.place`."""
    path, rule, placement = home.spot.path, home.rule, home.placement
    if rule is None:
        yield
        return
    frames = list(open_frames())
    for own in placement.frames:
        same = [frame for frame in frames if frame.kind == own.kind != "compress" and frame is not own]
        if same:
            raise PlacementError(
                f"nb.place stands inside nb.{own.kind} at {own.site}, and layer {path!r} inside that at {same[0].site}",
                where=str(placement.site),
                why=f"there is one nb.{own.kind} around a stage",
                mend=f"leave one nb.{own.kind} out",
            )
        frames += [own] * (own not in frames)
    frames.append(placement.frame(rule, path))
    said = f"layer {path!r} to {rule.cluster!r} by {rule.pattern.pattern!r}"
    with impose_frames(tuple(frames)), tf_private.stamp_ops(graph, {LAYER: said}):
        yield


_call = tf_private.KerasLayer.__call__


@functools.wraps(_call)  # by the module, AutoGraph leaves it unconverted, as Keras's own
def call_placed(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replacement of `Layer.__call__`: a layer given to `nb.place` runs in its stage."""
    trace = current()
    if trace is None or trace.flags.busy or not trace.places or tf_private.in_symbolic_scope():
        return _call(layer, *args, **kwargs)  # in a symbolic scope Keras builds the model, in a graph of its own
    with trace.places.around(trace, layer):
        return _call(layer, *args, **kwargs)

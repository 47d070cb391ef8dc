"""The registry of models passed to `nb.place`: the stage of each of their layers, and of each call in a trace."""

from __future__ import annotations

import contextlib
import difflib
import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tensorflow as tf

from whale_nebula.capture.tracing import Tracing, current_trace
from whale_nebula.errors import BoundaryInBodyError, OptionError, PlacementError
from whale_nebula.errors.text import closest, list_names
from whale_nebula.ir.graph import LAYER
from whale_nebula.scopes.frames import Frame, impose_frames, open_frames, split_of, stage_of
from whale_nebula.scopes.placement import Placement, Rule, SplitRule
from whale_nebula.tf import private as tf_private


class LayerPath(NamedTuple):
    """A path of a layer in its model; a shared layer has several."""

    path: str
    layer: Any
    parent: Any

    @property
    def around(self) -> str:
        """The path of the enclosing layer; empty for the model."""
        return self.path.rpartition("/")[0]


def list_layer_paths(model: Any) -> Iterator[LayerPath]:
    """All layers inside a model except inputs, each before the layers inside it. The second of two siblings with the
    same name gets a number: "dense", "dense#2".

    >>> import keras
    >>> inner = keras.Sequential([keras.layers.Dense(2, name="a"), keras.layers.Dense(2, name="b")], name="inner")
    >>> model = keras.Sequential([keras.Input((2,)), inner, keras.layers.Dense(1, name="c")])
    >>> [spot.path for spot in list_layer_paths(model)]
    ['inner', 'inner/a', 'inner/b', 'c']
    """
    return _inside(model, "", (model,))


def _inside(parent: Any, prefix: str, around: tuple[Any, ...]) -> Iterator[LayerPath]:
    numbers: dict[str, int] = {}
    for layer in tf_private.list_sublayers(parent):
        if isinstance(layer, tf_private.KerasInput) or any(layer is each for each in around):
            continue
        numbers[layer.name] = number = numbers.get(layer.name, 0) + 1
        path = prefix + layer.name + f"#{number}" * (number > 1)
        yield LayerPath(path, layer, parent)
        yield from _inside(layer, f"{path}/", (*around, layer))


_placed: weakref.WeakKeyDictionary[Any, Placement] = weakref.WeakKeyDictionary()
_changes = 0


@dataclass(frozen=True, slots=True)
class LayerHome:
    """A layer at one of its paths, with the rule that matches it or an enclosing layer."""

    spot: LayerPath
    rule: Rule | None
    placement: Placement

    @property
    def key(self) -> str | None:
        """The key of the stage to which the layer is assigned, if any."""
        return None if self.rule is None else self.rule.key


@dataclass(frozen=True, slots=True)
class LayerHomes:
    """All layers of a placed model at all their paths, and the rules that matched no layer."""

    homes: tuple[LayerHome, ...]
    unmatched: tuple[Rule, ...]


def place(model: Any, placement: Placement) -> None:
    """Register the map of a model's layers, which replaces an earlier one; an empty map removes it."""
    global _changes
    if not isinstance(model, tf_private.KerasLayer):
        raise OptionError(
            f"nb.place takes a Keras model, not {model!r}",
            where=str(placement.site),
            why="it selects layers by name",
            mend="nb.place(model, {...}); use with nb.stage(...): around other code",
        )
    found = match_rules(model, placement)
    # layers that are not built yet may create others
    if found.unmatched and all(layer.built for layer in (model, *(spot.layer for spot in list_layer_paths(model)))):
        raise no_match_error(model, placement, found.unmatched[0])
    paths = [spot.path for spot in list_layer_paths(model)]
    idle = [rule for rule in placement.splits if not any(map(rule.pattern.fullmatch, paths))]
    if idle and model.built:
        raise no_match_error(model, placement, idle[0])
    _changes += 1
    if placement.rules or placement.splits:
        _placed[model] = placement
    else:
        _placed.pop(model, None)


def match_rules(model: Any, placement: Placement) -> LayerHomes:
    """Every layer with the rule that matches it; raises if two rules conflict."""
    found: dict[str, LayerHome] = {}
    matched: set[Rule] = set()
    for spot in list_layer_paths(model):
        own = [rule for rule in placement.rules if rule.pattern.fullmatch(spot.path)]
        if len(own) > 1:
            raise PlacementError(
                f"nb.place: layer {spot.path!r} of {model.name!r} matches two patterns, {own[0]} and {own[1]}",
                where=str(placement.site),
                why="a layer can belong to only one stage",
                mend=_separate_rules(list(dict.fromkeys(spot.path for spot in list_layer_paths(model))), own[:2]),
            )
        matched.update(own)
        outer = found.get(spot.around)
        around = outer.rule if outer is not None else None
        if own and around is not None and own[0].key != around.key:
            raise PlacementError(
                f"nb.place: layer {spot.path!r} of {model.name!r} matches {own[0]}, and {spot.around!r}, "
                f"which contains it, matches {around}",
                where=str(placement.site),
                why="stages follow one another, and cannot be nested",
                mend=f"place the layers inside {spot.around!r} one by one, or remove {own[0].pattern.pattern!r}",
            )
        found[spot.path] = LayerHome(spot, around or next(iter(own), None), placement)
    unmatched = tuple(rule for rule in placement.rules if rule not in matched)
    return LayerHomes(tuple(found.values()), unmatched)


def list_placed_models() -> list[tuple[Any, Placement]]:
    """The models that are placed, with their placements."""
    return list(_placed.items())


def list_placements(layers: list[Any]) -> tuple[Placement, ...]:
    """The placements of those layers that are placed models."""
    return tuple(_placed[layer] for layer in layers if layer in _placed) if _placed else ()


def count_changes() -> int:
    """A counter of changes of placements; a step that was planned earlier is planned again."""
    return _changes


# ---------------------------------------------------------------------- hints for patterns
_SHOWN = 8
_TAILS = ("(/.*)?", "/.*", "/.+", ".*", "/")


def no_match_error(model: Any, placement: Placement, rule: Rule | SplitRule) -> PlacementError:
    """The error for a pattern that no layer's path matches."""
    paths = list(dict.fromkeys(spot.path for spot in list_layer_paths(model)))
    pattern = rule.pattern.pattern
    tail = next((tail for tail in _TAILS if pattern.endswith(tail)), "")
    head = pattern.removesuffix(tail)
    near = difflib.get_close_matches(head, paths, n=_SHOWN, cutoff=0.4)
    shown = f"its layers are {_list_some([*near, *(path for path in paths if path not in near)])}"
    return PlacementError(
        f"nb.place: no layer of {model.name!r} matches {pattern!r}",
        where=str(placement.site),
        why=shown if paths else "the model contains no layers",
        mend=_suggest_pattern(head, tail, paths),
    )


def _list_some(paths: Sequence[str]) -> str:
    more = len(paths) - _SHOWN
    return list_names(paths[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _suggest_pattern(head: str, tail: str, paths: Sequence[str]) -> str:
    intended_path = head if head in paths else closest(head, paths)
    if intended_path is None:
        return "a pattern must match the complete path of a layer, starting at the model"
    inside = any(path.startswith(f"{intended_path}/") for path in paths)
    if intended_path == head and tail:
        return f"did you mean {head!r}? it contains no layers"
    return f"did you mean {intended_path + tail * inside!r}?"


def _separate_rules(paths: Sequence[str], rules: Sequence[Rule]) -> str:
    """The fix for two overlapping patterns: exclude the matches of the narrower one from the wider one."""
    matched = [{path for path in paths if rule.pattern.fullmatch(path)} for rule in rules]
    less, more = sorted(rules, key=lambda rule: len(matched[rules.index(rule)]))
    if matched[0] == matched[1]:
        return f"remove {less.pattern.pattern!r} or {more.pattern.pattern!r}: they match the same layers"
    excluded, rest = (_group_pattern(rule.pattern.pattern) for rule in (less, more))
    return f"exclude the layer from one of them: (?!{excluded}$){rest}"


def _group_pattern(pattern: str) -> str:
    """A pattern that can be part of a larger one: if it contains '|', it is put in a group.

    >>> _group_pattern("block_1.*"), _group_pattern("block_1.*|head")
    ('block_1.*', '(?:block_1.*|head)')
    """
    return f"(?:{pattern})" if "|" in pattern else pattern


@dataclass
class Places:
    """Homes of all layers during one trace, and the layers that it has called.

    Layers are referenced, not only their ids: an id could be reused for another layer.
    """

    homes: dict[int, list[LayerHome]] = field(default_factory=dict)
    models: dict[int, tuple[Any, Placement]] = field(default_factory=dict)
    called_placements: set[Placement] = field(default_factory=set)
    unplaced_layers: dict[int, Any] = field(default_factory=dict)
    running_layers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        for model, placement in list_placed_models():
            self.models[id(model)] = model, placement
            for home in match_rules(model, placement).homes:
                self.homes.setdefault(id(home.spot.layer), []).append(home)

    @contextlib.contextmanager
    def enter_layer(self, trace: Tracing, layer: Any) -> Iterator[None]:
        """Context around one call of a layer: enters the stage and the split that maps give it."""
        homes = self.homes.get(id(layer), [])
        self.called_placements.update(home.placement for home in homes)
        if id(layer) in self.models:
            self.called_placements.add(self.models[id(layer)][1])
        elif not homes:
            self.unplaced_layers[id(layer)] = layer
        self.running_layers.append(layer)
        try:
            with self._enter_stage(trace, layer, homes), _enter_split(homes):
                yield
        finally:
            self.running_layers.pop()

    def _enter_stage(
        self, trace: Tracing, layer: Any, homes: list[LayerHome]
    ) -> contextlib.AbstractContextManager[None]:
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
                f"nb.place: layer {home.spot.path!r}, which matches {home.rule}, is called inside a loop, a branch "
                "or a nested tf.function",
                where=str(home.placement.site),
                why="TensorFlow runs such a body as one op, so a boundary inside it is not possible",
                mend=f"place the layer around it: {around!r}" if around else "place layers that are called outside it",
            )
        return _enter_rule(trace.graph, home)

    def _choose_home(self, layer: Any, homes: list[LayerHome]) -> LayerHome | None:
        """The home of this call, if a rule applies there; raises if two maps conflict."""
        placements = dict.fromkeys(home.placement for home in homes)
        chosen = [self._choose_in_map(layer, [home for home in homes if home.placement is each]) for each in placements]
        found = [home for home in chosen if home.rule is not None]
        if len({home.key for home in found}) > 1:
            places = [f"as {home.spot.path!r} under {home.rule} at {home.placement.site}" for home in found]
            raise PlacementError(
                f"nb.place: the same layer is placed twice, {' and '.join(places)}",
                where=str(found[-1].placement.site),
                why="a layer can belong to only one stage",
                mend="remove one of the maps: nb.place(model, {})",
            )
        return next(iter(found), None)

    def _choose_in_map(self, layer: Any, homes: list[LayerHome]) -> LayerHome:
        """The home in one map: a shared layer goes with the layer that calls it."""
        if len({home.key for home in homes}) <= 1:
            return homes[0]
        for parent in reversed(self.running_layers[:-1]):
            found = next((home for home in homes if home.spot.parent is parent), None)
            if found is not None:
                return found
        paths = [f"{h.spot.path!r} ({f'under {h.rule}' if h.rule else 'under no pattern'})" for h in homes]
        raise PlacementError(
            f"nb.place: layer {layer.name!r} has several paths: {' and '.join(paths)}",
            where=str(homes[0].placement.site),
            why="it is called by none of the layers that contain it, so its stage is ambiguous",
            mend="assign both to the same stage",
        )

    def check(self) -> None:
        """At the end of a trace: check that every pattern of a model that ran has matched a layer
        before it was called.
        """
        for model, placement in self.models.values():
            if placement not in self.called_placements:
                continue
            found = match_rules(model, placement)
            if found.unmatched:
                raise no_match_error(model, placement, found.unmatched[0])
            for home in found.homes:
                if home.rule is not None and id(home.spot.layer) in self.unplaced_layers:
                    raise PlacementError(
                        f"nb.place: layer {home.spot.path!r}, which matches {home.rule}, was created "
                        "while the step was traced",
                        where=str(placement.site),
                        why="it ran before it could be placed",
                        mend="build the model first: model.build(shape), or call it once",
                    )


def _enter_split(homes: list[LayerHome]) -> contextlib.AbstractContextManager[None]:
    """Enter the split scope that a map gives a layer, unless its own code or its surroundings have one."""
    frames = open_frames()
    pairs = ((home, rule) for home in homes for rule in home.placement.splits)
    found = next((rule for home, rule in pairs if rule.pattern.fullmatch(home.spot.path)), None)
    if found is None or split_of(frames) is not None:
        return contextlib.nullcontext()
    return impose_frames((*frames, found.frame))


def _check_inside(opened: Frame, homes: list[LayerHome]) -> None:
    """Check that a layer called inside a stage may run there; the stage must come from `nb.place`."""
    outer = opened.options.get("layer")
    if "layer" in opened.options and any(home.rule is None or home.key == opened.key for home in homes):
        return
    home = next((home for home in homes if home.rule is not None), None)
    if home is None or home.rule is None:
        return
    around = f"inside nb.stage at {opened.site}"
    mend = f"remove that scope from the code of the model, or remove {home.rule.pattern.pattern!r}"
    if outer is not None:
        around = f"inside layer {outer!r}, which matches {opened.options['rule']}"
        mend = f"assign both to the same stage, or remove {home.rule.pattern.pattern!r}"
    raise PlacementError(
        f"nb.place: layer {home.spot.path!r}, which matches {home.rule}, is called {around}",
        where=str(home.placement.site),
        why="stages follow one another, and cannot be nested",
        mend=mend,
    )


@contextlib.contextmanager
def _enter_rule(graph: Any, home: LayerHome) -> Iterator[None]:
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
                f"nb.place is inside nb.{own.kind} at {own.site}, and layer {path!r} inside the one at {same[0].site}",
                where=str(placement.site),
                why=f"a stage can be inside only one nb.{own.kind}",
                mend=f"remove one nb.{own.kind}",
            )
        frames += [own] * (own not in frames)
    frames.append(placement.frame(rule, path))
    label = f"layer {path!r} to {rule.cluster!r} by {rule.pattern.pattern!r}"
    with impose_frames(tuple(frames)), tf_private.stamp_ops(graph, {LAYER: label}):
        yield


_call = tf_private.KerasLayer.__call__


@functools.wraps(_call)  # with this module name, AutoGraph leaves it unconverted, like Keras's own functions
def call_placed(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replacement of `Layer.__call__`: a layer of a placed model runs in its stage."""
    trace = current_trace()
    if trace is None or trace.flags.busy or not trace.places or tf_private.in_symbolic_scope():
        return _call(layer, *args, **kwargs)  # in a symbolic scope Keras builds the model, in a separate graph
    with trace.places.enter_layer(trace, layer):
        return _call(layer, *args, **kwargs)

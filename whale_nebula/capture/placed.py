"""The registry of models given to `nb.place`, and of the stage that each of their layers belongs to."""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from whale_nebula.errors import OptionError, PlacementError
from whale_nebula.errors.text import closest, list_names
from whale_nebula.scopes.placing import Placement, Rule, SplitRule
from whale_nebula.tf import private as tf_private


class Spot(NamedTuple):
    """A place of a layer in its model; a shared layer has several."""

    path: str
    layer: Any
    parent: Any

    @property
    def around(self) -> str:
        """The path of the layer that holds this one; empty for the model."""
        return self.path.rpartition("/")[0]


def spots(model: Any) -> Iterator[Spot]:
    """All layers inside a model except inputs, a layer before those inside it.

    The second of two siblings with one name gets a number: "dense", "dense#2".

    >>> import keras
    >>> inner = keras.Sequential([keras.layers.Dense(2, name="a"), keras.layers.Dense(2, name="b")], name="inner")
    >>> [spot.path for spot in spots(keras.Sequential([keras.Input((2,)), inner, keras.layers.Dense(1, name="c")]))]
    ['inner', 'inner/a', 'inner/b', 'c']
    """
    return _inside(model, "", (model,))


def _inside(parent: Any, prefix: str, around: tuple[Any, ...]) -> Iterator[Spot]:
    numbers: dict[str, int] = {}
    for layer in tf_private.sublayers(parent):
        if isinstance(layer, tf_private.KerasInput) or any(layer is each for each in around):
            continue
        numbers[layer.name] = number = numbers.get(layer.name, 0) + 1
        path = prefix + layer.name + f"#{number}" * (number > 1)
        yield Spot(path, layer, parent)
        yield from _inside(layer, f"{path}/", (*around, layer))


_placed: weakref.WeakKeyDictionary[Any, Placement] = weakref.WeakKeyDictionary()
_changes = 0


@dataclass(frozen=True, slots=True)
class Home:
    """One layer at one of its places, with the rule that matches it or an enclosing layer."""

    spot: Spot
    rule: Rule | None
    placement: Placement

    @property
    def key(self) -> str | None:
        """The key of the stage to which the layer is assigned, if any."""
        return None if self.rule is None else self.rule.key


@dataclass(frozen=True, slots=True)
class Homes:
    """All layers of a placed model, and the rules that matched no layer."""

    homes: tuple[Home, ...]
    unmatched: tuple[Rule, ...]


def place(model: Any, placement: Placement) -> None:
    """Register the rules for a model's layers, replacing earlier ones; an empty placement removes them."""
    global _changes
    if not isinstance(model, tf_private.KerasLayer):
        raise OptionError(
            f"nb.place takes a Keras model, not {model!r}",
            where=str(placement.site),
            why="it goes by the names of layers",
            mend="nb.place(model, {...}); around other code write with nb.stage(...):",
        )
    found = homes_of(model, placement)
    # layers that are not built yet may create others
    if found.unmatched and all(layer.built for layer in (model, *(spot.layer for spot in spots(model)))):
        raise no_match(model, placement, found.unmatched[0])
    paths = [spot.path for spot in spots(model)]
    idle = [rule for rule in placement.splits if not any(map(rule.pattern.fullmatch, paths))]
    if idle and model.built:
        raise no_match(model, placement, idle[0])
    _changes += 1
    if placement.rules or placement.splits:
        _placed[model] = placement
    else:
        _placed.pop(model, None)


def homes_of(model: Any, placement: Placement) -> Homes:
    """Every layer with the rule that matches it; raises for two that conflict."""
    found: dict[str, Home] = {}
    matched: set[Rule] = set()
    for spot in spots(model):
        own = [rule for rule in placement.rules if rule.pattern.fullmatch(spot.path)]
        if len(own) > 1:
            raise PlacementError(
                f"nb.place: layer {spot.path!r} of {model.name!r} matches two patterns, {own[0]} and {own[1]}",
                where=str(placement.site),
                why="a layer belongs to one stage",
                mend=_separate_rules(list(dict.fromkeys(spot.path for spot in spots(model))), own[:2]),
            )
        matched.update(own)
        outer = found.get(spot.around)
        around = outer.rule if outer is not None else None
        if own and around is not None and own[0].key != around.key:
            raise PlacementError(
                f"nb.place: layer {spot.path!r} of {model.name!r} comes under {own[0]}, and {spot.around!r}, "
                f"which holds it, under {around}",
                where=str(placement.site),
                why="stages follow one another, they do not nest",
                mend=f"place the layers inside {spot.around!r} one by one, or leave {own[0].pattern.pattern!r} out",
            )
        found[spot.path] = Home(spot, around or next(iter(own), None), placement)
    unmatched = tuple(rule for rule in placement.rules if rule not in matched)
    return Homes(tuple(found.values()), unmatched)


def placed_models() -> list[tuple[Any, Placement]]:
    """The models that are placed, with their placements."""
    return list(_placed.items())


def placements_in(layers: list[Any]) -> tuple[Placement, ...]:
    """The placements of those layers that are placed models."""
    return tuple(_placed[layer] for layer in layers if layer in _placed) if _placed else ()


def changes() -> int:
    """A counter of changes of placements; a step that was planned earlier is planned again."""
    return _changes


# ---------------------------------------------------------------------- hints for patterns
_SHOWN = 8
_TAILS = ("(/.*)?", "/.*", "/.+", ".*", "/")


def no_match(model: Any, placement: Placement, rule: Rule | SplitRule) -> PlacementError:
    """The error for a pattern that no layer's path matches."""
    paths = list(dict.fromkeys(spot.path for spot in spots(model)))
    pattern = rule.pattern.pattern
    tail = next((tail for tail in _TAILS if pattern.endswith(tail)), "")
    head = pattern.removesuffix(tail)
    near = difflib.get_close_matches(head, paths, n=_SHOWN, cutoff=0.4)
    shown = f"its layers are {_list_some([*near, *(path for path in paths if path not in near)])}"
    return PlacementError(
        f"nb.place: no layer of {model.name!r} matches {pattern!r}",
        where=str(placement.site),
        why=shown if paths else "it has no layers inside",
        mend=_suggest_pattern(head, tail, paths),
    )


def _list_some(paths: Sequence[str]) -> str:
    more = len(paths) - _SHOWN
    return list_names(paths[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _suggest_pattern(head: str, tail: str, paths: Sequence[str]) -> str:
    meant = head if head in paths else closest(head, paths)
    if meant is None:
        return "a pattern must match the whole path of a layer, from the model on"
    inside = any(path.startswith(f"{meant}/") for path in paths)
    if meant == head and tail:
        return f"did you mean {head!r}? it has no layers inside"
    return f"did you mean {meant + tail * inside!r}?"


def _separate_rules(paths: Sequence[str], rules: Sequence[Rule]) -> str:
    """The mend for two overlapping patterns: exclude from the wider one what the other matches."""
    matched = [{path for path in paths if rule.pattern.fullmatch(path)} for rule in rules]
    less, more = sorted(rules, key=lambda rule: len(matched[rules.index(rule)]))
    if matched[0] == matched[1]:
        return f"leave {less.pattern.pattern!r} or {more.pattern.pattern!r} out: they match the same layers"
    gone, rest = (_group_pattern(rule.pattern.pattern) for rule in (less, more))
    return f"let one of them leave it out: (?!{gone}$){rest}"


def _group_pattern(pattern: str) -> str:
    """A pattern that can be a part of a larger one: with a '|' it is put in a group.

    >>> _group_pattern("block_1.*"), _group_pattern("block_1.*|head")
    ('block_1.*', '(?:block_1.*|head)')
    """
    return f"(?:{pattern})" if "|" in pattern else pattern

"""The models that `nb.place` was told of, and which of their layers belong to which stage."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from whale_nebula.capture import place_errors
from whale_nebula.capture.layer_paths import Spot, spots
from whale_nebula.errors import OptionError
from whale_nebula.scopes import Placement, Rule
from whale_nebula.tf import private as tf_private

_placed: weakref.WeakKeyDictionary[Any, Placement] = weakref.WeakKeyDictionary()
_changes = 0


@dataclass(frozen=True, slots=True)
class Home:
    """One layer at one of its places: the rule that it, or the layer around it, comes under."""

    spot: Spot
    rule: Rule | None
    placement: Placement


@dataclass(frozen=True, slots=True)
class Homes:
    """All layers of a placed model, and the rules that no layer came under."""

    homes: tuple[Home, ...]
    unmatched: tuple[Rule, ...]


def place(model: Any, placement: Placement) -> None:
    """Remember where a model's layers go, in the place of what was said before; no rules: nowhere."""
    global _changes
    if not isinstance(model, tf_private.KerasLayer):
        raise OptionError(
            f"nb.place takes a Keras model, not {model!r}",
            where=str(placement.site),
            why="it goes by the names of layers",
            mend="nb.place(model, {...}); around other code write with nb.stage(...):",
        )
    found = homes_of(model, placement)
    if found.unmatched and _complete(model):
        raise place_errors.no_match(model, placement, found.unmatched[0])
    _changes += 1
    if placement.rules:
        _placed[model] = placement
    else:
        _placed.pop(model, None)


def homes_of(model: Any, placement: Placement) -> Homes:
    """Every layer with the rule that it comes under; two that are at odds are an error."""
    found: dict[str, Home] = {}
    matched: set[Rule] = set()
    for spot in spots(model):
        own = [rule for rule in placement.rules if rule.pattern.fullmatch(spot.path)]
        if len(own) > 1:
            raise place_errors.two_rules(model, placement, spot.path, own)
        matched.update(own)
        outer = found.get(spot.around)
        around = outer.rule if outer is not None else None
        if own and around is not None and own[0].key != around.key:
            raise place_errors.inside(model, placement, spot, own[0], around)
        found[spot.path] = Home(spot, around or next(iter(own), None), placement)
    unmatched = tuple(rule for rule in placement.rules if rule not in matched)
    return Homes(tuple(found.values()), unmatched)


def _complete(model: Any) -> bool:
    """Whether no layer can come to light any more: those not built yet may make others."""
    return all(layer.built for layer in (model, *(spot.layer for spot in spots(model))))


def placed_models() -> Iterator[tuple[Any, Placement]]:
    """The models that are placed, with their placements."""
    return iter(list(_placed.items()))


def placements_in(layers: list[Any]) -> tuple[Placement, ...]:
    """The placements of those of these layers that are placed models."""
    return tuple(_placed[layer] for layer in layers if layer in _placed) if _placed else ()


def changes() -> int:
    """How often it was said anew where layers go: a step that was planned before is planned again."""
    return _changes

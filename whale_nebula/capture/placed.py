"""The registry of models given to `nb.place`, and of the stage that each of their layers belongs to."""

from __future__ import annotations

import difflib
import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from whale_nebula.errors import BoundaryInBodyError, OptionError, PlacementError
from whale_nebula.errors.text import closest, list_names
from whale_nebula.scopes import Frame, Placement, Rule
from whale_nebula.tf import private as tf_private


class Spot(NamedTuple):
    """A place where a layer stands; a shared layer has several."""

    path: str
    layer: Any
    parent: Any

    @property
    def around(self) -> str:
        """The path of the layer that holds this one; empty for the model."""
        return self.path.rpartition("/")[0]


def spots(model: Any) -> Iterator[Spot]:
    """All layers inside a model but its inputs, each before those inside it.

    Of two neighbours with one name the second gets a number: "dense", "dense#2".

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


_SHOWN = 8
_ANY = re.compile(r"(?<!\\)\.([*+])(?!\)\?$)")
"""Any number of any characters, except at the end of "(/.*)?", which is meant to match all that is inside."""
_TAILS = ("(/.*)?", "/.*", "/.+", ".*", "/")


def no_match(model: Any, placement: Placement, rule: Rule) -> PlacementError:
    """A pattern that no layer's path matches."""
    paths = list(dict.fromkeys(spot.path for spot in spots(model)))
    head, tail = _split_suffix(rule.pattern.pattern)
    return PlacementError(
        f"nb.place: no layer of {model.name!r} matches {rule.pattern.pattern!r}",
        where=str(placement.site),
        why=_nearby(head, paths) if paths else "it has no layers inside",
        mend=_meant(head, tail, paths),
    )


def _split_suffix(pattern: str) -> tuple[str, str]:
    """A pattern without what stands at its end for all that is inside."""
    tail = next((tail for tail in _TAILS if pattern.endswith(tail)), "")
    return pattern.removesuffix(tail), tail


def _nearby(head: str, paths: Sequence[str]) -> str:
    near = difflib.get_close_matches(head, paths, n=_SHOWN, cutoff=0.4)
    return f"its layers are {_list_some([*near, *(path for path in paths if path not in near)])}"


def _list_some(paths: Sequence[str]) -> str:
    more = len(paths) - _SHOWN
    return list_names(paths[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _beginning(head: str, paths: Sequence[str]) -> str | None:
    """How some layers begin, if that is nearer to what was written than any whole name: "block_" for "blok_".

    >>> _beginning("blok_", ["stem", "block_1", "block_2"]), _beginning("stam", ["stem", "block_1"])
    ('block_', None)
    """
    lengths = range(max(len(head) - 1, 1), len(head) + 3)
    starts = dict.fromkeys(path[:length] for path in paths for length in lengths)
    found = difflib.get_close_matches(head, starts, n=1, cutoff=0.7)
    return found[0] if found and found[0] not in paths else None


def _meant(head: str, tail: str, paths: Sequence[str]) -> str:
    begins = _beginning(head, paths) if tail == ".*" and head not in paths else None
    if begins is not None:
        return f"did you mean {begins + tail!r}?"
    meant = head if head in paths else closest(head, paths)
    if meant is None:
        return "a pattern must match the whole path of a layer, from the model on"
    inside = any(path.startswith(f"{meant}/") for path in paths)
    if meant == head and tail:
        return f"did you mean {head!r}? it has no layers inside"
    return f"did you mean {meant + tail * inside!r}?"


def two_rules(model: Any, placement: Placement, path: str, rules: Sequence[Rule]) -> PlacementError:
    """A layer that two patterns match."""
    one, two = rules[:2]
    return PlacementError(
        f"nb.place: layer {path!r} of {model.name!r} matches two patterns, {one} and {two}",
        where=str(placement.site),
        why="a layer belongs to one stage",
        mend=_leaving_out(list(dict.fromkeys(spot.path for spot in spots(model))), rules[:2]),
    )


def _leaving_out(paths: Sequence[str], rules: Sequence[Rule]) -> str:
    """Patterns that no longer overlap: one of them kept within one level of names, or without what both match."""
    matched = [[path for path in paths if rule.pattern.fullmatch(path)] for rule in rules]
    for rule, others in zip(rules, reversed(matched), strict=True):
        narrow = _ANY.sub(r"[^/]\1", rule.pattern.pattern)
        left = [path for path in paths if re.fullmatch(narrow, path)]
        if left and not set(left) & set(others):
            instead = f"{narrow!r} instead of {rule.pattern.pattern!r}"
            return f"'.' matches '/' too; {instead} matches {_list_some(left)} alone"
    few, many = (0, 1) if len(matched[0]) <= len(matched[1]) else (1, 0)
    less, more = rules[few].pattern.pattern, rules[many].pattern.pattern
    both = [path for path in matched[few] if path in matched[many]]
    if len(both) == len(matched[many]):
        return f"leave {less!r} or {more!r} out: they match the same layers"
    gone = re.escape(both[0]) if len(both) == 1 else _group_pattern(less)
    return f"let one of them leave it out: (?!{gone}$){_group_pattern(more)}"


def _group_pattern(pattern: str) -> str:
    """A pattern that other things can be written beside: a '|' in it ends at its own end.

    >>> _group_pattern("block_1.*"), _group_pattern("block_1.*|head")
    ('block_1.*', '(?:block_1.*|head)')
    """
    return f"(?:{pattern})" if "|" in pattern else pattern


def inside(model: Any, placement: Placement, spot: Spot, own: Rule, around: Rule) -> PlacementError:
    """A layer that is given elsewhere than the layer that it is a part of."""
    return PlacementError(
        f"nb.place: layer {spot.path!r} of {model.name!r} comes under {own}, and {spot.around!r}, "
        f"which holds it, under {around}",
        where=str(placement.site),
        why="stages follow one another, they do not nest",
        mend=f"place the layers inside {spot.around!r} one by one, or leave {own.pattern.pattern!r} out",
    )


PlacedLayers = Sequence[tuple[str, Rule | None, Placement]]


def two_maps(homes: PlacedLayers) -> PlacementError:
    """A layer that two maps give to two stages: a model is placed, and so is one inside it."""
    said = [f"as {path!r} under {rule} at {placement.site}" for path, rule, placement in homes]
    return PlacementError(
        f"nb.place: one layer comes {' and '.join(said)}",
        where=str(homes[-1][2].site),
        why="a layer belongs to one stage",
        mend="take one of the maps away: nb.place(model, {})",
    )


def undecided_error(layer: Any, homes: PlacedLayers) -> PlacementError:
    """A shared layer that is given to two stages, called from neither of its places."""
    said = [f"{path!r} ({f'under {rule}' if rule else 'under no pattern'})" for path, rule, _ in homes]
    return PlacementError(
        f"nb.place: layer {layer.name!r} stands at {' and at '.join(said)}",
        where=str(homes[0][2].site),
        why="it is called by none of the layers that hold it, so nothing says which of them is meant",
        mend="give both to the same stage",
    )


def two_stages(path: str, rule: Rule, placement: Placement, open_stage: Frame) -> PlacementError:
    """A placed layer that is called inside another stage."""
    outer = open_stage.options.get("layer")
    if outer is not None:
        inside_of = f"inside layer {outer!r}, which comes under {open_stage.options['rule']}"
        mend = f"give both to the same stage, or leave {rule.pattern.pattern!r} out"
    else:
        inside_of = f"inside nb.stage at {open_stage.site}"
        mend = f"take that scope out of the model's code, or leave {rule.pattern.pattern!r} out"
    return PlacementError(
        f"nb.place: layer {path!r}, which comes under {rule}, is called {inside_of}",
        where=str(placement.site),
        why="stages follow one another, they do not nest",
        mend=mend,
    )


def two_scopes(path: str, placement: Placement, own: Frame, other: Frame) -> PlacementError:
    """Two scopes of one kind around a placed layer."""
    return PlacementError(
        f"nb.place stands inside nb.{own.kind} at {own.site}, and layer {path!r} inside that at {other.site}",
        where=str(placement.site),
        why=f"there is one nb.{own.kind} around a stage",
        mend=f"leave one nb.{own.kind} out",
    )


def in_body(path: str, rule: Rule, placement: Placement) -> BoundaryInBodyError:
    """A placed layer that is called where no boundary can lie."""
    around = path.rpartition("/")[0]
    return BoundaryInBodyError(
        f"nb.place: layer {path!r}, which comes under {rule}, is called inside a loop, a branch "
        "or a nested tf.function",
        where=str(placement.site),
        why="TensorFlow runs such a body as one op, so no boundary can lie inside it",
        mend=f"place what is around it: {around!r}" if around else "place layers that are called outside of it",
    )


def too_late(path: str, rule: Rule, placement: Placement) -> PlacementError:
    """A layer that was not there yet when the step was traced."""
    return PlacementError(
        f"nb.place: layer {path!r}, which comes under {rule}, was made while the step was traced",
        where=str(placement.site),
        why="it ran before it could be placed",
        mend="build the model first: model.build(shape), or call it once",
    )


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
        raise no_match(model, placement, found.unmatched[0])
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
            raise two_rules(model, placement, spot.path, own)
        matched.update(own)
        outer = found.get(spot.around)
        around = outer.rule if outer is not None else None
        if own and around is not None and own[0].key != around.key:
            raise inside(model, placement, spot, own[0], around)
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

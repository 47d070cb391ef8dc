"""The map of `nb.place`: from patterns of layer paths to stages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from whale_nebula.errors import NestingError
from whale_nebula.scopes import identity
from whale_nebula.scopes import options as values
from whale_nebula.scopes.frames import Block, Frame, Stack, current_stack
from whale_nebula.scopes.scope import Scope
from whale_nebula.site import Site, calling_site

_MEND = 'nb.place(model, {"encoder/.*": "gpu", "decoder/.*": "npu"})'


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of the map: layers whose whole path matches belong to this stage."""

    pattern: re.Pattern[str]
    key: str
    cluster: str

    def __str__(self) -> str:
        return f"{self.pattern.pattern!r}: {self.key!r}"


@dataclass(frozen=True, slots=True)
class SplitRule:
    """An entry of the map whose layers' variables are sharded, as by an `nb.split` around their calls."""

    pattern: re.Pattern[str]
    frame: Frame

    def __str__(self) -> str:
        return f"{self.pattern.pattern!r}: nb.split"


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """The whole map, where it was written, and the scopes that it was written in, which enclose its stages."""

    rules: tuple[Rule, ...]
    frames: tuple[Frame, ...]
    site: Site
    splits: tuple[SplitRule, ...] = ()

    def frame(self, rule: Rule, path: str) -> Frame:
        """The frame of a rule's stage for one call of the layer at this path."""
        options = {"cluster": rule.cluster, "name": rule.key, "layer": path, "rule": rule}
        return Frame("stage", options, self.site, key=rule.key, cluster=rule.cluster)


def parse_placement(mapping: Any) -> Placement:
    """Validate every entry of the map and return the placement."""
    if not isinstance(mapping, Mapping):
        why = "it maps layer paths (regex) to clusters"
        raise values.option_error(f"nb.place takes a dict, not {mapping!r}", why=why, mend=_MEND)
    stack = _check_stack()
    divided = {p: home for p, home in mapping.items() if isinstance(home, Scope) and home.kind == "split"}
    rules = tuple(_create_rule(pattern, home, stack) for pattern, home in mapping.items() if pattern not in divided)
    splits = tuple(_create_split_rule(pattern, home) for pattern, home in divided.items())
    for frame in stack.frames:
        frame.touched = True
    return Placement(rules, stack.frames, calling_site(), splits)


def _check_stack() -> Stack:
    """The open scopes, which must not be a stage or a split; outside any block, the entries of the map form one."""
    stack = current_stack()
    for frame in stack.frames:
        if frame.kind in ("stage", "split"):
            what = f"nb.place is called inside nb.{frame.kind} at {frame.site}"
            why = "it creates stages, and stages cannot be nested"
            mend = f"dedent it: only nb.cluster, nb.replica, nb.pipeline and nb.compress may enclose {_MEND}"
            raise NestingError(what, where=str(calling_site()), why=why, mend=mend)
    blocks = any(frame.block is not None for frame in stack.frames)
    return stack if blocks else replace(stack, block=Block())


def _create_rule(pattern: Any, home: Any, stack: Stack) -> Rule:
    cluster, name = _parse_home(pattern, home)
    if isinstance(home, Scope):
        home.record_placement()
    key, cluster = identity.identify_stage(name, cluster, calling_site(), stack)
    return Rule(_compile_pattern(pattern), key, cluster)


def _create_split_rule(pattern: Any, home: Scope) -> SplitRule:
    home.record_placement()
    return SplitRule(_compile_pattern(pattern), Frame("split", home.options, calling_site()))


def _compile_pattern(pattern: Any) -> re.Pattern[str]:
    if not isinstance(pattern, str):
        raise values.option_error(
            f"{pattern!r} is not a pattern", why="layer paths are matched by regular expressions", mend=_MEND
        )
    try:
        return re.compile(pattern)
    except re.error as error:
        raise values.option_error(
            f"{pattern!r} is not a valid regular expression", why=str(error), mend="'.*dense.*'"
        ) from None


def _parse_home(pattern: Any, home: Any) -> tuple[str | None, str | None]:
    """(cluster, name) of an entry: a cluster's name, or `nb.stage(...)` if a cluster has several stages."""
    if isinstance(home, Scope) and home.kind == "stage" and any(home.options.values()):
        cluster, name = (home.options[option] for option in ("cluster", "name"))
        return str(cluster) if cluster else None, str(name) if name else None
    if not isinstance(home, str):
        why = "layers are assigned to a cluster, or to a stage with a cluster or a name"
        mend = f'{{{pattern!r}: "gpu"}}, or {{{pattern!r}: nb.stage(cluster="gpu", name="encoder")}}'
        raise values.option_error(f"{pattern!r} is assigned to {home!r}", why=why, mend=mend)
    return values.check_cluster_name("cluster", home), None

"""The state of `nb.auto_parallel`: the limits within which steps without scopes are planned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from whale_nebula.scopes import compress_options
from whale_nebula.scopes import options as values
from whale_nebula.site import Site


@dataclass(frozen=True, slots=True)
class Limits:
    """The options of `nb.auto_parallel`, and where it was written. None means that the planner chooses."""

    site: Site
    clusters: tuple[str, ...] | None = None
    memory: int | None = None
    micro_batch: int | None = None
    replica: int | None = None
    compress: str | None = None
    recompute: bool | None = None
    split: bool | None = None
    replan: bool | None = None

    def complete_from(self, other: Limits) -> Limits:
        """These limits, with those of `other` where they are None."""
        missing = [each.name for each in fields(self) if getattr(self, each.name) is None]
        return replace(self, **{name: getattr(other, name) for name in missing})


def check_limits(
    site: Site,
    *,
    clusters: Iterable[str] | None = None,
    memory: int | str | None = None,
    micro_batch: int | None = None,
    replica: int | None = None,
    compress: Any = None,
    recompute: bool | None = None,
    split: bool | None = None,
    replan: bool = False,
) -> Limits:
    """Validate the options of a call; raises for invalid ones."""
    return Limits(
        site,
        clusters=None if clusters is None else _check_clusters(clusters),
        memory=None if memory is None else values.check_memory("memory", memory),
        micro_batch=None if micro_batch is None else values.check_count("micro_batch", micro_batch),
        replica=None if replica is None else values.check_count("replica", replica),
        compress=compress_options.parse_crossing_codec(compress),
        recompute=None if recompute is None else values.check_bool("recompute", recompute),
        split=None if split is None else values.check_bool("split", split),
        replan=values.check_bool("replan", replan) or None,
    )


def _check_clusters(value: Iterable[str]) -> tuple[str, ...] | None:
    """Validate names of clusters, each once; None for all."""
    if value in ("all", ["all"], ("all",), {"all"}):
        return None
    mend = "clusters=['gpu', 'npu'], or remove clusters= to use all clusters"
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise values.option_error(f"clusters={value!r} is not a list of cluster names", mend=mend)
    names = tuple(values.check_cluster_name("clusters", each) for each in value)
    if not names or len(set(names)) < len(names):
        raise values.option_error(
            f"clusters={list(names)!r} {'names a cluster twice' if names else 'is empty'}", mend=mend
        )
    return tuple(sorted(names)) if isinstance(value, set | frozenset) else names


_current: Limits | None = None
_base_limits: Limits | None = None


def get_current_limits() -> Limits | None:
    """The limits in effect: the script's, completed from the base limits; None if steps are cut by scopes alone."""
    if _current is None or _base_limits is None:
        return _current or _base_limits
    return _current.complete_from(_base_limits)


@contextlib.contextmanager
def use_base_limits(limits: Limits) -> Iterator[None]:
    """Plan steps without scopes while this context is open; the script's own limits take precedence."""
    global _base_limits
    before, _base_limits = _base_limits, limits
    try:
        yield
    finally:
        _base_limits = before


def set_limits(limits: Limits | None) -> Limits | None:
    """Set the limits of the script, None for none; returns the previous ones."""
    global _current
    before, _current = _current, limits
    return before


class AutoParallel:
    """The result of `nb.auto_parallel`, in effect from the call on; as a context manager until its block ends."""

    def __init__(self, limits: Limits, before: Limits | None) -> None:
        self._limits, self._before = limits, before

    def __enter__(self) -> AutoParallel:
        return self

    def __exit__(self, *exc: object) -> None:
        set_limits(self._before)

    def __repr__(self) -> str:
        options = ((each.name, getattr(self._limits, each.name)) for each in fields(Limits) if each.name != "site")
        return f"nb.auto_parallel({', '.join(f'{name}={value!r}' for name, value in options if value is not None)})"

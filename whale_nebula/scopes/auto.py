"""What `nb.auto_parallel` has said: the limits within which steps without scopes are planned."""

from __future__ import annotations

from dataclasses import dataclass

from whale_nebula.site import Site


@dataclass(frozen=True, slots=True)
class Limits:
    """The options of `nb.auto_parallel`, and where it was written. None leaves a choice to the planner."""

    site: Site
    clusters: tuple[str, ...] | None = None
    memory: int | None = None
    micro_batch: int | None = None
    replica: int | None = None
    compress: str | None = None
    recompute: bool | None = None

    def words(self) -> list[str]:
        """What was said, as options of a call."""
        names = ("clusters", "memory", "micro_batch", "replica", "compress", "recompute")
        said = ((name, getattr(self, name)) for name in names)
        return [f"{name}={value!r}" for name, value in said if value is not None]


_current: Limits | None = None


def current_limits() -> Limits | None:
    """The limits that hold now; None where steps are cut by scopes alone."""
    return _current


def set_limits(limits: Limits | None) -> Limits | None:
    """Let these limits hold from now on; gives those that held before."""
    global _current
    before, _current = _current, limits
    return before


class AutoParallel:
    """What `nb.auto_parallel` returns: it holds from the call on, and as a context manager until its block ends."""

    def __init__(self, limits: Limits, before: Limits | None) -> None:
        self._limits, self._before = limits, before

    def __enter__(self) -> AutoParallel:
        return self

    def __exit__(self, *exc: object) -> None:
        set_limits(self._before)

    def __repr__(self) -> str:
        return f"nb.auto_parallel({', '.join(self._limits.words())})"

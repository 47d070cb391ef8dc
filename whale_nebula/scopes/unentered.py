"""Scopes that were made and never entered: `nb.stage(cluster="gpu")` without `with` holds nothing.

That is said where a model or a step is about to run, for then it is known that it is missing there.
"""

from __future__ import annotations

import warnings

from whale_nebula.errors import NebulaWarning
from whale_nebula.scopes.frames import Frame
from whale_nebula.site import Site, calling_site

_waiting: dict[Site, str] = {}
_entered: set[Site] = set()
_idle: set[Site] = set()


def made(written: str) -> Site:
    """A scope is made here, as it is `written`; gives the place by which it is known."""
    site = calling_site()
    if site not in _entered:
        _waiting.setdefault(site, written)
    return site


def entered(site: Site) -> None:
    """The scope that was made there is entered: so will be the others that are made there."""
    _waiting.pop(site, None)
    _entered.add(site)


def refused(site: Site) -> None:
    """An error was given of the scope that was made there, which says more."""
    _waiting.pop(site, None)


def forget() -> None:
    """Begin anew."""
    _waiting.clear()
    _entered.clear()
    _idle.clear()


def tell(model: str) -> None:
    """Say once of each scope that was never entered that it held nothing; `model` is about to run without scopes."""
    _tell(f"model {model!r} runs uncut")


def tell_beside(step: str) -> None:
    """The same where a `step` is about to run that has others."""
    _tell(f"step {step!r} runs without it")


def tell_idle(frame: Frame, written: str) -> None:
    """Clusters are to train copies, and no step came for that: a loop without @nb.function, say. It is said once for
    each place.
    """
    if frame.touched or frame.building or frame.site in _idle:
        return
    _idle.add(frame.site)
    warning = NebulaWarning(
        f"{written} holds no step that runs by a plan",
        where=str(frame.site),
        why="what ran in it ran in this process alone, as if it were not there",
        mend="@nb.function over the step of a loop, in the place of @tf.function; or the call of fit inside it",
    )
    warnings.warn_explicit(warning, NebulaWarning, frame.site.file, frame.site.line)


def _tell(so: str) -> None:
    for site, written in list(_waiting.items()):
        entered(site)
        warning = NebulaWarning(
            f"{written} is never entered",
            where=str(site),
            why=f"a scope holds the lines inside its with block, and this one has none; {so}",
            mend=f"with {written}: and inside it {_inside(written)}",
        )
        warnings.warn_explicit(warning, NebulaWarning, site.file, site.line)


def _inside(written: str) -> str:
    """What is to stand in it: some scopes may stand around a whole step, too."""
    around = written.startswith(("nb.replica", "nb.pipeline", "nb.cluster", "nb.compress"))
    return "the calls of the layers" + ", or the call of fit" * around

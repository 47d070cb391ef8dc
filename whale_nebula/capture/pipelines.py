"""Which `nb.pipeline` counts in a step. A step has one batch, which is cut once: all of its scopes must say the same.

The one that a model was built under goes before one that stands around `fit`.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection

from whale_nebula.errors import NebulaWarning, OptionError
from whale_nebula.scopes import Frame, Site

_said: set[tuple[Site, Site]] = set()


def counting(before: Frame | None, frame: Frame, around: Collection[Frame]) -> Frame:
    """The one that counts of the pipeline met `before` and that which is entered now; `around` are the scopes that the
    whole step stands in.

    >>> one, same = (Frame("pipeline", {"micro_batch": 4}, Site("train.py", line)) for line in (2, 6))
    >>> counting(one, same, ()) is same
    True
    """
    mine, other = _unlike(frame, before) if before is not None else ("", "")
    if before is None or not mine:
        return frame
    if before not in around:
        raise OptionError(
            f"nb.pipeline says {mine}, and at {before.site} it says {other}",
            where=str(frame.site),
            why="a step has one batch, which is cut once, for all of its stages",
            mend="one nb.pipeline(...) around all stages, or the same options at both lines",
        )
    if (before.site, frame.site) not in _said:
        _said.add((before.site, frame.site))
        _tell(before, frame, mine, other)
    return frame


def _unlike(frame: Frame, before: Frame) -> tuple[str, str]:
    """The options in which two pipelines differ, as each has them."""
    names = [name for name in frame.options if frame.options[name] != before.options.get(name)]
    mine, other = (", ".join(f"{name}={each.options.get(name)!r}" for name in names) for each in (frame, before))
    return mine, other


def _tell(around: Frame, frame: Frame, mine: str, other: str) -> None:
    warning = NebulaWarning(
        f"nb.pipeline({other}) around the step does not count",
        where=str(around.site),
        why=f"the model has its own at {frame.site}, with {mine}; it is said once for this place",
        mend="leave one of the two out",
    )
    warnings.warn_explicit(warning, NebulaWarning, around.site.file, around.site.line)

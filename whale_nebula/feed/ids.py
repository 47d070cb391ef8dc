"""`nb.init(ids=...)`: the input by which clusters check that they train on the same rows must be one of a step's."""

from __future__ import annotations

from collections.abc import Sequence

from whale_nebula.errors import OptionError
from whale_nebula.suggest import did_you_mean, listed


def compared_by(ids: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names that `ids` lists.

    >>> compared_by("x/id"), compared_by(["x/id", "y"]), compared_by(None)
    (('x/id',), ('x/id', 'y'), ())
    """
    return (ids,) if isinstance(ids, str) else tuple(ids or ())


def names_any(ids: Sequence[str], inputs: Sequence[str], where: str) -> bool:
    """Whether a step has an input that `ids` names. Refused where it has others only: by a name that means nothing no
    row would be compared.

    >>> names_any(["x/id"], ["x/id", "y"], "train.py:3"), names_any(["x/id"], [], "train.py:3")
    (True, False)
    """
    if not ids or set(ids) & set(inputs):
        return True
    if not inputs:
        return False
    given = repr(ids[0]) if len(ids) == 1 else repr(list(ids))
    raise OptionError(
        f"nb.init(ids={given}) names no input of this step",
        where=where,
        why=f"its inputs are {listed(inputs)}; by ids that are none of them no row would be compared",
        mend=_mend(ids[0], inputs),
    )


def _mend(name: str, inputs: Sequence[str]) -> str:
    inner = [each for each in inputs if each.endswith(f"/{name}")]
    return f'nb.init(ids="{inner[0]}")' if inner else did_you_mean(name, inputs)

"""A Keras train step that is not given what its loss needs says so: for `nb.plan` and `nb.verify`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from whale_nebula.errors import NebulaError, OptionError
from whale_nebula.site import script_site


@contextlib.contextmanager
def target_wanted(call: str, model: Any, batch: Sequence[Any]) -> Iterator[None]:
    """Around what traces a train step for `call`.

    Only what fails is told anew: a model whose losses are all its own needs no y, and a tuple may be its x.
    """
    try:
        yield
    except (ValueError, TypeError, AttributeError) as error:
        told = _told(call, model, batch, error) if len(batch) == 1 and _has_loss(model) else None
        if told is None:
            raise
        raise told from error


def _told(call: str, model: Any, batch: Sequence[Any], error: Exception) -> OptionError | None:
    said = error.what if isinstance(error, NebulaError) else str(error).strip().splitlines()[0]
    where = str(script_site())
    if isinstance(batch[0], tuple) and 1 < len(batch[0]) < 4:
        what = f"{call} was given a tuple as x, and x, y and sample_weight are given one by one"
        return OptionError(what, where=where, why=said, mend=f"{call}(model, *batch)")
    if any(word in said for word in _NO_Y):
        what = f"{call} was given x alone, and the loss of model {model.name!r} needs y"
        return OptionError(what, where=where, why=said, mend=f"{call}(model, x, y)")
    return None


_NO_Y = ("None values", "NoneType", "y_true", "got None")


def _has_loss(model: Any) -> bool:
    return getattr(model, "loss", None) is not None

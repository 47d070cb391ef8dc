"""The words of a public call are checked before the call: an unknown one is refused with a suggestion."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

from whale_nebula.errors import OptionError
from whale_nebula.scopes.site import calling_site
from whale_nebula.suggest import did_you_mean

P = ParamSpec("P")
T = TypeVar("T")


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, but a call that does not fit its signature ends in a sentence of ours.

    >>> @checked
    ... def pipeline(micro_batch=1, *, schedule="gpipe"): ...
    >>> pipeline(shedule="1f1b")
    Traceback (most recent call last):
    ...
    whale_nebula.errors.OptionError: NB-104 nb.pipeline has no option 'shedule' (...)
      why: its options are 'micro_batch', 'schedule'
      mend: did you mean 'schedule'?
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise _misfit(function.__name__, signature, args, kwargs, error) from None
        return function(*args, **kwargs)

    return call


def _misfit(
    name: str, signature: inspect.Signature, args: Sequence[object], words: Iterable[str], error: TypeError
) -> OptionError:
    known = list(signature.parameters)
    unknown = [word for word in words if word not in known]
    where = str(calling_site())
    if unknown:
        what, mend = f"nb.{name} has no option {unknown[0]!r}", did_you_mean(unknown[0], known)
    elif len(args) > (places := _places(signature)):
        what = f"nb.{name} takes {places or 'no'} positional argument{'s' * (places > 1)}, not {len(args)}"
        mend = f"say what it is: nb.{name}({known[min(places, len(known) - 1)]}={args[places]!r})"
    else:
        what, mend = f"nb.{name}: {error}", f"nb.{name}{signature}"
    return OptionError(what, where=where, why=f"its options are {', '.join(map(repr, known))}", mend=mend)


def _places(signature: inspect.Signature) -> int:
    return sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in signature.parameters.values())

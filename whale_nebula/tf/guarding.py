"""Variables with reads and writes that are handled by given functions: a class for each kind of variable.

Each function has a contract test in tests/contract.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from whale_nebula.tf import private as tf_private

Answer = Callable[..., Any]
"""Called with the variable, the name of the method, the plain method, and the arguments."""


@functools.cache
def make_guarded_class(kind: Any, mixin: type, name: str, read: Answer, write: Answer) -> type:
    """A subclass of a kind of variable and of a mixin that passes all reads and writes to `read` and `write`. The same
    arguments return the same class.
    """

    def guard(name: str, answer: Answer) -> Any:
        plain = getattr(kind, name)
        return lambda variable, *args, **kwargs: answer(variable, name, plain, *args, **kwargs)

    methods = {each: guard(each, read) for each in tf_private.VARIABLE_READS}
    methods |= {each: guard(each, write) for each in tf_private.VARIABLE_WRITES}
    handle = operator.itemgetter(tf_private.VARIABLE_HANDLE)
    covered = property(lambda variable: _Cover(handle(vars(variable))))
    plain = property(lambda variable: handle(vars(variable)))
    return type(name, (mixin, kind), {**methods, tf_private.VARIABLE_HANDLE: covered, "handle": plain})


@dataclass(frozen=True)
class _Cover:
    """A wrapper that eager ops do not accept as a handle, so that they read through the guarded methods."""

    covered: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.covered, name)

"""Variables with reads and writes that are handled by given functions: a class for each kind of variable.

Each function has a contract test in tests/contract.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from whale_nebula.tf import private as tf_private

AccessHandler = Callable[..., Any]
"""Called with the variable, the name of the method, the plain method, and the arguments."""


@functools.cache
def make_guarded_class(kind: Any, mixin: type, name: str, read: AccessHandler, write: AccessHandler) -> type:
    """A subclass of a kind of variable and of a mixin that passes all reads and writes to `read` and `write`. The same
    arguments return the same class.
    """

    def guard(name: str, handler: AccessHandler) -> Any:
        plain = getattr(kind, name)

        @tf.autograph.experimental.do_not_convert
        def access(variable: Any, *args: Any, **kwargs: Any) -> Any:
            return handler(variable, name, plain, *args, **kwargs)

        return access

    methods = {each: guard(each, read) for each in tf_private.VARIABLE_READS}
    methods |= {each: guard(each, write) for each in tf_private.VARIABLE_WRITES}
    handle = operator.itemgetter(tf_private.VARIABLE_HANDLE)
    hidden_handle = property(lambda variable: _HiddenHandle(handle(vars(variable))))
    plain = property(lambda variable: handle(vars(variable)))
    return type(name, (mixin, kind), {**methods, tf_private.VARIABLE_HANDLE: hidden_handle, "handle": plain})


@dataclass(frozen=True)
class _HiddenHandle:
    """A wrapper that eager ops do not accept as a handle, so that they read through the guarded methods."""

    hidden_handle: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.hidden_handle, name)

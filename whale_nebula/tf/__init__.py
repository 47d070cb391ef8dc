"""Private parts of TensorFlow and Keras that this package uses, by subject; each function has a contract test.

`tf` is TensorFlow itself, loaded when it is first used, for modules that hosts without TensorFlow import too.
"""

from __future__ import annotations

import importlib
from typing import Any


class _Lazy:
    """Has what a module has; the module is loaded when something of it is first asked for.

    >>> _Lazy("math").sqrt(4.0)
    2.0
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        self.__dict__[attribute] = value
        return value


tf: Any = _Lazy("tensorflow")

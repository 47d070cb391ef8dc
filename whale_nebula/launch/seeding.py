"""Seed a worker's random generators before its script draws from them, without loading unneeded libraries.

A script may need to configure TensorFlow before it is loaded, usually by environment variables. So each library is
seeded right after the script has loaded it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def seed_all(seed: int) -> None:
    """Seed the random generators of Python, NumPy, TensorFlow and Keras, like `keras.utils.set_random_seed`: those of
    loaded libraries at once, others once they are loaded.
    """
    random.seed(seed)
    call_when_loaded("numpy", lambda: importlib.import_module("numpy").random.seed(seed))
    call_when_loaded("keras", lambda: _seed_keras(seed))
    # the hook for Keras seeds TensorFlow, too: while Keras loads TensorFlow, Keras itself is not ready yet
    call_when_loaded("tensorflow", lambda: "keras" in sys.modules or importlib.import_module("keras"))


@contextlib.contextmanager
def keep_generators() -> Iterator[None]:
    """Restore the generators of Python and NumPy at the end: weights depend on them, and processes may draw different
    numbers inside.

    >>> random.seed(1); first = random.random(); random.seed(1)
    >>> with keep_generators():
    ...     drawn = random.random()
    >>> drawn == first == random.random()
    True
    """
    python_state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def _seed_keras(seed: int) -> None:
    """Seed TensorFlow and Keras, but not NumPy, which a script may have seeded meanwhile."""
    generator = importlib.import_module("numpy").random
    state = generator.get_state()
    importlib.import_module("keras").utils.set_random_seed(seed)
    generator.set_state(state)


def call_when_loaded(name: str, do: Callable[[], object]) -> None:
    """Call a function once a module is loaded; at once if it is.

    >>> call_when_loaded("sys", lambda: print("it is"))
    it is
    """
    if name in sys.modules:
        do()
    else:
        sys.meta_path.insert(0, _LoadHook(name, do))


def call_before_load(name: str, do: Callable[[], object]) -> None:
    """Call a function whenever the spec of a module is searched, the last time right before the module is loaded; never
    if it is loaded already.
    """
    sys.meta_path.insert(0, _SearchHook(name, do))


class _SearchHook(MetaPathFinder):
    """An import hook that calls a function when one module is searched, and finds none."""

    def __init__(self, name: str, do: Callable[[], object]) -> None:
        self._name, self._do = name, do

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == self._name:
            self._do()


class _LoadHook(MetaPathFinder):
    """An import hook that waits until one module is loaded, and then removes itself. A search for the module's spec
    alone does not load it.
    """

    def __init__(self, name: str, do: Callable[[], object]) -> None:
        self._name = name
        self._do = do
        self._is_searching = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _NotifyingLoader(spec.loader, self._note_load)
        return spec

    def _note_load(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._do()


class _NotifyingLoader(Loader):
    """A loader that loads a module by another loader, and then calls a function."""

    def __init__(self, loader: Any, do: Callable[[], object]) -> None:
        self._loader = loader
        self._do = do

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader  # for code that asks the module for its files
        state = random.getstate()  # loading draws an unspecified number of random numbers
        self._loader.exec_module(module)
        self._do()
        random.setstate(state)

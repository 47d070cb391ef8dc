"""The one inert wrapper on Keras, put on when Keras is loaded, whichever is imported first.

Importing this package loads no TensorFlow (a gateway's host has none), and yet a subclassed model whose first act is
`fit` needs the wrapper to be there before Keras traces it. So the wrapper is put on at once where Keras is loaded,
and else by a finder that waits for that one module and then leaves.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeAlias

_TRAINER = "keras.src.backend.tensorflow.trainer"
_KINDS = ("train", "test", "predict")

Hook: TypeAlias = Callable[[], Any]


def wrap_keras(hook: Hook) -> None:
    """Put the wrapper on now, or as soon as Keras's trainer is loaded; again does nothing. `hook` loads what makes
    the functions of models, once one is to be made.
    """
    loaded = sys.modules.get(_TRAINER)
    if loaded is not None and hasattr(loaded, "TensorFlowTrainer"):
        _wrap(loaded.TensorFlowTrainer, hook)
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting(hook))


def unwrap_keras() -> None:
    """Take the wrapper off: Keras is again what it was."""
    trainer = getattr(sys.modules.get(_TRAINER), "TensorFlowTrainer", None)
    for kind in _KINDS:
        wrapper = vars(trainer).get(f"make_{kind}_function") if trainer is not None else None
        if wrapper is not None and hasattr(wrapper, "nebula_original"):
            setattr(trainer, f"make_{kind}_function", wrapper.nebula_original)


def _wrap(trainer: type, hook: Hook) -> None:
    for kind in _KINDS:
        original = vars(trainer)[f"make_{kind}_function"]
        if not hasattr(original, "nebula_original"):
            setattr(trainer, f"make_{kind}_function", _wrapper(kind, original, hook))


def _wrapper(kind: str, original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def make(model: Any, force: bool = False) -> Any:
        from whale_nebula.tf import find_unsupported

        if find_unsupported() is not None:  # a scope says so where it is entered, and this model has entered none
            return original(model, force)
        return hook().make_function(kind, original, model, force)

    make.nebula_original = original  # type: ignore[attr-defined]
    make.__doc__ = original.__doc__
    return make


class _Waiting(MetaPathFinder):
    """Waits for Keras's trainer to be loaded, wraps it, and is gone."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _TRAINER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _wrap(vars(module)["TensorFlowTrainer"], self._hook)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class Bootstrap:
    """A watcher of scopes that brings in capture with the first scope that is entered beside TensorFlow."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    @contextlib.contextmanager
    def enter(self, frame: Any) -> Iterator[None]:
        """Install the real watchers; they are told of this frame too."""
        with contextlib.ExitStack() as opened:
            if "tensorflow" in sys.modules or "keras" in sys.modules:
                from whale_nebula.tf import require_supported

                require_supported()
                for watcher in self._hook().install():
                    opened.enter_context(watcher.enter(frame))
            yield

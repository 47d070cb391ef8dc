"""The only wrapper on Keras, installed when Keras is loaded, whichever package is imported first.

Importing this package loads no TensorFlow (a gateway's host has none), but a subclassed model whose first action is
`fit` needs the wrapper before Keras traces it. It is therefore installed immediately if Keras is loaded, and otherwise
by an import finder that waits for that one module and then removes itself.
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
    """Install the wrapper now, or as soon as Keras's trainer is loaded; repeated calls do nothing. `hook` loads the
    factory of models' functions when it is first needed.
    """
    loaded = sys.modules.get(_TRAINER)
    if loaded is not None and hasattr(loaded, "TensorFlowTrainer"):
        _wrap(loaded.TensorFlowTrainer, hook)
    elif not any(isinstance(finder, _TrainerFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TrainerFinder(hook))


def unwrap_keras() -> None:
    """Remove the wrapper and restore Keras."""
    trainer = getattr(sys.modules.get(_TRAINER), "TensorFlowTrainer", None)
    for kind in _KINDS:
        wrapper = vars(trainer).get(f"make_{kind}_function") if trainer is not None else None
        if wrapper is not None and hasattr(wrapper, "nebula_original"):
            setattr(trainer, f"make_{kind}_function", wrapper.nebula_original)


def _wrap(trainer: type, hook: Hook) -> None:
    for kind in _KINDS:
        original = vars(trainer)[f"make_{kind}_function"]
        if not hasattr(original, "nebula_original"):
            setattr(trainer, f"make_{kind}_function", _make_wrapper(kind, original, hook))


def _make_wrapper(kind: str, original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def make(model: Any, force: bool = False) -> Any:
        from whale_nebula.tf import find_unsupported

        if find_unsupported() is not None:  # scopes report it when they are entered, but this model has none
            return original(model, force)
        return hook().make_function(kind, original, model, force)

    make.nebula_original = original  # type: ignore[attr-defined]
    make.__doc__ = original.__doc__
    return make


class _TrainerFinder(MetaPathFinder):
    """Import finder that waits for Keras's trainer, wraps it, and removes itself."""

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
    """Observer of scopes that installs capture when the first scope is entered after TensorFlow was loaded."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    @contextlib.contextmanager
    def enter(self, frame: Any) -> Iterator[None]:
        """Install the real observers, and report this frame to them."""
        with contextlib.ExitStack() as opened:
            if "tensorflow" in sys.modules or "keras" in sys.modules:
                from whale_nebula.tf import require_supported

                require_supported()
                for watcher in self._hook().install():
                    opened.enter_context(watcher.enter(frame))
            yield

"""Train one TensorFlow model across clusters that share a slow link.

Add a few scopes to a working script. It then trains across clusters and produces the same model:

    import whale_nebula as nb

    with nb.cluster():
        with nb.stage(cluster="gpu"):
            hidden = encoder(inputs)
        with nb.stage(cluster="npu"):
            logits = decoder(hidden)

All public names are here. Each is loaded when it is first used: importing this package does not load TensorFlow.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from whale_nebula.tf.keras_import import Bootstrap, wrap_keras

if TYPE_CHECKING:
    from whale_nebula import codec as codec
    from whale_nebula import errors as errors
    from whale_nebula.capture import place as place
    from whale_nebula.ir import outer_optimizer as outer
    from whale_nebula.runtime.planning import plan as plan
    from whale_nebula.scopes.public import auto_parallel, cluster, compress, pipeline, replica, split, stage

__version__ = "0.1.0.dev0"

# public name -> the module that defines it
_HOMES = {
    "init": "runtime.run",
    "shutdown": "runtime.run",
    "here": "runtime.run",
    "gathered": "runtime.run",
    "clusters": "runtime.clusters",
    "Clusters": "hardware.clusters",
    "Run": "runtime.run",
    "Here": "runtime.run",
    "cluster": "scopes.public",
    "replica": "scopes.public",
    "pipeline": "scopes.public",
    "stage": "scopes.public",
    "split": "scopes.public",
    "compress": "scopes.public",
    "auto_parallel": "scopes.public",
    "place": "capture",
    "shard": "feed.shard",
    "data": "runtime.data",
    "function": "runtime.function",
    "loss_weight": "capture",
    "plan": "runtime.planning",
    "Plan": "plan.plan",
    "verify": "runtime.verify",
    "Verification": "plan.verification",
    "save": "runtime.checkpoint.public",
    "restore": "runtime.checkpoint.public",
    "resumed": "runtime.checkpoint.public",
    "Resumed": "runtime.checkpoint.public",
    "state": "runtime.checkpoint.public",
    "last_report": "report.published",
    "Report": "report.report",
}
_MODULES = {"codec": "codec", "errors": "errors", "outer": "ir.outer_optimizer"}

__all__ = [
    "Clusters",
    "Here",
    "Plan",
    "Report",
    "Resumed",
    "Run",
    "Verification",
    "__version__",
    "auto_parallel",
    "cluster",
    "clusters",
    "codec",
    "compress",
    "data",
    "errors",
    "function",
    "gathered",
    "here",
    "init",
    "last_report",
    "loss_weight",
    "outer",
    "pipeline",
    "place",
    "plan",
    "replica",
    "restore",
    "resumed",
    "save",
    "shard",
    "shutdown",
    "split",
    "stage",
    "state",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}")
    if name not in _HOMES:
        from whale_nebula.errors.text import did_you_mean

        message = f"module 'whale_nebula' has no attribute {name!r}: {did_you_mean(name, __all__)}"
        raise AttributeError(message, name=name, obj=sys.modules[__name__])
    home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    if _HOMES[name] in ("scopes.public", "capture"):
        frames = importlib.import_module(f"{__name__}.scopes.frames")
        if not any(isinstance(watcher, Bootstrap) for watcher in frames.watchers):
            frames.watchers.append(Bootstrap(_load_keras_hook))
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def _load_keras_hook() -> Any:
    return importlib.import_module(f"{__name__}.runtime.keras_hook")


class _PublicModule(ModuleType):
    """The class of this module, which keeps public names such as `nb.plan` functions.

    Importing a subpackage binds it to its package as an attribute, which would hide a public name that is also a
    package's name.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _PublicModule

wrap_keras(_load_keras_hook)

"""The checks of `whale-nebula doctor`, one small function each. None of them loads TensorFlow.

What one machine can tell of itself starts without gRPC too; what concerns a cluster is in `site`, and loaded on demand.
"""

from __future__ import annotations

from whale_nebula.cli.checks import local
from whale_nebula.cli.checks.local import Check, config_checks

__all__ = ["Check", "config_checks", "machine_checks"]


def machine_checks(*, training: bool = True) -> list[Check]:
    """All that can be told of this machine and its packages; without `training` it is that of a gateway alone."""
    return [
        local.python_check(),
        local.own_check(),
        *(local.package_check(package, training=training) for package in local.NEEDED),
        local.tensorboard_check(),
        local.backend_check(),
        *local.threads_checks(),
        local.onednn_check(),
        local.memory_check(),
    ]

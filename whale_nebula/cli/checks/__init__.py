"""What `whale-nebula doctor` looks at, one small function each. Nothing here loads TensorFlow.

What one machine can tell of itself starts without gRPC too; what concerns a cluster is in `site`, and loaded on demand.
"""

from __future__ import annotations

from whale_nebula.cli.checks import machine, packages
from whale_nebula.cli.checks.check import Check
from whale_nebula.cli.checks.configured import config_checks

__all__ = ["Check", "config_checks", "machine_checks"]


def machine_checks(*, training: bool = True) -> list[Check]:
    """All that can be told of this machine and its packages; without `training` it is that of a gateway alone."""
    return [
        packages.python_check(),
        packages.own_check(),
        *(packages.package_check(package, training=training) for package in packages.NEEDED),
        packages.tensorboard_check(),
        machine.backend_check(),
        *machine.threads_checks(),
        machine.onednn_check(),
        machine.memory_check(),
    ]

"""Actions of an owner apart from the registry, certificates and approvals, as events of the registry's log."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from whale_nebula.accounts.registry import Registry
from whale_nebula.accounts.rows import FILE
from whale_nebula.security import authority


def record_action(folder: Path, action: str, reason: str = "", **more: Any) -> None:
    """Record an action of the owner, if the authority in this folder has a registry of accounts."""
    if (folder / FILE).exists():
        with contextlib.closing(Registry(folder, authority.load(folder))) as registry:
            registry.record_event(action, "", "", reason, **more)

"""The end of a level of checkpoints."""

from __future__ import annotations

from unittest.mock import Mock

from whale_nebula.runtime.checkpoint.copies import Copies
from whale_nebula.runtime.checkpoint.level import Level, Pace


def test_closed_level_ends_its_threads() -> None:
    """That of the copies, too: a process that opens and shuts down several runs would keep one of each run."""
    copies = Copies(Mock(), Mock(), "npu/1", "npu/2")
    level = Level(Mock(), Mock(), Pace(), keep=2, copies=copies)
    threads = [level._writer._thread, copies._writer._thread]
    assert all(thread.is_alive() for thread in threads)
    level.close()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)

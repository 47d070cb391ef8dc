"""Starting one worker process, with what it is told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from whale_nebula.launch.identity import VARIABLE, Identity


def start(
    argv: Sequence[str], identity: Identity, env: Mapping[str, str] | None = None, cwd: str | Path | None = None
) -> subprocess.Popen[bytes]:
    """A new process, no fork of this one's memory, in a group of its own, so that it can be killed whole."""
    return subprocess.Popen(
        [sys.executable, *argv],
        env={**os.environ, **(env or {}), VARIABLE: identity.to_json()},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=identity.descriptors,
        process_group=0,
    )


def abandon(processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Some process could not be started: take the others back."""
    for process in processes.values():
        process.kill()
        process.communicate()

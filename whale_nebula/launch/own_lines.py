"""An error's traceback as the writer of a script reads it: from the script's first line on, and without our lines."""

from __future__ import annotations

import os
import sysconfig
import traceback
from types import TracebackType

from whale_nebula.errors import NebulaError

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PYTHONS = sysconfig.get_paths()["stdlib"] + os.sep


def own_lines(error: BaseException, path: str) -> str:
    """The traceback of an error that the script at `path` has ended by; what is above its first line is ours.

    Our own errors say where and why; of their tracebacks only the user's lines are worth reading. Where there are
    none, as where the script only calls another library, all lines stand.

    >>> print(own_lines(ValueError("no"), "train.py"), end="")
    ValueError: no
    """
    ours, trace = isinstance(error, NebulaError), _from(error.__traceback__, path)
    told = traceback.TracebackException(type(error), error, trace or error.__traceback__)
    written = [frame for frame in told.stack if not _installed(frame.filename)]
    if trace is None or (ours and written):
        told.stack = traceback.StackSummary.from_list(written)
    return "".join(told.format(chain=not ours))


def _installed(file: str) -> bool:
    return file.startswith((_OURS, _PYTHONS, "<")) or "site-packages" in file or "__autograph_generated" in file


def _from(trace: TracebackType | None, path: str) -> TracebackType | None:
    """The part that begins in the script; it never came there where the script does not even compile."""
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    return trace

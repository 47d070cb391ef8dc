"""How commands end. The numbers from 64 to 78 are those of sysexits.h, those above 128 name a signal.

`whale-nebula run` ends as the worker that failed first did: with its exit code, or 128 and the number of the signal
that ended it. Where no worker failed it ends with 0, or with 75 where they left.
"""

from __future__ import annotations

DONE = 0
FAILED = 1
"""The script raised, or something that is looked at is not as it must be."""
USAGE = 2
NOTHING = 3
"""There was nothing to show: no step with scopes."""
NO_DATA = 65
"""A file that holds something else."""
NO_FILE = 66
NOT_YET = 69
ORPHANED = 71
"""A worker whose launcher is gone."""
LEFT = 75
"""The workers were asked to end (SIGTERM, SIGINT, SIGHUP), and left between two steps: start them again."""
CONFIG = 78
"""The config, the environment or the certificates are wrong: nothing was started."""
INTERRUPTED = 130
SIGNALLED = 128
"""Plus the number of a signal: 137 is SIGKILL, by which also a worker is ended that is frozen or will not leave."""


def shown(code: int) -> int:
    """How a shell shows the exit code of a process that a signal may have ended.

    >>> shown(3), shown(-9)
    (3, 137)
    """
    return code if code >= 0 else SIGNALLED - code

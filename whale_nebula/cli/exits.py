"""How commands end. The numbers above 63 are those of sysexits.h."""

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
CONFIG = 78
INTERRUPTED = 130

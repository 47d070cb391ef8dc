"""`python -m whale_nebula`: the command line, for when `whale-nebula` is not on the path."""

from __future__ import annotations

import sys

from whale_nebula.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

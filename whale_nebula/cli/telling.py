"""How commands say that something is wrong: in words on stderr, or as one JSON object on stdout."""

from __future__ import annotations

import json
import sys

from whale_nebula.errors import NebulaError

PARTS = ("code", "what", "where", "why", "mend")


def tell(error: NebulaError, *, as_json: bool) -> None:
    """Print an error."""
    if as_json:
        print(json.dumps({part: getattr(error, part) for part in PARTS}))
    else:
        print(error, file=sys.stderr)


def remark(text: str) -> None:
    """A line beside the output, for people only."""
    print(f"whale-nebula: {text}", file=sys.stderr)

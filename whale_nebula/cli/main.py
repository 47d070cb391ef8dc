"""`whale-nebula`: the commands, of which this version has the words and the help.

What has no engine yet says so and ends with 69 (service unavailable), with nothing done.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from whale_nebula import __version__
from whale_nebula.errors import NotYetError

EXIT_NOT_YET = 69

COMMANDS = {
    "run": "run a script on this cluster's workers: whale-nebula run --config clusters.yaml --cluster gpu train.py",
    "show": "show a script's plan: stages, boundaries, schedule, what crosses the line",
    "doctor": "check names, ports, clocks, certificates and the line between clusters",
    "certs": "make, issue, show, renew and revoke certificates",
    "gateway": "be the one process of a cluster that others can reach",
    "audit": "verify a gateway's audit log",
    "bench": "measure the line between two clusters: whale-nebula bench link",
}


def parser() -> argparse.ArgumentParser:
    """The commands and their help."""
    made = argparse.ArgumentParser(
        prog="whale-nebula",
        description="Train one TensorFlow model across clusters that share a slow line.",
        epilog="A script with scopes needs none of these: python train.py runs all clusters in one process.",
    )
    made.add_argument("--version", action="version", version=f"whale-nebula {__version__}")
    commands = made.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        command.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="options of the command")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; gives the exit code.

    >>> main(["--version"])
    Traceback (most recent call last):
        ...
    SystemExit: 0
    """
    made = parser()
    chosen = made.parse_args(argv)
    if chosen.command is None:
        made.print_help()
        return 0
    error = NotYetError(f"whale-nebula {chosen.command}", mend="python train.py runs all clusters in this process")
    if chosen.json or "--json" in chosen.rest:
        print(json.dumps({"code": error.code, "what": error.what, "mend": error.mend}))
    else:
        print(error, file=sys.stderr)
    return EXIT_NOT_YET


if __name__ == "__main__":
    sys.exit(main())

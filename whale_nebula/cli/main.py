"""The `whale-nebula` command: each subcommand imports what it needs when called; the start needs no TensorFlow."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import select
import signal
import sys
from collections.abc import Sequence

from whale_nebula import __version__
from whale_nebula.cli.arguments import DONE, INTERRUPTED, SIGNALLED
from whale_nebula.errors.text import did_you_mean

COMMANDS = {  # the help of each command, which is the `main` of the module with its name in this package
    "run": "run a script as the workers of this host: whale-nebula run --config clusters.yaml --cluster gpu train.py",
    "show": "show the plan of a script (stages, boundaries, schedule, traffic), or a saved plan or report",
    "plan": "find the best plan for a script without scopes: whale-nebula plan train.py --config clusters.yaml",
    "doctor": "check this machine: versions, packages, threads, memory, and a clusters.yaml",
    "certs": "create, issue, show, renew and revoke certificates",
    "approve": "show what a program does, and sign that it may run",
    "accounts": "manage the accounts of a cluster's owner, and serve logins",
    "data": "publish, list, grant, serve and request datasets",
    "login": "log in with an account and get certificates for this host",
    "gateway": "run a cluster's gateway, its only process that other sites can reach",
    "audit": "verify an audit log, or report who read what, when, with which program",
    "checkpoints": "list, show, verify, prune and export checkpoints",
    "measure": "measure this machine for the planner: kernels, memory, codecs, collectives, links",
    "bench": "measure the link between two clusters: whale-nebula bench link",
}


def make_parser() -> argparse.ArgumentParser:
    """The commands and their help."""
    parser = argparse.ArgumentParser(
        prog="whale-nebula",
        description="Train one TensorFlow model across clusters that are connected by a slow link.",
        epilog="A script with scopes needs none of these: python train.py runs all clusters in one process. "
        "whale-nebula COMMAND --help describes each command.",
    )
    parser.add_argument("--version", action="version", version=f"whale-nebula {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    >>> main(["--version"])
    Traceback (most recent call last):
        ...
    SystemExit: 0
    """
    _open_closed_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return _run_command(words[0], words[1:])
    parser = make_parser()
    if words and not words[0].startswith("-"):
        parser.error(f"unknown command {words[0]!r}; {did_you_mean(words[0], COMMANDS)}")
    parser.parse_args(words)
    parser.print_help()
    return DONE


def _open_closed_streams() -> None:
    """Connect closed standard streams (`>&-`) with the null device, which takes the lowest free number: theirs."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode, encoding="utf-8"))


def _run_command(command: str, words: Sequence[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape characters missing in the terminal's encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = int(importlib.import_module(f"whale_nebula.cli.{command}").main(words))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        ends = select.poll()
        ends.register(sys.stdout.fileno(), 0)
        if not ends.poll(0):  # stdout is still read: another pipe broke
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SIGNALLED + signal.SIGPIPE
    return code


if __name__ == "__main__":
    sys.exit(main())

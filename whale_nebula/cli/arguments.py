"""Parse command lines, and print answers and errors with their exit codes."""

from __future__ import annotations

import argparse
import getpass
import itertools
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

from whale_nebula.errors import ConfigError, NebulaError
from whale_nebula.errors.text import closest, did_you_mean

Options = Mapping[str, tuple[str | None, str]]
"""The name of each option's value, None for a flag, and its help."""


class Words(NamedTuple):
    """The parts of a command line: our options, the script (or file), and the script's arguments."""

    options: list[str]
    script: str | None
    arguments: list[str]


def split(argv: Sequence[str], known: Options) -> Words:
    """Split a command line: our options may be anywhere, but everything after "--" is the script's.

    >>> known = {"--json": (None, ""), "--links": ("LINE", "")}
    >>> split(["--json", "train.py", "--epochs", "3", "--links", "10mbit"], known)
    Words(options=['--json', '--links', '10mbit'], script='train.py', arguments=['--epochs', '3'])
    >>> split(["train.py", "--", "--json"], known).arguments
    ['--json']
    """
    options: list[str] = []
    arguments: list[str] = []
    script: str | None = None
    waiting = iter(argv)
    for word in waiting:
        name, value, _ = word.partition("=")
        if word == "--":
            arguments += waiting
        elif name in known or name in ("-h", "--help"):
            options.append(word)
            if not value and known.get(name, (None,))[0] is not None:
                options += itertools.islice(waiting, 1)
        elif script is None and word.startswith("-"):
            options.append(word)
        elif script is None:
            script = word
        else:
            arguments.append(word)
    if script is None and arguments:
        script, *arguments = arguments
    return Words(options, script, arguments)


def read_script(parser: Parser, argv: Sequence[str], options: Options) -> tuple[argparse.Namespace, Words]:
    """Parse the options of a command that runs a script; returns the script's part, too. A note names options that may
    be misspelt and go to the script.
    """
    words = split(argv, options)
    args = parser.read(words.options)
    before = itertools.takewhile(lambda word: word != "--", argv)
    for word in (word for word in before if word.startswith("--") and word in words.arguments):
        meant = closest(word.partition("=")[0], options, similarity=0.8)
        if meant is not None:
            silent = "write it after '--' if it is the script's"
            print(f"note: {word} is passed to the script: did you mean {meant}? ({silent})", file=sys.stderr)
    return args, words


def read_words(parser: Parser, argv: Sequence[str], options: Options) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options of a command, which may be anywhere in the line; returns the other words, too."""
    parts = split(argv, options)
    words = [] if parts.script is None else [parts.script, *parts.arguments]
    args = parser.read([*parts.options, *(word for word in words if word.startswith("-"))])
    return args, [word for word in words if not word.startswith("-")]


def choose_command(
    argv: Sequence[str], commands: Collection[str], make_parser: Callable[[str], Parser]
) -> tuple[str, Parser]:
    """The command at the beginning of a line, and its parser; any other word is a usage error."""
    command = argv[0] if argv else ""
    parser = make_parser(command if command in commands else "")
    if command not in commands:
        parser.read([word for word in argv if word in ("-h", "--help")])
        names, place = ", ".join(commands), f" before {command!r}" if command else ""
        unknown = f"unknown command {command!r}: {did_you_mean(command, commands)}"
        is_option = not command or command.startswith("-")
        parser.error(f"missing command{place}: one of {names}" if is_option else unknown)
    return command, parser


class Parser(argparse.ArgumentParser):
    """The parser of a command: no abbreviations, and suggestions for misspelt options."""

    def __init__(
        self, command: str, description: str, options: Options, *, usage: str | None = None, epilog: str = ""
    ) -> None:
        kind = argparse.RawDescriptionHelpFormatter
        prog = f"whale-nebula {command}"
        super().__init__(prog, usage, description, epilog, formatter_class=kind, allow_abbrev=False)
        self.names = list(options)
        for name, (value, text) in options.items():
            if value is None:
                self.add_argument(name, action="store_true", help=text)
            else:
                self.add_argument(name, metavar=value, help=text)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the options in these words; any other word is a usage error."""
        args, unknown = self.parse_known_args(list(words))
        if unknown:
            self.error(f"unknown option {unknown[0]!r}; {did_you_mean(unknown[0], self.names)}")
        return args

    def number(self, name: str, text: str | None) -> int | None:
        """Parse the number of an option, from 0 to 65535; None if it is not given."""
        if text is not None and not (text.isdecimal() and text.isascii() and int(text) < 65536):
            self.error(f"{name} needs a number from 0 to 65535, not {text!r}")
        return None if text is None else int(text)

    def address(self, name: str, text: str) -> tuple[str, int]:
        """Parse the host and port of an option; an IPv6 address is in brackets."""
        host, _, port = text.rpartition(":")
        if not host or not (port.isdecimal() and port.isascii() and int(port) < 65536):
            self.error(f"{name} needs HOST:PORT, not {text!r}")
        return host.removeprefix("[").removesuffix("]"), int(port)

    def amount(self, name: str, text: str | None, default: float) -> float:
        """Parse the amount of an option, a finite number; `default` if it is not given."""
        try:
            amount = default if text is None else float(text)
        except ValueError:
            amount = math.nan
        if not math.isfinite(amount):
            self.error(f"{name} needs a number, not {text!r}")
        return amount


def user_name() -> str:
    """The user of this process; in a container it may be a number without a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


DONE = 0
FAILED = 1
"""Exit status: the script raised, or a check failed."""
USAGE = 2
NOTHING = 3
"""Exit status: the script ran no step to show."""
NO_DATA = 65
"""Exit status: a file has other content."""
NO_FILE = 66
USED_UP = 70
"""Exit status: the workers failed, and the restarts are used up."""
LEFT = 75
"""Exit status: the workers exited on request (SIGTERM, SIGINT, SIGHUP) between two steps, and can be started again."""
CONFIG = 78
"""Exit status: the config, the environment or the certificates are invalid, and nothing was started."""
INTERRUPTED = 130
SIGNALLED = 128
"""Exit status, plus the number of a signal: 137 is SIGKILL, which also ends a frozen worker or one that does not exit.
"""


def shell_code(code: int) -> int:
    """The exit code as a shell shows it, if a signal may have ended the process.

    >>> shell_code(3), shell_code(-9)
    (3, 137)
    """
    return code if code >= 0 else SIGNALLED - code


PARTS = ("code", "what", "where", "why", "mend")


def print_error(error: NebulaError, *, as_json: bool, code: int = FAILED) -> int:
    """Print an error; returns the exit status."""
    if as_json:
        print(json.dumps({part: getattr(error, part) for part in PARTS}))
    else:
        print(error, file=sys.stderr)
    return code


Answer = tuple[Any, str]
"""The output of a command: a document with --json, and a text without."""
Codes = Mapping[type[NebulaError], int]
"""The exit status by the class of an error; the first matching class counts."""


def answer(
    args: argparse.Namespace, run: Callable[[], int | Answer], codes: Codes = MappingProxyType({ConfigError: CONFIG})
) -> int:
    """Run a command and print its answer or its error; returns the exit status. A command that prints its own output
    returns the status. Errors that `codes` does not list result in `FAILED`.
    """
    as_json = getattr(args, "json", False)
    try:
        result = run()
    except NebulaError as error:
        code = next((code for kind, code in codes.items() if isinstance(error, kind)), FAILED)
        return print_error(error, as_json=as_json, code=code)
    if isinstance(result, int):
        return result
    print(json.dumps(result[0], indent=1) if as_json else result[1])
    return DONE


@dataclass(frozen=True)
class Check:
    """The result of a check: its subject, the finding, and a fix.

    `state` is ok, note (it works, but is worth knowing), warning (it works now, but may fail) or bad.
    """

    name: str
    state: str
    found: str
    why: str = ""
    mend: str = ""


def describe_time(remaining: timedelta) -> str:
    """A time in days, hours or minutes, of which there are at least two, or in minutes; "over" if it is not positive.

    >>> [describe_time(timedelta(hours=hours)) for hours in (156, 30, 1.5, -1)]
    ['6 days', '30 hours', '90 minutes', 'over']
    """
    if remaining <= timedelta():
        return "over"
    units = ((timedelta(days=1), "day"), (timedelta(hours=1), "hour"), (timedelta(minutes=1), "minute"))
    unit, word = next((each for each in units if remaining >= 2 * each[0]), units[-1])
    count = round(remaining / unit)
    return f"{count} {word}{'s' * (count != 1)}"


def remark(text: str) -> None:
    """Print a line to stderr, with the name of the program; programs do not parse it."""
    print(f"whale-nebula: {text}", file=sys.stderr, flush=True)


def catch_stop_signals() -> threading.Event:
    """An event that SIGTERM and Ctrl-C set from now on, instead of ending the process."""
    stopped = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: stopped.set())
    return stopped

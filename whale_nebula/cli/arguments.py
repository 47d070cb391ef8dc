"""Separate a command's own arguments from those of the script that it runs."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, NoReturn

from whale_nebula.errors import NebulaError
from whale_nebula.errors.text import did_you_mean


class Words(NamedTuple):
    """Our options, the script (or file), and the arguments that are handed on to it."""

    options: list[str]
    script: str | None
    arguments: list[str]


def split(argv: Sequence[str], flags: Collection[str], valued: Collection[str]) -> Words:
    """Sort the words of a command line: our options may stand anywhere, but after "--" all is the script's.

    >>> split(["--json", "train.py", "--epochs", "3", "--links", "10mbit"], {"--json"}, {"--links"})
    Words(options=['--json', '--links', '10mbit'], script='train.py', arguments=['--epochs', '3'])
    >>> split(["train.py", "--", "--json"], {"--json"}, {"--links"}).arguments
    ['--json']
    """
    options: list[str] = []
    arguments: list[str] = []
    script: str | None = None
    waiting = iter(argv)
    for word in waiting:
        name = word.partition("=")[0]
        if word == "--":
            arguments += waiting
        elif name in flags:
            options.append(word)
        elif name in valued:
            options += [word] if "=" in word else [word, *_next(waiting)]
        elif script is None and word.startswith("-"):
            options.append(word)
        elif script is None:
            script = word
        else:
            arguments.append(word)
    if script is None and arguments:
        script, *arguments = arguments
    return Words(options, script, arguments)


def misspelt(argv: Sequence[str], words: Words, known: Collection[str]) -> list[tuple[str, str]]:
    """Options behind the script, before any "--", that are nearly one of ours, each with the one that it looks like.

    >>> line = ["train.py", "--htlm", "a.html", "--epochs", "3", "--", "--jsno"]
    >>> misspelt(line, split(line, {"--json"}, {"--html"}), ["--html", "--json", "--steps"])
    [('--htlm', '--html')]
    """
    before = argv[: list(argv).index("--")] if "--" in argv else argv
    names = [word.partition("=")[0] for word in before if word.startswith("--") and word in words.arguments]
    found = [(name, difflib.get_close_matches(name, known, n=1, cutoff=_NEARLY)) for name in names]
    return [(name, meant[0]) for name, meant in found if meant]


_NEARLY = 0.8
"""How alike the two must be: a script's own --epochs is not taken for --steps."""


def _next(waiting: object) -> list[str]:
    found = next(waiting, None)  # type: ignore[call-overload]
    return [] if found is None else [found]


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations, and says what was meant."""

    def __init__(self, *, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.names: list[str] = []

    def option(self, name: str, text: str, value: str | None = None) -> None:
        """One option: a flag, or one that is given a value."""
        self.names.append(name)
        if value is None:
            self.add_argument(name, action="store_true", help=text)
        else:
            self.add_argument(name, metavar=value, help=text)

    def options(self, flags: Mapping[str, str], valued: Mapping[str, tuple[str, str]]) -> None:
        """Many of them: flags with their texts, then those with a value, each with that value's name and its text."""
        for name, text in flags.items():
            self.option(name, text)
        for name, (value, text) in valued.items():
            self.option(name, text, value)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The options in these words."""
        found, unknown = self.parse_known_args(list(words))
        if unknown:
            self.refuse(f"there is no option {unknown[0]!r}; {did_you_mean(unknown[0], self.names)}")
        return found

    def refuse(self, why: str) -> NoReturn:
        """End with a usage error."""
        self.error(why)


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


def shell_code(code: int) -> int:
    """How a shell shows the exit code of a process that a signal may have ended.

    >>> shell_code(3), shell_code(-9)
    (3, 137)
    """
    return code if code >= 0 else SIGNALLED - code


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

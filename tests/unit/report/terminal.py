"""A terminal emulator for tests: it interprets the output of our screen, rich and Keras's bar."""

from __future__ import annotations

import io
import re
import sys

import pytest

_WORDS = re.compile(r"\x1b\[(\d*(?:;\d+)*)([A-Za-z])|([\n\r\b])|([^\x1b\n\r\b]+)")


class Terminal(io.StringIO):
    """A stream that is a terminal; `shown` is what stands on it, line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = [""]
        self.row = self.column = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for number, command, control, plain in _WORDS.findall(text):
            if command == "A":
                self.row -= int(number or 1)
            elif command == "K":
                self.lines[self.row] = ""
                self.column = 0
            elif control:
                self._control(control)
            elif plain:
                self._plain(plain)
        return super().write(text)

    def _control(self, control: str) -> None:
        self.column = max(self.column - 1, 0) if control == "\b" else 0
        if control == "\n":
            self.row += 1
            if self.row == len(self.lines):
                self.lines.append("")

    def _plain(self, text: str) -> None:
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + text + line[self.column + len(text) :]
        self.column += len(text)

    @property
    def shown(self) -> list[str]:
        return [line.rstrip() for line in self.lines if line.strip()]


def replace_standard_streams(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Let a terminal be both standard streams; to be called in the test itself, because pytest sets them before it."""
    made = Terminal()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, made)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    return made

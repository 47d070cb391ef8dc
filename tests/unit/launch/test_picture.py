"""Pictures through a pipe: transferred whole without blocking, and kept at the end."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.unit.report.terminal import Terminal
from whale_nebula.launch.worker_output import Picture, Shown, Sink
from whale_nebula.report.screen import Screen

NOWHERE = os.open(os.devnull, os.O_RDONLY)


@dataclass
class Silent:
    """Reads nothing, and says that it was closed."""

    closed: list[bool] = field(default_factory=list)

    def close(self) -> tuple[str, str]:
        self.closed.append(True)
        return "out", "err"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ours, theirs = os.pipe()
    yield ours, theirs
    for fd in (ours, theirs):
        try:
            os.close(fd)
        except OSError:
            continue


def shown(drawn: list[str], *, leave: bool) -> Terminal:
    """What stands on a terminal after so many pictures and a line from somebody else."""
    ours, theirs = os.pipe()
    seen, silent = Terminal(), Silent()
    screen = Screen(seen)
    follower = Shown("gpu/0", silent, ours, screen)
    picture = Picture(theirs, NOWHERE)
    for text in drawn:
        assert picture.draw(text)
    if leave:
        picture.close()
    os.close(theirs)
    assert follower.close() == ("out", "err") and silent.closed == [True]
    screen.write(seen, "a line\n")
    return seen


def test_each_takes_the_place_of_the_one_before_and_the_last_is_left() -> None:
    assert shown(["one\ntwo\n", "three\n"], leave=True).shown == ["three", "a line"]


def test_who_drew_nothing_leaves_the_picture_of_another_where_it_is() -> None:
    seen = Terminal()
    screen = Screen(seen)
    screen.draw("a table\n")
    ours, theirs = os.pipe()
    follower = Shown("gpu/1", Silent(), ours, screen)
    Picture(theirs, NOWHERE).close()
    os.close(theirs)
    follower.close()
    screen.draw("the next\n")
    assert seen.shown == ["the next"]


def test_of_a_worker_that_died_nothing_stays() -> None:
    assert shown(["one\ntwo\n"], leave=False).shown == ["a line"]


def test_a_full_pipe_is_not_waited_for_and_no_picture_is_torn(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    picture = Picture(theirs, NOWHERE)
    large = "x" * (1 << 20) + "\n"
    assert picture.draw(large)
    assert not picture.draw("left out\n")  # the large one has not gone out yet
    read = b""
    while not read.endswith(b"\0"):
        read += os.read(ours, 1 << 20)
        picture.draw("late\n")
    picture.close()
    os.close(theirs)
    with os.fdopen(os.dup(ours), "rb", buffering=0) as rest:
        found = (read + rest.read()).decode().split("\0")
    assert found[0] == large and set(found[1:-2]) <= {"late\n"} and found[-2:] == ["", ""]


def test_nobody_looks_any_more(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    picture = Picture(theirs, NOWHERE)
    os.close(ours)
    assert picture.draw("one\n")
    picture.close()


def test_lines_of_workers_stand_above() -> None:
    ours, theirs = os.pipe()
    seen = Terminal()
    screen = Screen(seen)
    screen.draw("a table\n")
    Sink(theirs, screen).write(b"[gpu/0] a line\n")
    assert os.read(ours, 100) == b"[gpu/0] a line\n" and seen.shown == []
    assert screen.draw("a table\n")
    Sink(theirs, screen).write(b"[gpu/0] half a")
    assert not screen.draw("a table\n")
    os.close(ours)
    os.close(theirs)


def test_it_is_as_large_as_the_launchers_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 31, 117, 0, 0))
    picture = Picture(os.dup(NOWHERE), follower)
    assert picture.size() == os.terminal_size((117, 31))
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 90, 0, 0))
    assert picture.size() == os.terminal_size((90, 20))
    for fd in (leader, follower):
        os.close(fd)

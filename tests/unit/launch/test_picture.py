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
from whale_nebula.launch.worker_output import PictureReader, PictureWriter, Sink
from whale_nebula.report.screen import Screen

NULL_DEVICE = os.open(os.devnull, os.O_RDONLY)


@dataclass
class EmptyReader:
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


def draw_through_pipe(drawn: list[str], *, leave: bool) -> Terminal:
    """What stands on a terminal after so many pictures and a line from somebody else."""
    ours, theirs = os.pipe()
    seen, silent = Terminal(), EmptyReader()
    screen = Screen(seen)
    follower = PictureReader("gpu/0", silent, ours, screen)
    picture = PictureWriter(theirs, NULL_DEVICE)
    for text in drawn:
        assert picture.draw(text)
    if leave:
        picture.close()
    os.close(theirs)
    assert follower.close() == ("out", "err") and silent.closed == [True]
    screen.write(seen, "a line\n")
    return seen


def test_picture_replaces_the_previous_one_and_the_last_stays() -> None:
    assert draw_through_pipe(["one\ntwo\n", "three\n"], leave=True).shown == ["three", "a line"]


def test_writer_without_a_picture_leaves_the_screen_unchanged() -> None:
    seen = Terminal()
    screen = Screen(seen)
    screen.draw("a table\n")
    ours, theirs = os.pipe()
    follower = PictureReader("gpu/1", EmptyReader(), ours, screen)
    PictureWriter(theirs, NULL_DEVICE).close()
    os.close(theirs)
    follower.close()
    screen.draw("the next\n")
    assert seen.shown == ["the next"]


def test_picture_of_a_dead_worker_is_removed() -> None:
    assert draw_through_pipe(["one\ntwo\n"], leave=False).shown == ["a line"]


def test_full_pipe_skips_pictures_without_blocking(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    picture = PictureWriter(theirs, NULL_DEVICE)
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


def test_drawing_after_the_reader_closed_does_not_raise(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    picture = PictureWriter(theirs, NULL_DEVICE)
    os.close(ours)
    assert picture.draw("one\n")
    picture.close()


def test_lines_of_workers_appear_above_the_picture() -> None:
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


def test_picture_has_the_size_of_the_launchers_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 31, 117, 0, 0))
    picture = PictureWriter(os.dup(NULL_DEVICE), follower)
    assert picture.size() == os.terminal_size((117, 31))
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 90, 0, 0))
    assert picture.size() == os.terminal_size((90, 20))
    for fd in (leader, follower):
        os.close(fd)

"""Free ports: distinct for all processes, and usable."""

import socket
import subprocess
import sys

import pytest

from whale_nebula.launch import placement

ASKING = (
    "import sys; from whale_nebula.launch import placement; print(placement.free_port(), flush=True); sys.stdin.read()"
)


def test_no_two_processes_are_given_the_same_port_before_anybody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    asking = f"from whale_nebula.launch import placement; placement._COUNT = 8; {ASKING}"
    command = [sys.executable, "-c", asking]
    others = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        given = [int(each.stdout.readline()) for each in others if each.stdout is not None]
        monkeypatch.setattr(placement, "_COUNT", 8)
        given += [placement.free_port() for _ in range(3)]
    finally:
        for each in others:
            each.communicate(timeout=60)
    assert len(set(given)) == len(given) == 6


def test_a_free_port_can_be_listened_at() -> None:
    with socket.create_server(("127.0.0.1", placement.free_port())) as server:
        assert placement.free_port() != server.getsockname()[1]

"""The emulated slow line between hosts has the requested properties."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WAN = ROOT / "tools" / "wan.py"
DEADLINE = 60

SENDER = """
import socket, time
deadline = time.monotonic() + 10
while True:
    try:
        line = socket.create_connection(("10.77.0.2", 7000), timeout=10)
        break
    except OSError:
        if time.monotonic() > deadline: raise
start = time.monotonic(); line.sendall(bytes(1_000_000)); line.shutdown(socket.SHUT_WR); line.recv(1)
print("seconds", time.monotonic() - start)
"""
READER = """
import socket
server = socket.create_server(("10.77.0.2", 7000)); server.settimeout(20)
line, _ = server.accept()
while line.recv(1 << 16): pass
line.sendall(b"k")
"""

needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or not os.access("/dev/net/tun", os.W_OK), reason="needs root and /dev/net/tun"
)


def run_wan(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, WAN, *words], capture_output=True, text=True, timeout=DEADLINE)


def python_command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@needs_hosts
class TestEmulatedLine:
    def test_transfer_takes_at_least_the_time_of_rate_and_delay(self) -> None:
        ended = run_wan(
            "--rate", "20mbit", "--delay", "20ms", "--", *python_command(SENDER), "---", *python_command(READER)
        )
        assert ended.returncode == 0, ended.stderr
        assert float(ended.stdout.split()[1]) >= 8e6 / 20e6 + 0.04
        crossed = json.loads(ended.stderr.splitlines()[-1])["links"]
        assert crossed["0->1"]["bytes"] > 1_000_000 > crossed["1->0"]["bytes"]

    def test_follow_file_sets_rate_and_delay(self, tmp_path: Path) -> None:
        settings = tmp_path / "line"
        settings.write_text("20mbit 20ms")
        ended = run_wan(
            "--rate", "1gbit", "--follow", str(settings), "--", *python_command(SENDER), "---", *python_command(READER)
        )
        assert ended.returncode == 0, ended.stderr
        assert float(ended.stdout.split()[1]) >= 8e6 / 20e6 + 0.04

    def test_cut_line_delivers_nothing(self) -> None:
        connect = ("bash", "-c", "exec 3<>/dev/tcp/10.77.0.2/7000")  # starts at once, also on a busy machine
        ended = run_wan("--cut", "0s+60s", "--timeout", "2s", "--", *connect, "---", "sleep", "60")
        assert ended.returncode != 0
        links = json.loads(ended.stderr.splitlines()[-1])["links"]
        assert links["0->1"]["bytes"] == 0 and links["0->1"]["lost"] > 0

    def test_missing_command_is_reported(self) -> None:
        ended = run_wan("--", "no-such-command", "---", "true")
        assert ended.returncode == 127 and "site 0: no-such-command" in ended.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "fast", "--", "true", "---", "true"], "'fast' is not a quantity"),
        (["--", "true"], "at least two commands"),
        (["--rate", "1mbit"], "write them after --"),
    ],
)
def test_invalid_arguments_are_reported(words: list[str], message: str) -> None:
    ended = run_wan(*words)
    assert ended.returncode == 2 and message in ended.stderr

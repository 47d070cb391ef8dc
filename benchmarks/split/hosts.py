"""Two emulated hosts on one machine: network namespaces joined by a line with a rate. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

ADDRESSES = ("10.78.0.1", "10.78.0.2")


@contextlib.contextmanager
def join_hosts(rate: str) -> Iterator[list[list[str]]]:
    """Create two hosts joined by a line of `rate` bits a second each way; yields the command prefix of each."""
    names = [f"split{os.getpid()}-{number}" for number in range(2)]
    with contextlib.ExitStack() as stack:
        for name in names:
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "delete", name)
        _run("ip", "-n", names[0], "link", "add", "line", "type", "veth", "peer", "name", "line", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "line")
            _run("ip", "-n", name, "link", "set", "line", "mtu", "9000", "up")
            limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "20ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", "line", "root", *limit)
        yield [["ip", "netns", "exec", name] for name in names]


def _run(*command: str) -> None:
    subprocess.run(command, check=True)

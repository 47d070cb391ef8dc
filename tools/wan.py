#!/usr/bin/env python3
"""Run one command per site, each on its own emulated host; the hosts are connected by a slow wide-area network.

    python tools/wan.py --rate 60mbit --delay 20ms --loss 0.1% -- CMD OF SITE 0 --- CMD OF SITE 1 [--- ...]

Each site is a network namespace with one interface, `wan0`, at 10.77.0.1, 10.77.0.2 and so on. A router in user space
forwards packets between them, with a rate, a one-way delay and a loss for each direction of each pair. Requires root,
/dev/net/tun and iproute2. The environment of a command has its site in WAN_SITE (0, 1 ...).

    --cut 5s+3s         drop all packets for 3 seconds, from second 5 on
    --cut 5s+3s@0:1     drop only packets from site 0 to site 1
    --change 10s=6mbit  change all rates, from second 10 on
    --follow FILE       read rate and delay from a file ("120mbit 20ms") whenever it changes

--cut and --change may be repeated. Their times count from the start or, with --go FILE, from when that file exists. The
exit code is that of the first command that failed, or 0. The last output is a line of JSON on stderr with the bytes and
packets that were delivered in each direction, including headers. The commands are killed when wan.py exits.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import fcntl
import heapq
import json
import math
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET, PR_SET_PDEATHSIG = 0x400454CA, 0x0001, 0x1000, 0x40000000, 1
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "ms": 1e-3, "us": 1e-6, "s": 1.0, "%": 1e-2, "": 1.0}
TICK_SECONDS = 0.05
READS_AT_ONCE = 64
_NET = b"\x0a\x4d\x00"  # 10.77.0

Way = tuple[int, int]
"""A direction: the sending and the receiving site."""


class Cut(NamedTuple):
    """A time span in which packets are dropped, in one direction or in all."""

    start: float
    end: float
    way: Way | None

    def blocks(self, now: float, way: Way) -> bool:
        """Whether packets of this direction are dropped now."""
        return self.start <= now < self.end and self.way in (None, way)


class Site(NamedTuple):
    """An emulated host: its first process, the router's network device, and the socket that starts its command."""

    pid: int
    device: int
    control: socket.socket


def parse_quantity(text: str) -> float:
    """Parse a number with a unit, as bits per second, seconds or a share."""
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz%")
    try:
        return float(number) * UNITS[text[len(number) :]]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a quantity: write 60mbit, 20ms, 5s or 1%") from None


def parse_cut(text: str) -> Cut:
    """Parse START+LENGTH[@FROM:TO]."""
    span, _, way = text.partition("@")
    start, _, length = span.partition("+")
    begin = parse_quantity(start)
    one, _, other = way.partition(":")
    return Cut(begin, begin + parse_quantity(length), (int(one), int(other)) if way else None)


def parse_change(text: str) -> tuple[float, float]:
    """Parse WHEN=RATE."""
    when, _, rate = text.partition("=")
    return parse_quantity(when), parse_quantity(rate)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[list[str]]]:
    """Parse the options, and the command of each site."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=parse_quantity, default=60e6, help="rate of each direction (60mbit)")
    parser.add_argument("--delay", type=parse_quantity, default=0.0, help="one-way delay, such as 20ms")
    parser.add_argument("--loss", type=parse_quantity, default=0.0, help="share of packets that are lost, such as 1%%")
    parser.add_argument(
        "--queue", type=parse_quantity, default=0.2, help="length of the router's queues, in seconds at the rate"
    )
    parser.add_argument("--mtu", type=int, default=9000)
    parser.add_argument("--seed", type=int, default=0, help="seed of losses")
    parser.add_argument(
        "--cut", type=parse_cut, action="append", default=[], help="START+LENGTH[@FROM:TO], such as 5s+3s"
    )
    parser.add_argument("--change", type=parse_change, action="append", default=[], help="WHEN=RATE, such as 10s=6mbit")
    parser.add_argument("--follow", help="file with rate and delay, which may change: 120mbit 20ms")
    parser.add_argument("--go", help="file; times of cuts and changes count from when it exists")
    parser.add_argument("--timeout", type=parse_quantity, default=3600.0)
    words = list(argv)
    if "--" not in words:
        parser.parse_args(words)
        parser.error("no commands: write them after --, separated by ---")
    at = words.index("--")
    options, commands = parser.parse_args(words[:at]), _split_commands(words[at + 1 :])
    if len(commands) < 2 or not all(commands):
        parser.error("at least two commands are required, separated by ---")
    return options, commands


def _split_commands(words: Sequence[str]) -> list[list[str]]:
    commands: list[list[str]] = [[]]
    for word in words:
        if word == "---":
            commands.append([])
        else:
            commands[-1].append(word)
    return commands


def start_site(index: int, command: Sequence[str], mtu: int) -> Site:
    """Fork a process into its own namespace. It sends its network device, and waits until its command may start."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _run_site(index, command, mtu, theirs)
    theirs.close()
    _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(4))
    if not ancillary:
        sys.exit(f"wan.py: cannot create site {index} (see above)")
    return Site(pid, array.array("i", ancillary[0][2])[0], ours)


def _run_site(index: int, command: Sequence[str], mtu: int, parent: socket.socket) -> None:
    """Run in the forked process: create the namespace and its device, send the device, and become the command."""
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare requires root")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"wan0", IFF_TUN | IFF_NO_PI))
    for words in (
        ["link", "set", "lo", "up"],
        ["addr", "add", f"10.77.0.{index + 1}/24", "dev", "wan0"],
        ["link", "set", "wan0", "mtu", str(mtu), "txqueuelen", "2000", "up"],
    ):
        subprocess.run(["ip", *words], check=True)
    parent.sendmsg([b"t"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [device]))])
    parent.recv(1)
    os.environ["WAN_SITE"] = str(index)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"wan.py: site {index}: {command[0]}: {error.strerror}\n")
        os._exit(127)


@dataclass
class Router:
    """Forwards packets between sites: in each direction they are sent at the rate, then delayed. The `queue` has when
    each packet is due; `free_at` is when the direction has sent all earlier ones.
    """

    devices: Sequence[int]
    options: argparse.Namespace
    random: random.Random
    began: float = field(default_factory=time.monotonic)
    has_started: bool = False
    free_at: defaultdict[Way, float] = field(default_factory=lambda: defaultdict(float))
    queue: list[tuple[float, int, Way, bytes]] = field(default_factory=list)
    count: int = 0
    sent: Counter[Way] = field(default_factory=Counter)
    packets: Counter[Way] = field(default_factory=Counter)
    lost: Counter[Way] = field(default_factory=Counter)
    next_follow: float = 0.0

    def follow(self, now: float) -> None:
        """Read rate and delay from the file at intervals. If it is being written, it is read the next time."""
        if not self.options.follow or now < self.next_follow:
            return
        self.next_follow = now + TICK_SECONDS
        try:
            with open(self.options.follow) as file:
                rate, delay = map(parse_quantity, file.read().split())
        except (OSError, ValueError, argparse.ArgumentTypeError):
            return
        self.options.rate, self.options.delay = rate, delay

    def elapsed(self, now: float) -> float:
        """Seconds on the clock of cuts and changes; negative until it starts."""
        if self.options.go and not self.has_started:
            if not os.path.exists(self.options.go):
                return -1.0
            self.has_started, self.began = True, now
        return now - self.began

    def wait(self) -> float:
        """Seconds until the next packet is due, at most `TICK_SECONDS`."""
        return min(TICK_SECONDS, max(0.0, self.queue[0][0] - time.monotonic())) if self.queue else TICK_SECONDS

    def read(self, source: int) -> None:
        """Read the packets that a site sends."""
        for _ in range(READS_AT_ONCE):
            try:
                packet = os.read(self.devices[source], 65536)
            except OSError:
                return
            if packet[0] >> 4 == 4 and packet[16:19] == _NET and 1 <= packet[19] <= len(self.devices):
                self._enqueue(packet, (source, packet[19] - 1), time.monotonic())

    def _enqueue(self, packet: bytes, way: Way, now: float) -> None:
        """Queue a packet, unless it is lost: by a cut, a full queue, or at random."""
        elapsed = self.elapsed(now)
        begin = max(self.free_at[way], now)
        is_cut = any(each.blocks(elapsed, way) for each in self.options.cut)
        if is_cut or begin - now > self.options.queue or self.random.random() < self.options.loss:
            self.lost[way] += 1
            return
        self.free_at[way] = begin + len(packet) * 8 / self._find_rate(elapsed)
        self.count += 1
        heapq.heappush(self.queue, (self.free_at[way] + self.options.delay, self.count, way, packet))

    def _find_rate(self, elapsed: float) -> float:
        latest = max((each for each in self.options.change if each[0] <= elapsed), default=None)
        return latest[1] if latest else self.options.rate

    def deliver(self) -> None:
        """Deliver the packets that are due."""
        now = time.monotonic()
        while self.queue and self.queue[0][0] <= now:
            _, _, way, packet = heapq.heappop(self.queue)
            try:
                os.write(self.devices[way[1]], packet)
            except OSError:
                self.lost[way] += 1
                continue
            self.sent[way] += len(packet)
            self.packets[way] += 1

    def to_json(self) -> str:
        """The delivered bytes and packets, and the lost packets, of each direction as JSON."""
        ways = {
            f"{a}->{b}": {"bytes": self.sent[a, b], "packets": self.packets[a, b], "lost": self.lost[a, b]}
            for a, b in sorted(self.sent | self.lost)
        }
        return json.dumps({"seconds": round(time.monotonic() - self.began, 3), "links": ways})


def route(sites: Sequence[Site], options: argparse.Namespace) -> int:
    """Forward packets until all commands have exited; return the exit code."""
    # Losses are seeded so that a run can be repeated; they need no secure random numbers.
    router = Router([site.device for site in sites], options, random.Random(options.seed))
    poll, end = select.poll(), time.monotonic() + options.timeout
    numbers = {site.device: number for number, site in enumerate(sites)}
    for device in numbers:
        os.set_blocking(device, False)
        poll.register(device, select.POLLIN)
    status: dict[int, int] = {}
    while len(status) < len(sites):
        if time.monotonic() > end:
            sys.stderr.write("wan.py: timeout\n")
            _kill(sites, status)
            end = math.inf
        for device, _ in poll.poll(router.wait() * 1000):
            router.read(numbers[device])
        router.deliver()
        router.follow(time.monotonic())
        _poll_sites(sites, status)
    sys.stderr.write(router.to_json() + "\n")
    return next((status[site.pid] for site in sites if status[site.pid]), 0)


def _kill(sites: Sequence[Site], status: dict[int, int]) -> None:
    for site in sites:
        if site.pid not in status:
            os.killpg(site.pid, signal.SIGKILL)


def _poll_sites(sites: Sequence[Site], status: dict[int, int]) -> None:
    """Add the exit codes of commands that have ended, by process id."""
    for site in sites:
        if site.pid not in status:
            done, code = os.waitpid(site.pid, os.WNOHANG)
            if done:
                status[site.pid] = os.waitstatus_to_exitcode(code)


def main() -> int:
    """Create the sites, start their commands together, and forward packets."""
    options, commands = parse(sys.argv[1:])
    sites = [start_site(number, command, options.mtu) for number, command in enumerate(commands)]
    for site in sites:
        site.control.send(b"g")
    return route(sites, options) & 0xFF


if __name__ == "__main__":
    sys.exit(main())

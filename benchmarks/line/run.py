"""The throughput of a link over gRPC and mutual TLS: speed and CPU on loopback, and its share of a slow line.

    python benchmarks/line/run.py             # loopback, and as root a slow line; writes result.json
    python benchmarks/line/run.py --quick     # little of each; writes nothing

Two processes; one sends tensors of 1 MiB as fast as they are accepted, with at least 16 MiB in flight, the other
receives them. Time counts from the first to the last arrival.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import describe_machine, parser, verdict, write

ROOT = Path(__file__).resolve().parents[2]
WAN = ROOT / "tools" / "wan.py"
SENDER, RECEIVER, RUN = "gpu/0", "npu/0", "line"
MIB = 1 << 20
CPU_BAR, SHARE_BAR = 2.5, 0.95


def run_side(here: str, folder: str, addresses: dict[str, str], count: int, sealed: bool) -> None:
    """Run one of the two processes; prints its measurement as JSON."""
    import numpy as np

    from whale_nebula.security import Credentials, CurrentCredentials, Files, Identity, Prover
    from whale_nebula.transport.grpc.links import GrpcLinks, Place
    from whale_nebula.transport.peer import PeerLink
    from whale_nebula.transport.protocol import Key
    from whale_nebula.wire.greeting import Greeting

    there = RECEIVER if here == SENDER else SENDER
    credentials = Credentials.load(Files.in_folder(folder, Identity.of_worker(RUN, here)))
    place = Place(RUN, here, {there: addresses[there]}, addresses[here], credentials=credentials)
    if sealed:  # as for gateways, but without them
        prover = Prover(CurrentCredentials(credentials))
        GrpcLinks._make_link = lambda self, carrier, options: PeerLink(  # type: ignore[method-assign]
            carrier, Greeting(RUN, here, there), place.workers, prover=prover, sealed=True, **options
        )
    links = GrpcLinks(place)
    link = links.links[there]
    link.post({"kind": "SESSION", "about": "HELLO"})
    link.take("SESSION", 60.0)
    keys = [Key("forward", 1, 0, 0, -1, slot, SENDER, RECEIVER) for slot in range(count)]
    link.post({"kind": "SESSION", "about": "STEP", "program": 1, "step": 0, "rows": 1, "inputs": {}})
    started_at, cpu_before = time.monotonic(), _read_cpu_seconds()
    if here == SENDER:
        tensor = np.random.default_rng(0).integers(0, 255, MIB, np.uint8)
        for key in keys:
            link.send(key, tensor)
        link.take("PING", 600.0)
    else:
        for number, key in enumerate(keys):
            link.receive(key, 600.0)
            started_at = time.monotonic() if number == 0 else started_at
        link.post({"kind": "PING", "last": True})
    measurement = {
        "seconds": time.monotonic() - started_at,
        "cpu": _read_cpu_seconds() - cpu_before,
        "lanes": link.state().connections,
    }
    links.close()
    print(json.dumps(measurement), flush=True)


def _read_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(count: int, hosts: tuple[str, str], wan: list[str], *, sealed: bool = False) -> dict[str, Any]:
    """Run both processes, over a line if there is one; speed by the receiver's clock, CPU of both."""
    from whale_nebula.security import issue_ephemeral

    port = 20_000 + os.getpid() % 10_000
    addresses = {SENDER: f"{hosts[0]}:{port}", RECEIVER: f"{hosts[1]}:{port + 1}"}
    folder = next(iter(issue_ephemeral(RUN, (SENDER, RECEIVER)).values())).cert.parent
    outputs = {here: tempfile.NamedTemporaryFile("r", suffix=".json") for here in addresses}  # noqa: SIM115
    commands = []
    for here, file in outputs.items():
        call = [__file__, "--side", here, "--folder", str(folder), "--addresses", json.dumps(addresses)]
        call += ["--count", str(count), "--out", file.name] + ["--sealed"] * sealed
        commands.append([sys.executable, *map(str, call)])
    try:
        if wan:
            command = [sys.executable, str(WAN), *wan, "--", *commands[0], "---", *commands[1]]
            subprocess.run(command, check=True, timeout=600)
        else:
            processes = [subprocess.Popen(command) for command in commands]
            for each in processes:
                if each.wait(timeout=600):
                    raise SystemExit("a side has failed")
        measurements = {here: json.loads(file.read()) for here, file in outputs.items()}
    finally:
        shutil.rmtree(folder)
    size = count * MIB
    return {
        "mib_per_second": round((count - 1) / measurements[RECEIVER]["seconds"], 1),
        "bits_per_second": 8 * (size - MIB) / measurements[RECEIVER]["seconds"],
        "cpu_s_per_gb": round(1e9 * sum(each["cpu"] for each in measurements.values()) / size, 2),
        "cpu_sender": round(1e9 * measurements[SENDER]["cpu"] / size, 2),
        "cpu_receiver": round(1e9 * measurements[RECEIVER]["cpu"] / size, 2),
    }


def main() -> int:
    """Measure, print and write the result."""
    options = parser(__doc__, "little of each; writes nothing")
    options.add_argument("--side", help=argparse.SUPPRESS)
    for name in ("--folder", "--addresses", "--out"):
        options.add_argument(name, help=argparse.SUPPRESS)
    options.add_argument("--count", type=int, help=argparse.SUPPRESS)
    options.add_argument("--sealed", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.side:
        with open(arguments.out, "w") as sys.stdout:
            run_side(
                arguments.side, arguments.folder, json.loads(arguments.addresses), arguments.count, arguments.sealed
            )
        return 0
    machine_description = describe_machine()
    loopback = ("127.0.0.1", "127.0.0.1")
    count = 400 if arguments.quick else 1500
    on_loopback = {sealed: measure(count, loopback, [], sealed=sealed) for sealed in (False, True)}
    rows: list[list[Any]] = [["what", "measured", "bar", "verdict"]]
    for sealed, result in on_loopback.items():
        cpu, name = result["cpu_s_per_gb"], "sealed, in TLS" if sealed else "TLS"
        rows.append([f"loopback, {name}: MiB/s", result["mib_per_second"], "", ""])
        rows.append([f"loopback, {name}: CPU seconds per GB, both ends", cpu, CPU_BAR, verdict(cpu, CPU_BAR)])
    slow: dict[str, Any] = {}
    if os.geteuid() == 0 and Path("/dev/net/tun").exists():
        wan = ["--rate", "60mbit", "--delay", "20ms"]
        slow = measure(30 if arguments.quick else 150, ("10.77.0.1", "10.77.0.2"), wan)
        share = round(slow["bits_per_second"] / 60e6, 3)
        share_verdict = verdict(share, SHARE_BAR, least=True)
        rows.append(["60 Mbit/s, 40 ms round trip: share of the line", share, SHARE_BAR, share_verdict])
    for row in rows:
        print(" | ".join(map(str, row)))
    if not arguments.quick:
        result = {
            "machine": machine_description,
            "loopback": on_loopback[False],
            "loopback_sealed": on_loopback[True],
            "line": slow,
        }
        write(__file__, result, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

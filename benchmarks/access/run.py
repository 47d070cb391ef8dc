"""The cost of accounts: decisions in a large registry, and training steps during an attack by password guesses.

    python benchmarks/access/run.py            # everything; writes result.json
    python benchmarks/access/run.py --quick    # a few, to see that it runs; writes nothing

The registry has 1,000 accounts with 10 secrets each. A decision is the median of many; those with scrypt's deliberate
delay are listed separately. The step is that of a small model, in one process; the service runs in another one of the
same machine, and a third, with the lowest priority, opens a connection for each guess, at the service's own port or at
that of a gateway. An exchange is a transfer in both directions between two workers through their gateways, at 60
Mbit/s. Steps and exchanges with and without guesses alternate.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import socket
import ssl
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from common import describe_machine, parser, verdict, write

from whale_nebula.accounts import service
from whale_nebula.accounts.login import LoginIssuer
from whale_nebula.accounts.registry import PASSWORD, TOKEN, Registry
from whale_nebula.accounts.service import serve
from whale_nebula.errors import AccountError, LoginError
from whale_nebula.gateway.settings import GatewaySettings
from whale_nebula.launch.gateways import start_gateway
from whale_nebula.security import Credentials, authority, issue_ephemeral
from whale_nebula.security.authority import Authority
from whale_nebula.transport.grpc.links import GrpcLinks, Place
from whale_nebula.transport.handover import LOGIN
from whale_nebula.transport.protocol import Key

ACCOUNTS, SECRETS = 1000, 10
DECISION_BAR_MS, STEP_BAR = 1.0, 1.05
GUESSES_A_SECOND = 50
RATE = 60e6
PASSWORD_TEXT = "a sentence to remember"


def measure_decisions(folder: Path, accounts: int, times: int) -> list[dict[str, Any]]:
    """Milliseconds of operations of a large registry."""
    with contextlib.closing(fill_registry(folder, accounts)) as registry:
        last = f"user{accounts - 1}"
        token = registry.make_secret(last, TOKEN, 1.0)

        def guess() -> None:
            with contextlib.suppress(LoginError):
                registry.log_in("nobody", PASSWORD, "guess")

        rows = [
            _measure_operation("an account is found", times, lambda: registry.find(last), DECISION_BAR_MS),
            _measure_operation(
                "the certificates of an account", times, lambda: registry.list_certificates(last), DECISION_BAR_MS
            ),
            _measure_operation("its secrets", times, lambda: registry.list_secrets(last), DECISION_BAR_MS),
            _measure_operation("somebody logs in by a token", times // 10, lambda: registry.log_in(last, TOKEN, token)),
            _measure_operation("somebody guesses", times // 10, guess),
            _measure_operation(
                "a change, signed and on disk", times // 10, lambda: registry.record_event("login", last, "deny")
            ),
        ]
    started = time.perf_counter()
    with contextlib.closing(Registry(folder, authority.load(folder))) as registry:
        registry.find(last)
    return [*rows, {"what": "opened and checked", "ms": round(1e3 * (time.perf_counter() - started), 2)}]


def fill_registry(folder: Path, accounts: int) -> Registry:
    """Create a registry with this number of accounts in one change."""
    registry = Registry(folder, authority.load(folder))
    with registry.write_transaction():
        database = registry.database
        for number in range(accounts):
            row = (f"user{number}", "trainer", "enabled", "", 1, 0, "", "2026-01-01T00:00:00Z")
            database.execute("insert into account values (?, ?, ?, ?, ?, ?, ?, ?)", row)
            for secret in range(SECRETS):
                more = (f"{number:04x}{secret:04x}", row[0], TOKEN, f"{number}-{secret}", "2999-01-01T00:00:00Z")
                database.execute("insert into secret values (?, ?, ?, ?, ?)", more)
    return registry


def _measure_operation(what: str, times: int, act: Callable[[], object], bar: float | None = None) -> dict[str, Any]:
    taken = []
    for _ in range(max(5, times)):
        started = time.perf_counter()
        act()
        taken.append(1e3 * (time.perf_counter() - started))
    middle = statistics.median(taken)
    row = {"what": what, "ms": round(middle, 3), "worst_ms": round(max(taken), 2)}
    return {**row, "bar_ms": bar, "verdict": verdict(middle, bar)} if bar else row


# ---------------------------------------------------------------------- a step beside guesses
def _serve(folder: str, pipe: Any) -> None:
    home = Path(folder)
    signer = authority.load(home)
    with contextlib.closing(Registry(home, signer)) as registry:
        with contextlib.suppress(AccountError):  # it exists from an earlier call
            registry.add("ana", password=PASSWORD_TEXT)
        with serve(LoginIssuer(registry, signer, home), "gpu", "127.0.0.1", 0, home) as port:
            pipe.send(port)
            pipe.recv()


def _guess(port: int, going: Any, over: Any, count: Any) -> None:
    os.nice(19)  # an attacker uses another machine's cores
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([LOGIN])
    body = json.dumps({"account": "ana", "kind": "password", "secret": "guess", "requests": []}).encode()
    data = f"POST {service.LOGIN} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    def once() -> None:
        with contextlib.suppress(OSError):
            with (
                socket.create_connection(("127.0.0.1", port), 5) as plain,
                context.wrap_socket(plain) as secured,
            ):
                secured.sendall(data)
                secured.recv(4096)
            with count.get_lock():
                count.value += 1

    due = time.monotonic()
    while not over.is_set():
        if not going.is_set():
            due = time.monotonic()
            time.sleep(0.01)
            continue
        threading.Thread(target=once, daemon=True).start()
        due += 1 / GUESSES_A_SECOND
        time.sleep(max(0.0, due - time.monotonic()))


def measure_steps(folder: Path, rounds: int, per_round: int, gateway: bool) -> dict[str, Any]:
    """A step during guesses, as a multiple of one without."""
    import keras

    import whale_nebula as nb

    inputs = keras.Input((256,))
    with nb.cluster():
        with nb.stage(cluster="gpu"):
            hidden = keras.layers.Dense(1024, activation="relu")(inputs)
        with nb.stage(cluster="npu"):
            outputs = keras.layers.Dense(1)(hidden)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    x, y = np.ones((512, 256), "float32"), np.ones((512, 1), "float32")
    model.train_on_batch(x, y)
    at = "at a gateway's port" if gateway else "at the service's port"
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(run_gateways(folder, None))[0] if gateway else None
        return _compare_under_attack(
            folder, port, lambda: model.train_on_batch(x, y), rounds, per_round, f"a step, guesses {at}"
        )


def _compare_under_attack(
    folder: Path, port: int | None, act: Callable[[], object], rounds: int, per_round: int, what: str
) -> dict[str, Any]:
    """The time of an operation during guesses, as a multiple of the time without."""
    found: dict[bool, list[float]] = {False: [], True: []}
    with _run_attacker(folder, port) as (going, count):
        for number in range(2 * rounds):
            attacked = bool(number % 2)
            (going.set if attacked else going.clear)()
            time.sleep(0.2)
            started = time.perf_counter()
            for _ in range(per_round):
                act()
            found[attacked].append((time.perf_counter() - started) / per_round)
        answered = count.value
    quiet, busy = (statistics.median(found[which]) for which in (False, True))
    ratio = round(busy / quiet, 3)
    return {"what": f"{what}: {GUESSES_A_SECOND} a second ({answered} answered)", "ms": round(1e3 * busy, 2),
            "without_ms": round(1e3 * quiet, 2), "ratio": ratio, "bar": STEP_BAR,
            "verdict": verdict(ratio, STEP_BAR)}  # fmt: skip


# ---------------------------------------------------------------------- through gateways
@contextlib.contextmanager
def run_gateways(folder: Path, rate: float | None, front: bool = True) -> Iterator[tuple[int, Callable[[int], None]]]:
    """Two gateways in separate processes with a worker behind each; yields the first one's port, and a function that
    makes both workers exchange a number of bytes. With a `front` logins use the gateway's port, too.
    """
    names = ("gpu/0", "npu/0", "gpu/gateway", "npu/gateway")
    made = issue_ephemeral("mt", names)
    where = dict(zip(names, (f"127.0.0.1:{port}" for port in find_free_ports(4)), strict=True))
    workers = {name: where[name] for name in names[:2]}
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, made[names[0]].cert.parent)
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for cluster, other in (("gpu", "npu"), ("npu", "gpu")):
            name = f"{cluster}/gateway"
            site = GatewaySettings(
                "mt", cluster, where[name], workers, {other: where[f"{other}/gateway"]}, {other: rate}, made[name],
                home / f"{cluster}.jsonl", services=folder if front else None,
            )  # fmt: skip
            process = start_gateway(site)
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None and process.stdout.readline()
        links = {
            name: stack.enter_context(contextlib.closing(GrpcLinks(Place(
                "mt", name, {each: at for each, at in workers.items() if each != name}, workers[name],
                where[f"{name[:3]}/gateway"], Credentials.load(made[name]),
            ))))
            for name in workers
        }  # fmt: skip
        ends = [(links[one].links[other], one, other) for one, other in (names[:2], names[1::-1])]
        numbers = itertools.count()

        def exchange(size: int) -> None:
            tensor, slot = np.ones(size // 4, np.float32), next(numbers)
            for link, one, other in ends:
                link.send(Key("forward", 1, 0, 0, -1, slot, one, other), tensor)
            for link, one, other in ends:
                link.receive(Key("forward", 1, 0, 0, -1, slot, other, one), 60.0)

        for link, *_ in ends:
            link.post({"kind": "SESSION", "about": "STEP", "program": 1, "step": 0, "rows": 1, "inputs": {}})
        for link, *_ in ends:
            link.take("SESSION", 60.0)
        exchange(1 << 12)
        yield int(where["gpu/gateway"].rpartition(":")[2]), exchange


def find_free_ports(count: int) -> list[int]:
    """Free ports."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(each.getsockname()[1]) for each in held]


def measure_exchanges(folder: Path, rounds: int, per_round: int) -> list[dict[str, Any]]:
    """An exchange during guesses; and the cost of the front for links, compared with gateways without one."""
    with run_gateways(folder, RATE / 8) as (port, exchange):
        what = "an exchange of 256 KiB at 60 Mbit/s, guesses at the gateway's port"
        rows = [_compare_under_attack(folder, port, lambda: exchange(256 << 10), rounds, per_round, what)]
    found: dict[tuple[int, bool], list[float]] = {}
    for _ in range(max(1, rounds // 3)):
        for front in (False, True):
            with run_gateways(folder, None, front) as (_, exchange):
                for size in (1 << 12, 1 << 20):
                    started = time.perf_counter()
                    for _ in range(4 * per_round):
                        exchange(size)
                    seconds = (time.perf_counter() - started) / (4 * per_round)
                    found.setdefault((size, front), []).append(seconds)
    for size, name in ((1 << 12, "4 KiB"), (1 << 20, "1 MiB")):
        without, shared = (statistics.median(found[size, front]) for front in (False, True))
        rows.append({"what": f"an exchange of {name} on loopback, through a port that logins share",
                     "ms": round(1e3 * shared, 2), "without_ms": round(1e3 * without, 2),
                     "ratio": round(shared / without, 3)})  # fmt: skip
    return rows


@contextlib.contextmanager
def _run_attacker(folder: Path, port: int | None) -> Iterator[tuple[Any, Any]]:
    """A service and an attacker in separate processes; guesses are made while the event is set, at the port of a
    gateway if one is given.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe()
    going, over, count = spawn.Event(), spawn.Event(), spawn.Value("i", 0)
    serving = spawn.Process(target=_serve, args=(str(folder), sender), daemon=True)
    serving.start()
    own = receiver.recv()
    guessing = spawn.Process(target=_guess, args=(port or own, going, over, count), daemon=True)
    guessing.start()
    try:
        yield going, count
    finally:
        over.set()
        receiver.send("over")
        for each in (guessing, serving):
            each.join(10)
            each.kill()


def main() -> int:
    """Measure, print and write the result."""
    quick = parser(__doc__, "a few of each; writes nothing").parse_args().quick
    about = describe_machine()
    with tempfile.TemporaryDirectory() as name:
        large, small = Path(name) / "large", Path(name) / "small"
        for each in (large, small):
            authority.create(each, Authority.create("mt", {}, bound=["gpu"]))
        rows = measure_decisions(large, 50 if quick else ACCOUNTS, 50 if quick else 1000)
        rows += [measure_steps(small, *((1, 5) if quick else (12, 60)), gateway) for gateway in (False, True)]
        rows += measure_exchanges(small, *((1, 5) if quick else (12, 20)))
    for row in rows:
        print(row)
    if not quick:
        table = [("what", "median", "worst", "bar", "verdict"), *map(_describe, rows)]
        write(__file__, {"machine": about, "rows": rows}, table)
    return 0


def _describe(row: dict[str, Any]) -> tuple[str, ...]:
    if "ratio" in row:
        bar = f"{row['bar']} x" if "bar" in row else ""
        return row["what"], f"{row['ratio']:.3f} x", "", bar, row.get("verdict", "")
    bar = f"{row['bar_ms']:g} ms" if "bar_ms" in row else ""
    worst = f"{row['worst_ms']:g} ms" if "worst_ms" in row else ""
    return row["what"], f"{row['ms']:g} ms", worst, bar, row.get("verdict", "")


if __name__ == "__main__":
    sys.exit(main())

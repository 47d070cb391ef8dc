"""What accounts cost: decisions in a large registry, and a step of training beside somebody who guesses passwords.

    python benchmarks/access/run.py            # everything; writes result.json
    python benchmarks/access/run.py --quick    # a few, to see that it runs; writes nothing

The registry has 1,000 accounts with 10 secrets each. A decision is the median of many; what waits for scrypt on purpose
stands apart. The step is that of a small model, in one process; the service runs in another one of the same machine,
and a third, with the lowest priority, opens a connection for each guess. Steps with and without guesses take turns.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
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

from common import machine, parser, verdict, write

from whale_nebula.accounts import service
from whale_nebula.accounts.login import Desk
from whale_nebula.accounts.registry import PASSWORD, TOKEN, Registry
from whale_nebula.accounts.service import serve
from whale_nebula.errors import LoginError
from whale_nebula.security import authority
from whale_nebula.security.authority import Authority

ACCOUNTS, SECRETS = 1000, 10
DECISION_BAR_MS, STEP_BAR = 1.0, 1.05
GUESSES_A_SECOND = 50
GOOD = "a sentence to remember"


def decisions(folder: Path, accounts: int, times: int) -> list[dict[str, Any]]:
    """Milliseconds of what is asked of a large registry."""
    with contextlib.closing(fill(folder, accounts)) as registry:
        last = f"user{accounts - 1}"
        token = registry.make_secret(last, TOKEN, 1.0)

        def guess() -> None:
            with contextlib.suppress(LoginError):
                registry.log_in("nobody", PASSWORD, "guess")

        rows = [
            _row("an account is found", times, lambda: registry.find(last), DECISION_BAR_MS),
            _row("the certificates of an account", times, lambda: registry.certificates(last), DECISION_BAR_MS),
            _row("its secrets", times, lambda: registry.list_secrets(last), DECISION_BAR_MS),
            _row("somebody logs in by a token", times // 10, lambda: registry.log_in(last, TOKEN, token)),
            _row("somebody guesses", times // 10, guess),
            _row("a change, signed and on disk", times // 10, lambda: registry.note("login", last, "deny")),
        ]
    started = time.perf_counter()
    with contextlib.closing(Registry(folder, authority.load(folder))) as registry:
        registry.find(last)
    return [*rows, {"what": "opened and checked", "ms": round(1e3 * (time.perf_counter() - started), 2)}]


def fill(folder: Path, accounts: int) -> Registry:
    """A registry with so many accounts, written in one change."""
    registry = Registry(folder, authority.load(folder))
    with registry.change():
        database = registry.database
        for number in range(accounts):
            row = (f"user{number}", "trainer", "enabled", "", 1, 0, "", "2026-01-01T00:00:00Z")
            database.execute("insert into account values (?, ?, ?, ?, ?, ?, ?, ?)", row)
            for secret in range(SECRETS):
                more = (f"{number:04x}{secret:04x}", row[0], TOKEN, f"{number}-{secret}", "2999-01-01T00:00:00Z")
                database.execute("insert into secret values (?, ?, ?, ?, ?)", more)
    return registry


def _row(what: str, times: int, act: Callable[[], object], bar: float | None = None) -> dict[str, Any]:
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
    signs = authority.load(home)
    with contextlib.closing(Registry(home, signs)) as registry:
        registry.add("ana", password=GOOD)
        with serve(Desk(registry, signs, home), "gpu", "127.0.0.1", 0) as port:
            pipe.send(port)
            pipe.recv()


def _guess(port: int, going: Any, over: Any, count: Any) -> None:
    os.nice(19)  # it would be on another machine
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
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


def steps(folder: Path, rounds: int, a_round: int) -> dict[str, Any]:
    """A step beside guesses, as a multiple of one without."""
    import keras
    import numpy as np

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
    with _attacked(folder) as (going, count):
        found: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * rounds):
            attacked = bool(number % 2)
            (going.set if attacked else going.clear)()
            time.sleep(0.2)
            started = time.perf_counter()
            for _ in range(a_round):
                model.train_on_batch(x, y)
            found[attacked].append((time.perf_counter() - started) / a_round)
        made = count.value
    quiet, busy = (statistics.median(found[which]) for which in (False, True))
    what = f"a step beside {GUESSES_A_SECOND} guesses a second ({made} answered)"
    ratio = round(busy / quiet, 3)
    return {"what": what, "ms": round(1e3 * busy, 2), "without_ms": round(1e3 * quiet, 2), "ratio": ratio,
            "bar": STEP_BAR, "verdict": verdict(ratio, STEP_BAR)}  # fmt: skip


@contextlib.contextmanager
def _attacked(folder: Path) -> Iterator[tuple[Any, Any]]:
    """A service and somebody who guesses, in processes of their own; he does so while the event is set."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    going, over, count = spawn.Event(), spawn.Event(), spawn.Value("i", 0)
    serving = spawn.Process(target=_serve, args=(str(folder), theirs), daemon=True)
    serving.start()
    port = ours.recv()
    guessing = spawn.Process(target=_guess, args=(port, going, over, count), daemon=True)
    guessing.start()
    try:
        yield going, count
    finally:
        over.set()
        ours.send("over")
        for each in (guessing, serving):
            each.join(10)
            each.kill()


def main() -> int:
    """Measure, print, write."""
    quick = parser(__doc__, "a few of each; writes nothing").parse_args().quick
    about = machine()
    with tempfile.TemporaryDirectory() as name:
        large, small = Path(name) / "large", Path(name) / "small"
        for each in (large, small):
            authority.create(each, Authority.fresh("mt", {}, bound=["gpu"]))
        rows = decisions(large, 50 if quick else ACCOUNTS, 50 if quick else 1000)
        rows.append(steps(small, *((1, 5) if quick else (12, 60))))
    for row in rows:
        print(row)
    if not quick:
        table = [("what", "median", "worst", "bar", "verdict"), *map(_describe, rows)]
        write(__file__, {"machine": about, "rows": rows}, table)
    return 0


def _describe(row: dict[str, Any]) -> tuple[str, ...]:
    if "ratio" in row:
        return row["what"], f"{row['ratio']:.3f} x", "", f"{row['bar']} x", row["verdict"]
    bar = f"{row['bar_ms']:g} ms" if "bar_ms" in row else ""
    worst = f"{row['worst_ms']:g} ms" if "worst_ms" in row else ""
    return row["what"], f"{row['ms']:g} ms", worst, bar, row.get("verdict", "")


if __name__ == "__main__":
    sys.exit(main())

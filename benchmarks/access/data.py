"""The cost of reading an owner's data: over lines, compared with files, and of decisions and records for each batch.

    python benchmarks/access/data.py            # everything; writes data.json
    python benchmarks/access/data.py --quick    # a few, to see that it runs; writes nothing

The service runs in a separate process, and is read at its own port and at that of a gateway. Over loopback and over an
emulated line of 60 Mbit/s with 20 ms each way (tools/wan.py, as root), rows of 4 KB are read in batches of 256, as
columns and as a `tf.data.Dataset`; bytes are those of rows, without headers. Steps fed by `nb.data` on the owner's
machine alternate with steps fed by `tf.data` from the same TFRecord files. Decisions and records are timed alone, in a
registry of 1,000 accounts with 10 grants each, as a share of that step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from common import describe_machine, parser, verdict, write

from whale_nebula.accounts.registry import Registry
from whale_nebula.config.place import Place
from whale_nebula.datasets.grants import Grants
from whale_nebula.datasets.guard import Guard, Reader, ReadRequest, Usage
from whale_nebula.datasets.interface import parse_interface
from whale_nebula.datasets.reading import RemoteClient, RowSelection, open_remote
from whale_nebula.datasets.service import open_service
from whale_nebula.gateway.settings import GatewaySettings
from whale_nebula.launch.gateways import start_gateway
from whale_nebula.security import GATEWAY, Files, Identity, authority, files, issue
from whale_nebula.security.audit import AuditLog
from whale_nebula.security.authority import Authority

ACCOUNTS, GRANTS = 1000, 10
WIDTH, BATCH, FEATURES = 1024, 256, 256
LOOPBACK_BAR, LINE_BAR, STEP_BAR, SHARE_BAR, DECISION_BAR = 200.0, 0.95, 1.02, 0.01, 1.0
RATE = 60e6
END = "2999-01-01T00:00:00Z"
ROOT = Path(__file__).resolve().parents[2]


def make_rows() -> dict[str, Any]:
    """Rows of 4 KB; a factory that the interface names."""
    return {"x": np.random.default_rng(1).random((20_000, WIDTH), np.float32)}


def make_site(folder: Path, accounts: int) -> None:
    """Create an authority, accounts with grants, two datasets, and the certificate of one of the accounts."""
    signer = Authority.create("mt", {}, bound=["gpu"])
    authority.create(folder / "certs", signer)
    write_records(folder / "rows.tfrecord", 64 * BATCH)
    with contextlib.closing(Registry(folder / "certs", signer)) as registry:
        grants, database = Grants(registry), registry.database
        for fields in (
            {"name": "wide", "source": {"factory": "data:make_rows"}, "schema": {"x": _column(WIDTH)}},
            {
                "name": "records",
                "source": {"tfrecord": "*.tfrecord", "features": {"x": _column(FEATURES)}},
                "schema": {"x": _column(FEATURES)},
            },
        ):
            grants.publish(parse_interface(Place({**fields, "expires": END})), folder)
        with registry.write_transaction():
            for number in range(accounts):
                row = (f"user{number}", "trainer", "enabled", "", 1, 0, "", "2026-01-01T00:00:00Z")
                database.execute("insert into account values (?, ?, ?, ?, ?, ?, ?, ?)", row)
                for grant in range(GRANTS):
                    name = ("wide", "records")[grant % 2]
                    permission_row = (
                        f"{number:04x}{grant:04x}",
                        name,
                        row[0],
                        f"study {grant}",
                        "granted",
                        row[-1],
                        row[-1],
                        END,
                    )
                    database.execute("insert into permission values (?, ?, ?, ?, ?, ?, ?, ?)", permission_row)
    _certify(folder, signer, f"user{accounts - 1}")


def _column(width: int) -> dict[str, Any]:
    return {"dtype": "float32", "shape": [width]}


def _certify(folder: Path, signer: Authority, account: str) -> None:
    folder_of_account, identity, key, now = folder / "of-gpu", Identity("mt", "gpu"), authority.make_key(), files.now()
    folder_of_account.mkdir(mode=0o700)
    until = now + timedelta(days=1)
    certificate = authority.make_process_certificate(
        identity, key.public_key(), signer.certificate, signer.key, until, now, account
    )
    paths = Files.in_folder(folder_of_account, identity)
    files.write(paths.cert, authority.encode_certificate(certificate), files.PUBLIC)
    files.write(paths.key, authority.encode_key(key), files.SECRET)
    files.write(paths.ca, authority.encode_certificate(signer.certificate), files.PUBLIC)


def write_records(path: Path, count: int) -> None:
    """Write a TFRecord file."""
    import tensorflow as tf

    values = np.random.default_rng(2).random((count, FEATURES), np.float32)
    with tf.io.TFRecordWriter(str(path)) as file:
        for row in values:
            feature = tf.train.Feature(float_list=tf.train.FloatList(value=row))
            example = tf.train.Example(features=tf.train.Features(feature={"x": feature}))
            file.write(example.SerializeToString())


# ---------------------------------------------------------------------- over lines
def serve(folder: str, host: str, port: int, ready: Any = None) -> None:
    """Run the owner's service until its process is ended."""
    home = Path(folder)
    with open_service(home / "certs", authority.load(home / "certs"), "gpu", host, port, home / "certs") as bound:
        if ready is not None:
            ready.send(bound)
        time.sleep(3600)


@contextlib.contextmanager
def run_service(folder: Path) -> Iterator[int]:
    """The service on loopback in a separate process; yields its port."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe()
    process = spawn.Process(target=serve, args=(str(folder), "127.0.0.1", 0, sender), daemon=True)
    process.start()
    try:
        yield int(receiver.recv())
    finally:
        process.kill()
        process.join(10)


@contextlib.contextmanager
def run_gateway(folder: Path, listen: str) -> Iterator[int]:
    """A gateway to the service in a separate process; yields its port."""
    certs, who = folder / "certs", Identity("mt", "gpu", GATEWAY)
    paths = Files.in_folder(certs, who)
    if not paths.cert.exists():
        issue.issue(certs, authority.load(certs), [who])
    process = start_gateway(
        GatewaySettings("mt", "gpu", listen, {}, {"npu": None}, {}, paths, folder / "gate.jsonl", services=certs)
    )
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline().decode().partition("listens on ")[2].partition(";")[0].rpartition(":")[2])
    finally:
        process.kill()
        process.wait(10)


def read_columns(remote: RemoteClient, batches: int) -> float:
    """The rate of reading columns, in bytes of rows a second."""
    about = remote.describe("wide")
    found = remote.read(RowSelection("wide", 1, 0, 0, batches * BATCH, BATCH), about)
    size, started = 0, 0.0
    for number, columns in enumerate(found):
        if number:  # the first batch includes connection and opening
            size += columns["x"].nbytes
        else:
            started = time.perf_counter()
    return size / (time.perf_counter() - started)


def read_dataset(folder: Path, port: int, batches: int) -> float:
    """The rate of reading through `nb.data`."""
    import whale_nebula as nb

    nb.init({"run": "mt", "data": {"gpu": {"at": f"127.0.0.1:{port}", "folder": str(folder / "of-gpu")}}})
    try:
        size, started = 0, 0.0
        for number, batch in enumerate(nb.data("gpu://wide", batch=BATCH, seed=1, purpose="study 0").take(batches)):
            if number:
                size += batch["x"].shape[0] * WIDTH * 4
            else:
                started = time.perf_counter()
        return size / (time.perf_counter() - started)
    finally:
        nb.shutdown()


def measure_loopback(folder: Path, rounds: int, batches: int) -> list[dict[str, Any]]:
    """Megabytes a second over loopback, the median of several passes."""
    with run_service(folder) as own, run_gateway(folder, "127.0.0.1:0") as shared:
        found = {}
        for name, port in (("", own), (", by a gateway's port", shared)):
            remote = open_remote(f"127.0.0.1:{port}", folder / "of-gpu", "mt", "gpu", Reader("", "", purpose="study 0"))
            found[f"loopback, as columns{name}: MB/s"] = [read_columns(remote, batches) / 1e6 for _ in range(rounds)]
            found[f"loopback, as a tf.data.Dataset{name}: MB/s"] = [
                read_dataset(folder, port, batches) / 1e6 for _ in range(rounds)
            ]
    return [_make_row(what, statistics.median(each), LOOPBACK_BAR) for what, each in found.items()]


def measure_line(folder: Path, batches: int) -> list[dict[str, Any]]:
    """The share of a 60 Mbit/s line that rows use."""
    if os.geteuid() or not Path("/dev/net/tun").exists():
        return []
    script = [sys.executable, __file__, "--folder", str(folder), "--batches", str(batches)]
    wan = [sys.executable, str(ROOT / "tools/wan.py"), "--rate", "60mbit", "--delay", "20ms", "--"]
    command = [*wan, *script, "--side", "owner", "---", *script, "--side", "reader"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    rates = [json.loads(each) for each in result.stdout.splitlines() if each.startswith("{")]
    if not rates:
        raise SystemExit(f"the line ended with {result.returncode}:\n{result.stderr[-3000:]}")
    names = {"7300": "", "7100": ", by a gateway's port"}
    return [
        _make_row(f"60 Mbit/s, 40 ms round trip{names[port]}: share of the line", 8 * rate / RATE, LINE_BAR)
        for port, rate in rates[0].items()
    ]


def play_side(side: str, folder: Path, batches: int) -> None:
    """Run one site of the line; the reading one ends the other."""
    finished = folder / "over"
    if side == "owner":
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=serve, args=(str(folder), "10.77.0.1", 7300), daemon=True)
        process.start()
        with run_gateway(folder, "10.77.0.1:7100"):
            while not finished.exists() and process.is_alive():
                time.sleep(0.1)
        process.kill()
        return
    try:
        found = {}
        for port in ("7300", "7100"):
            at = f"10.77.0.1:{port}"
            remote = open_remote(at, folder / "of-gpu", "mt", "gpu", Reader("", "", purpose="study 0"))
            for _ in range(200):
                with contextlib.suppress(Exception):
                    remote.describe("wide")
                    break
                time.sleep(0.2)
            found[port] = read_columns(remote, batches)
        print(json.dumps(found), flush=True)
    finally:
        finished.touch()


# ---------------------------------------------------------------------- a step, decisions
def measure_step(folder: Path, rounds: int) -> tuple[list[dict[str, Any]], float]:
    """A step fed by `nb.data` on the owner's machine, as a multiple of one fed from the same files; and its seconds."""
    import keras
    import tensorflow as tf

    import whale_nebula as nb

    nb.init({"run": "mt", "data": {"gpu": {"registry": str(folder / "certs")}}})
    inputs = keras.Input((FEATURES,))
    with nb.cluster():
        with nb.stage(cluster="gpu"):
            hidden = keras.layers.Dense(2048, activation="relu")(keras.layers.Dense(2048, activation="relu")(inputs))
        with nb.stage(cluster="npu"):
            outputs = keras.layers.Dense(1)(hidden)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    wanted = {"x": tf.io.FixedLenFeature([FEATURES], tf.float32)}

    def from_files() -> Any:
        records = tf.data.TFRecordDataset(str(folder / "rows.tfrecord")).shuffle(64 * BATCH, seed=1).batch(BATCH)
        return records.map(lambda each: tf.io.parse_example(each, wanted)).prefetch(4)

    sources = {"files": from_files(), "data": nb.data("gpu://records", batch=BATCH, seed=1)}
    pairs = {name: each.map(lambda row: (row["x"], row["x"][:, :1])) for name, each in sources.items()}
    taken: dict[str, list[float]] = {"files": [], "data": []}
    processors: dict[str, float] = {"files": 0.0, "data": 0.0}
    for number in range(2 * rounds + 4):
        name = ("files", "data", "data", "files")[number % 4]
        used, found = time.process_time(), _time_steps(model, pairs[name])
        if number >= 4:  # the first passes trace functions and fill caches
            processors[name] += (time.process_time() - used) / (64 * rounds)
            taken[name] += found
    nb.shutdown()
    seconds = {name: statistics.median(each) for name, each in taken.items()}
    rows = []
    for unit, of in (("seconds", seconds), ("seconds of the processors", processors)):
        ratio = round(of["data"] / of["files"], 3)
        what = f"a step fed by nb.data on the owner's machine, beside one fed from files: {unit}"
        times = {f"{name}_ms": round(1e3 * each, 2) for name, each in of.items()}
        rows.append({"what": what, **times, "value": ratio, "bar": STEP_BAR, "verdict": verdict(ratio, STEP_BAR)})
    return rows, seconds["data"]


def _time_steps(model: Any, dataset: Any) -> list[float]:
    """The seconds of each step of a pass but the first, from batch to batch."""
    found, last = [], 0.0
    for number, batch in enumerate(dataset):
        model.train_on_batch(*batch)
        now = time.perf_counter()
        if number:
            found.append(now - last)
        last = now
    return found


def measure_decisions(folder: Path, accounts: int, times: int, seconds_of_step: float) -> list[dict[str, Any]]:
    """Milliseconds of a decision, and of all decisions, counts and records for a batch."""
    registry, usage = Registry(folder / "certs", authority.load(folder / "certs")), Usage(folder / "certs")
    log = AuditLog(folder / "bench.jsonl", Identity("mt", "gpu", "operator"), None)
    grants = Grants(registry)
    guard, account = Guard(grants, usage, log), f"user{accounts - 1}"
    reader = Reader(account, "nebula://mt/gpu/worker/0", purpose="study 1")
    opened = guard.open(reader, "records")
    checks, whole, rows_alone = [], [], []
    for number in range(times):
        first = number % 60 * BATCH
        started = time.perf_counter()
        grants.check(account, "records", "study 1")
        checked = time.perf_counter()
        guard.read(reader, ReadRequest("records", 1, 0, first, first + BATCH))
        read = time.perf_counter()
        opened.read(1, 0, first, first + BATCH)
        rows_alone.append(1e3 * (time.perf_counter() - read))
        whole.append(1e3 * (read - checked))
        checks.append(1e3 * (checked - started))
    for each in (log, usage, registry):
        each.close()
    cost = statistics.median(whole) - statistics.median(rows_alone)
    share = cost / (1e3 * seconds_of_step)
    decision = statistics.median(checks)
    return [
        {"what": "a decision, with 1,000 accounts and 10,000 grants: ms", "value": round(decision, 3),
         "worst_ms": round(max(checks), 2), "bar": DECISION_BAR, "verdict": verdict(decision, DECISION_BAR)},
        {"what": "all that is decided, counted and recorded of a batch: ms", "value": round(cost, 3)},
        {"what": "the same as a share of that step", "value": round(share, 4), "bar": SHARE_BAR,
         "verdict": verdict(share, SHARE_BAR)},
    ]  # fmt: skip


def _make_row(what: str, value: float, bar: float) -> dict[str, Any]:
    return {"what": what, "value": round(value, 3), "bar": bar, "verdict": verdict(value, bar, least=True)}


def main() -> int:
    """Measure, print and write the result."""
    arguments = parser(__doc__, "a few of each; writes nothing")
    for option in ("--side", "--folder", "--batches"):
        arguments.add_argument(option, help=argparse.SUPPRESS)
    args = arguments.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    if args.side:
        play_side(args.side, Path(args.folder), int(args.batches))
        return 0
    about, quick = describe_machine(), args.quick
    accounts = 20 if quick else ACCOUNTS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_site(folder, accounts)
        rows = measure_loopback(folder, *((1, 20) if quick else (5, 78)))
        rows += measure_line(folder, 5 if quick else 60)
        steps, seconds = measure_step(folder, 1 if quick else 16)
        rows += [*steps, *measure_decisions(folder, accounts, 50 if quick else 2000, seconds)]
    for row in rows:
        print(row)
    if not quick:
        table = [("what", "measured", "bar", "verdict")]
        table += [
            (each["what"], str(each["value"]), str(each.get("bar", "")), each.get("verdict", "")) for each in rows
        ]
        write(__file__, {"machine": about, "rows": rows}, table, "data")
    return 0


if __name__ == "__main__":
    sys.exit(main())

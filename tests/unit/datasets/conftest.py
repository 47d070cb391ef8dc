"""An owner with accounts and a dataset, with a clock that tests set."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from whale_nebula.accounts import server
from whale_nebula.accounts.login import LoginIssuer
from whale_nebula.accounts.registry import Registry
from whale_nebula.config.place import Place
from whale_nebula.datasets.grants import GRANTED, Grants, Permission
from whale_nebula.datasets.guard import Guard, Reader, Usage
from whale_nebula.datasets.interface import parse_interface
from whale_nebula.datasets.reading import RemoteClient, RowSelection, open_remote
from whale_nebula.datasets.service import serve
from whale_nebula.security import Credentials, Files, Identity, authority, files
from whale_nebula.security.allowance import UNLIMITED
from whale_nebula.security.audit import AuditLog
from whale_nebula.security.authority import Authority

INTERFACE: dict[str, Any] = {
    "name": "corpus",
    "source": {"csv": "*.csv", "columns": {"age": "int64", "name": "string"}},
    "transform": [{"select": ["age"]}],
    "schema": {"age": {"dtype": "int64"}},
    "expires": "2999-01-01",
}


@dataclass
class Owner:
    """An owner: the registry with accounts ana and bob, and the folder of the files."""

    home: Path
    registry: Registry
    signer: Authority
    clock: list[datetime] = field(default_factory=list)

    @property
    def grants(self) -> Grants:
        return Grants(self.registry)

    def publish(self, **more: Any) -> None:
        self.grants.publish(parse_interface(Place({**INTERFACE, **more})), self.home / "files")

    def grant(self, account: str, dataset: str = "corpus", purpose: str = "study", days: float = 7) -> Permission:
        return self.grants.decide(self.grants.ask(account, dataset, purpose).number, GRANTED, days)

    def pass_days(self, days: float) -> None:
        self.clock[0] += timedelta(days=days)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    home = tmp_path / "gpu"
    (home / "files").mkdir(parents=True)
    (home / "files/a.csv").write_text("age,name\n" + "".join(f"{age},n{age}\n" for age in range(100)))
    signer = Authority.create("mt", {}, bound=["gpu"])
    authority.create(home / "certs", signer)
    clock = [files.now()]
    registry = Registry(home / "certs", authority.load(home / "certs"), lambda: clock[0])
    for account in ("ana", "bob"):
        registry.add(account, workers=4)
    owner = Owner(home, registry, signer, clock)
    yield owner
    owner.registry.close()  # a test may have opened it again


def certify(owner: Owner, account: str, folder: Path, *, signer: Authority | None = None, **more: Any) -> Files:
    """Write the files that `whale-nebula login` writes."""
    signer, options = signer or owner.signer, {"cluster": "gpu", "index": 0, "role": "worker", "days": 1.0, **more}
    identity = Identity("mt", options["cluster"], options["role"], options["index"])
    folder.mkdir(mode=0o700, exist_ok=True)
    key, now = authority.make_key(), files.now() + timedelta(days=options.get("begins", 0))
    paths = Files.in_folder(folder, identity)
    until = now + timedelta(days=options["days"])
    certificate = authority.make_process_certificate(
        identity,
        key.public_key(),
        signer.certificate,
        signer.key,
        until,
        now,
        account,
        options.get("allowance", UNLIMITED),
    )
    files.write(paths.cert, authority.encode_certificate(certificate), files.PUBLIC)
    files.write(paths.key, authority.encode_key(key), files.SECRET)
    files.write(paths.ca, authority.encode_certificate(owner.signer.certificate), files.PUBLIC)
    return paths


@dataclass
class Site:
    """An owner's data service, and the folders of its readers."""

    owner: Owner
    guard: Guard
    port: int
    tmp: Path

    def open_reader(self, account: str, **more: Any) -> RemoteClient:
        folder = self.tmp / f"of-{account}"
        if not folder.exists():
            certify(self.owner, account, folder)
        reader = Reader("", "", **{"run": "run-1", "program": "ab" * 32, "versions": "keras 3", **more})
        return replace(open_remote(f"127.0.0.1:{self.port}", folder, "mt", "gpu", reader), sleep=lambda seconds: None)

    def read_rows(
        self, account: str, batch: int = 25, seed: int | None = None, number: int = 0, **more: Any
    ) -> list[int]:
        remote = self.open_reader(account, **more)
        about = remote.describe("corpus")
        batches = remote.read(RowSelection("corpus", seed, number, 0, about.count, batch), about)
        return [int(age) for columns in batches for age in columns["age"]]

    @property
    def access_records(self) -> list[dict[str, Any]]:
        lines = self.guard.log.path.read_text("ascii").splitlines()
        return [record for record in map(json.loads, lines) if record["action"] == "read"]


@pytest.fixture
def site(owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(server, "_OPEN_RATE", 1000.0)
    folder, identity = owner.home / "certs", Identity("mt", "gpu", "operator")
    usage, issuer = Usage(folder), LoginIssuer(owner.registry, owner.signer, folder)
    log = AuditLog(tmp_path / "data-gpu.jsonl", identity, Credentials.load(server.certify_service(issuer, identity)))
    guard = Guard(owner.grants, usage, log)
    with serve(issuer, guard, "gpu", "127.0.0.1", 0) as port:
        yield Site(owner, guard, port, tmp_path)
    log.close()
    usage.close()

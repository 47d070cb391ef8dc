"""An owner with accounts and a dataset, at a time that tests move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from whale_nebula.accounts.registry import Registry
from whale_nebula.config.place import Place
from whale_nebula.datasets.grants import GRANTED, Grants, Permission
from whale_nebula.datasets.interface import parse_interface
from whale_nebula.security import authority, files
from whale_nebula.security.authority import Authority

PLAIN: dict[str, Any] = {
    "name": "corpus",
    "source": {"csv": "*.csv", "columns": {"age": "int64", "name": "string"}},
    "transform": [{"select": ["age"]}],
    "schema": {"age": {"dtype": "int64"}},
    "expires": "2999-01-01",
}


@dataclass
class Owner:
    """Whose data it is: his registry with accounts ana and bob, and the folder of his files."""

    home: Path
    registry: Registry
    signs: Authority
    clock: list[datetime] = field(default_factory=list)

    @property
    def grants(self) -> Grants:
        return Grants(self.registry)

    def publish(self, **more: Any) -> None:
        self.grants.publish(parse_interface(Place({**PLAIN, **more})), self.home / "files")

    def grant(self, account: str, dataset: str = "corpus", purpose: str = "study", days: float = 7) -> Permission:
        return self.grants.decide(self.grants.ask(account, dataset, purpose).number, GRANTED, days)

    def pass_days(self, days: float) -> None:
        self.clock[0] += timedelta(days=days)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    home = tmp_path / "gpu"
    (home / "files").mkdir(parents=True)
    (home / "files/a.csv").write_text("age,name\n" + "".join(f"{age},n{age}\n" for age in range(100)))
    signs = Authority.fresh("mt", {}, bound=["gpu"])
    authority.create(home / "certs", signs)
    clock = [files.now()]
    registry = Registry(home / "certs", authority.load(home / "certs"), lambda: clock[0])
    for account in ("ana", "bob"):
        registry.add(account, workers=4)
    yield Owner(home, registry, signs, clock)
    registry.close()

"""Passwords with a fast hash, and an owner's login service with an account."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from whale_nebula.accounts import passwords, server, service
from whale_nebula.accounts.login import LoginIssuer, LoginRequest
from whale_nebula.accounts.registry import PASSWORD, Registry
from whale_nebula.accounts.service import LoginClient, serve
from whale_nebula.security import WORKER, Identity, Trust, authority, files, owners
from whale_nebula.security.authority import Authority
from whale_nebula.security.trust import DenyList

RUN, GOOD = "mt", "a sentence to remember"


@pytest.fixture(autouse=True)
def fast_password_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash passwords with a low cost; the doctest of `hash_password` covers the real one."""
    monkeypatch.setattr(passwords, "_LOG_N", 4)


@dataclass
class Site:
    """An owner's login service with an account, and the folder of a host that logs in."""

    issuer: LoginIssuer
    host: Path
    port: int

    @property
    def ca(self) -> bytes:
        return (self.issuer.folder / authority.CA).read_bytes()

    def request(self, identity: Identity, host: str = "host") -> str:
        return owners.request(self.host / host, identity).path.read_text()

    def ask(self, *identities: Identity, host: str = "host", **more: Any) -> Any:
        texts = [self.request(each, host) for each in identities]
        return self.send(texts, **more)

    def send(self, requests: list[str], **more: Any) -> Any:
        """Log in with requests for certificates."""
        fields = {"account": "ana", "kind": PASSWORD, "secret": GOOD, **more}
        return self.service.log_in(LoginRequest(requests=requests, **fields))

    @property
    def service(self) -> LoginClient:
        return LoginClient("127.0.0.1", self.port, self.ca, RUN, "gpu")

    def trust(self) -> Trust:
        known = authority.load_certificates(self.issuer.folder)
        return Trust(known, DenyList(self.issuer.folder / files.REVOKED, known))

    @property
    def last(self) -> dict[str, Any]:
        return self.issuer.registry.list_events()[-1]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(server, "_OPEN_RATE", 1000.0)
    monkeypatch.setattr(service, "_RATE", 1000.0)
    monkeypatch.setattr(service, "_ALL_RATE", 1000.0)
    authority.create(tmp_path / "certs", Authority.create(RUN, {}, bound=["gpu"]))
    signer = authority.load(tmp_path / "certs")
    registry = Registry(tmp_path / "certs", signer)
    registry.add("ana", workers=2, password=GOOD)
    issuer = LoginIssuer(registry, signer, tmp_path / "certs")
    with serve(issuer, "gpu", "127.0.0.1", 0) as port:
        yield Site(issuer, tmp_path, port)
    registry.close()


def identify(index: int, cluster: str = "gpu", role: str = WORKER, run: str = RUN) -> Identity:
    return Identity(run, cluster, role, index)

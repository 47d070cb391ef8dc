"""A run of an account on this host: its folder, its limits, what is not isolated, and a log of what it has started."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from whale_nebula.errors import AccountError
from whale_nebula.launch.limits import Limits, Starts, find_hierarchy
from whale_nebula.security import Credentials, Files
from whale_nebula.security.audit import AuditLog
from whale_nebula.security.tenant import Tenant, check_room, open_home

AUDIT, STARTS = "audit", "starts"


@dataclass(frozen=True)
class Tenancy:
    """What the launcher has opened for an account: `home` is its folder, `log` stands in that."""

    tenant: Tenant
    home: Path
    limits: Limits
    log: AuditLog

    def note_start(self, workers: Sequence[str], script: str, epoch: int) -> None:
        """Write down what is started, before it is."""
        digest = hashlib.sha256(Path(script).read_bytes()).hexdigest()
        self._note("start run", "allow", workers=list(workers), script=Path(script).name, sha256=digest, epoch=epoch)

    def note_end(self, codes: Mapping[str, int], excess: str, epoch: int) -> None:
        """Write down how it ended; `excess` is what it used too much of."""
        self._note("end run", "deny" if excess else "", excess, codes=dict(codes), epoch=epoch)

    def _note(self, action: str, decision: str, reason: str = "", **more: Any) -> None:
        said = {"account": self.tenant.account, "limits": self.tenant.allowance.limits, **more}
        self.log.record(
            action, actor=self.log.identity, decision=decision, reason=reason, durable=True,
            held=list(self.limits.held), **said,
        )  # fmt: skip


@contextlib.contextmanager
def open_tenancy(
    tenant: Tenant | None,
    base: Path,
    security: Mapping[str, Files],
    tell: Callable[[str], None],
    find: Callable[[], Path | None] = find_hierarchy,
) -> Iterator[Tenancy | None]:
    """Open what an account has here, and `tell` what is not isolated; None where a run is of no account."""
    if tenant is None:
        yield None
        return
    home = open_home(base, tenant)
    credentials = Credentials.of(next(iter(security.values())))
    log = AuditLog(home / AUDIT / f"{credentials.identity.stem}.jsonl", credentials.identity, credentials)
    limits = Limits(tenant, find(), Starts(home / STARTS))
    try:
        try:
            check_room(tenant, [home])
        except AccountError as error:
            log.record(
                "start run", actor=log.identity, decision="deny", reason=error.what, account=tenant.account,
                limits=tenant.allowance.limits,
            )  # fmt: skip
            raise
        allowed = replace(tenant.allowance, line=None)
        may = f", and may use {allowed} on this host" * bool(allowed)
        tell(f"{tenant}: its folder is {home}{may}")
        for each in list_unisolated(home, limits):
            tell(f"not isolated: {each}")
        yield Tenancy(tenant, home, limits, log)
    finally:
        limits.close()
        log.close("the launcher has ended")


def list_unisolated(home: Path, limits: Limits) -> Iterator[str]:
    """What keeps this account apart from others less than it could."""
    unheld = list(limits.list_unheld())
    if unheld:
        yield f"{'; '.join(unheld)} (there is no control group, version 2, that this user can make)"
    near = [each for each in home.parent.parent.glob("*/*") if each != home and _is_own(each)]
    if near:
        names = ", ".join(sorted(f"{each.name} of {each.parent.name}" for each in near))
        yield f"{names} and this account are the same user of this host, and one's script can read the other's files"


def _is_own(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.is_dir() and path.stat().st_uid == os.geteuid()
    return False

"""The certificates of those who are here: whether they read, how long they are good, and what the clock has to say."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from datetime import datetime, timedelta

from whale_nebula.cli.checks.check import Check
from whale_nebula.cli.checks.host import Host
from whale_nebula.errors import IdentityError
from whale_nebula.security import Credentials, Files
from whale_nebula.security.authority import KEY as AUTHORITY_KEY
from whale_nebula.security.files import find_other_keys
from whale_nebula.security.making import now

_SOON = timedelta(days=2)


def certificate_checks(host: Host) -> Iterator[Check]:
    """Two for each who is here, and those of the authority."""
    authority: list[Check] = []
    for name in host.here:
        files = host.files(name)
        if files is None:
            continue
        try:
            credentials = Credentials.of(files)
            credentials.check_is(host.identity(name))
        except IdentityError as error:
            why = ": ".join(part for part in (error.where, error.why) if part)
            yield Check(f"certificate of {name}", "bad", error.what, why, error.mend)
            continue
        yield _own(name, credentials, now())
        yield _key(name, files)
        yield from _other_keys(host, name, files)
        authority = [*_authority(credentials, now()), *_deny_list(credentials)]
    yield from authority


def _own(name: str, credentials: Credentials, at: datetime) -> Check:
    left, identity = credentials.not_after - at, credentials.identity
    who = f"--cluster {identity.cluster} --role {identity.role} --index {identity.index}"
    until = f"until {credentials.not_after:%Y-%m-%d %H:%M} UTC; {identity.uri}"
    if left < _SOON:
        mend = f"whale-nebula certs renew {who}, and copy its .pem here; a run goes on meanwhile"
        return Check(f"certificate of {name}", "warning", f"{days(left)} left", until, mend)
    return Check(f"certificate of {name}", "ok", f"{days(left)} left", until)


def _key(name: str, files: Files) -> Check:
    """Its mode; others may not read it, or the certificate would not have been read either."""
    mode = stat.S_IMODE(os.stat(files.key).st_mode)
    return Check(f"key of {name}", "ok", f"{mode:04o}", str(files.key))


def _other_keys(host: Host, name: str, files: Files) -> Iterator[Check]:
    """Private keys that lie beside this one and belong to nobody on this host."""
    here = {host.identity(each).stem for each in host.here}
    others = [path.name for path in find_other_keys(files) if path.stem not in here and path.name != AUTHORITY_KEY]
    if others:
        why = f"{', '.join(others)} in {files.key.parent}: {name} could act as any of them"
        yield Check(f"keys beside {name}", "warning", f"{len(others)} of others", why, "rm them on this host")


def _authority(credentials: Credentials, at: datetime) -> Iterator[Check]:
    """Its dates, and its key, which belongs where certificates are issued and nowhere else."""
    ca = credentials.files.ca
    ends = max(each.not_valid_after_utc for each in credentials.trust.authorities)
    found, why = f"{days(ends - at)} left", f"until {ends:%Y-%m-%d %H:%M} UTC; {ca}"
    if ends - at < _SOON:
        yield Check("authority", "warning", found, why, "whale-nebula certs renew --ca, and copy ca.pem to all hosts")
    else:
        yield Check("authority", "ok", found, why)
    if ca.with_name(AUTHORITY_KEY).exists():
        why = f"{ca.with_name(AUTHORITY_KEY)}: who has it can be anybody in this run"
        mend = "if certificates are issued on another host, take it away from this one"
        yield Check("authority's key", "note", "it is here", why, mend)


def _deny_list(credentials: Credentials) -> Iterator[Check]:
    """Its number, which is the same on all hosts that have the newest."""
    if credentials.files.revoked is None:
        why = "security: {revoked: none}: nobody is denied here, not even who was revoked"
        yield Check("deny list", "note", "there is none", why, "leave it out, once each host has revoked.json")
    else:
        yield Check("deny list", "ok", f"number {credentials.trust.denied.number}", str(credentials.files.revoked))


def days(left: timedelta) -> str:
    """A time in days, or in hours if it is short.

    >>> days(timedelta(days=6.98)), days(timedelta(hours=30)), days(timedelta(minutes=20))
    ('7 days', '30 hours', '20 minutes')
    """
    if left >= timedelta(days=2):
        return f"{round(left / timedelta(days=1), 1):g} days"
    hours, minutes = left // timedelta(hours=1), left // timedelta(minutes=1)
    return f"{hours} hours" if hours >= 2 else f"{minutes} minute{'s' * (minutes != 1)}"

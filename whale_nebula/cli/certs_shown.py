"""The text output of `whale-nebula certs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from whale_nebula.cli.arguments import describe_time
from whale_nebula.errors import CredentialsError, IdentityError
from whale_nebula.security import Identity, Peer, authority, files, issue, trust
from whale_nebula.security.authority import Authority
from whale_nebula.security.identity import command_options
from whale_nebula.security.issue import Issued
from whale_nebula.security.owners import Requested
from whale_nebula.security.trust import Revocation, SignedList

STATES = {"good": "green", "replaced": "dim", "revoked": "red", "expired": "red"}
"""Colours of states; others are yellow."""
_SERIAL = 16


def moment(at: datetime) -> str:
    """Format a date."""
    return f"{at:%Y-%m-%d %H:%M} UTC"


def state(begin: datetime, end: datetime, at: datetime) -> str:
    """The state of a certificate by its dates; "ends soon" in the last quarter of its validity."""
    if at < begin:
        return "not yet valid"
    if at > end:
        return "expired"
    return "ends soon" if end - at < (end - begin) / 4 else "good"


# ---------------------------------------------------------------------- show
def rows(folder: Path) -> list[dict[str, Any]]:
    """The fields of every certificate of a folder."""
    issued, denied, at, found = issue.list_issued(folder), _list_revoked(folder), files.now(), []
    current = _find_current(folder).values()
    for peer in issued:
        revoked, said = denied.get(peer.serial), state(peer.not_before, peer.not_after, at)
        if revoked or (peer.serial not in current and said != "expired"):
            said = "revoked" if revoked else "replaced"
        left, why = describe_time(peer.not_after - at), revoked.why if revoked else ""
        found.append({**_identify(peer), "left": left, "state": said, "why": why})
    return found


def _identify(peer: Peer) -> dict[str, Any]:
    """The fields that name a certificate and its owner."""
    identity = peer.identity
    return {"who": identity.worker, "uri": identity.uri, "serial": peer.serial, "not_after": peer.not_after.isoformat()}


def _find_current(folder: Path) -> dict[Identity, str | None]:
    """The serial number of the certificate in use by each identity, if any."""
    newest = {peer.identity: peer for peer in issue.list_issued(folder)}
    return {identity: _current(folder, peer, files.now()) for identity, peer in newest.items()}


def _current(folder: Path, newest: Peer, at: datetime) -> str | None:
    """The serial number in the file that a process would use; if that was moved to its host, the newest valid one."""
    identity = newest.identity
    path = files.Files.under(folder, identity).cert
    if not path.exists():
        return newest.serial if newest.not_after >= at else None
    try:
        return files.serial(files.certificate(files.read(path, "a certificate"), str(path)))
    except IdentityError as error:
        what = f"the certificate of {identity.worker} does not read"
        why = error.why or error.what
        mend = f"mv {path} {path}.broken, then whale-nebula certs renew {command_options(identity)}"
        raise CredentialsError(what, where=str(path), why=why, mend=mend) from None


def renewable(folder: Path) -> list[Identity]:
    """The identities with a certificate in use that is not revoked."""
    used, revoked = _find_current(folder), _list_revoked(folder)
    return sorted(identity for identity, serial in used.items() if serial is not None and serial not in revoked)


def _list_revoked(folder: Path) -> Mapping[str, Revocation]:
    found = deny_list(folder)
    return {} if found is None else found.revoked


def deny_list(folder: Path) -> SignedList | None:
    """The deny list of a folder, if it has one."""
    path = folder / files.REVOKED
    return trust.load(path, authority.authorities(folder)) if path.exists() else None


def deny_list_document(found: SignedList | None) -> dict[str, Any] | None:
    """The deny list as JSON."""
    return None if found is None else {"number": found.number, "certificates": len(found.revoked)}


def document(folder: Path) -> dict[str, Any]:
    """The output of `show` as JSON."""
    found = deny_list_document(deny_list(folder))
    return {**authority_document(folder), "deny_list": found, "certificates": rows(folder)}


def authority_document(folder: Path) -> dict[str, Any]:
    """The authority as JSON."""
    found = authority.load_certificate(folder)
    at = files.now()
    return {
        "run": files.authority_run(found),
        "folder": str(folder),
        "authority": {
            "ca": str(folder / authority.CA),
            "serial": files.serial(found),
            "not_after": found.not_valid_after_utc.isoformat(),
            "state": state(found.not_valid_before_utc, found.not_valid_after_utc, at),
            "can_issue": (folder / authority.KEY).exists(),
        },
    }


def table(folder: Path) -> str:
    """The output of `show` as text; colours on a terminal only."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    certificate = authority.load_certificate(folder)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    drawn = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for column in ("who", "serial", "not after", "left", "state"):
        drawn.add_column(column, no_wrap=column != "state")
    found = rows(folder)
    for row in found:
        until = moment(datetime.fromisoformat(row["not_after"]))
        said = f"{row['state']}: {row['why']}" if row["why"] else row["state"]
        style = STATES.get(row["state"], "yellow")
        drawn.add_row(row["who"], row["serial"][:_SERIAL], until, row["left"], Text(said, style=style))
    at, end = files.now(), certificate.not_valid_after_utc
    said = state(certificate.not_valid_before_utc, end, at)
    where = "" if (folder / authority.KEY).exists() else "; its key is on another host"
    run = files.authority_run(certificate)
    own, others = files.authority_clusters(certificate), authority.authorities(folder)[1:]
    speaks = f" for {', '.join(own)}" * bool(own)
    ours = f"run {run}: authority{speaks} good until {moment(end)} ({describe_time(end - at)}, {said}){where}"
    trusted = [name for each in others for name in files.authority_clusters(each)]
    ours += f"\nfurther authorities: for {', '.join(trusted)}" * bool(trusted)
    denied = deny_list(folder)
    theirs = f"no deny list here: copy {files.REVOKED} from where certificates are issued"
    if denied is not None:
        count = len(denied.revoked)
        theirs = f"deny list number {denied.number}: {count or 'no'} certificate{'s' * (count != 1)}"
    with console.capture() as capture:
        console.print(Text(f"{ours}\n{theirs}\n"))
        console.print(drawn if found else Text("no certificate was issued yet: whale-nebula certs issue --cluster gpu"))
    return capture.get().rstrip("\n")


# ---------------------------------------------------------------------- results of commands
def describe_authority(new: Authority, folder: Path) -> str:
    """The text after `init`, and after the authority was renewed."""
    until = moment(new.certificate.not_valid_after_utc)
    speaks = f" for {', '.join(new.bound)}" * bool(new.bound)
    ca = f"{folder / authority.CA}   the authority of run {new.run}{speaks}, good until {until}: every host gets a copy"
    return f"{ca}\n{folder / authority.KEY}   its key: it stays on this host"


def line(each: Issued, verb: str) -> str:
    """The line about a new certificate."""
    peer = each.peer
    return f"{verb} {peer.identity.worker}   serial {peer.serial[:_SERIAL]}   good until {moment(peer.not_after)}"


def describe_destinations(made: Sequence[Issued]) -> str:
    """Which files must be copied to which host."""
    lines = [""]
    for each in made:
        lines += [
            f"to the host of {each.peer.identity.worker}, if it is another one:",
            *(f"  {path}" for path in each.files[:3]),
            f"  {each.files.revoked}   and again after each revocation",
        ]
    folder = made[0].files.ca.parent
    lines.append(f"There they are found in {folder.name!r} beside clusters.yaml; or name them in it:")
    own = f"{folder}/{{cluster}}-{{role}}-{{index}}"
    return "\n".join([*lines, f'  security: {{ca: {folder}/ca.pem, cert: "{own}.pem", key: "{own}.key"}}'])


def describe_renewed(made: Sequence[Issued]) -> str:
    """The files that must be copied after a renewal."""
    lines = [f"  {each.files.cert}   to the host of {each.peer.identity.worker}" for each in made]
    return "\n".join(["", "the keys are the same; copy these, if they are for another host:", *lines])


def describe_requests(found: Sequence[Requested]) -> str:
    """The text after keys and requests were made."""
    lines = []
    for each in found:
        lines += [
            f"requested {each.identity.worker}   key {each.digest}",
            f"  {each.key}   stays on this host",
            f"  {each.path}   to the owner of {each.identity.cluster}, with the digest of the key by another way",
        ]
    return "\n".join(lines)


def describe_signed(made: Sequence[Issued]) -> str:
    """The files to return, and the values to compare first."""
    lines = ["", "are these the digests that the hosts say? Then to each of them:"]
    for each in made:
        lines.append(f"  {each.files.cert}   key {each.peer.key[:32]}")
    folder = made[0].files.ca.parent
    return "\n".join([*lines, f"  {made[0].files.ca}", *(f"  {path}" for path in sorted(folder.glob("revoked*.json")))])


def describe_revocation(new: Sequence[Revocation], present: SignedList | None, folder: Path) -> str:
    """The text after a revocation."""
    if not new or present is None:
        return "nothing changed: it was revoked already"
    lines = [f"revoked {Identity.parse(each.who).worker}   serial {each.serial[:_SERIAL]}" for each in new]
    return "\n".join([*lines, "", signed_list(present, folder)])


def signed_list(found: SignedList, folder: Path) -> str:
    """The text after the deny list was written."""
    return f"copy to every host: {folder / files.REVOKED}   now number {found.number}"


def issued_document(each: Issued) -> dict[str, Any]:
    """A new certificate as JSON."""
    paths = {part: str(path) for part, path in each.files._asdict().items()}
    return {**_identify(each.peer), "files": paths, "clipped": each.clipped}

"""`whale-nebula certs`: create a run's authority; issue, show, renew and revoke certificates. Needs no TensorFlow."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from whale_nebula.accounts.registry import record_action
from whale_nebula.cli.arguments import (
    Answer,
    Options,
    Parser,
    answer,
    choose_command,
    describe_time,
    remark,
    split,
    user_name,
)
from whale_nebula.config import Config, load
from whale_nebula.errors import CredentialsError, IdentityError, NebulaError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.security import GATEWAY, WORKER, Identity, Peer, authority, files, issue, owners, trust
from whale_nebula.security.authority import AUTHORITY_DAYS, Authority
from whale_nebula.security.identity import ROLES, command_options
from whale_nebula.security.issue import DAYS, Issued
from whale_nebula.security.owners import CertificateRequest
from whale_nebula.security.trust import Revocation, SignedList

_DESCRIPTION = """\
Manage certificates, which prove the identity of each process. One host has the authority of the run, a folder with its
key, created once by "init". Certificates are issued there and copied to the hosts that use them: "issue" prints which
files go where.

If clusters belong to several owners, each owner has an authority that is valid only for its clusters ("init
--cluster"). Each host then creates its own key ("request"), the owner signs it ("sign"), and all hosts trust all
owners ("trust")."""

_EPILOG = """\
commands:
  init     create the authority of a run
  issue    create a key and certificate for a worker, a gateway or an operator
  show     list certificates, their validity and state
  renew    create a new certificate for an existing key: copy only its .pem, the run may continue
  revoke   put a certificate on the deny list
  request  create a key that stays on this host, and a request for the authority to sign
  sign     create certificates for requests
  trust    add the authority of another owner, for its clusters, with its deny list

examples:
  whale-nebula certs init --config clusters.yaml
  whale-nebula certs issue --all --config clusters.yaml
  whale-nebula certs issue --cluster gpu --count 2
  whale-nebula certs issue --cluster gpu --role gateway --days 30
  whale-nebula certs show
  whale-nebula certs renew --cluster gpu
  whale-nebula certs renew --ca
  whale-nebula certs renew --revoked
  whale-nebula certs revoke --cluster npu --index 1 --why "the host was sold"
  whale-nebula certs init --run mt --cluster gpu
  whale-nebula certs request --run mt --cluster gpu --index 1
  whale-nebula certs sign gpu-worker-1.csr
  whale-nebula certs trust --ca from-npu/ca.pem --list from-npu/revoked.json

whale-nebula certs COMMAND --help describes each command.

exit status:
  0   done
  1   refused; nothing was changed, and the message gives the reason
  2   wrong command line
  78  wrong config"""

_COMMAND_TEXTS = {
    "init": "Create the authority of a run: a folder, accessible only to you, with the key that signs all "
    "certificates.",
    "issue": "Create a key and a certificate for each given process. A process with a valid certificate gets no second "
    "key.",
    "show": "Show the authority and all certificates that were issued here or copied here.",
    "renew": "Create new certificates for existing keys: all of them, or the given ones. The old certificates stay "
    "valid until they expire, and running processes pick up new ones automatically.",
    "revoke": "Put certificates on the deny list, revoked.json, which every process reads again when it changes. Copy "
    "it to every host.",
    "request": "Create a key for a process of this host, unless it has one, and a request: a file for the owner of the "
    "authority. The key stays on this host.",
    "sign": "Create certificates for requests. Compare the digest of the key with the sender of the file.",
    "trust": "Trust the authority of another owner, only for its clusters.",
}
_OPTIONS: Options = {
    "--run": ("NAME", "the run's name, if there is no config with a name"),
    "--config": ("FILE", "clusters.yaml: the run's name, its clusters, and the location of certs"),
    "--cluster": ("NAME", "the cluster of the process"),
    "--role": ("ROLE", f"{', '.join(ROLES)}; default: worker"),
    "--index": ("N", "the index of the worker in its cluster; default: 0"),
    "--count": ("N", "workers 0 to N-1"),
    "--all": (None, "every worker of the config, and every gateway in it"),
    "--ca": (None, "the authority's own certificate: new dates for the same key"),
    "--revoked": (None, "the deny list: sign it again, with the next number"),
    "--list": ("FILE", "the deny list of the other owner (revoked.json)"),
    "--forget-revocations": (None, "with --revoked: the list is lost, and never had an entry"),
    "--serial": ("HEX", "one certificate, by the first digits of its serial number"),
    "--why": ("TEXT", "a comment to store"),
    "--days": ("DAYS", f"days of validity; default: {DAYS:g}, for the authority {AUTHORITY_DAYS:g}"),
    "--folder": ("FOLDER", 'the folder of the authority; default: "certs" next to the --config, or here'),
    "--json": (None, "print one JSON object"),
}
_IDENTITY_OPTIONS = ("--cluster", "--role", "--index", "--count")
_COMMAND_OPTIONS = {
    "init": ("--run", "--config", "--cluster", "--days", "--folder", "--json"),
    "issue": (*_IDENTITY_OPTIONS, "--all", "--config", "--days", "--folder", "--json"),
    "show": ("--config", "--folder", "--json"),
    "renew": (
        *_IDENTITY_OPTIONS,
        "--ca",
        "--revoked",
        "--forget-revocations",
        "--config",
        "--days",
        "--folder",
        "--json",
    ),
    "revoke": (*_IDENTITY_OPTIONS, "--serial", "--why", "--config", "--folder", "--json"),
    "request": ("--run", *_IDENTITY_OPTIONS, "--config", "--folder", "--json"),
    "sign": ("--days", "--config", "--folder", "--json"),
    "trust": ("--list", "--config", "--folder", "--json"),
}
_SPECIAL_OPTIONS: Mapping[str, Options] = {
    "init": {"--cluster": ("NAMES", "create an authority that is valid only for these clusters: gpu, or gpu,tpu")},
    "trust": {"--ca": ("FILE", "the certificate of the other owner's authority (ca.pem)")},
}
"""Help texts that differ in one of the commands."""


def make_parser(command: str = "") -> Parser:
    """The options of `certs`, or of one of its commands."""
    if not command:
        usage = "whale-nebula certs init|issue|show|renew|revoke|request|sign|trust [options]"
        return Parser("certs", _DESCRIPTION, {}, usage=usage, epilog=_EPILOG)
    options = {**{name: _OPTIONS[name] for name in _COMMAND_OPTIONS[command]}, **_SPECIAL_OPTIONS.get(command, {})}
    usage = f"whale-nebula certs {command} [options]{' FILE ...' * (command == 'sign')}"
    return Parser(f"certs {command}", _COMMAND_TEXTS[command], options, usage=usage)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    command, parser = choose_command(argv, _COMMANDS, make_parser)
    words = split(argv[1:], {**_OPTIONS, **_SPECIAL_OPTIONS.get(command, {})})
    paths = [each for each in (words.script, *words.arguments) if each is not None] if command == "sign" else []
    args = parser.read(words.options if command == "sign" else argv[1:])
    args.paths = paths
    if any(each.startswith("-") for each in paths):
        parser.error(f"unknown option {next(each for each in paths if each.startswith('-'))!r}")
    return answer(args, lambda: _run(command, args, parser))


def _run(command: str, args: argparse.Namespace, parser: Parser) -> Answer:
    """Run a command, and record what it has changed in the log of the owner's registry."""
    document, text = _COMMANDS[command](args, parser)
    if command in _RECORDED_COMMANDS:
        record_change(find_folder(args), f"certs {command}", args.why if command == "revoke" else None, document)
    return document, text


_RECORDED_COMMANDS = ("issue", "renew", "revoke", "sign", "trust")


def record_change(folder: Path, action: str, why: str | None, document: Mapping[str, Any]) -> None:
    """Record a change in the log of the accounts, by the document that its command answers. If that fails, it is only
    reported, as the change is in effect.
    """
    changed = [
        f"{each['who']} {each['serial']}" if isinstance(each, Mapping) else str(each)
        for values in document.values()
        for each in (values if isinstance(values, list) else ())
    ]
    try:
        record_action(folder, action, why or "", by=user_name(), changed=changed)
    except NebulaError as error:
        remark(f"this change is not in the log of the accounts: {error}")


# ---------------------------------------------------------------------- the commands
def _init(args: argparse.Namespace, parser: Parser) -> Answer:
    config, folder = load_config(args), find_folder(args)
    run = args.run or (config.run if args.config is None else config.run_name)
    if not run:
        parser.error('missing run name: --run mt, or --config clusters.yaml with "run: mt" in it')
    if args.run and args.config is not None and config.run_name != args.run:
        parser.error(f"the config's run is {config.run_name!r}: remove --run, or write run: {args.run} in it")
    clusters = [each.strip() for each in args.cluster.split(",")] if args.cluster else []
    new = Authority.create(
        run, authority.count_workers(config), parser.amount("--days", args.days, AUTHORITY_DAYS), bound=clusters
    )
    authority.create(folder, new)
    return make_authority_document(folder), describe_authority(new, folder)


def _issue(args: argparse.Namespace, parser: Parser) -> Answer:
    folder, config = find_folder(args), load_config(args)
    days, requested = parser.amount("--days", args.days, DAYS), list_requested_identities(args, parser)
    if args.all and (requested or args.config is None):
        parser.error("--all needs --config clusters.yaml, and cannot be combined with --cluster")
    if not args.all and not requested:
        parser.error("missing process: --cluster gpu, or --all --config clusters.yaml")
    signer = _apply_config(authority.load(folder), config, folder)
    identities = (
        authority.list_identities(signer.run, config)
        if args.all
        else [Identity(signer.run, *each) for each in requested]
    )
    return _describe_issued(issue.issue(folder, signer, identities, days), args, "issued", describe_destinations)


def _show(args: argparse.Namespace, parser: Parser) -> Answer:
    return make_document(find_folder(args)), "" if args.json else format_table(find_folder(args))


def _renew(args: argparse.Namespace, parser: Parser) -> Answer:
    folder, requested = find_folder(args), list_requested_identities(args, parser)
    if args.ca:
        if requested:
            parser.error("--ca renews only the authority's certificate: remove --cluster")
        new = issue.renew_authority(folder, parser.amount("--days", args.days, AUTHORITY_DAYS))
        return make_authority_document(folder), describe_authority(new, folder)
    signer = authority.load(folder)
    if args.forget_revocations and not args.revoked:
        parser.error("--forget-revocations needs --revoked")
    if args.revoked:
        if requested:
            parser.error("--revoked only signs the deny list again: remove --cluster")
        renewed = issue.renew_deny_list(folder, signer, forget=args.forget_revocations)
        return {"deny_list": make_deny_list_document(renewed)}, describe_signed_list(renewed, folder)
    identities = [Identity(signer.run, *each) for each in requested] or list_renewable(folder)
    if not identities:
        raise CredentialsError("there is no certificate to renew", where=str(folder), mend="whale-nebula certs issue")
    renewals = issue.renew(folder, signer, identities, parser.amount("--days", args.days, DAYS))
    return _describe_issued(renewals, args, "renewed", describe_renewed)


def _revoke(args: argparse.Namespace, parser: Parser) -> Answer:
    folder, requested = find_folder(args), list_requested_identities(args, parser)
    if bool(requested) == bool(args.serial):
        parser.error("missing certificate: --cluster gpu --index 0, or --serial with its first digits")
    signer = authority.load(folder)
    identities = [Identity(signer.run, *each) for each in requested]
    serials = _match_serial(folder, args.serial) if args.serial else _find_serials(folder, identities)
    new = issue.revoke(folder, signer, serials, args.why or "")
    text = describe_revocation(new, load_deny_list(folder), folder)
    return {"revoked": [each._asdict() for each in new]}, text


def _request(args: argparse.Namespace, parser: Parser) -> Answer:
    config, folder, requested = load_config(args), find_folder(args), list_requested_identities(args, parser)
    run = args.run or config.run
    if not run or not requested:
        parser.error(
            "missing run or process: --run mt --cluster gpu --index 0, or --config clusters.yaml with the run in it"
        )
    requests = [owners.request(folder, Identity(run, *each)) for each in requested]
    documents = [
        {"uri": each.identity.uri, **{n: str(v) for n, v in each._asdict().items() if n != "identity"}}
        for each in requests
    ]
    return {"requested": documents}, describe_requests(requests)


def _sign(args: argparse.Namespace, parser: Parser) -> Answer:
    if not args.paths:
        parser.error("missing requests: whale-nebula certs sign gpu-worker-0.csr")
    folder, config = find_folder(args), load_config(args)
    signer = _apply_config(authority.load(folder), config, folder)
    signed = owners.sign(folder, signer, [Path(each) for each in args.paths], parser.amount("--days", args.days, DAYS))
    return _describe_issued(signed, args, "signed", describe_signed)


def _trust(args: argparse.Namespace, parser: Parser) -> Answer:
    if args.ca is None:
        parser.error("missing authority: --ca their-ca.pem --list their-revoked.json")
    changed = owners.trust_owner(find_folder(args), Path(args.ca), args.list and Path(args.list))
    text = "\n".join(["copy to each of your hosts:", *(f"  {path}" for path in changed)])
    return {"changed": changed}, text


_COMMANDS: dict[str, Callable[[argparse.Namespace, Parser], Answer]] = {
    "init": _init, "issue": _issue, "show": _show, "renew": _renew, "revoke": _revoke, "request": _request,
    "sign": _sign, "trust": _trust,
}  # fmt: skip


# ---------------------------------------------------------------------- options
def find_folder(args: argparse.Namespace) -> Path:
    """The folder of a run's authority and certificates: --folder, or "certs" next to the config."""
    if args.folder is not None:
        return Path(args.folder)
    return Path("certs") if args.config is None else Path(args.config).parent / "certs"


def load_config(args: argparse.Namespace) -> Config:
    """The given config, or an empty one."""
    return load(args.config) if args.config is not None else Config()


def list_requested_identities(args: argparse.Namespace, parser: Parser) -> list[tuple[str, str, int]]:
    """Cluster, role and number of the identities that options name; empty if they name none."""
    if args.cluster is None:
        if args.role or args.index or args.count:
            parser.error("missing cluster: --cluster gpu")
        return []
    role = args.role or WORKER
    if role not in ROLES:
        parser.error(f"unknown role {role!r}: {did_you_mean(role, ROLES)}")
    if args.index is not None and args.count is not None:
        parser.error("--index and --count cannot be combined")
    count, index = parser.number("--count", args.count), parser.number("--index", args.index)
    if role == GATEWAY and (count or index):
        parser.error("a cluster has one gateway: remove --index and --count")
    if count == 0:
        parser.error("--count must be at least 1")
    return [(args.cluster, role, number) for number in (range(count) if count else [index or 0])]


def _apply_config(signer: Authority, config: Config, folder: Path) -> Authority:
    """The authority with the clusters of the config, if it names any; if they have changed, they are stored. A config
    of another run is refused.
    """
    mend = f"whale-nebula certs init --folder certs-{config.run}, or pass the --config of {signer.run!r}"
    check_run(signer, config, folder, mend)
    clusters = authority.count_workers(config)
    if not clusters or clusters == signer.clusters:
        return signer
    changed = replace(signer, clusters=clusters)
    authority.save_clusters(folder, changed)
    return changed


def check_run(signer: Authority, config: Config, folder: Path, mend: str) -> None:
    """Refuse a config of a run that is not the authority's."""
    if config.run not in (None, signer.run):
        what = f"the config is for run {config.run!r}, but the authority is for {signer.run!r}"
        raise CredentialsError(what, where=str(folder), mend=mend)


def _find_serials(folder: Path, identities: Sequence[Identity]) -> list[str]:
    """The serial numbers of all certificates of these identities, as old ones can be abused, too."""
    found = [peer.serial for peer in issue.list_issued(folder) if peer.identity in identities]
    if not found:
        what = f"{', '.join(each.worker for each in identities)} has no certificate here"
        raise CredentialsError(what, where=str(folder), mend="whale-nebula certs show")
    return found


def _match_serial(folder: Path, start: str) -> list[str]:
    """The serial number, as a list, of the one certificate whose serial number begins with these digits."""
    found = [peer.serial for peer in issue.list_issued(folder) if peer.serial.startswith(start.lower())]
    if len(found) != 1:
        count_text = f"{len(found)} certificates have" if found else "no certificate has"
        what = f"{count_text} a serial that begins with {start!r}"
        raise CredentialsError(what, where=str(folder), mend="whale-nebula certs show")
    return found


def _describe_issued(
    issued: Sequence[Issued], args: argparse.Namespace, verb: str, describe: Callable[[Sequence[Issued]], str]
) -> Answer:
    if any(each.clipped for each in issued) and not args.json:
        remark("they expire with the authority, earlier than requested; to extend it: whale-nebula certs renew --ca")
    text = "\n".join([*(format_line(each, verb) for each in issued), describe(issued)])
    return {verb: [make_issued_document(each) for each in issued]}, text


# ---------------------------------------------------------------------- certificates as text
STATES = {"good": "green", "replaced": "dim", "revoked": "red", "expired": "red"}
"""Colours of states; others are yellow."""
_SERIAL = 16


def format_moment(at: datetime) -> str:
    """Format a date."""
    return f"{at:%Y-%m-%d %H:%M} UTC"


def find_state(begin: datetime, end: datetime, at: datetime) -> str:
    """The state of a certificate by its dates; "ends soon" in the last quarter of its validity."""
    if at < begin:
        return "not yet valid"
    if at > end:
        return "expired"
    return "ends soon" if end - at < (end - begin) / 4 else "good"


# ---------------------------------------------------------------------- show
def list_rows(folder: Path) -> list[dict[str, Any]]:
    """The certificates of a folder as rows of `show`: identity, time left, state, and why it was revoked."""
    denied, at, rows = _list_revoked(folder), files.now(), []
    current = _find_current(folder).values()
    for peer in issue.list_issued(folder):
        revoked, state = denied.get(peer.serial), find_state(peer.not_before, peer.not_after, at)
        if revoked or (peer.serial not in current and state != "expired"):
            state = "revoked" if revoked else "replaced"
        left, why = describe_time(peer.not_after - at), revoked.why if revoked else ""
        rows.append({**_make_identity_fields(peer), "left": left, "state": state, "why": why})
    return rows


def _make_identity_fields(peer: Peer) -> dict[str, Any]:
    """The fields of a certificate: its identity, serial number and last date."""
    identity = peer.identity
    return {"who": identity.worker, "uri": identity.uri, "serial": peer.serial, "not_after": peer.not_after.isoformat()}


def _find_current(folder: Path) -> dict[Identity, str | None]:
    """The serial number of the certificate that each identity uses; None if it has none that is valid."""
    newest = {peer.identity: peer for peer in issue.list_issued(folder)}
    return {identity: _find_current_serial(folder, peer, files.now()) for identity, peer in newest.items()}


def _find_current_serial(folder: Path, newest: Peer, at: datetime) -> str | None:
    """The serial number in the file that a process would use; if that was moved to its host, the newest valid one."""
    identity = newest.identity
    path = files.Files.in_folder(folder, identity).cert
    if not path.exists():
        return newest.serial if newest.not_after >= at else None
    try:
        return files.format_serial(files.parse_certificate(files.read(path, "a certificate"), str(path)))
    except IdentityError as error:
        what = f"the certificate of {identity.worker} cannot be read"
        why = error.why or error.what
        mend = f"mv {path} {path}.broken, then whale-nebula certs renew {command_options(identity)}"
        raise CredentialsError(what, where=str(path), why=why, mend=mend) from None


def list_renewable(folder: Path) -> list[Identity]:
    """The identities with a certificate in use that is not revoked."""
    used, revoked = _find_current(folder), _list_revoked(folder)
    return sorted(identity for identity, serial in used.items() if serial is not None and serial not in revoked)


def _list_revoked(folder: Path) -> Mapping[str, Revocation]:
    found = load_deny_list(folder)
    return {} if found is None else found.revoked


def load_deny_list(folder: Path) -> SignedList | None:
    """The deny list of a folder, if it has one."""
    path = folder / files.REVOKED
    return trust.load(path, authority.load_certificates(folder)) if path.exists() else None


def make_deny_list_document(found: SignedList | None) -> dict[str, Any] | None:
    """The deny list as a document, by its number and size; None if there is none."""
    return None if found is None else {"number": found.number, "certificates": len(found.revoked)}


def make_document(folder: Path) -> dict[str, Any]:
    """The output of `show` as a document."""
    found = make_deny_list_document(load_deny_list(folder))
    return {**make_authority_document(folder), "deny_list": found, "certificates": list_rows(folder)}


def make_authority_document(folder: Path) -> dict[str, Any]:
    """The authority of a folder as a document."""
    certificate = authority.load_certificate(folder)
    at = files.now()
    return {
        "run": files.find_authority_run(certificate),
        "folder": str(folder),
        "authority": {
            "ca": str(folder / authority.CA),
            "serial": files.format_serial(certificate),
            "not_after": certificate.not_valid_after_utc.isoformat(),
            "state": find_state(certificate.not_valid_before_utc, certificate.not_valid_after_utc, at),
            "can_issue": (folder / authority.KEY).exists(),
        },
    }


def format_table(folder: Path) -> str:
    """The output of `show` as text; colours on a terminal only."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    certificate = authority.load_certificate(folder)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for column in ("who", "serial", "not after", "left", "state"):
        table.add_column(column, no_wrap=column != "state")
    rows = list_rows(folder)
    for row in rows:
        until = format_moment(datetime.fromisoformat(row["not_after"]))
        state_text = f"{row['state']}: {row['why']}" if row["why"] else row["state"]
        style = STATES.get(row["state"], "yellow")
        table.add_row(row["who"], row["serial"][:_SERIAL], until, row["left"], Text(state_text, style=style))
    at, end = files.now(), certificate.not_valid_after_utc
    state = find_state(certificate.not_valid_before_utc, end, at)
    where = "" if (folder / authority.KEY).exists() else "; its key is on another host"
    run, clusters = files.find_authority_run(certificate), files.list_authority_clusters(certificate)
    scope = f" for {', '.join(clusters)}" * bool(clusters)
    until = f"{format_moment(end)} ({describe_time(end - at)}, {state})"
    lines = [f"run {run}: authority{scope} valid until {until}{where}"]
    others = authority.load_certificates(folder)[1:]
    trusted = [name for each in others for name in files.list_authority_clusters(each)]
    lines += [f"other trusted authorities: for {', '.join(trusted)}"] * bool(trusted)
    denied = load_deny_list(folder)
    if denied is None:
        lines.append(f"no deny list here: copy {files.REVOKED} from the host that issues certificates")
    else:
        count = len(denied.revoked)
        lines.append(f"deny list number {denied.number}: {count or 'no'} certificate{'s' * (count != 1)}")
    with console.capture() as capture:
        console.print(Text("\n".join([*lines, ""])))
        console.print(
            table if rows else Text("no certificates yet; issue one with: whale-nebula certs issue --cluster gpu")
        )
    return capture.get().rstrip("\n")


# ---------------------------------------------------------------------- results of commands
def describe_authority(new: Authority, folder: Path) -> str:
    """The text after `init`, and after the authority was renewed."""
    until = format_moment(new.certificate.not_valid_after_utc)
    scope = f" for {', '.join(new.bound)}" * bool(new.bound)
    ca = f"{folder / authority.CA}   the authority of run {new.run}{scope}, valid until {until}: copy it to every host"
    return f"{ca}\n{folder / authority.KEY}   its key: it stays on this host"


def format_line(each: Issued, verb: str) -> str:
    """The line about a new certificate; `verb` says how it was made: issued, renewed or signed."""
    peer = each.peer
    return (
        f"{verb} {peer.identity.worker}   serial {peer.serial[:_SERIAL]}   valid until {format_moment(peer.not_after)}"
    )


def describe_destinations(issued: Sequence[Issued]) -> str:
    """Which files must be copied to which host."""
    lines = [""]
    for each in issued:
        lines += [
            f"copy to the host of {each.peer.identity.worker}, if it is not this one:",
            *(f"  {path}" for path in each.files[:3]),
            f"  {each.files.revoked}   and again after each revocation",
        ]
    folder = issued[0].files.ca.parent
    lines.append(f"The default location is {folder.name!r} next to clusters.yaml; for any other, add to clusters.yaml:")
    stem = f"{folder}/{{cluster}}-{{role}}-{{index}}"
    return "\n".join([*lines, f'  security: {{ca: {folder}/ca.pem, cert: "{stem}.pem", key: "{stem}.key"}}'])


def describe_renewed(issued: Sequence[Issued]) -> str:
    """The files that must be copied after a renewal."""
    lines = [f"  {each.files.cert}   to the host of {each.peer.identity.worker}" for each in issued]
    return "\n".join(["", "the keys have not changed; copy these files if they are for another host:", *lines])


def describe_requests(found: Sequence[CertificateRequest]) -> str:
    """The text after keys and requests were created."""
    lines = []
    for each in found:
        lines += [
            f"requested {each.identity.worker}   key {each.digest}",
            f"  {each.key}   stays on this host",
            f"  {each.path}   send to the owner of {each.identity.cluster}; send the digest over another channel",
        ]
    return "\n".join(lines)


def describe_signed(issued: Sequence[Issued]) -> str:
    """The files to return, and the values to compare first."""
    lines = ["", "compare these digests with those that the hosts printed; then copy to each host:"]
    for each in issued:
        lines.append(f"  {each.files.cert}   key {each.peer.key[:32]}")
    folder = issued[0].files.ca.parent
    return "\n".join(
        [*lines, f"  {issued[0].files.ca}", *(f"  {path}" for path in sorted(folder.glob("revoked*.json")))]
    )


def describe_revocation(new: Sequence[Revocation], present: SignedList | None, folder: Path) -> str:
    """The text after a revocation."""
    if not new or present is None:
        return "nothing changed: already revoked"
    lines = [f"revoked {Identity.parse(each.who).worker}   serial {each.serial[:_SERIAL]}" for each in new]
    return "\n".join([*lines, "", describe_signed_list(present, folder)])


def describe_signed_list(found: SignedList, folder: Path) -> str:
    """The text after the deny list was written."""
    return f"copy to every host: {folder / files.REVOKED}   now number {found.number}"


def make_issued_document(each: Issued) -> dict[str, Any]:
    """A new certificate as a document."""
    paths = {part: str(path) for part, path in each.files._asdict().items()}
    return {**_make_identity_fields(each.peer), "files": paths, "clipped": each.clipped}

"""`whale-nebula certs`: create a run's authority; issue, show, renew and revoke certificates. Needs no TensorFlow."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from whale_nebula.cli import certs_shown
from whale_nebula.cli.arguments import Answer, Options, Parser, answer, choose_command, remark, split
from whale_nebula.config import Config, load
from whale_nebula.errors import CredentialsError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.security import GATEWAY, WORKER, Identity, authority, issue, owners
from whale_nebula.security.authority import AUTHORITY_DAYS, Authority
from whale_nebula.security.identity import ROLES
from whale_nebula.security.issue import DAYS, Issued

_DESCRIPTION = """\
Certificates say who a process is. One host has the run's authority: a folder with its key, made once by "init".
There all certificates are issued, and copied to the hosts of their owners: "issue" prints which files go where.

Clusters of several owners have an authority each, which speaks for its clusters alone: "init --cluster". There each
host makes its key by itself ("request"), the owner signs ("sign"), and everybody trusts all owners ("trust")."""

_EPILOG = """\
commands:
  init     make the authority of a run
  issue    a new key and certificate for a worker, a gateway or an operator
  show     who has a certificate, until when, and in which state
  renew    a new certificate for the key that is there: only its .pem must be copied again, while the run goes on
  revoke   put a certificate on the deny list
  request  make a key that stays on this host, and a request for the authority to sign
  sign     certificates for requests
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

whale-nebula certs COMMAND --help says more of each.

exit status:
  0   done
  1   refused: nothing was changed, and the message says why
  2   the command line is wrong
  78  the config is wrong"""

_TEXT = {
    "init": "Make the authority of a run: a folder that only you can enter, with the key that signs all certificates.",
    "issue": "Make a new key and a certificate for each of these. Nobody who has a good certificate gets another key.",
    "show": "Show the authority and every certificate that was issued here, or copied here.",
    "renew": "Make new certificates for the keys that are there: of all, or of those that are named. The old ones stay "
    "good until their dates, and running processes take up new ones by themselves.",
    "revoke": "Put certificates on the deny list, revoked.json; every process reads it again when it changes. Copy it "
    "to every host.",
}
_TEXT |= {
    "request": "Make a key for a process of this host, unless it has one, and a request: a file for the owner of the "
    "authority. The key stays here.",
    "sign": "Make certificates for requests. Compare the digest of the key with whoever sent the file.",
    "trust": "Trust the authority of another owner, for its clusters and no others.",
}
_OPTIONS: Options = {
    "--run": ("NAME", "the run's name, if the config names none"),
    "--config": ("FILE", "clusters.yaml: the run's name, which clusters there are, and where certs lies"),
    "--cluster": ("NAME", "whose certificates"),
    "--role": ("ROLE", f"{', '.join(ROLES)}; worker if it is not given"),
    "--index": ("N", "the number of the worker in its cluster; 0 if it is not given"),
    "--count": ("N", "workers 0 to N-1"),
    "--all": (None, "every worker of the config, and every gateway that it names"),
    "--ca": (None, "the authority's own certificate: new dates for the same key"),
    "--revoked": (None, "the deny list: signed anew, with the next number"),
    "--list": ("FILE", "the deny list of the other owner: his revoked.json"),
    "--forget-revocations": (None, "with --revoked: where the list is lost, and nobody was ever on it"),
    "--serial": ("HEX", "one certificate, by the first digits of its serial number"),
    "--why": ("TEXT", "what to remember about it"),
    "--days": ("DAYS", f"how long it is good: {DAYS:g} if it is not given, {AUTHORITY_DAYS:g} for the authority"),
    "--folder": ("FOLDER", 'where the authority is; if it is not given "certs" beside the --config, or here'),
    "--json": (None, "print one JSON object"),
}
_WHO = ("--cluster", "--role", "--index", "--count")
_TAKES = {
    "init": ("--run", "--config", "--cluster", "--days", "--folder", "--json"),
    "issue": (*_WHO, "--all", "--config", "--days", "--folder", "--json"),
    "show": ("--config", "--folder", "--json"),
    "renew": (*_WHO, "--ca", "--revoked", "--forget-revocations", "--config", "--days", "--folder", "--json"),
    "revoke": (*_WHO, "--serial", "--why", "--config", "--folder", "--json"),
    "request": ("--run", *_WHO, "--config", "--folder", "--json"),
    "sign": ("--days", "--config", "--folder", "--json"),
    "trust": ("--list", "--config", "--folder", "--json"),
}
_SPECIAL: Mapping[str, Options] = {
    "init": {"--cluster": ("NAMES", "an authority that speaks for these clusters alone: gpu, or gpu,tpu")},
    "trust": {"--ca": ("FILE", "the certificate of the other owner's authority: his ca.pem")},
}
"""Help texts that differ in one of the commands."""


def parser(command: str = "") -> Parser:
    """The options of `certs`, or of one of its commands."""
    if not command:
        usage = "whale-nebula certs init|issue|show|renew|revoke|request|sign|trust [options]"
        return Parser("certs", _DESCRIPTION, {}, usage=usage, epilog=_EPILOG)
    options = {**{name: _OPTIONS[name] for name in _TAKES[command]}, **_SPECIAL.get(command, {})}
    usage = f"whale-nebula certs {command} [options]{' FILE ...' * (command == 'sign')}"
    return Parser(f"certs {command}", _TEXT[command], options, usage=usage)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    command, made = choose_command(argv, _COMMANDS, parser)
    words = split(argv[1:], {**_OPTIONS, **_SPECIAL.get(command, {})})
    paths = [each for each in (words.script, *words.arguments) if each is not None] if command == "sign" else []
    given = made.read(words.options if command == "sign" else argv[1:])
    given.paths = paths
    if any(each.startswith("-") for each in paths):
        made.error(f"there is no option {next(each for each in paths if each.startswith('-'))!r}")
    return answer(given, lambda: _COMMANDS[command](given, made))


# ---------------------------------------------------------------------- the commands
def _init(given: argparse.Namespace, made: Parser) -> Answer:
    config, folder = load_config(given), find_folder(given)
    run = given.run or config.run
    if not run:
        made.error('which run? --run mt, or --config clusters.yaml with "run: mt" in it')
    if given.run and config.run not in (None, given.run):
        made.error(f"the config's run is {config.run!r}: leave --run out")
    bound = [each.strip() for each in given.cluster.split(",")] if given.cluster else []
    new = Authority.fresh(
        run, authority.clusters_of(config), made.amount("--days", given.days, AUTHORITY_DAYS), bound=bound
    )
    authority.create(folder, new)
    return certs_shown.authority_document(folder), certs_shown.describe_authority(new, folder)


def _issue(given: argparse.Namespace, made: Parser) -> Answer:
    folder, config = find_folder(given), load_config(given)
    days, wanted = made.amount("--days", given.days, DAYS), list_wanted(given, made)
    if given.all and (wanted or given.config is None):
        made.error("--all takes its workers from --config clusters.yaml, and from nothing else")
    if not given.all and not wanted:
        made.error("whose? --cluster gpu, or --all --config clusters.yaml")
    signs = _apply_config(authority.load(folder), config, folder)
    who = authority.everyone(signs.run, config) if given.all else [Identity(signs.run, *each) for each in wanted]
    return _describe_issued(issue.issue(folder, signs, who, days), given, "issued", certs_shown.describe_destinations)


def _show(given: argparse.Namespace, made: Parser) -> Answer:
    return certs_shown.document(find_folder(given)), "" if given.json else certs_shown.table(find_folder(given))


def _renew(given: argparse.Namespace, made: Parser) -> Answer:
    folder, wanted = find_folder(given), list_wanted(given, made)
    if given.ca:
        if wanted:
            made.error("--ca renews the authority's certificate, and no other")
        new = issue.renew_authority(folder, made.amount("--days", given.days, AUTHORITY_DAYS))
        return certs_shown.authority_document(folder), certs_shown.describe_authority(new, folder)
    signs = authority.load(folder)
    if given.forget_revocations and not given.revoked:
        made.error("--forget-revocations goes with --revoked")
    if given.revoked:
        if wanted:
            made.error("--revoked signs the deny list anew, and renews no certificate")
        renewed = issue.renew_deny_list(folder, signs, forget=given.forget_revocations)
        return {"deny_list": certs_shown.deny_list_document(renewed)}, certs_shown.signed_list(renewed, folder)
    who = [Identity(signs.run, *each) for each in wanted] or certs_shown.renewable(folder)
    if not who:
        raise CredentialsError("there is nothing to renew", where=str(folder), mend="whale-nebula certs issue")
    renewals = issue.renew(folder, signs, who, made.amount("--days", given.days, DAYS))
    return _describe_issued(renewals, given, "renewed", certs_shown.describe_renewed)


def _revoke(given: argparse.Namespace, made: Parser) -> Answer:
    folder, wanted = find_folder(given), list_wanted(given, made)
    if bool(wanted) == bool(given.serial):
        made.error("which? --cluster gpu --index 0, or --serial with its first digits")
    signs = authority.load(folder)
    who = [Identity(signs.run, *each) for each in wanted]
    serials = _match_serial(folder, given.serial) if given.serial else _find_serials(folder, who)
    new = issue.revoke(folder, signs, serials, given.why or "")
    text = certs_shown.describe_revocation(new, certs_shown.deny_list(folder), folder)
    return {"revoked": [each._asdict() for each in new]}, text


def _request(given: argparse.Namespace, made: Parser) -> Answer:
    config, folder, wanted = load_config(given), find_folder(given), list_wanted(given, made)
    run = given.run or config.run
    if not run or not wanted:
        made.error("for whom? --run mt --cluster gpu --index 0, or --config clusters.yaml with the run in it")
    found = [owners.request(folder, Identity(run, *each)) for each in wanted]
    document = [
        {"uri": each.identity.uri, **{n: str(v) for n, v in each._asdict().items() if n != "identity"}}
        for each in found
    ]
    return {"requested": document}, certs_shown.describe_requests(found)


def _sign(given: argparse.Namespace, made: Parser) -> Answer:
    if not given.paths:
        made.error("which requests? whale-nebula certs sign gpu-worker-0.csr")
    folder, config = find_folder(given), load_config(given)
    signs = _apply_config(authority.load(folder), config, folder)
    signed = owners.sign(folder, signs, [Path(each) for each in given.paths], made.amount("--days", given.days, DAYS))
    return _describe_issued(signed, given, "signed", certs_shown.describe_signed)


def _trust(given: argparse.Namespace, made: Parser) -> Answer:
    if given.ca is None:
        made.error("whom? --ca his-ca.pem --list his-revoked.json")
    changed = owners.trust_owner(find_folder(given), Path(given.ca), given.list and Path(given.list))
    text = "\n".join(["copy to every host of yours:", *(f"  {path}" for path in changed)])
    return {"changed": changed}, text


_COMMANDS: dict[str, Callable[[argparse.Namespace, Parser], Answer]] = {
    "init": _init, "issue": _issue, "show": _show, "renew": _renew, "revoke": _revoke, "request": _request,
    "sign": _sign, "trust": _trust,
}  # fmt: skip


# ---------------------------------------------------------------------- options
def find_folder(given: argparse.Namespace) -> Path:
    """The folder of a run's certificates: beside its config."""
    if given.folder is not None:
        return Path(given.folder)
    return Path("certs") if given.config is None else Path(given.config).parent / "certs"


def load_config(given: argparse.Namespace) -> Config:
    """The given config, or an empty one."""
    return load(given.config) if given.config is not None else Config()


def list_wanted(given: argparse.Namespace, made: Parser) -> list[tuple[str, str, int]]:
    """Cluster, role and number of the identities that options name; empty if they name none."""
    if given.cluster is None:
        if given.role or given.index or given.count:
            made.error("of which cluster? --cluster gpu")
        return []
    role = given.role or WORKER
    if role not in ROLES:
        made.error(f"there is no role {role!r}: {did_you_mean(role, ROLES)}")
    if given.index is not None and given.count is not None:
        made.error("--index is one, --count is several: choose one of them")
    count, index = made.number("--count", given.count), made.number("--index", given.index)
    if role == GATEWAY and (count or index):
        made.error("a cluster has one gateway: leave --index and --count out")
    if count == 0:
        made.error("--count takes a number from 1 up")
    return [(given.cluster, role, number) for number in (range(count) if count else [index or 0])]


def _apply_config(signs: Authority, config: Config, folder: Path) -> Authority:
    """The authority, with the clusters of the given config, if any."""
    if config.run not in (None, signs.run):
        what = f"the config is of run {config.run!r}, and the authority of {signs.run!r}"
        mend = f"whale-nebula certs init --folder certs-{config.run}, or the right --config"
        raise CredentialsError(what, where=str(folder), mend=mend)
    clusters = authority.clusters_of(config)
    if not clusters or clusters == signs.clusters:
        return signs
    changed = replace(signs, clusters=clusters)
    authority.save_clusters(folder, changed)
    return changed


def _find_serials(folder: Path, who: Sequence[Identity]) -> list[str]:
    """The serial numbers of all certificates of an identity, as old ones can be abused, too."""
    found = [peer.serial for peer in issue.list_issued(folder) if peer.identity in who]
    if not found:
        said = ", ".join(each.worker for each in who)
        raise CredentialsError(f"{said} has no certificate here", where=str(folder), mend="whale-nebula certs show")
    return found


def _match_serial(folder: Path, start: str) -> list[str]:
    found = [peer.serial for peer in issue.list_issued(folder) if peer.serial.startswith(start.lower())]
    if len(found) != 1:
        said = f"{len(found)} certificates begin with" if found else "no certificate has"
        raise CredentialsError(f"{said} the serial {start!r}", where=str(folder), mend="whale-nebula certs show")
    return found


def _describe_issued(
    made: Sequence[Issued], given: argparse.Namespace, verb: str, then: Callable[[Sequence[Issued]], str]
) -> Answer:
    if any(each.clipped for each in made) and not given.json:
        remark("they end with the authority, before the days that were asked for: whale-nebula certs renew --ca")
    text = "\n".join([*(certs_shown.line(each, verb) for each in made), then(made)])
    return {verb: [certs_shown.issued_document(each) for each in made]}, text

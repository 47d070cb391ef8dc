"""`whale-nebula accounts`: manage the accounts of users that may train in an owner's cluster. Needs no TensorFlow."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from whale_nebula.accounts.login import MOST_HOURS, LoginIssuer
from whale_nebula.accounts.members import DISABLED, ENABLED, ROLES, TRAINER, Account
from whale_nebula.accounts.registry import INVITATION, INVITATION_DAYS, TOKEN, TOKEN_DAYS, Registry
from whale_nebula.accounts.scope import Scope
from whale_nebula.accounts.service import serve
from whale_nebula.cli import arguments
from whale_nebula.cli.arguments import Answer, Options, Parser, answer, choose_command, remark, split
from whale_nebula.config import quantities
from whale_nebula.config.place import Place
from whale_nebula.errors import AccountError
from whale_nebula.security import authority, files
from whale_nebula.security.allowance import BYTE_LIMITS, UNLIMITED, Allowance
from whale_nebula.security.authority import Authority
from whale_nebula.security.identity import ROLES as IDENTITIES
from whale_nebula.transport.handover import DATA, LOGIN, is_served, socket_path

_DESCRIPTION = """\
Manage accounts, which define who may train in the clusters of an owner. They are stored in one file next to the owner's
authority ("whale-nebula certs init"). Logging in ("whale-nebula login") yields short-lived certificates that carry the
account's name."""

_EPILOG = """\
commands:
  add      add an account, with a one-time invitation to set its password
  list     list all accounts
  show     show one account: its state, secrets and certificates
  disable  forbid logins with an account, and revoke its certificates
  enable   allow logins again
  limit    limit the number of workers of an account, and their resources
  remove   remove an account and revoke its certificates
  passwd   create an invitation to set a new password, or read the password from a file
  token    create a login token for programs
  log      print decisions and changes as JSON lines
  serve    run the login service

examples:
  whale-nebula accounts add ana --workers 2
  whale-nebula accounts limit ana --memory 16GiB --cpus 4 --disk 50GiB --line 20GiB
  whale-nebula accounts token ana --days 7
  whale-nebula accounts token ana --for worker --count 2 --hours 2
  whale-nebula accounts disable ana
  whale-nebula accounts serve --cluster gpu --listen 0.0.0.0:7200

exit status:
  0   done
  1   refused; nothing was changed, and the message gives the reason
  2   wrong command line
  78  the service cannot listen"""

_COMMAND_TEXTS = {
    "add": "Add an account. Prints a one-time invitation for the person or program that will use the account.",
    "list": "List all accounts.",
    "show": "Show an account, the numbers of its secrets, and its certificates.",
    "disable": "Forbid logins with an account, and revoke its certificates: connections of its workers are closed as "
    "soon as revoked.json is on the hosts that they are connected to.",
    "enable": "Allow logins with an account again.",
    "limit": "Limit the number of workers of an account, and their resources; limits that are not given do not change. "
    "Changes apply from the next login on: existing certificates keep their limits.",
    "remove": "Remove an account with its secrets, and revoke its certificates.",
    "passwd": "Create an invitation to set a new password; or set it from a file, which ends earlier tokens.",
    "token": "Create a token, which can be used to log in until it expires. It is shown once. Without a scope it "
    "permits all that its account permits.",
    "log": "Print decisions and changes as JSON lines, after verifying the log.",
    "serve": "Serve logins until SIGTERM or Ctrl-C, on --listen and through the port of a gateway on this host that "
    "has --services.",
}
_OPTIONS: Options = {
    "--role": ("ROLE", f"{', '.join(ROLES)}; default: trainer"),
    "--workers": ("N", "maximum number of workers at a time; default: 1"),
    "--memory": ("SIZE", "limit for all its workers on a host together, such as 16GiB; none: unlimited"),
    "--cpus": ("N", "limit of processors, likewise"),
    "--processes": ("N", "limit of processes and threads, likewise"),
    "--disk": ("SIZE", "limit of stored data, likewise"),
    "--line": ("SIZE", "bytes per day through the cluster's gateway, for all its workers together"),
    "--for": ("ROLE", f"restrict the token to certificates of this role: {', '.join(IDENTITIES)}"),
    "--index": ("N", "restrict the token to the worker with this index"),
    "--count": ("N", "restrict the token to workers 0 to N-1"),
    "--hours": ("HOURS", f"maximum validity of its certificates; default: {MOST_HOURS:g}"),
    "--days": ("DAYS", f"days of validity; default: {INVITATION_DAYS:g} for invitations, {TOKEN_DAYS:g} for tokens"),
    "--password-file": ("FILE", "a file, readable only by you, whose first line is the password"),
    "--cluster": ("NAME", "the cluster of the service"),
    "--listen": ("HOST:PORT", "the address to listen on; default: 127.0.0.1:7200"),
    "--services": ("FOLDER", "where the --services of a gateway on this host find it; default: --folder"),
    "--folder": ("FOLDER", 'the folder of the authority; default: "certs"'),
    "--json": (None, "print one JSON object"),
}
_COMMON_OPTIONS = ("--folder", "--json")
_LIMITS = ("--memory", "--cpus", "--processes", "--disk", "--line")
_COMMAND_OPTIONS = {
    "add": ("--role", "--workers", *_LIMITS, "--days", "--password-file", *_COMMON_OPTIONS),
    "limit": ("--workers", *_LIMITS, *_COMMON_OPTIONS),
    "passwd": ("--days", "--password-file", *_COMMON_OPTIONS),
    "token": ("--for", "--index", "--count", "--hours", "--days", *_COMMON_OPTIONS),
    "serve": ("--cluster", "--listen", "--services", "--folder"),
}
_COMMANDS_WITH_NAME = ("add", "show", "disable", "enable", "limit", "remove", "passwd", "token")


def make_parser(command: str = "") -> Parser:
    """The options of `accounts`, or of one of its commands."""
    if not command:
        usage = f"whale-nebula accounts {'|'.join(_COMMAND_TEXTS)} [NAME] [options]"
        return Parser("accounts", _DESCRIPTION, {}, usage=usage, epilog=_EPILOG)
    usage = f"whale-nebula accounts {command}{' NAME' * (command in _COMMANDS_WITH_NAME)} [options]"
    options = {name: _OPTIONS[name] for name in _COMMAND_OPTIONS.get(command, _COMMON_OPTIONS)}
    return Parser(f"accounts {command}", _COMMAND_TEXTS[command], options, usage=usage)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    command, parser = choose_command(argv, _COMMAND_TEXTS, make_parser)
    words = split(argv[1:], _OPTIONS)
    args = parser.read(words.options)
    if words.arguments or (words.script is None) == (command in _COMMANDS_WITH_NAME):
        parser.error(
            "exactly one account name is required" if command in _COMMANDS_WITH_NAME else "only options are accepted"
        )
    folder = Path("certs" if args.folder is None else args.folder)

    def run() -> int | Answer:
        signer = authority.load(folder)
        with contextlib.closing(Registry(folder, signer)) as registry:
            if command == "serve":
                return _serve(args, parser, LoginIssuer(registry, signer, folder))
            return _COMMANDS[command](CommandCall(args, parser, registry, signer, folder, words.script or ""))

    return answer(args, run)


class CommandCall(NamedTuple):
    """A command with its arguments."""

    args: argparse.Namespace
    parser: Parser
    registry: Registry
    signer: Authority
    folder: Path
    name: str

    def days(self, default: float) -> float:
        """The days of validity of a secret: --days, or the default."""
        days = self.parser.amount("--days", self.args.days, default)
        if not 0 < days <= authority.MOST_DAYS:
            self.parser.error(f"--days must be greater than 0 and at most {authority.MOST_DAYS:g}")
        return days

    def allowance(self, before: Allowance = UNLIMITED) -> Allowance:
        """The limits of the options, merged with the previous ones."""
        texts = {option.lstrip("-"): getattr(self.args, option.lstrip("-")) for option in _LIMITS}
        return replace(before, **{name: _read_limit(name, text) for name, text in texts.items() if text is not None})

    def password(self) -> str | None:
        """The password in --password-file; None without this option."""
        path = self.args.password_file
        return None if path is None else read_secret(path, "password")

    def invite(self) -> tuple[str, str]:
        """Create an invitation; returns it, and instructions for its use."""
        invitation = self.registry.make_secret(self.name, INVITATION, self.days(INVITATION_DAYS))
        return (
            invitation,
            f"invitation: {invitation}\n  send it to {self.name} with ca.pem over a secure channel: "
            "whale-nebula login --invitation",
        )


def _read_limit(name: str, text: str) -> Any:
    """Parse a limit; None for no limit."""
    place = Place(text, f"--{name}")
    if text == "none":
        return None
    if name in BYTE_LIMITS:
        return quantities.read_memory(place)
    whole, most = name == "processes", 1 << 22  # the most that Linux allows
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        raise place.make_error(f"{text!r} is not a number", mend=f"--{name} 4, or --{name} none") from None
    return Place(value, f"--{name}").read_number(least=1 if whole else 0.1, most=most, integer=whole)


def _describe_account(account: Account) -> dict[str, Any]:
    return {**asdict(account), "allowance": account.allowance.limits}


def _add(call: CommandCall) -> Answer:
    workers = call.parser.number("--workers", call.args.workers)
    call.days(INVITATION_DAYS)
    password, workers = call.password(), 1 if workers is None else workers
    call.registry.add(call.name, call.args.role or TRAINER, workers, password, call.allowance())
    if password is not None:
        return {"added": call.name}, f"added {call.name}"
    invitation, text = call.invite()
    return {"added": call.name, "invitation": invitation}, f"added {call.name}\n{text}"


def _list(call: CommandCall) -> Answer:
    found = call.registry.list_accounts()
    limits = [f", {each.allowance}" * bool(each.allowance) for each in found]
    rows = [
        f"{each.name:<16} {each.role:<8} {each.state:<9} {each.workers} workers{more}"
        for each, more in zip(found, limits, strict=True)
    ]
    return [_describe_account(each) for each in found], "\n".join(
        rows
    ) or "no accounts; add one with: whale-nebula accounts add NAME"


def _show(call: CommandCall) -> Answer:
    found, secrets = call.registry.find(call.name), call.registry.list_secrets(call.name)
    certificates = call.registry.list_certificates(call.name)
    fields = {**asdict(found), "allowance": str(found.allowance)}
    lines = [f"{name}: {value}" for name, value in fields.items() if value != ""]
    lines += [
        f"{kind} {number} until {until}{f', for {scope}' * bool(scope)}" for number, kind, until, scope in secrets
    ]
    lines += [f"certificate {each.serial[:16]} of {each.identity} until {each.until}" for each in certificates]
    document = {**_describe_account(found), "secrets": secrets, "certificates": [asdict(each) for each in certificates]}
    return document, "\n".join(lines)


def _disable(call: CommandCall) -> Answer:
    call.registry.set_state(call.name, DISABLED)
    return _end_access(call, "disabled")


def _limit(call: CommandCall) -> Answer:
    found, workers = call.registry.find(call.name), call.parser.number("--workers", call.args.workers)
    allowed = call.allowance(found.allowance)
    workers = found.workers if workers is None else workers
    call.registry.set_limits(call.name, workers, allowed)
    text = f"{call.name}: workers {workers}{f', {allowed}' * bool(allowed)}, from the next login on"
    return {"limited": call.name, "workers": workers, **allowed.limits}, text


def _enable(call: CommandCall) -> Answer:
    call.registry.set_state(call.name, ENABLED)
    return {"enabled": call.name}, f"enabled {call.name}"


def _remove(call: CommandCall) -> Answer:
    call.registry.remove(call.name)
    return _end_access(call, "removed")


def _end_access(call: CommandCall, verb: str) -> Answer:
    """Revoke the certificates of an account that was disabled or removed."""
    revoked = LoginIssuer(call.registry, call.signer, call.folder).revoke_certificates(
        call.name, f"account {call.name} was {verb}"
    )
    text = f"{verb} {call.name}"
    if revoked:
        many = "s" * (len(revoked) != 1)
        text += f"\nrevoked {len(revoked)} certificate{many}; copy to every host: {call.folder / files.REVOKED}"
    return {verb: call.name, "revoked": [each.serial for each in revoked]}, text


def _set_password(call: CommandCall) -> Answer:
    password = call.password()
    if password is not None:
        call.registry.set_password(call.name, password)
        return {"changed": call.name}, f"changed the password of {call.name}"
    invitation, text = call.invite()
    return {"invitation": invitation}, text


def _make_token(call: CommandCall) -> Answer:
    scope = _read_scope(call)
    token = call.registry.make_secret(call.name, TOKEN, call.days(TOKEN_DAYS), scope)
    text = f"{token}\n  it is not shown again: store it in a file of mode 600, for --token-file"
    return {"token": token, "scope": str(scope)}, f"{text}\n  valid for {scope}" if scope else text


def _read_scope(call: CommandCall) -> Scope:
    """The scope of a token in the options."""
    args, parser = call.args, call.parser
    role = vars(args)["for"]
    if role not in (None, *IDENTITIES):
        parser.error(f"--for {role}: unknown role; choose one of {', '.join(IDENTITIES)}")
    index, count = parser.number("--index", args.index), parser.number("--count", args.count)
    if count == 0 or not (index is None or count is None):
        parser.error("use --index N for one worker, or --count N for workers 0 to N-1")
    hours = None if args.hours is None else parser.amount("--hours", args.hours, 0.0)
    if hours is not None and not 0 < hours <= MOST_HOURS:
        parser.error(f"--hours must be greater than 0 and at most {MOST_HOURS:g}")
    numbers = (index, index) if count is None else (0, count - 1)
    return Scope(role, *numbers, hours)


def _show_log(call: CommandCall) -> Answer:
    found = call.registry.list_events()
    return found, "\n".join(json.dumps(each) for each in found)


_COMMANDS: dict[str, Callable[[CommandCall], Answer]] = {
    "add": _add, "list": _list, "show": _show, "disable": _disable, "enable": _enable, "limit": _limit,
    "remove": _remove, "passwd": _set_password, "token": _make_token, "log": _show_log,
}  # fmt: skip


def _serve(args: argparse.Namespace, parser: Parser, issuer: LoginIssuer) -> int:
    return run_service(args, parser, issuer.authority, issuer.folder, LOGIN, partial(serve, issuer))


_SERVICES = {LOGIN: ("login", 7200), DATA: ("data", 7300)}
"""The name and the default port of the services, by their protocol."""


def run_service(
    args: argparse.Namespace,
    parser: Parser,
    signer: Authority,
    folder: Path,
    protocol: str,
    serve: Callable[[str, str, int, Path | None], contextlib.AbstractContextManager[int]],
) -> int:
    """Run a service of a cluster until SIGTERM or Ctrl-C. `serve` opens it, from the cluster, the host, the port, and
    the folder in which a gateway finds it; the result is the port in use.
    """
    cluster = args.cluster or (signer.bound[0] if len(signer.bound) == 1 else None)
    if cluster is None:
        parser.error("missing cluster: --cluster gpu")
    noun, usual_port = _SERVICES[protocol]
    host, port = parser.address("--listen", args.listen or f"127.0.0.1:{usual_port}")
    stopped = arguments.catch_stop_signals()
    with serve(cluster, host, port, _find_services(args, folder, protocol, cluster)) as bound:
        remark(f"{noun} service of {cluster} listens on {host}:{bound}")
        stopped.wait()
    return arguments.DONE


def _find_services(args: argparse.Namespace, folder: Path, protocol: str, cluster: str) -> Path | None:
    """The folder in which a gateway finds this service: --services, or `folder`. None if another service of this
    protocol is served there, so that this one is reachable only on its own port.
    """
    if args.services is not None:
        return Path(args.services)
    if not is_served(socket_path(folder, protocol, cluster)):
        return folder
    remark(f"another service already uses the gateway of {cluster}: this one can be reached only on its own port")
    return None


def read_secret(path: str, noun: str) -> str:
    """The first line of a file that only its owner can read: a password or a token."""
    mend = f"--{noun}-file FILE: the file that contains the {noun}"
    lines = files.read(path, f"the {noun}", secret=True, mend=mend).decode("utf-8", "replace").splitlines()
    return lines[0] if lines else ""


def ask_password(text: str) -> str:
    """Read a password from the terminal, or from the first line of standard input if that is not a terminal."""
    if sys.stdin.isatty():
        with contextlib.suppress(EOFError):
            return getpass.getpass(text)
        raise AccountError("no password was entered", mend="--password-file FILE, or --token-file FILE")
    line = sys.stdin.readline()
    if not line:
        raise AccountError(
            "cannot ask for a password without a terminal", mend="--password-file FILE, or --token-file FILE"
        )
    return line.rstrip("\n")

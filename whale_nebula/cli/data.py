"""`whale-nebula data`: publish an owner's datasets, grant access to them, serve them, and request access."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from whale_nebula.accounts.registry import Registry
from whale_nebula.cli.accounts import run_service
from whale_nebula.cli.arguments import Answer, Options, Parser, answer, choose_command, split, user_name
from whale_nebula.datasets import grants as states
from whale_nebula.datasets.grants import DAYS, Grants
from whale_nebula.datasets.interface import Interface, open_dataset, read_interface
from whale_nebula.datasets.reading import open_remote
from whale_nebula.datasets.schema import read_schema
from whale_nebula.datasets.service import open_service
from whale_nebula.errors import AccessError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.security import authority
from whale_nebula.transport.handover import DATA

_DESCRIPTION = """\
Manage access to datasets. Other owners do not get files, but rows of a published interface. Interfaces and grants are
stored next to the owner's authority ("whale-nebula certs init"), together with the accounts."""

_EPILOG = """\
commands of the owner:
  publish   publish a dataset interface: source, transformation, schema and limits
  list      list all datasets
  show      show one dataset, its schema and limits, and who may read it
  withdraw  end access to a dataset
  grants    list requests; --grant, --deny or --withdraw one of them
  serve     run the service that accounts read from

commands of an account, with the certificates of "whale-nebula login":
  list --at HOST:PORT   list the datasets that can be requested
  request               request access: whale-nebula data request gpu://corpus --at HOST:PORT --purpose TEXT

examples:
  whale-nebula data publish corpus.yaml
  whale-nebula data grants --grant 1f3a9c02 --days 7
  whale-nebula data withdraw corpus
  whale-nebula data serve --listen 0.0.0.0:7300
  whale-nebula data request gpu://corpus --at gpu.example.org:7100 --folder of-gpu --purpose "a study of tickets"

exit status:
  0   done
  1   refused; nothing was changed, and the message gives the reason
  2   wrong command line
  66  the file does not exist
  78  the interface is wrong"""

_COMMAND_TEXTS = {
    "publish": "Publish a dataset interface. Its first row is read, to detect errors at once.",
    "list": "List all datasets.",
    "show": "Show a dataset, its published schema, its limits, and who may read it.",
    "withdraw": "End access to a dataset. Grants end with it; publishing it again needs new ones.",
    "grants": "List the requests of accounts and their state, or answer one.",
    "serve": "Serve granted datasets until SIGTERM or Ctrl-C, on --listen and through the port of a gateway on this "
    "host that has --services. Reads are recorded in audit/data-CLUSTER.jsonl in the folder of the authority.",
    "request": "Request access to a dataset for this account, for a purpose.",
}
_OPTIONS: Options = {
    "--grant": ("NUMBER", "grant the request"),
    "--deny": ("NUMBER", "deny the request"),
    "--withdraw": ("NUMBER", "end a grant"),
    "--days": ("DAYS", f"validity of a grant; default: {DAYS:g}, at most that of the dataset"),
    "--why": ("TEXT", "a comment to store"),
    "--at": ("HOST:PORT", "the owner's gateway or data service"),
    "--cluster": ("NAME", "the cluster of the data"),
    "--listen": ("HOST:PORT", "the address to listen on; default: 127.0.0.1:7300"),
    "--purpose": ("TEXT", "what the rows are used for"),
    "--approvals": ("FOLDER", "approvals of programs, from which auditors' reports name approvers"),
    "--services": ("FOLDER", "where the --services of a gateway on this host find it; default: --folder"),
    "--folder": ("FOLDER", 'the folder of the authority, or of an account\'s certificates; default: "certs"'),
    "--json": (None, "print one JSON object"),
}
_COMMON_OPTIONS = ("--folder", "--json")
_COMMAND_OPTIONS = {
    "grants": ("--grant", "--deny", "--withdraw", "--days", "--why", *_COMMON_OPTIONS),
    "serve": ("--cluster", "--listen", "--services", "--approvals", "--folder"),
    "list": ("--at", "--cluster", *_COMMON_OPTIONS),
    "request": ("--at", "--purpose", *_COMMON_OPTIONS),
}
_ARGUMENTS = {"publish": "FILE", "show": "NAME", "withdraw": "NAME", "request": "CLUSTER://NAME"}


class CommandCall(NamedTuple):
    """A command with its arguments."""

    args: argparse.Namespace
    parser: Parser
    name: str
    grants: Grants


def make_parser(command: str = "") -> Parser:
    """The options of `data`, or of one of its commands."""
    if not command:
        usage = f"whale-nebula data {'|'.join(_COMMAND_TEXTS)} [NAME] [options]"
        return Parser("data", _DESCRIPTION, {}, usage=usage, epilog=_EPILOG)
    usage = f"whale-nebula data {command} {_ARGUMENTS.get(command, '')} [options]".replace("  ", " ")
    options = {name: _OPTIONS[name] for name in _COMMAND_OPTIONS.get(command, _COMMON_OPTIONS)}
    return Parser(f"data {command}", _COMMAND_TEXTS[command], options, usage=usage)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    command, parser = choose_command(argv, _COMMAND_TEXTS, make_parser)
    words = split(argv[1:], _OPTIONS)
    args = parser.read(words.options)
    if words.arguments or (words.script is None) == (command in _ARGUMENTS):
        parser.error(
            f"exactly one {_ARGUMENTS[command]} is required" if command in _ARGUMENTS else "only options are accepted"
        )
    folder = Path(args.folder or "certs")

    def run() -> int | Answer:
        if command == "request" or getattr(args, "at", None) is not None:
            return _ask_service(command, args, parser, words.script or "", folder)
        if command == "serve":
            return _serve(args, parser, folder)
        with contextlib.closing(Registry(folder, authority.load(folder))) as registry:
            return _COMMANDS[command](CommandCall(args, parser, words.script or "", Grants(registry)))

    return answer(args, run)


def _ask_service(command: str, args: argparse.Namespace, parser: Parser, name: str, folder: Path) -> Answer:
    """Ask an owner's service, as an account, for its datasets ("list") or for access to one ("request")."""
    if args.at is None:
        parser.error("missing data service: --at gpu.example.org:7100")
    cluster, _, dataset = name.partition("://") if command == "request" else (args.cluster, "", "")
    if not cluster or (command == "request" and not dataset):
        parser.error(
            "whale-nebula data request gpu://corpus" if command == "request" else "missing cluster: --cluster gpu"
        )
    service = open_remote(args.at, folder, None, cluster)
    if command == "list":
        found = service.list_datasets()
        return found, escape_foreign_text("\n".join(map(_describe_offer, found)), 20_000, lines=True)
    if not args.purpose:
        parser.error("missing purpose: --purpose TEXT")
    number = service.request(dataset, args.purpose)
    text = f"requested {name}: request {number}; its owner answers with: whale-nebula data grants --grant {number}"
    return {"asked": name, "number": number}, text


def _describe_offer(offer: dict[str, Any]) -> str:
    schema = ", ".join(map(str, read_schema(offer.get("schema"))))
    return f"{offer.get('name'):<16} {schema}   until {offer.get('until')}   {offer.get('about')}"


def _serve(args: argparse.Namespace, parser: Parser, folder: Path) -> int:
    signer = authority.load(folder)
    approvals = None if args.approvals is None else Path(args.approvals)
    serve = partial(open_service, folder, signer, approvals=approvals)
    return run_service(args, parser, signer, folder, DATA, serve)


def _publish(call: CommandCall) -> Answer:
    path = Path(call.name)
    interface = read_interface(path)
    folder = path.resolve().parent
    opened = open_dataset(interface, folder)
    dataset = call.grants.publish(interface, folder)
    text = f"published {dataset.name}: {opened.count} rows, until {dataset.expires}\n{describe_interface(interface)}"
    return {
        "published": dataset.name,
        "rows": opened.count,
        "interface": dataset.digest,
        "until": dataset.expires,
    }, text


def describe_interface(interface: Interface) -> str:
    """The schema, the limits and the description of an interface, as text."""
    limits = interface.limits
    bounds = [
        f"{most} {unit} {scope}"
        for scope, bound in (("in total", limits.account), ("per run", limits.run))
        for most, unit in ((bound.rows, "rows"), (bound.bytes, "bytes"))
        if most is not None
    ]
    bounds += [f"{limits.rate / 1e6:g}mbit"] * bool(limits.rate)
    lines = [f"  schema: {', '.join(map(str, interface.schema))}"]
    lines += [f"  limits per account: {', '.join(bounds)}"] * bool(bounds)
    return "\n".join(lines + [f"  about: {interface.about}"] * bool(interface.about))


def _list_datasets(call: CommandCall) -> Answer:
    found = call.grants.list_datasets()
    rows = [f"{each.name:<16} {each.state:<9} until {each.expires}" for each in found]
    return [asdict(each) for each in found], "\n".join(
        rows
    ) or "no datasets; publish one with: whale-nebula data publish FILE"


def _show_dataset(call: CommandCall) -> Answer:
    found = call.grants.find(call.name)
    permissions = call.grants.list_permissions(dataset=call.name)
    lines = [f"{found.name}: {found.state}, until {found.expires}", describe_interface(found.parse())]
    lines += [f"  files: {found.folder}", *(_describe_permission(each) for each in permissions)]
    return {**asdict(found), "permissions": [asdict(each) for each in permissions]}, "\n".join(lines)


def _withdraw(call: CommandCall) -> Answer:
    call.grants.withdraw(call.name)
    return {"withdrawn": call.name}, f"withdrawn: {call.name}"


def _decide_grants(call: CommandCall) -> Answer:
    args = call.args
    chosen = {
        state: number
        for state, number in (
            (states.GRANTED, args.grant), (states.DENIED, args.deny), (states.WITHDRAWN, args.withdraw)
        )
        if number is not None
    }  # fmt: skip
    if len(chosen) > 1:
        call.parser.error("--grant, --deny and --withdraw cannot be combined")
    if not chosen:
        found = call.grants.list_permissions()
        return [asdict(each) for each in found], "\n".join(map(_describe_permission, found)) or "no requests"
    ((state, number),) = chosen.items()
    days = call.parser.amount("--days", args.days, DAYS)
    if not 0 < days <= authority.MOST_DAYS:
        raise AccessError(f"{days:g} days is not a valid duration of a grant", mend="--days 30")
    decided = call.grants.decide(number, state, days, args.why or "", user_name())
    return asdict(decided), _describe_permission(decided)


def _describe_permission(each: states.Permission) -> str:
    until = f" until {each.until}" if each.until else ""
    return f"{each.number}  {each.account:<12} {each.dataset:<12} {each.state}{until}  {each.purpose}"


_COMMANDS: dict[str, Callable[[CommandCall], Answer]] = {
    "publish": _publish, "list": _list_datasets, "show": _show_dataset, "withdraw": _withdraw, "grants": _decide_grants,
}  # fmt: skip

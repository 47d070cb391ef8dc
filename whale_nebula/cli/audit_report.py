"""`whale-nebula audit report`: list accesses with reader, time, program and approver. Needs no TensorFlow."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from whale_nebula.accounts.registry import Registry
from whale_nebula.cli import arguments
from whale_nebula.cli.arguments import Options, Parser, print_error, split
from whale_nebula.datasets.reading import open_remote
from whale_nebula.datasets.report import Period, Read, Refusal, Report, parse_moment
from whale_nebula.datasets.report_files import Log, encode_report, report_accesses
from whale_nebula.errors import AuditError, NebulaError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.security import authority, chain, files
from whale_nebula.security.identity import AUDITOR

_DESCRIPTION = """\
Report who read which data of an owner, when, with which program, and who approved the program: from the logs of the
data service and the owner's machines, and the events of the account registry. Every log is verified first; a log that
was changed stops the command.

An account with the auditor role that has logged in ("whale-nebula login --role auditor") requests the report from
the owner's service with --at; the request itself is recorded."""

_EPILOG = """\
examples:
  whale-nebula audit report
  whale-nebula audit report --since 2026-11-01 --until 2026-12-01 --approvals approvals
  whale-nebula audit report --lines > november.jsonl
  whale-nebula audit report --cluster gpu --at gpu.example.org:7100 --folder of-gpu --since 2026-11-01
  whale-nebula audit report from-other-host/data-gpu-worker-1.jsonl certs/audit/data-gpu.jsonl

A program is identified by the SHA-256 of its script, as reported by the reader; approvals contain the same digest.

exit status:
  0   all logs are unchanged
  1   a log or the registry was changed; or the service refuses
  2   wrong command line
  66  the file does not exist"""

_OPTIONS: Options = {
    "--since": ("TIME", "a day or a time; default: from the beginning"),
    "--until": ("TIME", "a day or a time (exclusive); default: now"),
    "--at": ("HOST:PORT", "the owner's gateway or data service"),
    "--cluster": ("NAME", "the cluster of the owner"),
    "--folder": ("FOLDER", 'the folder of the authority, or of an auditor\'s certificate; default: "certs"'),
    "--approvals": ("FOLDER", "approvals of programs (whale-nebula approve)"),
    "--lines": (None, "print all records and events of the period as JSON lines"),
    "--json": (None, "print one JSON object"),
}


def make_parser() -> Parser:
    """The options of the command."""
    usage = "whale-nebula audit report [LOG ... | --at HOST:PORT] [--since TIME] [--until TIME] [options]"
    return Parser("audit report", _DESCRIPTION, _OPTIONS, usage=usage, epilog=_EPILOG)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = make_parser()
    words = split(argv, _OPTIONS)
    args = parser.read([*words.options, *(word for word in words.arguments if word.startswith("-"))])
    folder = Path(args.folder or "certs")
    paths = [Path(each) for each in (words.script, *words.arguments) if each is not None]
    if args.at and (paths or args.lines or args.approvals):
        parser.error("--at uses the logs and approvals of the owner's service: remove LOG, --approvals and --lines")
    for each in paths:
        if not each.is_file():
            error = AuditError(f"file {str(each)!r} does not exist", mend="whale-nebula audit report [LOG ...]")
            return print_error(error, as_json=args.json, code=arguments.NO_FILE)
    try:
        period = _read_period(args)
        report, logs = (
            _fetch_report(args, parser, folder, period) if args.at else _make_report(args, folder, period, paths)
        )
    except NebulaError as error:
        return print_error(error, as_json=args.json)
    if args.lines:
        for record in sorted([*report.records, *report.events], key=lambda each: str(each.get("time"))):
            print(chain.encode_canonical(record).decode("ascii"))
    else:
        print(json.dumps(encode_report(report, logs), indent=1) if args.json else describe(report, logs))
    return arguments.DONE


def _make_report(
    args: argparse.Namespace, folder: Path, period: Period, paths: Sequence[Path]
) -> tuple[Report, Sequence[Log]]:
    """Create the report on the host with the authority."""
    approvals = None if args.approvals is None else Path(args.approvals)
    with contextlib.closing(Registry(folder, authority.load_certificate(folder))) as registry:
        return report_accesses(folder, registry, period, paths, approvals)


def _fetch_report(
    args: argparse.Namespace, parser: Parser, folder: Path, period: Period
) -> tuple[Report, Sequence[Log]]:
    """Ask the owner's service for the report, as an auditor."""
    if args.cluster is None:
        parser.error("missing cluster: --cluster gpu")
    return open_remote(args.at, folder, None, args.cluster, role=AUDITOR).fetch_report(period)


def _read_period(args: argparse.Namespace) -> Period:
    since = datetime(1970, 1, 1, tzinfo=UTC) if args.since is None else parse_moment(args.since, "--since")
    until = datetime.now(UTC) if args.until is None else parse_moment(args.until, "--until")
    if since >= until:
        raise AuditError(
            f"--since is not before --until: {files.format_time(since)} and {files.format_time(until)}",
            why="the period excludes --until, so it would be empty",
            mend="--since 2026-11-01 --until 2026-12-01",
        )
    return Period(since, until)


def describe(report: Report, logs: Sequence[Log]) -> str:
    """The report as text."""
    lines = [report.period.describe(), "", "who read what"]
    lines += [line for each in report.reads for line in _describe_read(each)] or ["  nothing"]
    lines += ["", "refused", *(_describe_refusal(each) for each in report.refusals or ())]
    lines += [] if report.refusals else ["  nothing"]
    lines += ["", "actions of the owner and of accounts", *(_describe_event(each) for each in report.events)]
    lines += ["", "logs, all unchanged"]
    for each in logs:
        signed = "no head is signed" if each.signed is None else f"signed up to record {each.signed}"
        lines.append(f"  {Path(each.path).name}: {each.records} records, {signed}")
    return escape_foreign_text("\n".join(lines), 1 << 24, lines=True)


def _describe_read(each: Read) -> list[str]:
    program = f"script {each.program[:12]}" if each.program else "a program without a script"
    return [
        f"  {each.account}  {each.dataset}  {each.rows} rows, {each.bytes} bytes, in {each.batches} batches",
        f"    from {each.first[:19]}Z to {each.last[:19]}Z, interface {', '.join(each.interfaces)}",
        f"    for {each.purpose!r}, granted {each.granted}"
        if each.grant
        else "    by the owner, on the owner's machine",
        f"    by {program}: {each.approved or 'no approval found'}",
        *(f"    with {versions}" for versions in each.versions),
    ]


def _describe_refusal(each: Refusal) -> str:
    times = "once" if each.times == 1 else f"{each.times} times"
    return f"  {each.who}  {each.dataset}  {times}, last at {each.last[:19]}Z: {each.reason}"


_EVENT_FIELDS = ("dataset", "purpose", "number", "until", "scope", "by", "kind", "role", "reason")


def _describe_event(each: Any) -> str:
    more = "  ".join(f"{name} {each[name]}" for name in _EVENT_FIELDS if each.get(name))
    changed = each.get("changed")
    if isinstance(changed, list) and changed:
        more += f"{'  ' * bool(more)}{', '.join(map(str, changed))}"
    words = (each.get("time"), each.get("action"), each.get("account"), each.get("decision"))
    return "  " + "  ".join(str(word) for word in words if word) + f"  {more}" * bool(more)

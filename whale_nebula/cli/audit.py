"""`whale-nebula audit`: check that an audit log is unchanged (`verify`), or list accesses with reader, time, program
and approver (`report`). Needs no TensorFlow.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from whale_nebula.accounts.registry import Registry
from whale_nebula.cli import arguments
from whale_nebula.cli.arguments import Options, Parser, print_error, read_words
from whale_nebula.datasets.reading import open_remote
from whale_nebula.datasets.report import (
    Log,
    Period,
    Read,
    Refusal,
    Report,
    encode_report,
    parse_moment,
    report_accesses,
)
from whale_nebula.errors import AuditError, NebulaError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.security import authority, chain, files
from whale_nebula.security.audit import Head, read_heads
from whale_nebula.security.identity import AUDITOR
from whale_nebula.security.trust import Revocations, Trust, load
from whale_nebula.security.verdict import Verdict, verify

_VERIFY_DESCRIPTION = """\
Verify an audit log: follow its chain of digests from the first record, across rotated files. With --heads, a peer's
file of signed heads of this log, truncation and rewriting are also detected. With --ca, only heads signed by a
certificate of this authority count, and enough of them are required; heads signed by a revoked certificate do not
count (the deny list is expected next to --ca).

"whale-nebula audit report" reports who read which data of an owner: see its --help."""

_VERIFY_EPILOG = """\
examples:
  whale-nebula audit verify audit/gpu-gateway.jsonl
  whale-nebula audit verify audit/gpu-gateway.jsonl --heads from-npu/npu-gateway.heads.jsonl --ca certs/ca.pem
  whale-nebula audit verify audit/gpu-gateway.jsonl --json

The gateway of cluster gpu writes audit/gpu-gateway.jsonl; that of npu keeps its heads, in npu-gateway.heads.jsonl.

exit status:
  0   the log is unchanged
  1   a record is wrong or missing (the first one is named), or the log does not match the heads
  2   wrong command line
  65  the heads or the authority's certificate cannot be read
  66  the file does not exist"""

_VERIFY_OPTIONS: Options = {
    "--heads": ("FILE", "heads of this log that a peer has kept"),
    "--ca": ("FILE", "the authority's certificate"),
    "--revoked": ("FILE", "the deny list; default: next to --ca"),
    "--json": (None, "print one JSON object"),
}

_REPORT_DESCRIPTION = """\
Report who read which data of an owner, when, with which program, and who approved the program: from the logs of the
data service and the owner's machines, and the events of the account registry. Every log is verified first; a log that
was changed stops the command.

An account with the auditor role that has logged in ("whale-nebula login --role auditor") requests the report from
the owner's service with --at; the request itself is recorded."""

_REPORT_EPILOG = """\
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

_REPORT_OPTIONS: Options = {
    "--since": ("TIME", "a day or a time; default: from the beginning"),
    "--until": ("TIME", "a day or a time (exclusive); default: now"),
    "--at": ("HOST:PORT", "the owner's gateway or data service"),
    "--cluster": ("NAME", "the cluster of the owner"),
    "--folder": ("FOLDER", 'the folder of the authority, or of an auditor\'s certificate; default: "certs"'),
    "--approvals": ("FOLDER", "approvals of programs (whale-nebula approve)"),
    "--lines": (None, "print all records and events of the period as JSON lines"),
    "--json": (None, "print one JSON object"),
}


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    return _report(argv[1:]) if argv[:1] == ["report"] else _verify(argv)


# ---------------------------------------------------------------------- verify
def _verify(argv: Sequence[str]) -> int:
    usage = "whale-nebula audit verify FILE [--heads FILE] [--ca FILE [--revoked FILE]] [--json]"
    parser = Parser("audit", _VERIFY_DESCRIPTION, _VERIFY_OPTIONS, usage=usage, epilog=_VERIFY_EPILOG)
    args, words = read_words(parser, argv, _VERIFY_OPTIONS)
    if len(words) != 2 or words[0] != "verify":
        parser.error("whale-nebula audit verify FILE, or whale-nebula audit report")
    path = words[1]
    if args.revoked is not None and args.ca is None:
        parser.error("--revoked needs --ca: the authority signs the deny list")
    for each in (path, args.heads, args.ca, args.revoked):
        if each is not None and not os.path.isfile(each):
            error = AuditError(f"file {each!r} does not exist", mend="whale-nebula audit verify FILE")
            return print_error(error, as_json=args.json, code=arguments.NO_FILE)
    try:
        trust: Trust | None = None
        revoked: Revocations = {}
        if args.ca is not None:
            trust = Trust(files.parse_certificates(files.read(args.ca, "the authority's certificate"), args.ca))
            revoked = _load_revoked(args, trust)
        verdict = verify(path, _read_heads(args.heads), trust, revoked)
    except NebulaError as error:
        return print_error(error, as_json=args.json, code=arguments.NO_DATA)
    print(json.dumps({"ok": verdict.ok, **asdict(verdict)}, indent=1) if args.json else _format_text(verdict, args))
    return arguments.DONE if verdict.ok else arguments.FAILED


def _read_heads(path: str | None) -> list[Head]:
    if path is None:
        return []
    found = list(read_heads(path))
    if not found:
        raise AuditError("the file contains no heads", where=path, mend="--heads FILE: the heads that a peer has kept")
    return found


def _load_revoked(args: argparse.Namespace, trust: Trust) -> Revocations:
    path = Path(args.revoked or Path(args.ca).with_name(files.REVOKED))
    return load(path, trust.authorities).revoked if args.revoked or path.exists() else {}


def _format_text(verdict: Verdict, args: argparse.Namespace) -> str:
    name, why = Path(verdict.path).name, escape_foreign_text(verdict.why)
    if verdict.is_unrelated:
        return f"{name} and the given heads or authority do not belong together\n  why: {why}\n  mend: {_PAIR_FIX}"
    if not verdict.ok:
        return f"{name}: record {verdict.bad} is the first invalid one\n  why: {why}"
    lines = [
        f"{name}: {verdict.records} records, all unchanged",
        f"  log of {escape_foreign_text(verdict.site)}, run {escape_foreign_text(verdict.run)}",
    ]
    lines += [f"  {len(verdict.files)} files: {', '.join(verdict.files)}"] * (len(verdict.files) > 1)
    if verdict.torn:
        times, bytes_ = "once" if verdict.torn == 1 else f"{verdict.torn} times", verdict.torn_bytes
        lines.append(f"  a crash cut the last line {times}: {bytes_} bytes were set aside, as the log records")
    if verdict.signed is None:
        lines.append("  none of its heads is signed: anyone who can write the file could have rewritten it")
    else:
        by = "by a certificate of this authority" if args.ca else "by the certificate in the log; verify it with --ca"
        lines.append(f"  {verdict.heads} heads, the last for record {verdict.signed}, signed {by}")
    if verdict.kept is not None:
        lines.append(f"  the peer's heads match up to record {verdict.kept}")
    if not verdict.closed:
        cut = "" if args.heads else "; only a peer's heads can show whether its end was cut off: --heads FILE"
        lines.append(f"  the log was not closed: it is open, or its process crashed{cut}")
    return "\n".join(lines)


_PAIR_FIX = "use files of one run: audit verify gpu-gateway.jsonl --heads npu-gateway.heads.jsonl --ca certs/ca.pem"


# ---------------------------------------------------------------------- report
def _report(argv: Sequence[str]) -> int:
    usage = "whale-nebula audit report [LOG ... | --at HOST:PORT] [--since TIME] [--until TIME] [options]"
    parser = Parser("audit report", _REPORT_DESCRIPTION, _REPORT_OPTIONS, usage=usage, epilog=_REPORT_EPILOG)
    args, words = read_words(parser, argv, _REPORT_OPTIONS)
    folder, paths = Path(args.folder or "certs"), [Path(each) for each in words]
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

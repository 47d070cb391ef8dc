"""`whale-nebula audit report`: list accesses with reader, time, program and approver. Needs no TensorFlow."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from whale_nebula.accounts.registry import Registry
from whale_nebula.cli import arguments
from whale_nebula.cli.arguments import Options, Parser, split, tell
from whale_nebula.datasets.report import Period, Read, Refusal, Report, make_report, parse_moment
from whale_nebula.datasets.service import AUDIT
from whale_nebula.errors import AuditError, NebulaError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.security import approval, authority, chain, files
from whale_nebula.security.audit import pieces
from whale_nebula.security.code import SCRIPT
from whale_nebula.security.trust import DenyList, Trust, load
from whale_nebula.security.verdict import Verdict, verify

_DESCRIPTION = """\
Say who read what of an owner's data, when, by which program, and who approved it: from the logs of his service and of
his machines, and the events of his registry. Each log is verified first, and one that was changed ends the command."""

_EPILOG = """\
examples:
  whale-nebula audit report
  whale-nebula audit report --since 2026-11-01 --until 2026-12-01 --approvals approvals
  whale-nebula audit report --lines > november.jsonl
  whale-nebula audit report from-other-host/data-gpu-worker-1.jsonl certs/audit/data-gpu.jsonl

The program is the SHA-256 of a script, as the reader said it; an approval names the same digest.

exit status:
  0   every log is as it was written
  1   one is not, or the registry was changed
  2   the command line is wrong
  66  there is no such file"""

_OPTIONS: Options = {
    "--since": ("TIME", "a day or a moment; from the beginning if it is not given"),
    "--until": ("TIME", "a day or a moment, which is not in it any more; until now if it is not given"),
    "--folder": ("FOLDER", 'where the authority is; "certs" if it is not given'),
    "--approvals": ("FOLDER", "approvals of programs (whale-nebula approve)"),
    "--lines": (None, "print all records and events of the period as JSON lines"),
    "--json": (None, "print one JSON object"),
}


def parser() -> Parser:
    """The options of the command."""
    usage = "whale-nebula audit report [LOG ...] [--since TIME] [--until TIME] [options]"
    return Parser("audit report", _DESCRIPTION, _OPTIONS, usage=usage, epilog=_EPILOG)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    made = parser()
    words = split(argv, _OPTIONS)
    given = made.read([*words.options, *(word for word in words.arguments if word.startswith("-"))])
    folder = Path(given.folder or "certs")
    named = [Path(each) for each in (words.script, *words.arguments) if each is not None]
    for each in named:
        if not each.is_file():
            error = AuditError(f"there is no file {str(each)!r}", mend="whale-nebula audit report [LOG ...]")
            return tell(error, as_json=given.json, code=arguments.NO_FILE)
    try:
        period = _read_period(given)
        logs = named or [each for each in sorted((folder / AUDIT).glob("data-*.jsonl")) if each == pieces(each)[-1]]
        verdicts = [_verify(each, folder) for each in logs]
        certificate = authority.load_certificate(folder)
        with contextlib.closing(Registry(folder, certificate)) as registry:
            events = registry.list_events()
        records = [said for each in logs for said in _read_records(each)]
        report = make_report(period, records, events, _find_approvals(given, folder))
    except NebulaError as error:
        return tell(error, as_json=given.json)
    if given.lines:
        for said in sorted([*report.records, *report.events], key=lambda each: str(each.get("time"))):
            print(chain.canonical(said).decode("ascii"))
    else:
        print(json.dumps(_document(report, verdicts), indent=1) if given.json else describe(report, verdicts))
    return arguments.DONE


def _read_period(given: argparse.Namespace) -> Period:
    since = datetime(1970, 1, 1, tzinfo=UTC) if given.since is None else parse_moment(given.since, "--since")
    until = datetime.now(UTC) if given.until is None else parse_moment(given.until, "--until")
    if since >= until:
        raise AuditError(
            f"--since is not before --until: {files.format_time(since)} and {files.format_time(until)}",
            why="what is at --until is not in the period any more, so nothing is",
            mend="--since 2026-11-01 --until 2026-12-01",
        )
    return Period(since, until)


def _verify(path: Path, folder: Path) -> Verdict:
    """Verify a log, which must be unchanged, and signed by a certificate of this authority."""
    known = authority.authorities(folder)
    denied = folder / files.REVOKED
    revoked = load(denied, known).revoked if denied.exists() else {}
    found = verify(path, (), None, revoked)
    if found.ok and found.heads:
        found = verify(path, (), Trust(known), revoked)
    if not found.ok:
        raise AuditError(
            f"{path.name}: record {found.bad} is the first that is wrong", where=str(path), why=found.why,
            mend=f"whale-nebula audit verify {path} --ca {folder / authority.CA}",
        )  # fmt: skip
    return found


def _read_records(path: Path) -> Iterator[dict[str, Any]]:
    for each in pieces(path):
        for line in each.read_bytes().split(b"\n"):
            said = chain.parse(line)
            if said is not None:
                yield said


def _find_approvals(given: argparse.Namespace, folder: Path) -> dict[str, str]:
    """The approvers of scripts by their digests, from all approvals signed by this authority, also expired ones."""
    if given.approvals is None:
        return {}
    known, denied = authority.authorities(folder), folder / files.REVOKED
    trust = Trust(known, DenyList(denied if denied.exists() else None, known))
    found = {}
    for each in approval.read_all(Path(given.approvals), trust, None, files.now()):
        made = each.approval
        if made is not None:
            fault = f"; {each.fault}" if each.fault else ""
            why = f", {made.why}" if made.why else ""
            found[made.files.get(SCRIPT, "")] = f"{made.script}, approved by {made.by}{why}{fault}"
    return found


def _document(report: Report, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "since": files.format_time(report.period.since),
        "until": files.format_time(report.period.until),
        "reads": [asdict(each) for each in report.reads],
        "refusals": [asdict(each) for each in report.refusals],
        "events": list(report.events),
        "logs": {each.path: each.records for each in verdicts},
    }


def describe(report: Report, verdicts: Sequence[Verdict]) -> str:
    """The report as text."""
    lines = [report.period.describe(), "", "who read what"]
    lines += [line for each in report.reads for line in _describe_read(each)] or ["  nobody read anything"]
    lines += ["", "refused", *(_describe_refusal(each) for each in report.refusals or ())]
    lines += [] if report.refusals else ["  nothing"]
    lines += ["", "what the owner and the accounts did", *(_describe_event(each) for each in report.events)]
    lines += ["", "the logs, each as it was written"]
    for each in verdicts:
        signed = "no head is signed" if each.signed is None else f"signed up to record {each.signed}"
        lines.append(f"  {Path(each.path).name}: {each.records} records, {signed}")
    return escape_foreign_text("\n".join(lines), 1 << 24, lines=True)


def _describe_read(each: Read) -> list[str]:
    program = f"script {each.program[:12]}" if each.program else "a program without a script"
    return [
        f"  {each.account}  {each.dataset}  {each.rows} rows, {each.bytes} bytes, in {each.batches} batches",
        f"    from {each.first[:19]}Z to {each.last[:19]}Z, interface {', '.join(each.interfaces)}",
        f"    for {each.purpose!r}, granted {each.granted}" if each.grant else "    by the owner, on a machine of his",
        f"    by {program}: {each.approved or 'no approval of it is here'}",
        *(f"    with {versions}" for versions in each.versions),
    ]


def _describe_refusal(each: Refusal) -> str:
    times = "once" if each.times == 1 else f"{each.times} times"
    return f"  {each.who}  {each.dataset}  {times}, last at {each.last[:19]}Z: {each.reason}"


_SHOWN = ("dataset", "purpose", "number", "until", "scope", "by", "kind", "role", "reason")


def _describe_event(each: Any) -> str:
    more = "  ".join(f"{name} {each[name]}" for name in _SHOWN if each.get(name))
    words = (each.get("time"), each.get("action"), each.get("account"), each.get("decision"))
    return "  " + "  ".join(str(word) for word in words if word) + f"  {more}" * bool(more)

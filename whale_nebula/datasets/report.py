"""Access reports: reads by account, time, program and approver over a period, as tables from an owner's verified logs
and the registry next to the authority; and their JSON form, in which auditors receive them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from whale_nebula.accounts.registry import Registry
from whale_nebula.errors import AuditError
from whale_nebula.security import approval, authority, chain, files
from whale_nebula.security.audit import AuditLog, Head, list_log_files
from whale_nebula.security.code import SCRIPT
from whale_nebula.security.trust import DenyList, Trust, load
from whale_nebula.security.verdict import Verdict, verify

Record = Mapping[str, Any]
READ = "read"
AUDIT = "audit"
"""The folder of the logs of reads, within that of the authority."""
MOST_REPORT_BYTES = 16 << 20
"""The maximum size of a report that is sent to an auditor."""
_TRIES = 5
_FIRST_YEAR = 2000


@dataclass(frozen=True, slots=True)
class Period:
    """The time from one moment (inclusive) to another (exclusive)."""

    since: datetime
    until: datetime

    def contains(self, record: Record) -> bool:
        """Whether a record is within this period."""
        try:
            return self.since <= datetime.fromisoformat(str(record.get("time"))) < self.until
        except (ValueError, TypeError):
            return False

    def describe(self) -> str:
        """The period in words."""
        begin = "from the beginning" if self.since.year < _FIRST_YEAR else f"from {files.format_time(self.since)}"
        return f"{begin} to {files.format_time(self.until)}"


def parse_moment(text: str, option: str) -> datetime:
    """Parse a day or a time, by default in UTC.

    >>> parse_moment("2026-11-26", "--since").isoformat()
    '2026-11-26T00:00:00+00:00'
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        what = f"{option} {text!r} is neither a day nor a time"
        raise AuditError(what, mend=f"{option} 2026-11-26, or {option} 2026-11-26T12:00:00Z") from None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


@dataclass
class Read:
    """Reads of a dataset by one account with one program, under one grant."""

    account: str
    dataset: str
    purpose: str
    grant: str
    program: str
    interfaces: list[str] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0
    batches: int = 0
    first: str = ""
    last: str = ""
    granted: str = ""
    approved: str = ""
    versions: list[str] = field(default_factory=list)


@dataclass
class Refusal:
    """Refusals to one reader, with their number."""

    who: str
    dataset: str
    reason: str
    times: int = 0
    last: str = ""


@dataclass(frozen=True)
class Report:
    """The reads and refusals of a period, and the actions of the owner and the accounts."""

    period: Period
    reads: Sequence[Read]
    refusals: Sequence[Refusal]
    events: Sequence[Record]
    records: Sequence[Record]


def make_report(
    period: Period, records: Iterable[Record], events: Sequence[Record], approvals: Mapping[str, str]
) -> Report:
    """Create the report of a period. `approvals` has the approvers of programs by the digests of their scripts."""
    reads: dict[tuple[str, ...], Read] = {}
    refusals: dict[tuple[str, ...], Refusal] = {}
    grants = {str(each.get("number")): each for each in events if each.get("action") == "grant"}
    selected = sorted((each for each in records if period.contains(each)), key=lambda each: str(each.get("time")))
    for each in selected:
        if each.get("action") != READ:
            continue
        parts = {name: str(each.get(name, "")) for name in ("account", "purpose", "grant", "program")}
        dataset, at = str(each.get("object", "")), str(each.get("time"))
        if each.get("decision") == "allow":
            known = (parts["account"], dataset, parts["purpose"], parts["grant"], parts["program"])
            read = reads.setdefault(known, Read(*known, first=at))
            read.rows, read.bytes = read.rows + _count(each, "rows"), read.bytes + _count(each, "bytes")
            read.batches, read.last = read.batches + 1, at
            if (interface := str(each.get("interface", ""))) not in read.interfaces:
                read.interfaces.append(interface)
            if (versions := str(each.get("versions", ""))) and versions not in read.versions:
                read.versions.append(versions)
        else:
            subject = parts["account"] or str(each.get("actor", ""))
            refusal = refusals.setdefault((subject, dataset, str(each.get("reason"))), Refusal(subject, dataset, ""))
            refusal.reason, refusal.last = str(each.get("reason")), at
            refusal.times += _count(each, "times")
    for read in reads.values():
        if (grant := grants.get(read.grant)) is not None:
            by = f" by {grant['by']}" if grant.get("by") else ""
            read.granted = f"{read.grant}{by} at {grant.get('time')}"
        read.approved = approvals.get(read.program, "")
    return Report(period, [*reads.values()], [*refusals.values()], [e for e in events if period.contains(e)], selected)


def _count(record: Record, name: str) -> int:
    value = record.get(name)
    return value if type(value) is int else 0


# ---------------------------------------------------------------------- from logs
class Log(NamedTuple):
    """A verified log: its path, its number of records, and the last one that is signed, if any is."""

    path: str
    records: int
    signed: int | None


def report_accesses(
    folder: Path, registry: Registry, period: Period, logs: Sequence[Path] = (), approvals: Path | None = None
) -> tuple[Report, list[Log]]:
    """The report of a period, and the verified logs from which it was made: by default all in the authority's folder.
    Raises `AuditError` if one was changed.
    """
    events, home = registry.list_events(), folder / AUDIT
    positions = _find_positions(events)
    paths = logs or [each for each in sorted(home.glob("data-*.jsonl")) if each == list_log_files(each)[-1]]
    if not logs and (missing := sorted(positions.keys() - {each.name for each in paths})):
        why = "the registry has positions of this log, so it was moved or deleted"
        raise AuditError(f"{missing[0]} is missing", where=str(home), why=why, mend=f"restore {home / missing[0]}")
    verdicts = [_verify(each, folder, positions.get(each.name, ())) for each in paths]
    records = [record for each in paths for record in _read_records(each)]
    report = make_report(period, records, events, _find_approvals(approvals, folder))
    return report, [Log(each.path, each.records, each.signed) for each in verdicts]


def record_position(
    registry: Registry, log: AuditLog, action: str, account: str = "", decision: str = "", **more: Any
) -> None:
    """Record an event with the signed position of a log of reads: a report finds a log that was deleted, or changed
    before this position.
    """
    head = log.sign_head()
    position = {} if head is None else {"log": log.path.name, "head": head._asdict()}
    registry.record_event(action, account, decision, "", **more, **position)


def _find_positions(events: Sequence[Mapping[str, Any]]) -> dict[str, list[Head]]:
    """The positions of logs in the events of a registry, by the names of their files."""
    found: dict[str, list[Head]] = {}
    for each in events:
        if isinstance(each.get("log"), str) and isinstance(each.get("head"), Mapping):
            found.setdefault(each["log"], []).append(Head.from_dict(each["head"]))
    return found


def _verify(path: Path, folder: Path, positions: Sequence[Head]) -> Verdict:
    """Verify a log, which must be unchanged, signed by a certificate of this authority, and reach these positions.
    While a service writes to it, the last record may be incomplete: then a later record is the first invalid one in the
    next try.
    """
    known = authority.load_certificates(folder)
    denied = folder / files.REVOKED
    revoked = load(denied, known).revoked if denied.exists() else {}
    bad = -1
    for _ in range(_TRIES):
        found = verify(path, positions, Trust(known) if positions else None, revoked)
        if found.ok and found.heads and not positions:
            found = verify(path, (), Trust(known), revoked)
        if found.ok:
            return found
        if found.bad == bad:
            break
        bad = -1 if found.bad is None else found.bad
    raise AuditError(
        f"{path.name}: record {found.bad} is the first invalid one", where=str(path), why=found.why,
        mend=f"whale-nebula audit verify {path} --ca {folder / authority.CA}",
    )  # fmt: skip


def _read_records(path: Path) -> Iterator[dict[str, Any]]:
    for each in list_log_files(path):
        for line in each.read_bytes().split(b"\n"):
            record = chain.parse_line(line)
            if record is not None:
                yield record


def _find_approvals(approvals: Path | None, folder: Path) -> dict[str, str]:
    """The approvers of scripts by their digests, from all approvals signed by this authority, also expired ones."""
    if approvals is None:
        return {}
    known, denied = authority.load_certificates(folder), folder / files.REVOKED
    trust = Trust(known, DenyList(denied if denied.exists() else None, known))
    found = {}
    for each in approval.read_all(approvals, trust, None, files.now()):
        approved = each.approval
        if approved is not None:
            fault = f"; {each.fault}" if each.fault else ""
            why = f", {approved.why}" if approved.why else ""
            found[approved.files.get(SCRIPT, "")] = f"{approved.script}, approved by {approved.by}{why}{fault}"
    return found


# ---------------------------------------------------------------------- as JSON
def encode_report(report: Report, logs: Sequence[Log]) -> dict[str, Any]:
    """The report as a JSON object."""
    return {
        "since": files.format_time(report.period.since),
        "until": files.format_time(report.period.until),
        "reads": [asdict(each) for each in report.reads],
        "refusals": [asdict(each) for each in report.refusals],
        "events": list(report.events),
        "logs": {each.path: each.records for each in logs},
        "signed": {each.path: each.signed for each in logs},
    }


def decode_report(fields: Mapping[str, Any]) -> tuple[Report, list[Log]]:
    """The report in a JSON object; raises `ValueError` for anything else. It has no records of logs."""
    try:
        period = Period(parse_moment(str(fields["since"]), "since"), parse_moment(str(fields["until"]), "until"))
        reads, refusals = [Read(**each) for each in fields["reads"]], [Refusal(**each) for each in fields["refusals"]]
        logs = [Log(str(path), int(count), fields["signed"][path]) for path, count in fields["logs"].items()]
        return Report(period, reads, refusals, [dict(each) for each in fields["events"]], ()), logs
    except (AuditError, KeyError, TypeError, ValueError, AttributeError):
        raise ValueError("not a report of accesses") from None

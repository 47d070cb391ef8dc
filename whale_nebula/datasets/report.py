"""Access reports: reads by account, time, program and approver over a period, as tables from an owner's logs.

Pure functions of records of verified logs and events of the registry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from whale_nebula.errors import AuditError
from whale_nebula.security import files

Record = Mapping[str, Any]
READ = "read"
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

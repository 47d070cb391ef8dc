"""Access reports of an owner: created from the verified logs and the registry next to the authority; and their JSON
form, in which auditors receive them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from whale_nebula.accounts.registry import Registry
from whale_nebula.datasets.report import Period, Read, Refusal, Report, make_report, parse_moment
from whale_nebula.errors import AuditError
from whale_nebula.security import approval, authority, chain, files
from whale_nebula.security.audit import AuditLog, Head, list_log_files
from whale_nebula.security.code import SCRIPT
from whale_nebula.security.trust import DenyList, Trust, load
from whale_nebula.security.verdict import Verdict, verify

AUDIT = "audit"
"""The folder of the logs of reads, within that of the authority."""


MOST_BYTES = 16 << 20
"""The maximum size of a report that is sent to an auditor."""
_TRIES = 5


class Log(NamedTuple):
    """A verified log: its path, its number of records, and the last one that is signed, if any is."""

    path: str
    records: int
    signed: int | None


def report_accesses(
    folder: Path, registry: Registry, period: Period, logs: Sequence[Path] = (), approvals: Path | None = None
) -> tuple[Report, list[Log]]:
    """Create the report of a period from these logs, by default all in the authority's folder, which must be intact."""
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
    head = log.head()
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
    known = authority.authorities(folder)
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
            record = chain.parse(line)
            if record is not None:
                yield record


def _find_approvals(approvals: Path | None, folder: Path) -> dict[str, str]:
    """The approvers of scripts by their digests, from all approvals signed by this authority, also expired ones."""
    if approvals is None:
        return {}
    known, denied = authority.authorities(folder), folder / files.REVOKED
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

"""`whale-nebula audit report`: who read what, when, by which program, and who approved it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.datasets.conftest import Owner, Site, certify, owner, site  # noqa: F401 - fixtures
from whale_nebula.accounts.members import DISABLED
from whale_nebula.accounts.rows import FILE
from whale_nebula.cli.main import main
from whale_nebula.datasets.grants import GRANTED
from whale_nebula.datasets.reading import open_remote
from whale_nebula.datasets.report import record_position
from whale_nebula.errors import AccessError
from whale_nebula.security import approval, chain

Capture = pytest.CaptureFixture[str]
SCRIPT = b"print('hello')\n"


def run(line: str, capsys: Capture) -> tuple[int, str, str]:
    try:
        code = main(["audit", "report", *shlex.split(line)])
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, *capsys.readouterr()


@pytest.fixture
def read(site: Site) -> Site:  # noqa: F811
    """A site where ana has read with an approved program, and bob was refused."""
    site.owner.publish()
    request = site.owner.grants.ask("ana", "corpus", "a study")
    site.owner.grants.decide(request.number, GRANTED, 7, "she may", "olga")
    digest = hashlib.sha256(SCRIPT).hexdigest()
    site.read_rows("ana", program=digest)
    site.read_rows("ana", program="cd" * 32)
    certify(site.owner, "bob", site.tmp / "of-bob", index=1)
    for _ in range(2):
        with contextlib.suppress(AccessError):
            site.read_rows("bob")
    site.guard.log.sign_head()
    code = {"__main__": digest}, {"python": "3"}
    approval.save(site.tmp / "approvals", site.owner.signer, "train.py", code, {}, by="olga", why="reviewed")
    return site


def line(site: Site) -> str:  # noqa: F811
    return f"{site.guard.log.path} --folder {site.owner.home}/certs --approvals {site.tmp}/approvals"


def test_report_shows_reads_refusals_and_grants(read: Site, capsys: Capture) -> None:
    code, out, _ = run(line(read), capsys)
    (granted,) = (each.number for each in read.owner.grants.list_permissions())
    assert code == 0
    assert "ana  corpus  100 rows, 800 bytes, in 4 batches" in out
    assert f"for 'a study', granted {granted} by olga at" in out
    assert "train.py, approved by olga, reviewed" in out and "script cdcdcdcdcdcd: no approval found" in out
    assert "bob  corpus  2 times" in out and "it has not requested access" in out
    assert "grant  ana  allow" in out and "signed up to record" in out
    document = json.loads(run(f"{line(read)} --json", capsys)[1])
    assert [each["rows"] for each in document["reads"]] == [100, 100]
    assert document["reads"][0]["versions"] == ["keras 3"] and "    with keras 3" in out
    versions = [json.loads(each).get("versions") for each in Path(read.guard.log.path).read_text().splitlines()]
    assert versions.count("keras 3") == 1, "the first record of a run says it"
    assert document["refusals"][0]["times"] == 2


def test_report_is_limited_to_the_period(read: Site, capsys: Capture) -> None:
    out = run(f"{line(read)} --until 2026-01-01", capsys)[1]
    assert "who read what\n  nothing" in out and "refused\n  nothing" in out
    assert run(f"{line(read)} --since 2026-01-01T12:00:00Z", capsys)[1].count("100 rows") == 2
    assert "is neither a day nor a time" in run(f"{line(read)} --since yesterday", capsys)[2]
    code, out, err = run(f"{line(read)} --since 2026-02-01 --until 2026-01-01", capsys)
    assert (code, out) == (1, "") and "--since is not before --until" in err


def test_lines_option_prints_records_in_order(read: Site, capsys: Capture) -> None:
    records = [json.loads(each) for each in run(f"{line(read)} --lines", capsys)[1].splitlines()]
    assert {each["action"] for each in records} >= {"read", "grant", "request", "publish", "add", "genesis"}
    assert [each["time"][:19] for each in records] == sorted(each["time"][:19] for each in records)


def test_attack_changed_log_is_refused(read: Site, capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "data-changed.jsonl"
    path.write_bytes(read.guard.log.path.read_bytes().replace(b'"account":"ana"', b'"account":"bob"', 1))
    code, out, err = run(f"{path} --folder {read.owner.home}/certs", capsys)
    assert (code, out, "is the first invalid one" in err) == (1, "", True)


def test_attack_changed_registry_is_refused(read: Site, capsys: Capture) -> None:
    copy = read.tmp / "copy"
    shutil.copytree(read.owner.home / "certs", copy)
    with contextlib.closing(sqlite3.connect(copy / FILE)) as other:
        other.execute("update event set line = replace(line, 'olga', 'ana')")
        other.commit()
    code, _, err = run(f"{read.guard.log.path} --folder {copy}", capsys)
    assert (code, "was modified by other means" in err) == (1, True)


def keep_first_records(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:4]))


def rewrite_without_heads(path: Path) -> None:
    """Rewrite a log as one that was never signed, with correct digests, and ana's reads as bob's."""
    before, lines = chain.START, []
    for each in path.read_bytes().splitlines():
        record = json.loads(each)
        if record["action"] != chain.HEAD:
            fields = {name: value for name, value in record.items() if name not in ("seq", "prev")}
            fields |= {"account": "bob"} if record.get("account") == "ana" else {}
            line, before = chain.make_line(before, fields)
            lines.append(line + b"\n")
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Path.unlink, "data-gpu.jsonl is missing"),
        (keep_first_records, "the log ends at record 3, but a peer has a head"),
        (rewrite_without_heads, "but a peer has a head of record"),
    ],
    ids=["deleted", "truncated", "rewritten as unsigned"],
)
def test_attack_log_of_the_service_is_changed(
    change: Callable[[Path], object],
    message: str,
    read: Site,
    capsys: Capture,
) -> None:
    """The registry has positions of the log."""
    folder = read.owner.home / "certs"
    log = folder / "audit/data-gpu.jsonl"
    log.parent.mkdir(exist_ok=True)
    record_position(read.owner.registry, read.guard.log, "end data service")
    shutil.copy(read.guard.log.path, log)
    code, out, _ = run(f"--folder {folder}", capsys)
    assert code == 0 and "end data service" in out
    change(log)
    code, out, err = run(f"--folder {folder}", capsys)
    assert (code, out) == (1, "") and message in err


# ---------------------------------------------------------------------- over the line
def make_auditor_command(site: Site, account: str = "eva", role: str = "auditor") -> str:  # noqa: F811
    """Create an account with an auditor's certificate; returns the options that fetch the report."""
    log = site.owner.home / "certs/audit/data-gpu.jsonl"
    if not log.exists():
        log.parent.mkdir(exist_ok=True)
        os.link(site.guard.log.path, log)
    if account not in {each.name for each in site.owner.registry.list_accounts()}:
        site.owner.registry.add(account, role=role)
    certify(site.owner, account, site.tmp / f"of-{account}", role="auditor")
    return f"--at 127.0.0.1:{site.port} --cluster gpu --folder {site.tmp}/of-{account}"


def test_auditor_fetches_report_from_service(read: Site, capsys: Capture) -> None:
    command = make_auditor_command(read)
    code, out, err = run(f"{command} --since 2026-01-01", capsys)
    assert (code, err) == (0, "")
    assert "ana  corpus  100 rows, 800 bytes, in 4 batches" in out and "bob  corpus  2 times" in out
    assert "report  eva  allow" in out, "what he reads says that he has read it"
    assert str(read.owner.home) not in out
    local = run(f"{line(read).partition(' --approvals')[0]} --since 2026-01-01 --json", capsys)[1]
    remote = run(f"{command} --since 2026-01-01 --json", capsys)[1]
    parts = ("since", "reads", "refusals")
    assert [json.loads(local)[part] for part in parts] == [json.loads(remote)[part] for part in parts]
    assert run(f"{command} --until 2026-01-01", capsys)[1].count("rows") == 0
    code, _, err = run(command, capsys)
    assert (code, "too many reports are requested" in err) == (1, True)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"role": "trainer"}, "is not an auditor's"),  # the certificate is from when it was an auditor
        ({"role": "owner"}, "is not an auditor's"),
        ({"account": "ana"}, "is not an auditor's"),
        ({"disabled": True}, "or is disabled"),
    ],
)
def test_attack_report_without_auditor_role_is_refused(
    read: Site, capsys: Capture, more: dict[str, Any], message: str
) -> None:
    account = more.get("account", "eva")
    command = make_auditor_command(read, account, more.get("role", "auditor"))
    if more.get("disabled"):
        read.owner.registry.set_state(account, DISABLED)
    code, out, err = run(command, capsys)
    assert (code, out) == (1, "") and "may not read the audit report" in err and message in err
    assert (read.access_records[-1]["object"], read.access_records[-1]["decision"]) == ("the audit report", "deny")
    assert "report" not in {each["action"] for each in read.owner.registry.list_events()}


def test_attack_auditor_certificate_is_valid_only_for_reports(read: Site, capsys: Capture) -> None:
    make_auditor_command(read)
    for request in ({"ask": "list"}, {"ask": "request", "dataset": "corpus", "purpose": "x"}, {"ask": "read"}):
        auditor = open_remote(f"127.0.0.1:{read.port}", read.tmp / "of-eva", None, "gpu", role="auditor")
        with auditor._open() as opened, pytest.raises(AccessError, match="valid only for the audit report"):
            opened.ask(request)
    with (
        read.open_reader("ana")._open() as opened,
        pytest.raises(AccessError, match="ana may not read the audit report"),
    ):
        opened.ask({"ask": "report", "since": "2026-01-01", "until": "2027-01-01"})
    code, _, err = run(f"--at 127.0.0.1:{read.port} --cluster gpu --folder {read.tmp}/of-ana", capsys)
    assert (code, "--role auditor" in err) == (1, True), "who has no such certificate is told how to get one"


def test_invalid_remote_report_command_is_refused(capsys: Capture) -> None:
    for words in (
        "--at 127.0.0.1:1",
        "--at 127.0.0.1:1 --cluster gpu x.jsonl",
        "--at 127.0.0.1:1 --cluster gpu --lines",
    ):
        assert run(words, capsys)[0] == 2


def test_empty_report_and_missing_files(owner: Owner, capsys: Capture) -> None:  # noqa: F811
    code, out, _ = run(f"--folder {owner.home}/certs", capsys)
    assert (code, "who read what\n  nothing" in out) == (0, True)
    assert run(f"no.jsonl --folder {owner.home}/certs", capsys)[0] == 66
    assert run("--folder nowhere", capsys)[0] == 1
    assert run("--from x", capsys)[0] == 2

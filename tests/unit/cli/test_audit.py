"""`whale-nebula audit verify`: its output and exit status; and the examples of the page on security."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from whale_nebula.cli import arguments, audit
from whale_nebula.cli.main import main
from whale_nebula.security import Credentials, Files, Identity, authority, chain, identity, issue, issue_ephemeral
from whale_nebula.security.audit import AuditLog, KeptHeads

Capture = pytest.CaptureFixture[str]

ROOT = Path(__file__).resolve().parents[3]


def write(folder: Path, files: Files) -> None:
    """Write a log of 254 records with its heads, a changed copy, and a truncated copy."""
    gate = Credentials.load(files)
    kept = KeptHeads(folder / "from-npu/npu-gateway.heads.jsonl", gate.trust)
    path = folder / "audit/gpu-gateway.jsonl"
    log = AuditLog(path, gate.identity, gate, on_head=lambda head: kept.keep(head, gate.identity))
    for number in range(249):
        log.record("relay", actor=f"nebula://{gate.identity.run}/gpu/worker/0", target=f"{number}", durable=False)
    log.close()
    lines = (folder / "audit/gpu-gateway.jsonl").read_bytes().splitlines(keepends=True)
    changed = [*lines[:150], lines[150].replace(b"relay", b"delay"), *lines[151:]]
    for name in ("changed", "cut"):
        (folder / name).mkdir()
    (folder / "changed/gpu-gateway.jsonl").write_bytes(b"".join(changed))
    (folder / "cut/gpu-gateway.jsonl").write_bytes(b"".join(lines[:230]))


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    files = issue_ephemeral("mt", ["gpu/gateway"], folder)["gpu/gateway"]
    write(folder, files)
    (folder / "ca.pem").write_bytes(files.ca.read_bytes())
    return folder


def run(line: str, capsys: Capture) -> tuple[int, str, str]:
    try:
        code = audit.main(shlex.split(line))
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, *capsys.readouterr()


def test_valid_log_is_verified(logs: Path, capsys: Capture) -> None:
    options = f"--heads {logs}/from-npu/npu-gateway.heads.jsonl --ca {logs}/ca.pem"
    code, out, _ = run(f"verify {logs}/audit/gpu-gateway.jsonl {options}", capsys)
    assert code == arguments.DONE
    assert "254 records, all unchanged" in out
    assert "3 heads" in out and "by a certificate of this authority" in out
    assert "the peer's heads match up to record 252" in out
    code, out, _ = run(f"verify --json {logs}/audit/gpu-gateway.jsonl", capsys)
    document = json.loads(out)
    assert (code, document["ok"], document["records"], document["closed"]) == (0, True, 254, True)
    assert document["site"] == "nebula://mt/gpu/gateway/0"


def test_missing_checks_are_mentioned(logs: Path, capsys: Capture) -> None:
    out = run(f"verify {logs}/audit/gpu-gateway.jsonl", capsys)[1]
    assert "verify it with --ca" in out
    assert "peer's heads agree" not in out
    code, out, _ = run(f"verify {logs}/cut/gpu-gateway.jsonl", capsys)
    assert (code, "only a peer's heads can show" in out) == (arguments.DONE, True)


@pytest.mark.parametrize(("name", "bad"), [("changed", 151), ("cut", 230)])
def test_changed_or_truncated_log_is_reported(logs: Path, capsys: Capture, name: str, bad: int) -> None:
    line = f"verify {logs}/{name}/gpu-gateway.jsonl --heads {logs}/from-npu/npu-gateway.heads.jsonl"
    code, out, _ = run(line, capsys)
    assert (code, f"record {bad} is the first invalid one" in out) == (arguments.FAILED, True)
    code, out, _ = run(f"{line} --json", capsys)
    document = json.loads(out)
    assert (code, document["ok"], document["bad"]) == (arguments.FAILED, False, bad)


def test_heads_or_authority_of_another_log_are_reported(logs: Path, tmp_path: Path, capsys: Capture) -> None:
    """The heads of another gateway or the certificate of another run were passed by mistake."""
    other = Credentials.load(issue_ephemeral("mt", ["npu/gateway"], tmp_path)["npu/gateway"])
    kept = KeptHeads(tmp_path / "gpu-gateway.heads.jsonl", other.trust)
    log = AuditLog(tmp_path / "x.jsonl", other.identity, other, on_head=lambda head: kept.keep(head, other.identity))
    log.close()
    line = f"verify {logs}/audit/gpu-gateway.jsonl"
    code, out, _ = run(f"{line} --heads {tmp_path}/gpu-gateway.heads.jsonl", capsys)
    assert (code, "first that is wrong" in out) == (arguments.FAILED, False)
    assert (
        "the heads belong to the log of nebula://mt/npu/gateway/0" in out and "--heads npu-gateway.heads.jsonl" in out
    )
    code, out, _ = run(f"{line} --ca {other.files.ca}", capsys)
    assert (code, "rewritten" in out, "ca.pem belongs to another run" in out) == (arguments.FAILED, False, True)


@pytest.mark.parametrize("place", ["certs/revoked.json", "lists/taken-back.json"])
def test_deny_list_is_used_from_default_or_given_path(tmp_path: Path, capsys: Capture, place: str) -> None:
    signer, certs, gateway = authority.Authority.create("mt", {}), tmp_path / "certs", Identity("mt", "gpu", "gateway")
    authority.create(certs, signer)
    files = issue.issue(certs, signer, [gateway])[0].files
    write(tmp_path, files)
    log = f"verify {tmp_path}/audit/gpu-gateway.jsonl --ca {certs}/ca.pem"
    assert run(log, capsys)[0] == arguments.DONE
    issue.revoke(certs, signer, [Credentials.load(files._replace(revoked=None)).peer.serial], "stolen")
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (certs / "revoked.json").rename(tmp_path / place)
    options = "" if place.startswith("certs") else f" --revoked {tmp_path / place}"
    code, out, _ = run(log + options, capsys)
    assert (code, "record 0 is the first invalid one" in out, "revoked" in out) == (arguments.FAILED, True, True)
    code, out, _ = run(f"{log}{options} --heads {tmp_path}/from-npu/npu-gateway.heads.jsonl", capsys)
    assert (code, "the peer's heads match up to record 252" in out) == (arguments.DONE, True)


@pytest.mark.parametrize("options", ["", "--json"])
def test_malformed_head_in_forged_log_is_reported(logs: Path, tmp_path: Path, capsys: Capture, options: str) -> None:
    """The command reports the record and does not crash."""
    forged_lines, link = [], chain.START
    for line in (logs / "audit/gpu-gateway.jsonl").read_bytes().splitlines():
        fields = {key: value for key, value in json.loads(line).items() if key not in ("seq", "prev")}
        if fields["action"] == "head":
            fields["head"] |= {"certificate": "\ud800\x1b[2J"}
        line, link = chain.make_line(link, fields)
        forged_lines.append(line)
    (tmp_path / "forged.jsonl").write_bytes(b"\n".join(forged_lines) + b"\n")
    code, out, err = run(f"verify {tmp_path}/forged.jsonl --ca {logs}/ca.pem {options}", capsys)
    assert (code, err) == (arguments.FAILED, "")
    if options:
        assert (json.loads(out)["ok"], json.loads(out)["bad"]) == (False, 0)
    else:
        assert "record 0 is the first invalid one" in out and "the head at record 100 is invalid" in out


def test_torn_bytes_are_reported(logs: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_bytes(
        b"".join((logs / "audit/gpu-gateway.jsonl").read_bytes().splitlines(keepends=True)[:9]) + b'{"acti'
    )
    AuditLog(path, Identity("mt", "gpu", "gateway"), None).close()
    out = run(f"verify {path}", capsys)[1]
    assert "a crash cut the last line once: 6 bytes were set aside, as the log records" in out
    assert json.loads(run(f"verify {path} --json", capsys)[1])["torn_bytes"] == 6


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("", 2),
        ("verify", 2),
        ("check x", 2),
        ("verify a b", 2),
        ("verify {logs}/audit/gpu-gateway.jsonl --had x", 2),
        ("verify {logs}/no.jsonl", arguments.NO_FILE),
        ("verify {logs}/audit/gpu-gateway.jsonl --heads {logs}/no.jsonl", arguments.NO_FILE),
        ("verify {logs}/audit/gpu-gateway.jsonl --heads {logs}/ca.pem", arguments.NO_DATA),
        ("verify {logs}/audit/gpu-gateway.jsonl --ca {logs}/from-npu/npu-gateway.heads.jsonl", arguments.NO_DATA),
        ("verify {logs}/ca.pem", arguments.FAILED),
        ("verify {logs}/audit/gpu-gateway.jsonl --revoked {logs}/ca.pem", 2),
        ("verify {logs}/audit/gpu-gateway.jsonl --ca {logs}/ca.pem --revoked {logs}/no.json", arguments.NO_FILE),
        ("verify {logs}/audit/gpu-gateway.jsonl --ca {logs}/ca.pem --revoked {logs}/ca.pem", arguments.NO_DATA),
    ],
)
def test_verify_exit_status(logs: Path, capsys: Capture, line: str, code: int) -> None:
    assert run(line.format(logs=logs), capsys)[0] == code


# ---------------------------------------------------------------------- docs/security.md
PAGE = (ROOT / "docs" / "security.md").read_text("utf-8")


def mask_values(text: str) -> list[str]:
    """The lines with dates, serial numbers and remaining days replaced, without trailing spaces."""
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "DATE", text)
    text = re.sub(r"\b[0-9a-f]{16,32}\b", "SERIAL", text)
    text = re.sub(r"\b\d+ days\b( *)", "LEFT ", text)
    return [line.rstrip() for line in text.strip().splitlines()]


def test_security_page_examples_match_real_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Run every command of the page in order; the shown output must match."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        for example in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, expected = example.partition("\n")
            words = shlex.split(line)
            assert words[0] == "whale-nebula"
            if words[1] == "audit" and not Path("audit").exists():
                main(["certs", "issue", "--cluster", "gpu", "--role", "gateway"])
                write(tmp_path, Files.in_folder("certs", Identity("mt", "gpu", "gateway")))
                capsys.readouterr()
            main(words[1:])
            out = capsys.readouterr().out
            if expected:
                assert mask_values(out) == mask_values(expected), line


def test_security_page_permissions_match_the_code() -> None:
    section = PAGE.split("## Who may do what")[1].split("##")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    roles, found = rows[0][1:], set()
    for call, *cells in rows[2:]:
        found |= {(role, identity.Call(call.split(":")[0])) for role, cell in zip(roles, cells, strict=True) if cell}
    assert found == identity.PERMISSIONS

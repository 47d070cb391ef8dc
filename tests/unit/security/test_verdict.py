"""Verdicts on audit logs: changes are detected."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.security.authorities import GATE, OTHER_GATE, RUN, Home
from tests.unit.security.logs import read, read_lines, write
from whale_nebula.errors import AuditError, IdentityError
from whale_nebula.security import Credentials, Identity, Trust, audit, chain, issue
from whale_nebula.security.audit import Head, KeptHeads, list_log_files, read_heads
from whale_nebula.security.trust import Revocation
from whale_nebula.security.verdict import Verdict, verify


def edit_record(lines: list[bytes]) -> list[bytes]:
    return [*lines[:150], lines[150].replace(b"npu/", b"tpu/"), *lines[151:]]


def rebuild_chain(lines: list[bytes], change: Callable[[int, dict], dict | None]) -> list[bytes]:
    """Change records and recompute all digests; None removes a record."""
    lines_made, link = [], chain.START
    for number, line in enumerate(lines):
        fields = {key: value for key, value in json.loads(line).items() if key not in ("seq", "prev")}
        changed = change(number, fields)
        if changed is not None:
            line, link = chain.make_line(link, changed)
            lines_made.append(line)
    return lines_made


def rewrite_record(lines: list[bytes]) -> list[bytes]:
    """Change a record without the key."""
    return rebuild_chain(lines, lambda number, fields: {**fields, "object": "tpu/0"} if number == 150 else fields)


def remove_heads(lines: list[bytes]) -> list[bytes]:
    return rebuild_chain(lines, lambda _, fields: None if fields["action"] == "head" else fields)


def forge_newline(lines: list[bytes]) -> list[bytes]:
    return [*lines[:150], lines[150].replace(b'"reason":""', b'"reason":"x\n{"seq":151}"'), *lines[151:]]


ATTACKS: dict[str, tuple[Callable[[list[bytes]], list[bytes]], int, bool]] = {
    # the attack, the first record that is wrong, and whether it takes a peer's heads to find it
    "edit": (edit_record, 151, False),
    "edit the last": (lambda lines: [*lines[:-1], lines[-1].replace(b"nebula", b"nebulb", 1)], -1, False),
    "delete a line": (lambda lines: lines[:150] + lines[151:], 150, False),
    "delete the first": (lambda lines: lines[1:], 0, False),
    "insert a line": (lambda lines: [*lines[:150], lines[20], *lines[150:]], 150, False),
    "swap two": (lambda lines: [*lines[:150], lines[151], lines[150], *lines[152:]], 150, False),
    "forge a newline": (forge_newline, 150, False),
    "add an empty line": (lambda lines: [*lines[:150], b"", *lines[150:]], 150, False),
    "write anew": (rewrite_record, 100, False),
    "delete the tail": (lambda lines: lines[:230], 230, True),
    "delete all": (lambda lines: [], 0, False),
    "write anew without heads": (remove_heads, 100, True),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_on_log_is_detected(tmp_path: Path, gate: Credentials, attack: str) -> None:
    act, bad, needs_heads = ATTACKS[attack]
    path = tmp_path / "audit.jsonl"
    heads = write(path, gate)
    lines = read_lines(path)
    path.write_bytes(b"".join(line + b"\n" for line in act(lines)))
    found = [verify(path), verify(path, heads, gate.trust)]
    assert found[0].ok == needs_heads
    assert [verdict.bad for verdict in found if not verdict.ok] == [bad if bad >= 0 else len(lines) - 1] * (
        2 - needs_heads
    )
    assert all(verdict.why for verdict in found if not verdict.ok)


@pytest.mark.parametrize("count", [250, 5])
def test_log_without_heads_is_invalid(tmp_path: Path, gate: Credentials, count: int) -> None:
    path = tmp_path / "audit.jsonl"
    write(path, gate, count)
    path.write_bytes(b"".join(line + b"\n" for line in remove_heads(read_lines(path))))
    verdict = verify(path, trust=gate.trust)
    assert (verdict.bad, verdict.closed, "rewritten" in verdict.why) == (0, False, True)
    assert not verify(path).closed


def test_removed_later_heads_are_detected(tmp_path: Path, gate: Credentials) -> None:
    path = tmp_path / "audit.jsonl"
    heads = write(path, gate, 250, close=False)
    last_kept = heads[0].seq + 1
    path.write_bytes(
        b"".join(
            line + b"\n"
            for line in rebuild_chain(
                read_lines(path),
                lambda number, fields: None if number > last_kept and fields["action"] == "head" else fields,
            )
        )
    )
    verdict = verify(path, trust=gate.trust)
    assert (verdict.bad, "151 records follow the last head" in verdict.why) == (last_kept, True)


def test_restarts_do_not_delay_heads(tmp_path: Path, gate: Credentials) -> None:
    path, heads = tmp_path / "audit.jsonl", []
    for count in (90, *[1] * 60, *[0] * 60):
        heads += write(path, gate, count, close=False)
    assert len(heads) >= 2
    assert verify(path, trust=gate.trust).ok
    write(path, gate, 120, close=False, most_bytes=1 << 14)
    for _ in range(3):
        write(path, gate, 0, close=False)
    assert len(list_log_files(path)) > 1
    assert verify(path, trust=gate.trust).ok
    assert read(path)[-1]["action"] in ("head", "start")


class TestRevokedKey:
    """Heads signed with a revoked key may be forged."""

    @staticmethod
    def revoked(*signers: Credentials) -> dict[str, Revocation]:
        serials = [signer.peer.serial for signer in signers]
        return {each: Revocation(each, GATE.uri, "2026-11-24T10:00:00Z", "stolen") for each in serials}

    def test_heads_of_revoked_key_are_not_accepted(self, tmp_path: Path, gate: Credentials) -> None:
        heads = write(tmp_path / "a.jsonl", gate, 250)
        verdict = verify(tmp_path / "a.jsonl", trust=gate.trust, revoked=self.revoked(gate))
        assert (verdict.bad, verdict.signed, verdict.closed) == (0, None, False)
        assert "from record 0 on, the heads are signed with a certificate revoked 2026-11-24" in verdict.why
        assert "stolen" in verdict.why
        assert verify(tmp_path / "a.jsonl", heads, gate.trust, self.revoked(gate)).ok
        some = verify(tmp_path / "a.jsonl", heads[:1], gate.trust, self.revoked(gate))
        assert (some.bad, some.kept) == (heads[0].seq + 1, heads[0].seq)

    def test_later_valid_head_covers_earlier_records(self, tmp_path: Path, home: Home) -> None:
        identity = Identity(RUN, "tape", "gateway")
        old = home.credentials(identity)
        first = write(tmp_path / "a.jsonl", old, 120, close=False)
        issue.renew(home.folder, home.authority, [identity])
        new = Credentials.load(old.files)
        good = write(tmp_path / "a.jsonl", new, 120, close=False)
        assert verify(tmp_path / "a.jsonl", trust=new.trust, revoked=self.revoked(old)).ok
        verdict = verify(tmp_path / "a.jsonl", trust=new.trust, revoked=self.revoked(new))
        assert (verdict.bad, verdict.signed) == (first[-1].seq + 1, first[-1].seq)
        assert good[-1].seq > verdict.bad


class TestHeads:
    def test_log_of_another_gateway_is_detected(self, tmp_path: Path, gate: Credentials, other: Credentials) -> None:
        mine, yours = write(tmp_path / "a.jsonl", gate, 10), write(tmp_path / "b.jsonl", other, 10)
        assert verify(tmp_path / "a.jsonl", mine).ok
        assert "but the log is of" in verify(tmp_path / "a.jsonl", yours).why
        assert verify(tmp_path / "b.jsonl", mine + yours).ok

    def test_log_rewritten_with_its_own_key_is_detected_by_peer_heads(self, tmp_path: Path, gate: Credentials) -> None:
        heads = write(tmp_path / "a.jsonl", gate, 250)
        write(tmp_path / "b.jsonl", gate, 250)
        verdict = verify(tmp_path / "b.jsonl", heads, gate.trust)
        assert (verdict.bad, "rewritten" in verdict.why) == (0, True)

    def test_log_of_another_authority_is_detected(self, tmp_path: Path, gate: Credentials) -> None:
        stranger = Home.at(tmp_path / "other").credentials(GATE)
        heads = write(tmp_path / "a.jsonl", stranger, 250)
        assert verify(tmp_path / "a.jsonl", heads).ok
        verdict = verify(tmp_path / "a.jsonl", trust=gate.trust)
        assert (verdict.bad, "a different authority" in verdict.why) == (0, True)

    def test_invalid_peer_head_is_reported(self, tmp_path: Path, gate: Credentials) -> None:
        heads = write(tmp_path / "a.jsonl", gate, 10)
        with pytest.raises(AuditError, match="of the peer is invalid"):
            verify(tmp_path / "a.jsonl", [heads[0]._replace(seq=3)])

    def test_kept_heads_can_be_read_again(self, tmp_path: Path, gate: Credentials, other: Credentials) -> None:
        path = tmp_path / "kept" / "heads.jsonl"
        kept = KeptHeads(path, other.trust)
        heads = write(tmp_path / "a.jsonl", gate)
        assert [kept.keep(Head.from_dict(json.loads(json.dumps(head._asdict()))), GATE) for head in heads] == [True] * 3
        assert [kept.keep(head, GATE) for head in heads] == [False] * 3  # sent again after a lost answer
        assert list(read_heads(path)) == heads
        assert not KeptHeads(path, other.trust).keep(heads[-1], GATE)
        assert verify(tmp_path / "a.jsonl", read_heads(path), other.trust).ok

    def test_text_around_certificate_of_head_is_removed(
        self, tmp_path: Path, gate: Credentials, other: Credentials
    ) -> None:
        kept = KeptHeads(tmp_path / "heads.jsonl", other.trust)
        heads = write(tmp_path / "a.jsonl", gate)
        for head in heads:
            kept.keep(head._replace(certificate="x" * 60_000 + "\n" + head.certificate + "y" * 60_000), GATE)
        assert list(read_heads(tmp_path / "heads.jsonl")) == heads

    def test_number_of_remembered_heads_is_limited(
        self, tmp_path: Path, gate: Credentials, other: Credentials, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(audit, "_MOST_REMEMBERED", 2)
        heads, path = write(tmp_path / "a.jsonl", gate), tmp_path / "heads.jsonl"
        kept = KeptHeads(path, other.trust)
        assert [kept.keep(head, GATE) for head in heads] == [True] * 3
        for each in (kept, KeptHeads(path, other.trust)):
            assert each._digests == {GATE: {head.seq: head.digest for head in heads[1:]}}
            assert not each.keep(heads[1], GATE)
            with pytest.raises(AuditError, match="rewritten or rolled back"):
                each.keep(heads[0], GATE)
        checked, check = [], Head.check
        monkeypatch.setattr(Head, "check", lambda head: checked.append(head.seq) or check(head))
        KeptHeads(path, other.trust)  # only the last heads are checked, however long the file is
        assert checked == [head.seq for head in heads[1:]]

    def test_rolled_back_log_is_detected(self, tmp_path: Path, gate: Credentials, other: Credentials) -> None:
        kept = KeptHeads(tmp_path / "heads.jsonl", other.trust)
        heads = write(tmp_path / "a.jsonl", gate)
        new_heads = write(tmp_path / "b.jsonl", gate)
        kept.keep(heads[1], GATE)
        for head in (heads[0], new_heads[1]):
            with pytest.raises(AuditError, match="rewritten or rolled back"):
                kept.keep(head, GATE)
        assert len(list(read_heads(tmp_path / "heads.jsonl"))) == 1

    def test_head_of_another_sender_is_refused(self, tmp_path: Path, gate: Credentials, other: Credentials) -> None:
        kept = KeptHeads(tmp_path / "heads.jsonl", other.trust)
        head = write(tmp_path / "a.jsonl", gate, 1)[0]
        stranger = Home.at(tmp_path / "other").credentials(GATE)
        for bad, sender in [
            (head, OTHER_GATE),
            (head._replace(seq=head.seq + 1), GATE),
            (head._replace(digest="0" * 64), GATE),
            (head._replace(signature="!"), GATE),
            (Head.sign(stranger, head.seq, head.digest), GATE),
            (head._replace(certificate=other.cert_pem.decode()), GATE),
        ]:
            with pytest.raises((AuditError, IdentityError)):
                kept.keep(bad, sender)
        assert not (tmp_path / "heads.jsonl").exists()

    def test_crash_while_keeping_heads_loses_one_line(self, tmp_path: Path, gate: Credentials) -> None:
        path = tmp_path / "heads.jsonl"
        heads = write(tmp_path / "a.jsonl", gate)
        KeptHeads(path, gate.trust).keep(heads[0], GATE)
        with open(path, "ab") as file:
            file.write(b'{"seq": 19')
        reopened = KeptHeads(path, gate.trust)
        assert not reopened.keep(heads[0], GATE)
        reopened.keep(heads[1], GATE)
        assert list(read_heads(path)) == heads[:2]

    @pytest.mark.parametrize(
        "fields", [{}, {"seq": "1"}, {"seq": -1, "digest": "0" * 64, "signature": "", "certificate": ""}]
    )
    def test_invalid_head_fields_are_refused(self, fields: dict) -> None:
        with pytest.raises(AuditError):
            Head.from_dict(fields)


@pytest.mark.parametrize(
    "change",
    [
        {"certificate": "\ud800"},
        {"signature": "é"},
        {"certificate": "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"},
        {"seq": True},
        {"digest": None},
    ],
)
def test_malformed_head_is_reported_by_its_record(tmp_path: Path, gate: Credentials, change: dict) -> None:
    """A forged log does not crash the verification."""
    path = tmp_path / "audit.jsonl"
    heads = write(path, gate, 5)
    forged_lines = rebuild_chain(
        read_lines(path),
        lambda _, fields: {**fields, "head": {**fields["head"], **change}} if fields["action"] == "head" else fields,
    )
    path.write_bytes(b"\n".join(forged_lines) + b"\n")
    verdict = verify(path, trust=gate.trust)
    assert (verdict.ok, f"the head at record {len(forged_lines) - 1} is invalid" in verdict.why) == (False, True)
    with pytest.raises((AuditError, IdentityError)):
        Head.from_dict({**heads[-1]._asdict(), **change}).check(gate.trust)


@pytest.mark.parametrize("fields", [{"site": "\ud800"}, {"site": 7}, {"site": "nebula://mt"}, {"run": "é\ud800"}])
def test_invalid_first_record_is_detected(tmp_path: Path, fields: dict) -> None:
    first = {"action": "genesis", "site": GATE.uri, "run": RUN, **fields}
    (tmp_path / "audit.jsonl").write_bytes(chain.make_line(chain.START, first)[0] + b"\n")
    verdict = verify(tmp_path / "audit.jsonl")
    assert (verdict.bad, "first record" in verdict.why, verdict.why.isascii()) == (0, True, True)


def test_empty_or_missing_log_is_not_valid(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").write_bytes(b"")
    assert verify(tmp_path / "audit.jsonl").bad == 0
    with pytest.raises(AuditError):
        verify(tmp_path / "no.jsonl")
    assert Verdict("x").ok
    assert Trust([]).authorities == ()

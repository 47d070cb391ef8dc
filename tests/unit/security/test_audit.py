"""The audit log: records, crashes, disk failures, and full files."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.security.authorities import GATE, RUN, Home
from tests.unit.security.logs import read, write
from whale_nebula.errors import AuditError
from whale_nebula.security import Credentials, CurrentCredentials, Identity, chain, issue
from whale_nebula.security.audit import AuditLog, Head, list_log_files
from whale_nebula.security.verdict import verify


class TestRecords:
    def test_log_begins_with_genesis_and_ends_with_signed_head(self, tmp_path: Path, gate: Credentials) -> None:
        heads = write(tmp_path / "audit.jsonl", gate)
        records = read(tmp_path / "audit.jsonl")
        assert (records[0]["action"], records[0]["run"], records[0]["site"]) == ("genesis", RUN, GATE.uri)
        assert records[0]["certificate"] == gate.peer.fingerprint
        assert [each["action"] for each in records[-2:]] == ["end", "head"]
        assert {"seq", "time", "mono_ns", "site", "actor", "action", "object", "decision", "reason", "prev"} <= set(
            records[1]
        )
        assert [head.seq for head in heads] == [99, 200, records[-2]["seq"]]
        verdict = verify(tmp_path / "audit.jsonl", heads, gate.trust)
        assert (verdict.ok, verdict.closed, verdict.heads, verdict.kept) == (True, True, 3, records[-2]["seq"])
        assert (verdict.records, verdict.site, verdict.run) == (len(records), GATE.uri, RUN)

    def test_log_file_is_private(self, tmp_path: Path, gate: Credentials) -> None:
        write(tmp_path / "new" / "audit.jsonl", gate, 1)
        assert (tmp_path / "new" / "audit.jsonl").stat().st_mode & 0o777 == 0o600

    def test_decisions_are_synced_before_record_returns(
        self, tmp_path: Path, gate: Credentials, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced: list[int] = []
        real = os.fsync
        monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), real(file))[1])
        log = AuditLog(tmp_path / "audit.jsonl", GATE, gate)
        counts = []
        for options in ({}, {"decision": "deny"}, {"decision": "allow"}, {"durable": True}, {}):
            before = len(synced)
            log.record("open", **options)
            counts.append(len(synced) - before)
        log.close()
        assert counts == [0, 1, 1, 1, 0]

    def test_reopened_log_continues_the_chain(self, tmp_path: Path, gate: Credentials) -> None:
        path = tmp_path / "audit.jsonl"
        heads = [head for _ in range(3) for head in write(path, gate, 60)]
        verdict = verify(path, heads, gate.trust)
        assert (verdict.ok, verdict.torn) == (True, 0)
        assert [each["action"] for each in read(path)].count("start") == 2

    def test_concurrent_threads_write_one_chain(self, tmp_path: Path, gate: Credentials) -> None:
        heads: list[Head] = []
        log = AuditLog(tmp_path / "audit.jsonl", GATE, gate, on_head=heads.append, head_every=20)
        threads = [
            threading.Thread(target=lambda: [log.record("x", durable=False) for _ in range(50)]) for _ in range(4)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(30)
        log.close()
        verdict = verify(tmp_path / "audit.jsonl", heads, gate.trust)
        assert verdict.ok
        assert [each["action"] for each in read(tmp_path / "audit.jsonl")].count("x") == 200
        assert [head.seq for head in heads] == sorted(head.seq for head in heads)

    def test_head_callback_may_write_records(self, tmp_path: Path, gate: Credentials) -> None:
        log = AuditLog(tmp_path / "audit.jsonl", GATE, gate, head_every=5)
        log._on_head = lambda head: log.record("sent", target=str(head.seq)) and None
        for _ in range(20):
            log.record("x", durable=False)
        log._on_head = None
        log.close()
        assert verify(tmp_path / "audit.jsonl", trust=gate.trust).ok

    def test_log_can_be_opened_only_once(self, tmp_path: Path, gate: Credentials) -> None:
        log = AuditLog(tmp_path / "audit.jsonl", GATE, gate)
        with pytest.raises(AuditError, match="another process writes to it"):
            AuditLog(tmp_path / "audit.jsonl", GATE, gate)
        log.close()

    def test_closed_log_refuses_records(self, tmp_path: Path, gate: Credentials) -> None:
        log = AuditLog(tmp_path / "audit.jsonl", GATE, gate)
        log.close()
        log.close()
        with pytest.raises(AuditError, match="closed"):
            log.record("x")

    def test_full_disk_leaves_no_partial_record(
        self, tmp_path: Path, gate: Credentials, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = AuditLog(tmp_path / "audit.jsonl", GATE, gate)
        real = os.write
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", lambda file, data: real(file, data[:20]))
            with pytest.raises(AuditError, match="cannot write"):
                log.record("lost")
        log.record("kept")
        log.close()
        assert verify(tmp_path / "audit.jsonl").ok
        assert [each["action"] for each in read(tmp_path / "audit.jsonl")] == ["genesis", "kept", "end", "head"]

    @pytest.mark.parametrize("room", [20, 500, 900])
    def test_full_disk_leaves_no_end_record_without_head(
        self, tmp_path: Path, gate: Credentials, monkeypatch: pytest.MonkeyPatch, room: int
    ) -> None:
        """An unsigned end would look like a forgery."""
        path = tmp_path / "audit.jsonl"
        log = AuditLog(path, GATE, gate)
        log.record("kept")
        most, real = path.stat().st_size + room, os.write
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", lambda file, data: real(file, data[: most - path.stat().st_size]))
            with pytest.raises(AuditError, match="cannot write"):
                log.close()
        assert [each["action"] for each in read(path)] == ["genesis", "kept"]
        assert verify(path, trust=gate.trust).ok
        log.close()
        verdict = verify(path, trust=gate.trust)
        assert verdict.ok and verdict.closed

    def test_record_refuses_invalid_or_reserved_fields_and_cuts_long_text(
        self, tmp_path: Path, gate: Credentials
    ) -> None:
        log = AuditLog(tmp_path / "audit.jsonl", GATE, gate)
        for more, words in (
            ({"bad": object()}, "not plain JSON"),
            ({"bad": float("nan")}, "not plain JSON"),
            ({"seq": 7}, r"\['seq'\] are reserved fields"),
            ({"prev": ""}, r"\['prev'\] are reserved fields"),
        ):
            with pytest.raises(AuditError, match=words):
                log.record("x", **more)
        log.record("x", reason="é\n" * 2000, bytes=7)
        log.close()
        assert verify(tmp_path / "audit.jsonl").ok
        assert len(read(tmp_path / "audit.jsonl")[1]["reason"]) == 1000

    def test_log_without_certificates_is_a_valid_chain(self, tmp_path: Path) -> None:
        assert write(tmp_path / "audit.jsonl", None) == []
        verdict = verify(tmp_path / "audit.jsonl")
        assert (verdict.ok, verdict.closed, verdict.signed) == (True, True, None)
        assert read(tmp_path / "audit.jsonl")[0]["insecure"] is True

    def test_renewed_certificate_is_logged_before_it_signs(self, tmp_path: Path, home: Home) -> None:
        identity = Identity(RUN, "tpu", "gateway")
        current = CurrentCredentials(home.credentials(identity))
        log = AuditLog(tmp_path / "audit.jsonl", identity, current, head_every=10)
        for number in range(40):
            log.record("x", durable=False)
            if number == 20:
                issue.renew(home.folder, home.authority, [identity])
        log.close()
        records = read(tmp_path / "audit.jsonl")
        renewed = [each for each in records if each["action"] == "renewed"]
        assert [each["certificate"] for each in renewed] == [current().peer.fingerprint]
        assert verify(tmp_path / "audit.jsonl", trust=current().trust).ok


class TestCrashRecovery:
    """A partial last line is set aside and recorded, not treated as a manipulation."""

    @pytest.mark.parametrize("keep", [1, 30, -2])
    def test_torn_record_is_set_aside_and_logged(self, tmp_path: Path, gate: Credentials, keep: int) -> None:
        path = tmp_path / "audit.jsonl"
        write(path, gate, 10, close=False)
        complete, last = path.read_bytes().rsplit(b"\n", 2)[:2]
        path.write_bytes(complete + b"\n" + last[:keep])
        assert not verify(path).ok  # the crash is not recorded yet
        write(path, gate, 5)
        verdict = verify(path, trust=gate.trust)
        assert (verdict.ok, verdict.torn) == (True, 1)
        [recovered] = [each for each in read(path) if each["action"] == "recovered"]
        [remainder] = tmp_path.glob("audit.jsonl.torn-*")  # nothing is ever removed
        assert (remainder.read_bytes(), chain.digest(remainder.read_bytes())) == (last[:keep], recovered["torn"])

    def test_record_without_newline_is_kept(self, tmp_path: Path, gate: Credentials) -> None:
        path = tmp_path / "audit.jsonl"
        write(path, gate, 10, close=False)
        path.write_bytes(path.read_bytes()[:-1])
        write(path, gate, 5)
        verdict = verify(path)
        assert (verdict.ok, verdict.torn) == (True, 0)

    def test_log_recovers_from_a_cut_at_any_byte(self, tmp_path: Path, gate: Credentials) -> None:
        path = tmp_path / "audit.jsonl"
        write(path, None, 2, close=False)
        start = path.read_bytes()
        for cut in range(1, len(start), 97):
            path.write_bytes(start[:cut])
            if b"\n" not in start[:cut]:
                write(path, None, 1)
            else:
                write(path, None, 0, close=False)
                path.write_bytes(path.read_bytes()[:-9])  # the next start is torn, too
                write(path, None, 1)
            assert verify(path).ok, cut

    def test_file_that_is_no_log_is_left_unchanged(self, tmp_path: Path, gate: Credentials) -> None:
        (tmp_path / "notes.txt").write_text("do not\nlose this\n")
        with pytest.raises(AuditError):
            AuditLog(tmp_path / "notes.txt", GATE, gate)
        assert (tmp_path / "notes.txt").read_text() == "do not\nlose this\n"

    def test_attack_hiding_whole_records_as_torn_is_detected(self, tmp_path: Path, gate: Credentials) -> None:
        """An attacker can write a `recovered` record, but not about complete records."""
        path = tmp_path / "audit.jsonl"
        write(path, gate, 10, close=False)
        lines = path.read_bytes().splitlines()
        before = chain.verify_lines(lines[:5], chain.START)
        hidden = lines[6:8]
        line, _ = chain.make_line(
            before, {"action": "recovered", "torn": chain.digest(b"\n".join(hidden)), "site": GATE.uri}
        )
        path.write_bytes(b"\n".join([*lines[:5], *hidden, line]) + b"\n")
        assert verify(path).bad == 5

    @pytest.mark.parametrize("remainder", [b"\0" * 700, b'{"action":"relay","ac' + b"\0" * 40])
    def test_partial_record_with_nul_bytes_is_recovered(
        self, tmp_path: Path, gate: Credentials, remainder: bytes
    ) -> None:
        path = tmp_path / "audit.jsonl"
        write(path, gate, 10, close=False)
        with open(path, "ab") as file:
            file.write(remainder)
        write(path, gate, 5)
        verdict = verify(path, trust=gate.trust)
        assert (verdict.ok, verdict.torn, verdict.torn_bytes) == (True, 1, len(remainder))

    @pytest.mark.parametrize(
        "garble",
        [
            lambda lines: [lines[0].replace(b'"npu/', b'"tpu/'), *lines[1:]],
            lambda lines: [line.replace(b"{", b"[", 1) for line in lines],
            lambda lines: [line[:-1] for line in lines],
            lambda lines: [*lines[:-1], lines[-1][:-1]],
            lambda lines: [b"\0" * len(line) for line in lines],
        ],
    )
    def test_log_with_garbled_lines_is_refused(
        self, tmp_path: Path, gate: Credentials, garble: Callable[[list[bytes]], list[bytes]]
    ) -> None:
        """A crash leaves one partial line without a newline; after any other damage the writer refuses."""
        path = tmp_path / "audit.jsonl"
        write(path, gate, 120, close=False, head_every=50)
        lines = path.read_bytes().splitlines()
        garbled = b"".join(line + b"\n" for line in [*lines[:10], *garble(lines[10:])])
        path.write_bytes(garbled)
        with pytest.raises(AuditError, match="was modified"):
            AuditLog(path, GATE, gate)
        assert path.read_bytes() == garbled
        assert not verify(path).ok

    def test_invalid_last_line_is_refused(self, tmp_path: Path, gate: Credentials) -> None:
        path = tmp_path / "audit.jsonl"
        write(path, gate, 10, close=False)
        with open(path, "ab") as file:
            file.write(b'["action":"relay"')
        with pytest.raises(AuditError, match="not the beginning of record 11"):
            AuditLog(path, GATE, gate)


class TestDiskFailure:
    """After a failed fsync, later ones succeed although data was lost."""

    def fail_during(self, monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], object]) -> AuditError:
        def fail(*_: object) -> None:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(os, name, fail)
            with pytest.raises(AuditError) as caught:
                act()
        return caught.value

    def test_failed_fsync_closes_the_log(
        self, tmp_path: Path, gate: Credentials, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        heads: list[Head] = []
        log = AuditLog(tmp_path / "audit.jsonl", GATE, gate, on_head=heads.append, head_every=3)
        error = self.fail_during(monkeypatch, "fsync", lambda: [log.record("x", decision="allow") for _ in range(3)])
        assert "cannot sync" in error.what and "restart this process" in error.mend
        for act in (lambda: log.record("y", decision="allow"), lambda: log.record("y", durable=False), log.sign_head):
            with pytest.raises(AuditError, match="the audit log is closed") as caught:
                act()
            assert "Input/output error" in caught.value.why
        log.close()
        assert heads == []
        write(tmp_path / "audit.jsonl", gate, 5)  # another process goes on
        assert verify(tmp_path / "audit.jsonl", trust=gate.trust).ok

    def test_unwritten_head_is_not_passed_on(
        self, tmp_path: Path, gate: Credentials, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        heads: list[Head] = []
        log = AuditLog(tmp_path / "audit.jsonl", GATE, gate, on_head=heads.append)
        self.fail_during(monkeypatch, "write", log.sign_head)
        log.record("x", durable=False)
        assert heads == []
        log.close()
        assert len(heads) == 1
        assert verify(tmp_path / "audit.jsonl", heads, gate.trust).ok

    def test_partial_record_that_cannot_be_removed_closes_the_log(
        self, tmp_path: Path, gate: Credentials, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = AuditLog(tmp_path / "audit.jsonl", GATE, gate)
        real = os.write
        monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:20]))
        self.fail_during(monkeypatch, "ftruncate", lambda: log.record("lost"))
        monkeypatch.undo()
        with pytest.raises(AuditError, match="closed"):
            log.record("x")
        write(tmp_path / "audit.jsonl", gate, 5)
        assert verify(tmp_path / "audit.jsonl").torn == 1


class TestRotation:
    def test_chain_continues_across_rotated_files(self, tmp_path: Path, gate: Credentials) -> None:
        path = tmp_path / "audit.jsonl"
        heads = write(path, gate, 120, most_bytes=10_000, head_every=20)
        heads += write(path, gate, 50, most_bytes=10_000, head_every=20)
        verdict = verify(path, heads, gate.trust)
        assert verdict.ok
        assert len(verdict.files) > 3
        assert sum(len(read(each)) for each in list_log_files(path)) == verdict.records
        assert max(each.stat().st_size for each in list_log_files(path)) < 13_000

    def test_rotated_file_is_verified_with_its_predecessors(self, tmp_path: Path, gate: Credentials) -> None:
        path = tmp_path / "audit.jsonl"
        write(path, gate, 120, most_bytes=10_000)
        second = list_log_files(path)[1]
        assert verify(second).files == tuple(each.name for each in list_log_files(path)[:2])
        assert verify(second).ok

    def test_crash_during_rotation_is_recovered(self, tmp_path: Path, gate: Credentials) -> None:
        path = tmp_path / "audit.jsonl"
        write(path, gate, 120, most_bytes=10_000, close=False)
        path.rename(path.with_name(f"audit.{read(path)[0]['seq']:012d}.jsonl"))
        write(path, gate, 5)
        assert verify(path).ok

    @pytest.mark.parametrize("how", ["missing", "swapped", "all"])
    def test_missing_or_swapped_log_files_are_detected(self, tmp_path: Path, gate: Credentials, how: str) -> None:
        path = tmp_path / "audit.jsonl"
        write(path, gate, 120, most_bytes=10_000)
        one, two = list_log_files(path)[1:3]
        first = read(one)[0]["seq"]
        if how == "all":
            first = 0
            for each in list_log_files(path)[:-1]:
                each.unlink()
        elif how == "missing":
            one.unlink()
        else:
            a, b = one.read_bytes(), two.read_bytes()
            one.write_bytes(b), two.write_bytes(a)
        assert verify(path).bad == first

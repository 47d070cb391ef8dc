"""The audit log: what a crash leaves is told, what somebody changes is found."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.security.made import GATE, OTHER_GATE, RUN, Home
from whale_nebula.errors import AuditError, IdentityError
from whale_nebula.security import Credentials, CurrentCredentials, Identity, Trust, audit, chain, issue
from whale_nebula.security.audit import AuditLog, Head, KeptHeads, pieces, read_heads
from whale_nebula.security.trust import Revocation
from whale_nebula.security.verdict import Verdict, verify


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home.at(tmp_path_factory.mktemp("authority") / "certs")


@pytest.fixture(scope="module")
def gate(home: Home) -> Credentials:
    return home.credentials(GATE)


@pytest.fixture(scope="module")
def other(home: Home) -> Credentials:
    return home.credentials(OTHER_GATE)


def write(path: Path, signer: Credentials | None, count: int = 250, *, close: bool = True, **options) -> list[Head]:
    heads: list[Head] = []
    log = AuditLog(path, signer.identity if signer else GATE, signer, on_head=heads.append, **options)
    for number in range(count):
        log.record("relay", actor=f"nebula://{RUN}/gpu/worker/0", target=f"npu/{number}", durable=False)
    log.close() if close else abandon(log)
    return heads


def abandon(log: AuditLog) -> None:
    """As a crash does: nothing more is written."""
    os.close(log._file)
    log._file = -1


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


class TestWriting:
    def test_a_log_begins_with_who_and_ends_signed(self, tmp_path: Path, gate: Credentials) -> None:
        heads = write(tmp_path / "audit.jsonl", gate)
        found = read(tmp_path / "audit.jsonl")
        assert (found[0]["action"], found[0]["run"], found[0]["site"]) == ("genesis", RUN, GATE.uri)
        assert found[0]["certificate"] == gate.peer.fingerprint
        assert [each["action"] for each in found[-2:]] == ["end", "head"]
        assert {"seq", "time", "mono_ns", "site", "actor", "action", "object", "decision", "reason", "prev"} <= set(
            found[1]
        )
        assert [head.seq for head in heads] == [99, 200, found[-2]["seq"]]
        verdict = verify(tmp_path / "audit.jsonl", heads, gate.trust)
        assert (verdict.ok, verdict.closed, verdict.heads, verdict.kept) == (True, True, 3, found[-2]["seq"])
        assert (verdict.records, verdict.site, verdict.run) == (len(found), GATE.uri, RUN)

    def test_only_its_user_can_read_it(self, tmp_path: Path, gate: Credentials) -> None:
        write(tmp_path / "new" / "audit.jsonl", gate, 1)
        assert (tmp_path / "new" / "audit.jsonl").stat().st_mode & 0o777 == 0o600

    def test_a_decision_is_on_disk_when_it_returns(
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

    def test_it_goes_on_where_it_ended(self, tmp_path: Path, gate: Credentials) -> None:
        path = tmp_path / "audit.jsonl"
        heads = [head for _ in range(3) for head in write(path, gate, 60)]
        verdict = verify(path, heads, gate.trust)
        assert (verdict.ok, verdict.torn) == (True, 0)
        assert [each["action"] for each in read(path)].count("start") == 2

    def test_many_threads_write_one_chain(self, tmp_path: Path, gate: Credentials) -> None:
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

    def test_who_is_given_a_head_may_write_about_it(self, tmp_path: Path, gate: Credentials) -> None:
        log = AuditLog(tmp_path / "audit.jsonl", GATE, gate, head_every=5)
        log._on_head = lambda head: log.record("sent", target=str(head.seq)) and None
        for _ in range(20):
            log.record("x", durable=False)
        log._on_head = None
        log.close()
        assert verify(tmp_path / "audit.jsonl", trust=gate.trust).ok

    def test_two_processes_do_not_write_one_log(self, tmp_path: Path, gate: Credentials) -> None:
        log = AuditLog(tmp_path / "audit.jsonl", GATE, gate)
        with pytest.raises(AuditError, match="another process writes it"):
            AuditLog(tmp_path / "audit.jsonl", GATE, gate)
        log.close()

    def test_a_closed_log_takes_nothing(self, tmp_path: Path, gate: Credentials) -> None:
        log = AuditLog(tmp_path / "audit.jsonl", GATE, gate)
        log.close()
        log.close()
        with pytest.raises(AuditError, match="closed"):
            log.record("x")

    def test_a_full_disk_leaves_no_half_line(
        self, tmp_path: Path, gate: Credentials, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = AuditLog(tmp_path / "audit.jsonl", GATE, gate)
        real = os.write
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", lambda file, data: real(file, data[:20]))
            with pytest.raises(AuditError, match="cannot be written"):
                log.record("lost")
        log.record("kept")
        log.close()
        assert verify(tmp_path / "audit.jsonl").ok
        assert [each["action"] for each in read(tmp_path / "audit.jsonl")] == ["genesis", "kept", "end", "head"]

    @pytest.mark.parametrize("room", [20, 500, 900])
    def test_a_full_disk_leaves_no_end_without_its_head(
        self, tmp_path: Path, gate: Credentials, monkeypatch: pytest.MonkeyPatch, room: int
    ) -> None:
        """Whatever fits of them: an end that nobody signs is what a forger leaves."""
        path = tmp_path / "audit.jsonl"
        log = AuditLog(path, GATE, gate)
        log.record("kept")
        most, real = path.stat().st_size + room, os.write
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", lambda file, data: real(file, data[: most - path.stat().st_size]))
            with pytest.raises(AuditError, match="cannot be written"):
                log.close()
        assert [each["action"] for each in read(path)] == ["genesis", "kept"]
        assert verify(path, trust=gate.trust).ok
        log.close()
        verdict = verify(path, trust=gate.trust)
        assert verdict.ok and verdict.closed

    def test_a_record_is_plain_json_and_its_fields_are_its_own(self, tmp_path: Path, gate: Credentials) -> None:
        log = AuditLog(tmp_path / "audit.jsonl", GATE, gate)
        for more in ({"bad": object()}, {"bad": float("nan")}, {"seq": 7}, {"prev": ""}):
            with pytest.raises(AuditError):
                log.record("x", **more)
        log.record("x", reason="é\n" * 2000, bytes=7)
        log.close()
        assert verify(tmp_path / "audit.jsonl").ok
        assert len(read(tmp_path / "audit.jsonl")[1]["reason"]) == 1000

    def test_without_certificates_it_is_a_chain_all_the_same(self, tmp_path: Path) -> None:
        assert write(tmp_path / "audit.jsonl", None) == []
        verdict = verify(tmp_path / "audit.jsonl")
        assert (verdict.ok, verdict.closed, verdict.signed) == (True, True, None)
        assert read(tmp_path / "audit.jsonl")[0]["insecure"] is True

    def test_a_renewed_certificate_is_told_before_it_signs(self, tmp_path: Path, home: Home) -> None:
        who = Identity(RUN, "tpu", "gateway")
        current = CurrentCredentials(home.credentials(who))
        log = AuditLog(tmp_path / "audit.jsonl", who, current, head_every=10)
        for number in range(40):
            log.record("x", durable=False)
            if number == 20:
                issue.renew(home.folder, home.authority, [who])
        log.close()
        found = read(tmp_path / "audit.jsonl")
        renewed = [each for each in found if each["action"] == "renewed"]
        assert [each["certificate"] for each in renewed] == [current().peer.fingerprint]
        assert verify(tmp_path / "audit.jsonl", trust=current().trust).ok


class TestAfterACrash:
    """The last line may be torn: it is neither hidden nor taken for a change."""

    @pytest.mark.parametrize("keep", [1, 30, -2])
    def test_a_torn_line_is_closed_and_told(self, tmp_path: Path, gate: Credentials, keep: int) -> None:
        path = tmp_path / "audit.jsonl"
        write(path, gate, 10, close=False)
        whole, last = path.read_bytes().rsplit(b"\n", 2)[:2]
        path.write_bytes(whole + b"\n" + last[:keep])
        assert not verify(path).ok  # nobody has said yet what happened
        write(path, gate, 5)
        verdict = verify(path, trust=gate.trust)
        assert (verdict.ok, verdict.torn) == (True, 1)
        [recovered] = [each for each in read(path) if each["action"] == "recovered"]
        [left] = tmp_path.glob("audit.jsonl.torn-*")  # nothing is ever removed
        assert (left.read_bytes(), chain.digest(left.read_bytes())) == (last[:keep], recovered["torn"])

    def test_a_line_that_lacks_only_its_newline_is_kept(self, tmp_path: Path, gate: Credentials) -> None:
        path = tmp_path / "audit.jsonl"
        write(path, gate, 10, close=False)
        path.write_bytes(path.read_bytes()[:-1])
        write(path, gate, 5)
        verdict = verify(path)
        assert (verdict.ok, verdict.torn) == (True, 0)

    def test_every_place_to_tear_and_twice(self, tmp_path: Path, gate: Credentials) -> None:
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

    def test_a_file_of_something_else_is_left_alone(self, tmp_path: Path, gate: Credentials) -> None:
        (tmp_path / "notes.txt").write_text("do not\nlose this\n")
        with pytest.raises(AuditError):
            AuditLog(tmp_path / "notes.txt", GATE, gate)
        assert (tmp_path / "notes.txt").read_text() == "do not\nlose this\n"

    def test_hiding_records_as_torn_is_found(self, tmp_path: Path, gate: Credentials) -> None:
        """Who can write the file writes `recovered` himself: over whole records that is no excuse."""
        path = tmp_path / "audit.jsonl"
        write(path, gate, 10, close=False)
        lines = path.read_bytes().splitlines()
        before = chain.follow_all(lines[:5], chain.START)
        hidden = lines[6:8]
        line, _ = chain.forge(
            before, {"action": "recovered", "torn": chain.digest(b"\n".join(hidden)), "site": GATE.uri}
        )
        path.write_bytes(b"\n".join([*lines[:5], *hidden, line]) + b"\n")
        assert verify(path).bad == 5

    @pytest.mark.parametrize("left", [b"\0" * 700, b'{"action":"relay","ac' + b"\0" * 40])
    def test_what_a_power_loss_leaves(self, tmp_path: Path, gate: Credentials, left: bytes) -> None:
        path = tmp_path / "audit.jsonl"
        write(path, gate, 10, close=False)
        with open(path, "ab") as file:
            file.write(left)
        write(path, gate, 5)
        verdict = verify(path, trust=gate.trust)
        assert (verdict.ok, verdict.torn, verdict.torn_bytes) == (True, 1, len(left))

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
    def test_garbled_lines_are_not_torn_ones(
        self, tmp_path: Path, gate: Credentials, garble: Callable[[list[bytes]], list[bytes]]
    ) -> None:
        """A crash tears one line, and that has no newline: the writer does not go on after anything else."""
        path = tmp_path / "audit.jsonl"
        write(path, gate, 120, close=False, head_every=50)
        lines = path.read_bytes().splitlines()
        spoilt = b"".join(line + b"\n" for line in [*lines[:10], *garble(lines[10:])])
        path.write_bytes(spoilt)
        with pytest.raises(AuditError, match="was changed"):
            AuditLog(path, GATE, gate)
        assert path.read_bytes() == spoilt
        assert not verify(path).ok

    def test_a_last_line_that_is_no_beginning_of_a_record(self, tmp_path: Path, gate: Credentials) -> None:
        path = tmp_path / "audit.jsonl"
        write(path, gate, 10, close=False)
        with open(path, "ab") as file:
            file.write(b'["action":"relay"')
        with pytest.raises(AuditError, match="no beginning of record 11"):
            AuditLog(path, GATE, gate)


class TestADiskThatFails:
    """What it lost once counts as clean: no later fsync says anything of it."""

    def fail_once(self, monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], object]) -> AuditError:
        def fail(*_: object) -> None:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(os, name, fail)
            with pytest.raises(AuditError) as told:
                act()
        return told.value

    def test_a_failed_fsync_closes_the_log_for_good(
        self, tmp_path: Path, gate: Credentials, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        heads: list[Head] = []
        log = AuditLog(tmp_path / "audit.jsonl", GATE, gate, on_head=heads.append, head_every=3)
        told = self.fail_once(monkeypatch, "fsync", lambda: [log.record("x", decision="allow") for _ in range(3)])
        assert "not safe on disk" in told.what and "start this process again" in told.mend
        for act in (lambda: log.record("y", decision="allow"), lambda: log.record("y", durable=False), log.head):
            with pytest.raises(AuditError, match="the audit log is closed") as again:
                act()
            assert "Input/output error" in again.value.why
        log.close()
        assert heads == []
        write(tmp_path / "audit.jsonl", gate, 5)  # another process goes on
        assert verify(tmp_path / "audit.jsonl", trust=gate.trust).ok

    def test_a_head_that_is_not_on_disk_is_not_given_away(
        self, tmp_path: Path, gate: Credentials, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        heads: list[Head] = []
        log = AuditLog(tmp_path / "audit.jsonl", GATE, gate, on_head=heads.append)
        self.fail_once(monkeypatch, "write", log.head)
        log.record("x", durable=False)
        assert heads == []
        log.close()
        assert len(heads) == 1
        assert verify(tmp_path / "audit.jsonl", heads, gate.trust).ok

    def test_half_a_record_that_stays_closes_the_log(
        self, tmp_path: Path, gate: Credentials, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = AuditLog(tmp_path / "audit.jsonl", GATE, gate)
        real = os.write
        monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:20]))
        self.fail_once(monkeypatch, "ftruncate", lambda: log.record("lost"))
        monkeypatch.undo()
        with pytest.raises(AuditError, match="closed"):
            log.record("x")
        write(tmp_path / "audit.jsonl", gate, 5)
        assert verify(tmp_path / "audit.jsonl").torn == 1


class TestRotation:
    def test_the_chain_goes_on_across_files(self, tmp_path: Path, gate: Credentials) -> None:
        path = tmp_path / "audit.jsonl"
        heads = write(path, gate, 120, most_bytes=10_000, head_every=20)
        heads += write(path, gate, 50, most_bytes=10_000, head_every=20)
        verdict = verify(path, heads, gate.trust)
        assert verdict.ok
        assert len(verdict.files) > 3
        assert sum(len(read(each)) for each in pieces(path)) == verdict.records
        assert max(each.stat().st_size for each in pieces(path)) < 13_000

    def test_an_older_file_is_verified_from_the_beginning_up_to_it(self, tmp_path: Path, gate: Credentials) -> None:
        path = tmp_path / "audit.jsonl"
        write(path, gate, 120, most_bytes=10_000)
        second = pieces(path)[1]
        assert verify(second).files == tuple(each.name for each in pieces(path)[:2])
        assert verify(second).ok

    def test_a_crash_between_two_files(self, tmp_path: Path, gate: Credentials) -> None:
        path = tmp_path / "audit.jsonl"
        write(path, gate, 120, most_bytes=10_000, close=False)
        path.rename(path.with_name(f"audit.{read(path)[0]['seq']:012d}.jsonl"))
        write(path, gate, 5)
        assert verify(path).ok

    @pytest.mark.parametrize("how", ["missing", "swapped", "all"])
    def test_files_that_are_missing_or_swapped_are_found(self, tmp_path: Path, gate: Credentials, how: str) -> None:
        path = tmp_path / "audit.jsonl"
        write(path, gate, 120, most_bytes=10_000)
        one, two = pieces(path)[1:3]
        first = read(one)[0]["seq"]
        if how == "all":
            first = 0
            for each in pieces(path)[:-1]:
                each.unlink()
        elif how == "missing":
            one.unlink()
        else:
            a, b = one.read_bytes(), two.read_bytes()
            one.write_bytes(b), two.write_bytes(a)
        assert verify(path).bad == first


def sealed(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def edit(lines: list[bytes]) -> list[bytes]:
    return [*lines[:150], lines[150].replace(b"npu/", b"tpu/"), *lines[151:]]


def forge_again(lines: list[bytes], change: Callable[[int, dict], dict | None]) -> list[bytes]:
    """All digests made right again after a change of some records; None leaves a record out."""
    made, link = [], chain.START
    for number, line in enumerate(lines):
        said = {key: value for key, value in json.loads(line).items() if key not in ("seq", "prev")}
        changed = change(number, said)
        if changed is not None:
            line, link = chain.forge(link, changed)
            made.append(line)
    return made


def rewrite(lines: list[bytes]) -> list[bytes]:
    """By someone without the key."""
    return forge_again(lines, lambda number, said: {**said, "object": "tpu/0"} if number == 150 else said)


def without_heads(lines: list[bytes]) -> list[bytes]:
    return forge_again(lines, lambda _, said: None if said["action"] == "head" else said)


def forged(lines: list[bytes]) -> list[bytes]:
    return [*lines[:150], lines[150].replace(b'"reason":""', b'"reason":"x\n{"seq":151}"'), *lines[151:]]


ATTACKS: dict[str, tuple[Callable[[list[bytes]], list[bytes]], int, bool]] = {
    # the attack, the first record that is wrong, and whether it takes a peer's heads to find it
    "edit": (edit, 151, False),
    "edit the last": (lambda lines: [*lines[:-1], lines[-1].replace(b"nebula", b"nebulb", 1)], -1, False),
    "delete a line": (lambda lines: lines[:150] + lines[151:], 150, False),
    "delete the first": (lambda lines: lines[1:], 0, False),
    "insert a line": (lambda lines: [*lines[:150], lines[20], *lines[150:]], 150, False),
    "swap two": (lambda lines: [*lines[:150], lines[151], lines[150], *lines[152:]], 150, False),
    "forge a newline": (forged, 150, False),
    "add an empty line": (lambda lines: [*lines[:150], b"", *lines[150:]], 150, False),
    "write anew": (rewrite, 100, False),
    "delete the tail": (lambda lines: lines[:230], 230, True),
    "delete all": (lambda lines: [], 0, False),
    "write anew without heads": (without_heads, 100, True),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_are_found(tmp_path: Path, gate: Credentials, attack: str) -> None:
    act, bad, needs_heads = ATTACKS[attack]
    path = tmp_path / "audit.jsonl"
    heads = write(path, gate)
    lines = sealed(path)
    path.write_bytes(b"".join(line + b"\n" for line in act(lines)))
    found = [verify(path), verify(path, heads, gate.trust)]
    assert found[0].ok == needs_heads
    assert [verdict.bad for verdict in found if not verdict.ok] == [bad if bad >= 0 else len(lines) - 1] * (
        2 - needs_heads
    )
    assert all(verdict.why for verdict in found if not verdict.ok)


@pytest.mark.parametrize("count", [250, 5])
def test_a_log_without_heads_is_none_of_a_gateway(tmp_path: Path, gate: Credentials, count: int) -> None:
    path = tmp_path / "audit.jsonl"
    write(path, gate, count)
    path.write_bytes(b"".join(line + b"\n" for line in without_heads(sealed(path))))
    verdict = verify(path, trust=gate.trust)
    assert (verdict.bad, verdict.closed, "written anew" in verdict.why) == (0, False, True)
    assert not verify(path).closed


def test_heads_are_left_out_from_some_record_on(tmp_path: Path, gate: Credentials) -> None:
    path = tmp_path / "audit.jsonl"
    heads = write(path, gate, 250, close=False)
    kept = heads[0].seq + 1
    path.write_bytes(
        b"".join(
            line + b"\n"
            for line in forge_again(
                sealed(path), lambda number, said: None if number > kept and said["action"] == "head" else said
            )
        )
    )
    verdict = verify(path, trust=gate.trust)
    assert (verdict.bad, "151 records follow the last head" in verdict.why) == (kept, True)


def test_starts_do_not_put_a_head_off(tmp_path: Path, gate: Credentials) -> None:
    path, heads = tmp_path / "audit.jsonl", []
    for count in (90, *[1] * 60, *[0] * 60):
        heads += write(path, gate, count, close=False)
    assert len(heads) >= 2
    assert verify(path, trust=gate.trust).ok
    write(path, gate, 120, close=False, most_bytes=1 << 14)
    for _ in range(3):
        write(path, gate, 0, close=False)
    assert len(pieces(path)) > 1
    assert verify(path, trust=gate.trust).ok
    assert read(path)[-1]["action"] in ("head", "start")


class TestARevokedKey:
    """What it signs, whoever has stolen it may have written."""

    @staticmethod
    def revoked(*signers: Credentials) -> dict[str, Revocation]:
        serials = [signer.peer.serial for signer in signers]
        return {each: Revocation(each, GATE.uri, "2026-11-24T10:00:00Z", "stolen") for each in serials}

    def test_its_heads_vouch_for_nothing(self, tmp_path: Path, gate: Credentials) -> None:
        heads = write(tmp_path / "a.jsonl", gate, 250)
        verdict = verify(tmp_path / "a.jsonl", trust=gate.trust, revoked=self.revoked(gate))
        assert (verdict.bad, verdict.signed, verdict.closed) == (0, None, False)
        assert "from record 0 on the heads are signed by a certificate that was revoked 2026-11-24" in verdict.why
        assert "stolen" in verdict.why
        assert verify(tmp_path / "a.jsonl", heads, gate.trust, self.revoked(gate)).ok
        some = verify(tmp_path / "a.jsonl", heads[:1], gate.trust, self.revoked(gate))
        assert (some.bad, some.kept) == (heads[0].seq + 1, heads[0].seq)

    def test_a_later_good_head_vouches_for_all_before_it(self, tmp_path: Path, home: Home) -> None:
        who = Identity(RUN, "tape", "gateway")
        old = home.credentials(who)
        first = write(tmp_path / "a.jsonl", old, 120, close=False)
        issue.renew(home.folder, home.authority, [who])
        new = Credentials.of(old.files)
        good = write(tmp_path / "a.jsonl", new, 120, close=False)
        assert verify(tmp_path / "a.jsonl", trust=new.trust, revoked=self.revoked(old)).ok
        verdict = verify(tmp_path / "a.jsonl", trust=new.trust, revoked=self.revoked(new))
        assert (verdict.bad, verdict.signed) == (first[-1].seq + 1, first[-1].seq)
        assert good[-1].seq > verdict.bad


class TestHeads:
    def test_a_log_in_the_place_of_another_is_found(
        self, tmp_path: Path, gate: Credentials, other: Credentials
    ) -> None:
        mine, yours = write(tmp_path / "a.jsonl", gate, 10), write(tmp_path / "b.jsonl", other, 10)
        assert verify(tmp_path / "a.jsonl", mine).ok
        assert "none of" in verify(tmp_path / "a.jsonl", yours).why
        assert verify(tmp_path / "b.jsonl", mine + yours).ok

    def test_one_written_anew_with_its_own_key_is_found_by_the_peer(self, tmp_path: Path, gate: Credentials) -> None:
        heads = write(tmp_path / "a.jsonl", gate, 250)
        write(tmp_path / "b.jsonl", gate, 250)
        verdict = verify(tmp_path / "b.jsonl", heads, gate.trust)
        assert (verdict.bad, "written anew" in verdict.why) == (0, True)

    def test_one_of_somebody_who_makes_his_own_authority(self, tmp_path: Path, gate: Credentials) -> None:
        stranger = Home.at(tmp_path / "other").credentials(GATE)
        heads = write(tmp_path / "a.jsonl", stranger, 250)
        assert verify(tmp_path / "a.jsonl", heads).ok
        verdict = verify(tmp_path / "a.jsonl", trust=gate.trust)
        assert (verdict.bad, "another authority" in verdict.why) == (0, True)

    def test_a_head_of_a_peer_that_is_wrong_is_told_as_that(self, tmp_path: Path, gate: Credentials) -> None:
        heads = write(tmp_path / "a.jsonl", gate, 10)
        with pytest.raises(AuditError, match="of the peer is wrong"):
            verify(tmp_path / "a.jsonl", [heads[0]._replace(seq=3)])

    def test_heads_are_kept_and_read_again(self, tmp_path: Path, gate: Credentials, other: Credentials) -> None:
        path = tmp_path / "kept" / "heads.jsonl"
        kept = KeptHeads(path, other.trust)
        heads = write(tmp_path / "a.jsonl", gate)
        assert [kept.keep(Head.from_dict(json.loads(json.dumps(head.as_dict()))), GATE) for head in heads] == [True] * 3
        assert [kept.keep(head, GATE) for head in heads] == [False] * 3  # as after a lost answer
        assert list(read_heads(path)) == heads
        assert not KeptHeads(path, other.trust).keep(heads[-1], GATE)
        assert verify(tmp_path / "a.jsonl", read_heads(path), other.trust).ok

    def test_text_around_a_certificate_is_not_kept(self, tmp_path: Path, gate: Credentials, other: Credentials) -> None:
        kept = KeptHeads(tmp_path / "heads.jsonl", other.trust)
        heads = write(tmp_path / "a.jsonl", gate)
        for head in heads:
            kept.keep(head._replace(certificate="x" * 60_000 + "\n" + head.certificate + "y" * 60_000), GATE)
        assert list(read_heads(tmp_path / "heads.jsonl")) == heads

    def test_only_so_many_heads_are_remembered(
        self, tmp_path: Path, gate: Credentials, other: Credentials, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(audit, "_REMEMBERED", 2)
        heads, path = write(tmp_path / "a.jsonl", gate), tmp_path / "heads.jsonl"
        kept = KeptHeads(path, other.trust)
        assert [kept.keep(head, GATE) for head in heads] == [True] * 3
        for each in (kept, KeptHeads(path, other.trust)):
            assert each._kept == {GATE: {head.seq: head.digest for head in heads[1:]}}
            assert not each.keep(heads[1], GATE)
            with pytest.raises(AuditError, match="another than it was"):
                each.keep(heads[0], GATE)

    def test_a_log_that_went_back_is_told(self, tmp_path: Path, gate: Credentials, other: Credentials) -> None:
        kept = KeptHeads(tmp_path / "heads.jsonl", other.trust)
        heads = write(tmp_path / "a.jsonl", gate)
        again = write(tmp_path / "b.jsonl", gate)
        kept.keep(heads[1], GATE)
        for head in (heads[0], again[1]):
            with pytest.raises(AuditError, match="another than it was"):
                kept.keep(head, GATE)
        assert len(list(read_heads(tmp_path / "heads.jsonl"))) == 1

    def test_only_its_owner_speaks_for_a_log(self, tmp_path: Path, gate: Credentials, other: Credentials) -> None:
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

    def test_a_crash_of_who_keeps_them_costs_one_line(self, tmp_path: Path, gate: Credentials) -> None:
        path = tmp_path / "heads.jsonl"
        heads = write(tmp_path / "a.jsonl", gate)
        KeptHeads(path, gate.trust).keep(heads[0], GATE)
        with open(path, "ab") as file:
            file.write(b'{"seq": 19')
        again = KeptHeads(path, gate.trust)
        assert not again.keep(heads[0], GATE)
        again.keep(heads[1], GATE)
        assert list(read_heads(path)) == heads[:2]

    @pytest.mark.parametrize(
        "said", [{}, {"seq": "1"}, {"seq": -1, "digest": "0" * 64, "signature": "", "certificate": ""}]
    )
    def test_what_is_no_head_is_refused(self, said: dict) -> None:
        with pytest.raises(AuditError):
            Head.from_dict(said)


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
def test_a_head_that_is_odd_is_named_by_its_record(tmp_path: Path, gate: Credentials, change: dict) -> None:
    """Whoever forges a log does not make the auditor crash."""
    path = tmp_path / "audit.jsonl"
    heads = write(path, gate, 5)
    made = forge_again(
        sealed(path),
        lambda _, said: {**said, "head": {**said["head"], **change}} if said["action"] == "head" else said,
    )
    path.write_bytes(b"\n".join(made) + b"\n")
    verdict = verify(path, trust=gate.trust)
    assert (verdict.ok, f"the head at record {len(made) - 1} is wrong" in verdict.why) == (False, True)
    with pytest.raises((AuditError, IdentityError)):
        Head.from_dict({**heads[-1].as_dict(), **change}).check(gate.trust)


@pytest.mark.parametrize("said", [{"site": "\ud800"}, {"site": 7}, {"site": "nebula://mt"}, {"run": "é\ud800"}])
def test_a_log_that_does_not_say_whose_it_is(tmp_path: Path, said: dict) -> None:
    first = {"action": "genesis", "site": GATE.uri, "run": RUN, **said}
    (tmp_path / "audit.jsonl").write_bytes(chain.forge(chain.START, first)[0] + b"\n")
    verdict = verify(tmp_path / "audit.jsonl")
    assert (verdict.bad, "first record" in verdict.why, verdict.why.isascii()) == (0, True, True)


def test_a_verdict_of_nothing_is_not_ok(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").write_bytes(b"")
    assert verify(tmp_path / "audit.jsonl").bad == 0
    with pytest.raises(AuditError):
        verify(tmp_path / "no.jsonl")
    assert Verdict("x").ok
    assert Trust([]).authorities == ()

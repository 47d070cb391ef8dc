"""Reading over a line: the granted rows, the same everywhere, and nothing for anybody else."""

from __future__ import annotations

import json
import socket
import ssl
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.datasets.conftest import Owner, Site, certify
from whale_nebula.accounts.members import DISABLED
from whale_nebula.accounts.server import dial, make_client_context
from whale_nebula.datasets.grants import WITHDRAWN
from whale_nebula.datasets.guard import Reader, ReadRequest
from whale_nebula.datasets.reading import LocalClient, RemoteClient, RowSelection
from whale_nebula.datasets.schema import ANSWER, ASK, BATCH, HELLO, MOST_JSON, REFUSED, Frame, read_frame, write_frame
from whale_nebula.errors import AccessError, InterfaceError, NebulaError, NebulaWarning
from whale_nebula.security import Credentials, Identity, authority, issue
from whale_nebula.security.audit import AuditLog, read_heads
from whale_nebula.security.authority import Authority
from whale_nebula.security.verdict import verify
from whale_nebula.transport.handover import DATA


def is_refusal_logged(site: Site, *words: str) -> bool:
    """Whether the last logged refusal contains these words, within ten seconds."""
    ended = time.monotonic() + 10
    while time.monotonic() < ended:
        last = json.dumps([each for each in site.access_records if each["decision"] == "deny"][-1:])
        if all(word in last for word in words):
            return True
    return False


# ---------------------------------------------------------------------- what works
def test_granted_rows_are_served_and_logged(site: Site) -> None:
    site.owner.publish()
    site.owner.grant("ana", purpose="my study")
    assert site.read_rows("ana", batch=30) == list(range(100))
    assert [(each["first"], each["rows"], each["bytes"]) for each in site.access_records] == [
        (0, 30, 240), (30, 30, 240), (60, 30, 240), (90, 10, 80)
    ]  # fmt: skip
    last = site.access_records[-1]
    assert (last["account"], last["purpose"], last["object"], last["decision"]) == (
        "ana",
        "my study",
        "corpus",
        "allow",
    )
    assert (last["program"], last["run"], last["actor"]) == ("ab" * 32, "run-1", "nebula://mt/gpu/worker/0")
    site.guard.log.sign_head()
    assert verify(site.guard.log.path).ok


def test_local_and_remote_readers_get_the_same_order_from_any_position(site: Site) -> None:
    site.owner.publish()
    site.owner.grant("ana")
    remote_rows = site.read_rows("ana", batch=7, seed=5, number=3)
    direct = LocalClient(site.guard, Reader("", "nebula://mt/gpu/worker/0"))
    info = direct.describe("corpus")
    local_rows = [int(x) for each in direct.read(RowSelection("corpus", 5, 3, 0, 100, 13), info) for x in each["age"]]
    later_rows = [int(x) for each in direct.read(RowSelection("corpus", 5, 3, 40, 100, 13), info) for x in each["age"]]
    assert sorted(local_rows) == list(range(100)) != local_rows
    assert (remote_rows, later_rows) == (local_rows, local_rows[40:])


def test_reader_reconnects_after_a_broken_connection(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.owner.publish()
    site.owner.grant("ana")
    remote, broken = site.open_reader("ana"), []
    read_plain = read_frame

    def break_once(line: ssl.SSLSocket, most_data: int = 0, most_json: int = MOST_JSON) -> Any:
        batches = read_plain(line, most_data, most_json)
        if batches.message.get("first") == 40 and not broken:
            broken.append(line.shutdown(socket.SHUT_RDWR))
            raise EOFError
        return batches

    monkeypatch.setattr("whale_nebula.datasets.reading.read_frame", break_once)
    batches = remote.read(RowSelection("corpus", 1, 0, 0, 100, 20), remote.describe("corpus"))
    assert sorted(int(x) for each in batches for x in each["age"]) == list(range(100))
    assert len(broken) == 1


def test_unreachable_data_service_is_reported_after_patience(site: Site) -> None:
    site.owner.publish()
    site.owner.grant("ana")
    remote = site.open_reader("ana")
    info = remote.describe("corpus")
    unreachable = replace(remote, port=1, patience=0.0)
    with pytest.raises(AccessError, match="cannot be read") as caught:
        list(unreachable.read(RowSelection("corpus", None, 0, 0, 100, 20), info))
    assert "for longer than patience" in caught.value.why


def test_reader_lists_datasets_and_requests_access(site: Site) -> None:
    site.owner.publish(about="ages")
    assert [each["name"] for each in site.open_reader("ana").list_datasets()] == ["corpus"]
    number = site.open_reader("ana").request("corpus", "my study")
    (request,) = site.owner.grants.list_permissions()
    assert (request.number, request.account, request.purpose, request.state) == (number, "ana", "my study", "asked")


# ---------------------------------------------------------------------- attacks: who
def test_attack_grant_of_another_account(site: Site) -> None:
    site.owner.publish()
    site.owner.grant("ana")
    certify(site.owner, "bob", site.tmp / "of-bob", index=1)
    with pytest.raises(AccessError, match="bob may not read dataset 'corpus'"):
        site.read_rows("bob")
    assert is_refusal_logged(site, "bob may not read", "nebula://mt/gpu/worker/1")
    with pytest.raises(AccessError, match="may not read"):
        site.read_rows("bob", purpose="study")


def test_attack_purpose_without_grant(site: Site) -> None:
    site.owner.publish()
    site.owner.grant("ana", purpose="study")
    with pytest.raises(AccessError, match="may not read") as caught:
        site.read_rows("ana", purpose="advertising")
    assert "not for this purpose" in caught.value.why and is_refusal_logged(site, "advertising")


def test_attack_same_account_name_of_another_owner(site: Site) -> None:
    """The owner of npu may have an account of the same name."""
    site.owner.publish()
    site.owner.grant("ana")
    other = Authority.create("mt", {}, bound=["npu"])
    certify(site.owner, "ana", site.tmp / "of-ana", signer=other)
    with pytest.raises(AccessError, match="refused this certificate"):
        site.read_rows("ana")
    assert is_refusal_logged(site, "no certificate of this owner", "127.0.0.1")


def test_attack_certificate_of_a_forged_authority(site: Site) -> None:
    site.owner.publish()
    site.owner.grant("ana")
    forger = Authority.create("mt", {}, bound=["gpu"])
    certify(site.owner, "ana", site.tmp / "of-ana", signer=forger)
    with pytest.raises(AccessError, match="refused this certificate"):
        site.read_rows("ana")
    assert is_refusal_logged(site, "no certificate of this owner")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"account": ""}, "has no account"),
        ({"role": "operator", "index": 7}, "has no account"),
        ({"cluster": "npu"}, "a cluster that its authority may not certify"),
    ],
)
def test_attack_certificate_without_account_or_for_another_cluster(
    site: Site, more: dict[str, Any], message: str
) -> None:
    site.owner.publish()
    site.owner.grant("ana")
    account = more.pop("account", "ana")
    paths = certify(site.owner, account, site.tmp / "of-x", **more)
    remote = replace(site.open_reader("ana"), paths=paths)
    with pytest.raises(AccessError, match=message):
        remote.describe("corpus")
    assert is_refusal_logged(site, message)


def test_attack_expired_certificate(site: Site) -> None:
    site.owner.publish()
    site.owner.grant("ana")
    certify(site.owner, "ana", site.tmp / "of-ana", begins=-2)
    with pytest.raises(AccessError, match="refused this certificate"):
        site.read_rows("ana")
    assert is_refusal_logged(site, "certificate has expired")


def test_attack_revoked_certificate(site: Site) -> None:
    site.owner.publish()
    site.owner.grant("ana")
    paths = certify(site.owner, "ana", site.tmp / "of-ana")
    peer = Credentials.load(paths._replace(revoked=None)).peer
    home = site.owner.home / "certs"
    (home / authority.ISSUED / f"{peer.serial}.pem").write_bytes(paths.cert.read_bytes())
    site.read_rows("ana")
    issue.revoke(home, site.owner.signer, [peer.serial], "stolen")
    with pytest.raises(AccessError, match="was revoked"):
        site.read_rows("ana")
    assert is_refusal_logged(site, "was revoked")


def test_attack_missing_certificate(site: Site) -> None:
    context, known = make_client_context((site.owner.home / "certs/ca.pem").read_bytes(), DATA)
    with (
        pytest.raises((ssl.SSLError, EOFError, ConnectionError)),
        dial("127.0.0.1", site.port, context, known, Identity("mt", "gpu", "operator"), DATA) as line,
    ):
        read_frame(line)
    assert is_refusal_logged(site, "no certificate of this owner")


def test_attack_impostor_service_receives_no_request(site: Site, tmp_path: Path) -> None:
    impostor = certify(
        site.owner, "", tmp_path / "liar", signer=Authority.create("mt", {}, bound=["gpu"]), role="operator"
    )
    received: list[bytes] = []

    def accept(listening: socket.socket) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(impostor.cert, impostor.key)
        try:
            with listening.accept()[0] as plain, context.wrap_socket(plain, server_side=True) as line:
                received.append(line.recv(100))
        except (ssl.SSLError, OSError):
            received.append(b"")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accept, args=(listening,))
        thread.start()
        with pytest.raises(NebulaError, match="did not prove that it is gpu/operator-0"):
            replace(site.open_reader("ana"), port=listening.getsockname()[1]).describe("corpus")
        thread.join(10)
    assert received == [b""]


# ---------------------------------------------------------------------- attacks: when
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda owner, grant: owner.pass_days(8), "its grant expired"),
        (lambda owner, grant: owner.grants.decide(grant.number, WITHDRAWN), "its grant was withdrawn"),
        (lambda owner, grant: owner.grants.withdraw("corpus"), "was withdrawn"),
        (lambda owner, grant: owner.registry.set_state("ana", DISABLED), "is not enabled"),
        (lambda owner, grant: owner.pass_days(400_000 - 26_000), "expired at"),
    ],
)
def test_attack_reading_continues_after_access_ends(
    site: Site, change: Callable[[Owner, Any], object], message: str
) -> None:
    """Access is checked for each batch, also on an open connection."""
    site.owner.publish()
    grant = site.owner.grant("ana")
    remote = site.open_reader("ana")
    info = remote.describe("corpus")
    assert len(next(remote.read(RowSelection("corpus", None, 0, 0, 100, 10), info))["age"]) == 10
    change(site.owner, grant)
    with pytest.raises(AccessError, match=r"may not read|was withdrawn|not enabled|expired at"):
        list(remote.read(RowSelection("corpus", None, 0, 10, 100, 10), info))
    assert is_refusal_logged(site, message)


def test_attack_replayed_request(site: Site) -> None:
    """A request is valid once, on its own connection only."""
    site.owner.publish()
    site.owner.grant("ana")
    remote = site.open_reader("ana")
    request = {"ask": "list", "nonce": "", "request": 1}
    with remote._open() as line:
        request["nonce"] = line._nonce
        for kind in (ANSWER, REFUSED):
            write_frame(line._secured, ASK, request)
            answer = read_frame(line._secured, 0)
            assert answer.kind == kind
    assert "was replayed" in answer.message["what"] and is_refusal_logged(site, "was replayed")
    with remote._open() as line:
        write_frame(line._secured, ASK, request)
        assert read_frame(line._secured, 0).kind == REFUSED


# ---------------------------------------------------------------------- attacks: how much
def test_attack_account_limit_with_many_runs_and_connections(site: Site) -> None:
    site.owner.publish(limits={"account": {"rows": 250}})
    site.owner.grant("ana")
    lines = [site.open_reader("ana", run=f"run-{number}") for number in range(4)]
    info = lines[0].describe("corpus")
    count = 0
    streams = [line.read(RowSelection("corpus", None, 0, 0, 100, 20), info) for line in lines]
    with pytest.raises(AccessError, match="the total limit of dataset 'corpus'"):
        for turn in range(20):
            count += len(next(streams[turn % 4])["age"])
    assert count <= 250
    certify(site.owner, "ana", site.tmp / "second", index=3)
    second = replace(lines[0], paths=lines[0].paths.in_folder(site.tmp / "second", Identity("mt", "gpu", "worker", 3)))
    with pytest.raises(AccessError, match="reached the total limit"):
        for _ in range(20):
            list(second.read(RowSelection("corpus", None, 0, 0, 100, 20), info))
    assert site.guard.usage.find("corpus", "ana")[0] <= 250 and is_refusal_logged(site, "reached the total limit")


def test_attack_run_limit_exceeded(site: Site) -> None:
    site.owner.publish(limits={"run": {"rows": 150}})
    site.owner.grant("ana")
    site.read_rows("ana")
    with pytest.raises(AccessError, match="reached the run limit"):
        site.read_rows("ana")
    assert site.read_rows("ana", run="run-2") == list(range(100))


def test_attack_rate_limit_with_many_runs(site: Site) -> None:
    """The rate of an account applies to all its runs together."""
    site.owner.publish(limits={"rate": "6.4kbit"})
    site.owner.grant("ana")
    site.owner.grant("bob")
    request = ReadRequest("corpus", None, 0, 0, 100)
    pauses = [site.guard.read(Reader("ana", "gpu/0", run=f"run-{number}"), request).pause for number in range(3)]
    assert pauses == pytest.approx([0, 1, 2], abs=0.5)
    assert site.guard.read(Reader("bob", "gpu/1"), request).pause == 0


def test_batch_with_too_long_a_pause_is_refused_and_not_counted(site: Site) -> None:
    """The reader would time out, ask again, and be counted twice."""
    site.owner.publish(limits={"rate": "16bit"})
    site.owner.grant("ana")
    request, ana = ReadRequest("corpus", None, 0, 0, 100), Reader("ana", "gpu/0")
    assert site.guard.read(ana, request).pause == 0
    with pytest.raises(AccessError, match="exceeds its rate limit") as caught:
        site.guard.read(ana, request)
    assert "would wait 400 s" in str(caught.value) and site.guard.usage.find("corpus", "ana")[0] == 100


def test_reader_without_run_is_counted_once(site: Site) -> None:
    site.owner.publish(limits={"account": {"rows": 250}, "run": {"rows": 150}})
    site.owner.grant("ana")
    request, ana = ReadRequest("corpus", None, 0, 0, 100), Reader("ana", "gpu/0", run="")
    site.guard.read(ana, request)
    assert site.guard.usage.find("corpus", "ana")[0] == 100
    with pytest.raises(AccessError, match="reached the run limit"):
        site.guard.read(ana, request)
    assert site.guard.usage.find("corpus", "ana")[0] == 100


def test_republishing_rereads_the_files(site: Site) -> None:
    site.owner.publish()
    site.owner.grant("ana")
    assert site.read_rows("ana") == list(range(100))
    with (site.owner.home / "files/a.csv").open("a") as file:
        file.write("100,n\n")
    assert site.read_rows("ana") == list(range(100))
    site.owner.pass_days(0.1)
    site.owner.publish()
    assert site.read_rows("ana") == list(range(101))


def test_opening_a_dataset_does_not_block_other_readers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    opening, release = threading.Event(), threading.Event()

    def open_rows() -> dict[str, Any]:
        opening.set()
        return {"age": np.arange(3)} if release.wait(20) else {}

    module = types.ModuleType("slowcorpus")
    module.__dict__["open_rows"] = open_rows
    monkeypatch.setitem(sys.modules, "slowcorpus", module)
    site.owner.publish()
    site.owner.publish(name="slow", source={"factory": "slowcorpus:open_rows"}, transform=[])
    reader = Reader("", "gpu")
    with ThreadPoolExecutor(2) as pool:
        slow = [pool.submit(site.guard.open, reader, "slow") for _ in range(2)]
        assert opening.wait(20)
        assert site.guard.open(reader, "corpus").count == 100 and not slow[0].done()
        release.set()
        assert slow[0].result(20) is slow[1].result(20)


def test_account_limits_are_counted_per_account(site: Site) -> None:
    site.owner.publish(limits={"account": {"rows": 100, "bytes": "1KB"}})
    site.owner.grant("ana")
    site.owner.grant("bob")
    assert site.read_rows("ana") == site.read_rows("bob") == list(range(100))
    with pytest.raises(AccessError, match="reached the total limit"):
        site.read_rows("ana")


@pytest.mark.parametrize(
    "more",
    [
        {"batch": 0}, {"batch": -1}, {"batch": 1 << 40}, {"first": -1}, {"first": "0"}, {"seed": 1.5}, {"number": None},
        {"dataset": "../corpus"}, {"dataset": None}, {"dataset": "a" * 1000}, {"run": "a\nb"}, {"ask": "write"},
        {"last": 101, "batch": 101}, {"edition": "other"}, {"purpose": ["study"]},
    ],
)  # fmt: skip
def test_attack_invalid_read_request(site: Site, more: dict[str, Any]) -> None:
    site.owner.publish()
    site.owner.grant("ana")
    request = {
        "ask": "read", "dataset": "corpus", "seed": None, "number": 0, "first": 0, "last": 100, "batch": 100,
        "edition": "", "run": "", "program": "", "versions": "", "purpose": None, **more,
    }  # fmt: skip
    with site.open_reader("ana")._open() as line, pytest.raises(AccessError):
        line.ask(request)
        line.take(BATCH, 1 << 20)
    assert is_refusal_logged(site, "ana")
    assert site.read_rows("ana") == list(range(100))


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"NBD1\x02\xff\xff\xff\xff\xff\xff\xff\xff", b"\0" * 64])
def test_attack_invalid_frame_bytes(site: Site, sent: bytes) -> None:
    site.owner.publish()
    site.owner.grant("ana")
    with site.open_reader("ana")._open() as line:
        line._secured.sendall(sent)
        assert read_frame(line._secured).kind == REFUSED
    assert is_refusal_logged(site, "sent an invalid frame")
    assert site.read_rows("ana") == list(range(100))


def test_connections_per_account_are_limited(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whale_nebula.datasets.service._ACCOUNT_CONNECTIONS", 1)
    with site.open_reader("ana")._open():
        with pytest.raises(AccessError, match="already has 1 connections"):
            site.open_reader("ana").list_datasets()
        certify(site.owner, "bob", site.tmp / "of-bob", index=1)
        site.open_reader("bob").list_datasets()


def test_refusals_in_the_log_are_rate_limited(site: Site) -> None:
    site.owner.publish()
    reader = Reader("ana", "nebula://mt/gpu/worker/0")
    for _ in range(50):
        with pytest.raises(AccessError):
            site.guard.open(reader, "corpus")
    assert len(site.access_records) == 8


# ---------------------------------------------------------------------- attacks: what
def test_attack_function_output_outside_the_schema_is_not_sent(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    (site.tmp / "leaky.py").write_text(
        "def wide(c): return {'age': c['age'].astype('float64')}\n"
        "def more(c): return {'age': c['age'], 'name': c['age']} if len(c['age']) > 1 else c\n"
        "def crash(c): raise ValueError('row of Mrs X') if len(c['age']) > 1 else None\n"
    )
    monkeypatch.syspath_prepend(str(site.tmp))
    site.owner.publish(transform=[{"select": ["age"]}, {"function": "leaky:more"}])
    site.owner.grant("ana")
    with pytest.raises(AccessError, match="so none is sent") as caught:
        site.read_rows("ana")
    assert "name" not in str(caught.value) and is_refusal_logged(site, "a column 'name' that is not in its schema")
    site.owner.publish(transform=[{"select": ["age"]}, {"function": "leaky:wide"}])
    with pytest.raises(AccessError, match="so none is sent"):
        site.read_rows("ana")
    assert is_refusal_logged(site, "does not match its schema")
    with pytest.raises(InterfaceError, match="does not match its schema"):
        LocalClient(site.guard, Reader("", "gpu/0")).describe("corpus")


AGE = [["age", "int64", []]]


@pytest.mark.parametrize(
    ("answered", "header", "data", "words"),
    [
        ({"schema": [*AGE, ["name", "string", []]]}, {}, 320, "has changed since the run began"),
        ({"schema": [["age", "float64", []]]}, {}, 160, "has changed since the run began"),
        ({"count": 99}, {}, 160, "has changed since the run began"),
        *(({"count": count}, {}, 160, "sent an invalid answer") for count in (-1, True, 1 << 63, "100")),
        ({"schema": "x"}, {}, 160, "sent an invalid answer"),
        ({}, {"rows": 21}, 168, "different rows than requested"),
        ({}, {"first": 20}, 160, "different rows than requested"),
        ({}, {}, 152, "do not match the schema"),
        ({}, {}, 1 << 30, "do not match the schema"),
    ],
)
def test_attack_service_sends_unexpected_schema_or_sizes(
    site: Site, answered: dict[str, Any], header: dict[str, int], data: int, words: str
) -> None:
    """A reader checks the schema and sizes before it allocates memory."""
    site.owner.publish()
    site.owner.grant("ana")
    remote = site.open_reader("ana")
    info = remote.describe("corpus")
    answers = iter([
        Frame(HELLO, {"nonce": "n"}, memoryview(b"")),
        Frame(ANSWER, {"schema": AGE, "count": 100, "edition": info.edition, **answered}, memoryview(b"")),
        Frame(BATCH, {"first": 0, "rows": 20, **header}, memoryview(bytes(min(data, 1000)))),
    ])  # fmt: skip

    def answer(line: object, most_data: int = 0, most_json: int = 0) -> Frame:
        frame = next(answers)
        assert frame.kind != BATCH or most_data == 160
        return frame

    with pytest.MonkeyPatch.context() as patch, pytest.raises(AccessError, match=words):
        patch.setattr("whale_nebula.datasets.reading.read_frame", answer)
        next(remote.read(RowSelection("corpus", None, 0, 0, 100, 20), info))


def test_attack_rewritten_or_truncated_audit_log_is_detected(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads that a reader keeps reveal a truncated or rewritten log."""
    site.owner.publish()
    site.owner.grant("ana")
    site.read_rows("ana")
    heads = list(read_heads(site.tmp / "of-ana/data-gpu.heads.jsonl"))
    path = Path(site.guard.log.path)
    assert len(heads) == 1 and verify(path, heads).kept == heads[0].seq
    cut = site.tmp / "cut.jsonl"
    cut.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
    assert not verify(cut, heads).ok
    site.guard.log.close()
    path.unlink()
    new_log = AuditLog(path, site.guard.log.identity, site.guard.log._signer)
    monkeypatch.setattr(site.guard, "log", new_log)
    with pytest.warns(NebulaWarning, match="the audit log of gpu/operator-0 was rewritten or rolled back"):
        site.read_rows("ana")
    new_log.close()


def test_reading_stops_when_the_dataset_changes(site: Site) -> None:
    site.owner.publish()
    site.owner.grant("ana")
    remote: RemoteClient = site.open_reader("ana")
    info = remote.describe("corpus")
    site.owner.publish(about="another")
    with pytest.raises(AccessError, match="has changed since"):
        list(remote.read(RowSelection("corpus", None, 0, 0, 100, 20), info))

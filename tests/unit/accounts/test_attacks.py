"""Attacks on logins, by users with an account and by strangers who can only connect. Each is refused, and leaves other
users and the registry as they were.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID

from tests.unit.accounts.conftest import GOOD, Site, identify
from whale_nebula.accounts import server, service
from whale_nebula.accounts.login import LoginRequest
from whale_nebula.accounts.registry import INVITATION, PASSWORD, TOKEN, Registry
from whale_nebula.accounts.rows import FILE
from whale_nebula.accounts.server import PendingConnections, find_source
from whale_nebula.accounts.service import _read_answer, serve
from whale_nebula.cli import accounts as accounts_command
from whale_nebula.cli import login as login_command
from whale_nebula.errors import AccountError, LoginError
from whale_nebula.security import authority, files, issue, trust
from whale_nebula.transport.grpc.limits import Buckets, Endpoint, Limits


def add_bob(site: Site) -> None:
    site.issuer.registry.add("bob", workers=2, password=GOOD)


# ---------------------------------------------------------------------- certificates
def request_twice(site: Site) -> list[str]:
    return [site.request(identify(5), host) for host in ("one", "two")]


def request_with_owners_worker(site: Site) -> list[str]:
    issue.issue(site.issuer.folder, site.issuer.authority, [identify(0)])
    return [site.request(identify(5)), site.request(identify(0))]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [(request_twice, "gpu/5 was requested twice"), (request_with_owners_worker, "gpu/0 already has a certificate")],
    ids=["twice", "with a worker of the owner"],
)
def test_refused_login_does_not_occupy_identities(
    prepare: Callable[[Site], list[str]], message: str, site: Site
) -> None:
    """The certificates issued before the refusal would belong to nobody until they expire."""
    add_bob(site)
    with pytest.raises(AccountError, match=message):
        site.send(prepare(site))
    assert (site.last["decision"], site.last["account"]) == ("deny", "ana")
    assert "gpu/5" not in [each.identity.worker for each in issue.list_issued(site.issuer.folder)]
    assert site.ask(identify(5), host="bobs", account="bob")["account"] == "bob"


def test_request_of_another_account_is_refused(site: Site) -> None:
    """Revoking bob's certificate would revoke the key of ana."""
    add_bob(site)
    text = site.request(identify(0))
    site.send([text], hours=1e-6)
    site.issuer.registry.remove_certificates(site.issuer.registry.list_certificates())  # as if it had expired
    with pytest.raises(AccountError, match="the key requested for gpu/0 is in use"):
        site.send([text], account="bob")
    assert "in use" in site.last["reason"] and site.last["account"] == "bob"
    assert site.send([text])["account"] == "ana"


def test_account_in_the_subject_of_a_request_is_ignored(site: Site) -> None:
    add_bob(site)
    key, identity = authority.make_key(), identify(0)
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity.uri), x509.DNSName(identity.dns)])
    subject = x509.Name([x509.NameAttribute(NameOID.USER_ID, "bob")])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).add_extension(names, critical=False)
    text = request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
    found = site.trust().check(site.send([text])["certificates"][0])
    assert found.account == "ana"


def test_frequent_logins_do_not_fill_the_deny_list(site: Site) -> None:
    """Each login with a new key revokes the earlier certificate."""
    add_bob(site)
    issuer = replace(site.issuer, issuances=Buckets(2 / 5, 0.0))  # two certificates of an account with two workers

    def log_in(account: str, host: str) -> object:
        worker = identify(("ana", "bob").index(account))
        return issuer.log_in(LoginRequest(account, PASSWORD, GOOD, [site.request(worker, host)]))

    for host in ("one", "two"):
        log_in("ana", host)
    with pytest.raises(AccountError, match="account ana logs in too often"):
        log_in("ana", "three")
    assert "too often" in site.last["reason"]
    assert len(trust.load(issuer.folder / files.REVOKED, [issuer.authority.certificate]).revoked) == 1
    assert log_in("bob", "bobs")


# ---------------------------------------------------------------------- names, secrets and time
@pytest.mark.parametrize(
    "name", ["\u0430na", "ana\u200b", "Ana", "ana ", "ａna", "ana\n", "-ana", "a/na", "", "ana" * 20]
)
def test_name_that_looks_like_another_is_neither_added_nor_logged_in(name: str, site: Site) -> None:
    with pytest.raises(AccountError, match="is not a valid account name"):
        site.issuer.registry.add(name)
    with pytest.raises(LoginError):
        site.send([], account=name)
    assert site.last["account"] == name[:64] and site.last["reason"] == "no such account"
    assert json.dumps(site.last).isascii()  # as the command prints it


def test_secrets_are_in_no_log_file_or_option(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Options of running commands are visible to all users of a host."""
    registry = site.issuer.registry
    secrets = {TOKEN: registry.make_secret("ana", TOKEN, 1), INVITATION: registry.make_secret("ana", INVITATION, 1)}
    with caplog.at_level(logging.DEBUG):
        for kind, secret in secrets.items():
            site.ask(identify(0), kind=kind, secret=secret, password=GOOD + "!" if kind == INVITATION else None)
            with pytest.raises(LoginError):
                site.send([], kind=kind, secret=secret + "x")
    stored = b"".join(each.read_bytes() for each in site.issuer.folder.rglob("*") if each.is_file()).decode("latin1")
    assert not any(each in text for each in (*secrets.values(), GOOD) for text in (caplog.text, stored))
    parsers = [login_command.make_parser(), *(accounts_command.make_parser(each) for each in ("add", "passwd"))]
    options = {name for parser in parsers for name in parser.names}
    assert {each for each in options if "password" in each or "token" in each} == {"--password-file", "--token-file"}


def test_lock_of_a_wrong_clock_ends_when_the_clock_is_corrected(site: Site) -> None:
    clock = [files.now()]
    registry = Registry(site.issuer.folder, site.issuer.authority, lambda: clock[0])
    clock[0] += timedelta(days=400)
    for _ in range(7):
        with pytest.raises(LoginError):
            registry.log_in("ana", PASSWORD, "wrong")
    clock[0] -= timedelta(days=400)
    assert registry.log_in("ana", PASSWORD, GOOD).account.name == "ana"
    registry.close()


def test_text_of_a_service_cannot_control_the_terminal() -> None:
    answer = {"account": "\x1b[2Jana", "role": "\x1b]0;x\x07", "certificates": []}
    assert "\x1b" not in json.dumps(_read_answer(200, json.dumps(answer).encode()), ensure_ascii=False)
    with pytest.raises(AccountError) as caught:
        _read_answer(403, json.dumps({"what": "no\x1b[2J", "why": "\u202e", "mend": "\x07"}).encode())
    assert not {"\x1b", "\u202e", "\x07"} & set(str(caught.value))


# ---------------------------------------------------------------------- strangers
def open_tls(port: int, host: str = "127.0.0.1") -> ssl.SSLSocket:
    """A connection to the service, from an address of this host."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(socket.create_connection(("127.0.0.1", port), 60, (host, 0)))


def wait_for_end(line: socket.socket) -> bool:
    """Whether the other end closes a connection within the socket's timeout."""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        return line.recv(1) == b""
    return True


def test_slow_request_is_ended(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its bytes arrives within the timeout of a message."""
    monkeypatch.setattr(server, "_PENDING_SECONDS", 0.5)
    with serve(site.issuer, "gpu", "127.0.0.1", 0) as port, open_tls(port) as line:
        line.sendall(b"POST /login HTTP/1.1\r\nContent-Length: 5000\r\n\r\n")
        ended, deadline = False, time.monotonic() + 60
        while not ended and time.monotonic() < deadline:
            try:
                line.sendall(b" ")
                line.settimeout(0.05)
                ended = line.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                ended = True
    assert ended


def test_idle_connections_of_one_address_do_not_keep_others_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service._Server, "connections", 4)
    with serve(site.issuer, "gpu", "127.0.0.1", 0) as port, contextlib.ExitStack() as stack:
        idle = []
        for _ in range(6):
            with contextlib.suppress(OSError):  # it was closed during its handshake, for the next one
                idle.append(stack.enter_context(open_tls(port, "127.0.0.2")))
        assert replace(site, port=port).ask(identify(0))["account"] == "ana"
        idle[0].settimeout(30)
        assert wait_for_end(idle[0])


def test_pending_connections_are_shared_by_network_and_precedence() -> None:
    """An IPv6 network counts as one source, however many addresses it has; accepted sources come first."""
    assert find_source("2001:db8::1") == find_source("2001:db8::ffff") != find_source("2001:db8:0:1::1")
    pending, pairs = PendingConnections(Limits(8, 8, 10.0), now=lambda: 0.0), {}

    def connect(host: str, port: int = 1) -> None:
        pairs[host] = socket.socketpair()
        pairs[host][1].setblocking(False)
        pending.add(Endpoint(host, port), pairs[host][0])

    def is_open(host: str) -> bool:
        try:
            return pairs[host][1].recv(1) != b""
        except BlockingIOError:
            return True

    pending.note_accepted("192.0.2.9")
    connect("192.0.2.9")
    connect("192.0.2.1")
    for number in range(100):
        connect(f"2001:db8::{number:x}")
    assert is_open("192.0.2.9") and is_open("192.0.2.1")
    assert sum(map(is_open, pairs)) == 8
    for one, other in pairs.values():
        one.close()
        other.close()


def guess(port: int, host: str) -> bytes:
    """The status of a login with a wrong password, from an address of this host."""
    body = json.dumps({"account": "ana", "kind": PASSWORD, "secret": "guess", "requests": []}).encode()
    with open_tls(port, host) as line:
        line.sendall(b"POST /login HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        return line.recv(4096).split()[1]


def test_guesses_do_not_use_up_the_logins_of_known_sources(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_ALL_BURST", 2)
    monkeypatch.setattr(service, "_ALL_RATE", 0.0)
    with serve(site.issuer, "gpu", "127.0.0.1", 0) as port:
        known = replace(site, port=port)
        assert known.ask(identify(0))["account"] == "ana"
        assert [guess(port, f"127.0.1.{number}") for number in range(4)] == [b"401", b"429", b"429", b"429"]
        assert known.ask(identify(1))["account"] == "ana"


# ---------------------------------------------------------------------- files
def test_number_of_an_older_copy_survives_a_full_record(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of the highest number grows with each change, and is compacted."""
    monkeypatch.setattr(trust, "_MOST_RECORD_BYTES", 500)
    folder, registry = site.issuer.folder, site.issuer.registry
    older = (folder / FILE).read_bytes()
    for number in range(20):
        registry.record_event("login", f"guess-{number}", "deny", "no such account")
    assert (folder / f"{FILE}.highest").stat().st_size < 600
    (folder / FILE).write_bytes(older)
    with pytest.raises(AccountError, match="but this host has seen number 2"):
        Registry(folder, site.issuer.authority).find("ana")


def test_record_of_the_highest_number_keeps_numbers_appended_during_compaction(tmp_path: Path) -> None:
    path, record = tmp_path / "a.db", tmp_path / "a.db.highest"
    record.write_text("".join(f"aa {number}\nbb {number + 5}\n" for number in range(90)) + "torn")
    write = files.write

    def write_late(*args: object, **more: object) -> None:
        with record.open("a") as file:  # another process, which has opened the old file
            file.write("\naa 500\n")
        write(*args, **more)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write", write_late)
        trust._compact(record)
    assert [trust.read_highest_number(path, signer) for signer in ("aa", "bb")] == [500, 94]
    assert record.stat().st_size < 40

"""Login over a line: certificates for valid accounts, and nothing for anybody else."""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.accounts.conftest import GOOD, RUN, Site, identify
from whale_nebula.accounts import service
from whale_nebula.accounts.login import LoginRequest
from whale_nebula.accounts.members import AUDITOR, DISABLED, OWNER
from whale_nebula.accounts.passwords import digest_secret
from whale_nebula.accounts.registry import PASSWORD, TOKEN, Registry, refused_login_error
from whale_nebula.accounts.scope import Scope
from whale_nebula.accounts.service import serve
from whale_nebula.cli.arguments import DONE
from whale_nebula.cli.login import Login, keep_logged_in, main
from whale_nebula.errors import AccountError, LoginError, NebulaError, RevokedError, WrongNameError
from whale_nebula.security import (
    GATEWAY,
    OPERATOR,
    WORKER,
    Credentials,
    Files,
    Identity,
    Trust,
    authority,
    files,
    issue,
)
from whale_nebula.security.allowance import Allowance
from whale_nebula.security.authority import Authority
from whale_nebula.security.trust import DenyList


def test_login_issues_certificates_of_the_account_without_keys(site: Site) -> None:
    answer = site.ask(identify(0), identify(1), hours=3)
    found = [site.trust().check(pem, identify(number)) for number, pem in enumerate(answer["certificates"])]
    assert {each.account for each in found} == {"ana"} and answer["role"] == "trainer"
    assert all(each.key == files.read_peer(each.certificate).key for each in found)
    assert not [*site.issuer.folder.glob("gpu-worker-*.key")] and not [*site.issuer.folder.glob("gpu-worker-*.pem")]
    assert [each.account for each in site.issuer.registry.list_certificates()] == ["ana", "ana"]
    assert (site.last["action"], site.last["decision"], len(site.last["serials"])) == ("login", "allow", 2)
    assert site.ask(identify(0))["account"] == "ana"  # again, with the same key
    assert GOOD not in json.dumps(site.issuer.registry.list_events())


def test_login_looks_up_the_token_once(site: Site) -> None:
    token, queries = site.issuer.registry.make_secret("ana", TOKEN, 1, Scope(WORKER)), []
    site.issuer.registry.database.set_trace_callback(queries.append)
    site.ask(identify(0), kind=TOKEN, secret=token)
    site.issuer.registry.database.set_trace_callback(None)
    assert sum(digest_secret(token) in each for each in queries) == 1


def test_certificate_contains_the_account_limits(site: Site) -> None:
    site.issuer.registry.set_limits("ana", 1, Allowance(memory=4 << 30, disk=1 << 30))
    found = site.trust().check(site.ask(identify(0))["certificates"][0])
    assert found.allowance == Allowance(memory=4 << 30, disk=1 << 30)

    class Later(Allowance):
        """The allowance of a later version, with an unknown limit."""

        def encode(self) -> bytes:
            return b'{"stars":1}'

    signer, key, now = site.issuer.authority, authority.make_key().public_key(), files.now()
    certificate = authority.make_process_certificate(
        identify(0), key, signer.certificate, signer.key, now + timedelta(days=1), now, "ana", Later(memory=1)
    )
    with pytest.raises(WrongNameError, match="account limits that this version does not know"):
        site.trust().check(certificate)


@pytest.mark.parametrize(
    ("scope", "wanted", "message"),
    [
        (Scope("worker"), identify(1, role=OPERATOR), "not valid for gpu/operator-1"),
        (Scope(first=1, last=1), identify(0), "not valid for gpu/0"),
        (Scope("worker", 1, 1, 2.0), identify(1), "not valid for certificates of 3 hours"),
        (Scope("worker", 1, 1, 3.0), identify(1), ""),
    ],
    ids=["a role", "a number", "hours", "within"],
)
def test_token_is_valid_only_for_its_scope(site: Site, scope: Scope, wanted: Identity, message: str) -> None:
    site.issuer.registry.add("eva", OWNER, 3, GOOD)
    token = site.issuer.registry.make_secret("eva", TOKEN, 1, scope)
    by_token = {"account": "eva", "kind": TOKEN, "secret": token, "hours": 3}
    if message:
        with pytest.raises(AccountError, match=message):
            site.ask(wanted, **by_token)
        assert site.last["decision"] == "deny" and not site.issuer.registry.list_certificates("eva")
        assert site.ask(wanted, account="eva", hours=3)["account"] == "eva"  # the password has no scope
    else:
        assert site.ask(wanted, **by_token)["account"] == "eva"
    assert site.issuer.registry.list_secrets("eva")[0][3] == str(scope)
    site.issuer.registry.remove("eva")
    with site.issuer.registry.read_transaction():
        assert not site.issuer.registry.database.execute("select * from about where name like 'scope of %'").fetchall()


def test_later_login_revokes_earlier_certificate(site: Site) -> None:
    before = site.ask(identify(0))["certificates"][0]
    after = site.ask(identify(0), host="another")["certificates"][0]
    assert site.trust().check(after).account == "ana"
    with pytest.raises(RevokedError, match="a later login of ana"):
        site.trust().check(before)


def test_disabling_an_account_revokes_its_certificates(site: Site) -> None:
    pem = site.ask(identify(0))["certificates"][0]
    trust = site.trust()
    site.issuer.registry.set_state("ana", DISABLED)
    assert len(site.issuer.revoke_certificates("ana", "account ana was disabled")) == 1
    with pytest.raises(RevokedError, match="account ana was disabled"):
        trust.check(pem)
    with pytest.raises(LoginError):
        site.ask(identify(0))
    site.issuer.registry.add("bob", password=GOOD)  # the identity is free again
    assert site.ask(identify(0), host="bobs", account="bob")["account"] == "bob"


def run_concurrently(folder: Path, *acts: Callable[[], object]) -> list[NebulaError]:
    """Run functions in threads that first wait for the locked folder; returns their errors."""
    errors: list[NebulaError] = []

    def run(act: Callable[[], object]) -> None:
        try:
            act()
        except NebulaError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[act]) for act in acts]
    with files.lock_folder(folder):
        for each in threads:
            each.start()
        for each in threads:
            each.join(1.0)
    for each in threads:
        each.join(30)
    return errors


def test_two_services_of_one_registry_enforce_the_worker_quota(site: Site) -> None:
    site.issuer.registry.add("bob", password=GOOD)
    other = replace(site.issuer, registry=Registry(site.issuer.folder, site.issuer.authority))
    wanted = [LoginRequest("bob", PASSWORD, GOOD, [site.request(identify(n))]) for n in range(2)]
    errors = run_concurrently(
        site.issuer.folder, *(partial(d.log_in, w) for d, w in zip([site.issuer, other], wanted, strict=True))
    )
    other.registry.close()
    assert len(site.issuer.registry.list_certificates("bob")) == 1
    assert [each.what for each in errors] == ["the account may have 1 worker at a time, but would have 2"]


def test_account_disabled_during_login_gets_no_valid_certificate(site: Site) -> None:
    request, trust = LoginRequest("ana", PASSWORD, GOOD, [site.request(identify(0))]), site.trust()

    def disable() -> None:
        site.issuer.registry.set_state("ana", DISABLED)
        site.issuer.revoke_certificates("ana", "disabled")

    run_concurrently(site.issuer.folder, partial(site.issuer.log_in, request), disable)
    assert site.issuer.registry.list_certificates("ana") == []
    for each in issue.list_issued(site.issuer.folder):
        if each.account == "ana":
            with pytest.raises(RevokedError):
                trust.check(each.certificate)


def add_other(site: Site) -> None:
    site.ask(identify(0))
    site.issuer.registry.add("bob", password=GOOD)


def issue_by_owner(site: Site) -> None:
    """Issue the worker's certificate to a host of the owner."""
    issue.issue(site.issuer.folder, site.issuer.authority, [identify(0)])


def add_account(role: str) -> Callable[[Site], None]:
    return lambda site: site.issuer.registry.add("bob", role, 9, GOOD)


Refusal = tuple[Callable[[Site], object], dict[str, Any], list[Identity], type[NebulaError], str]
REFUSED_LOGINS: dict[str, Refusal] = {
    "a wrong password": (lambda s: None, {"secret": "guess"}, [identify(0)], LoginError, "wrong password"),
    "an unknown account": (lambda s: None, {"account": "eve"}, [identify(0)], LoginError, "no such account"),
    "an expired token": (
        lambda s: None, {"kind": TOKEN, "secret": "token-00-old"}, [identify(0)], LoginError, "wrong token"
    ),
    "too many workers": (lambda s: None, {}, [identify(n) for n in range(3)], AccountError, "have 2 workers at"),
    "too many in turn": (
        lambda s: s.ask(identify(0), identify(1)), {}, [identify(2)], AccountError, "have 2 workers at"
    ),
    "another's worker": (add_other, {"account": "bob"}, [identify(0)], AccountError, "belongs to another account"),
    "a worker of the owner": (issue_by_owner, {}, [identify(0)], AccountError, "already has a certificate"),
    "a gateway": (lambda s: None, {}, [identify(0, role=GATEWAY)], AccountError, "certificate of a gateway"),
    "an operator": (lambda s: None, {}, [identify(0, role=OPERATOR)], AccountError, "certificate of an operator"),
    "an auditor's worker": (add_account(AUDITOR), {"account": "bob"}, [identify(0)], AccountError, "role auditor"),
    "an auditor by a trainer": (lambda s: None, {}, [identify(0, role=AUDITOR)], AccountError, "trainer .* auditor"),
    "an auditor by an owner": (
        add_account(OWNER), {"account": "bob"}, [identify(0, role=AUDITOR)], AccountError, "owner .* of an auditor"
    ),
    "another owner's cluster": (lambda s: None, {}, [identify(0, "npu")], AccountError, ", not npu"),
    "another run": (lambda s: None, {}, [identify(0, run="other")], AccountError, "not for run 'other'"),
    "an owner's tenth": (
        add_account(OWNER), {"account": "bob"}, [identify(n) for n in range(10)], AccountError, "have 9"
    ),
}  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSED_LOGINS.values(), ids=REFUSED_LOGINS)
def test_unauthorized_login_issues_no_certificate(refusal: Refusal, site: Site) -> None:
    prepare, fields, wanted, kind, message = refusal
    prepare(site)
    before = len(site.issuer.registry.list_certificates())
    with pytest.raises(kind) as caught:
        site.ask(*wanted, host="attacker", **fields)
    assert kind is not LoginError or str(caught.value) == str(refused_login_error())
    assert (site.last["decision"], site.last["account"]) == ("deny", fields.get("account", "ana"))
    assert len(site.issuer.registry.list_certificates()) == before
    assert re.search(message, site.last["reason"] if kind is LoginError else str(caught.value))


def send_raw(site: Site, data: bytes) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", site.port), 60) as plain,
        context.wrap_socket(plain) as secured,
    ):
        secured.sendall(data)
        found = b""
        while part := secured.recv(4096):
            found += part
        return found


def make_post(body: bytes, length: int | None = None, path: str = "/login") -> bytes:
    size = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n".encode() + body


GOOD_REQUEST = {"account": "ana", "kind": "password", "secret": GOOD, "requests": []}
HOSTILE_REQUESTS = {
    "no JSON": (make_post(b"{"), b"400"),
    "deep JSON": (make_post(b"[" * 100_000), b"400"),
    "a list": (make_post(b"[]"), b"400"),
    "an unknown field": (make_post(json.dumps({**GOOD_REQUEST, "role": "owner"}).encode()), b"400"),
    "another type": (make_post(json.dumps({**GOOD_REQUEST, "account": {"$ne": 1}}).encode()), b"400"),
    "a long name": (make_post(json.dumps({**GOOD_REQUEST, "account": "a" * 5000}).encode()), b"400"),
    "too many hours": (make_post(json.dumps({**GOOD_REQUEST, "hours": 1e9}).encode()), b"400"),
    "not a number": (make_post(json.dumps({**GOOD_REQUEST, "hours": float("nan")}).encode()), b"400"),
    "invalid requests": (make_post(json.dumps({**GOOD_REQUEST, "requests": ["x"]}).encode()), b"403"),
    "too many requests": (make_post(json.dumps({**GOOD_REQUEST, "requests": ["x"] * 65}).encode()), b"400"),
    "SQL in a name": (make_post(json.dumps({**GOOD_REQUEST, "account": "ana' or '1'='1"}).encode()), b"401"),
    "a lone surrogate": (make_post(json.dumps({**GOOD_REQUEST, "account": "\ud800"}).encode()), b"400"),
    "a lone surrogate in a request": (
        make_post(json.dumps({**GOOD_REQUEST, "requests": ["\udfff"]}).encode()),
        b"400",
    ),
    "too large": (make_post(b"", 1 << 30), b"413"),
    "a length with many digits": (
        make_post(b"", 10**4200).replace(b"Length: 1", b"Length: 1" + b"0" * 800),
        b"413",
    ),
    "no length": (b"POST /login HTTP/1.1\r\nHost: x\r\n\r\n", b"413"),
    "another path": (make_post(b"{}", path="/../certs/ca.key"), b"404"),
    "another method": (b"PUT /login HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"501"),
}


@pytest.mark.parametrize(("data", "code"), HOSTILE_REQUESTS.values(), ids=HOSTILE_REQUESTS)
def test_hostile_http_request_gets_an_error_status(data: bytes, code: bytes, site: Site) -> None:
    answer = send_raw(site, data)
    assert answer.split()[1:2] == [code] and b"Traceback" not in answer
    assert site.ask(identify(0))["account"] == "ana"


def test_login_rate_limit_answers_429_without_checking(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests above the limit are not checked."""
    monkeypatch.setattr(service, "_ALL_BURST", 3)
    monkeypatch.setattr(service, "_ALL_RATE", 0.0)
    guess = make_post(json.dumps({**GOOD_REQUEST, "secret": "guess"}).encode())
    with serve(site.issuer, "gpu", "127.0.0.1", 0) as port:
        codes = [send_raw(replace(site, port=port), guess).split()[1] for _ in range(5)]
    assert codes == [b"401"] * 3 + [b"429"] * 2
    assert [each["decision"] for each in site.issuer.registry.list_events()].count("deny") == 3


def test_impostor_login_service_receives_no_password(site: Site, tmp_path: Path) -> None:
    """The impostor has a certificate of another authority, or that of a worker."""
    received: list[bytes] = []
    authority.create(tmp_path / "false", Authority.create(RUN, {}, bound=["gpu"]))
    impostor = authority.load(tmp_path / "false")
    [other] = issue.issue(tmp_path / "false", impostor, [identify(0, role=OPERATOR)])
    [known] = issue.issue(site.issuer.folder, site.issuer.authority, [identify(5)])
    for paths in (other.files, known.files):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(paths.cert, paths.key)
        with socket.create_server(("127.0.0.1", 0)) as listening:

            def accept(listening: socket.socket = listening, context: ssl.SSLContext = context) -> None:
                plain, _ = listening.accept()
                try:
                    with context.wrap_socket(plain, server_side=True) as secured:
                        received.append(secured.recv(4096))
                except OSError:
                    received.append(b"")

            thread = threading.Thread(target=accept)
            thread.start()
            request = LoginRequest("ana", PASSWORD, GOOD, [])
            with pytest.raises(AccountError, match="did not prove that it is gpu/operator-0"):
                replace(site, port=listening.getsockname()[1]).service.log_in(request)
            thread.join(10)
    assert received == [b"", b""]


def test_login_command_writes_worker_credentials(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, secret = tmp_path / "own", tmp_path / "token"
    folder.mkdir(0o700)
    secret.touch(0o600)
    secret.write_text(site.issuer.registry.make_secret("ana", TOKEN, 1) + "\n")
    options = ["--cluster", "gpu", "--at", f"127.0.0.1:{site.port}", "--account", "ana", "--folder", str(folder)]
    assert main([*options, "--token-file", str(secret)]) == 1 and "ca.pem that came with" in capsys.readouterr().err
    (folder / "ca.pem").write_bytes(site.ca)
    assert main([*options, "--token-file", str(secret), "--count", "2"]) == 0
    assert capsys.readouterr().out.startswith("logged in as ana (trainer): gpu/0, gpu/1, valid until ")
    assert Credentials.load(Files.in_folder(folder, identify(1))).peer.account == "ana"
    assert main([*options, "--account", "bob", "--token-file", str(secret)]) == 1  # the key belongs to ana
    assert "gpu-worker-0.pem belongs to account ana, not to bob" in capsys.readouterr().err
    secret.chmod(0o644)
    assert (
        main([*options, "--token-file", str(secret)]) == 1 and "can be read by other users" in capsys.readouterr().err
    )
    assert main([*options, "--token-file", str(tmp_path / "gone")]) == 1
    assert "--token-file FILE: the file that contains the token" in capsys.readouterr().err


def test_kept_login_renews_certificates_and_fetches_deny_lists(site: Site, tmp_path: Path) -> None:
    folder, secret = tmp_path / "own", tmp_path / "token"
    folder.mkdir(0o700)
    (folder / "ca.pem").write_bytes(site.ca)
    secret.touch(0o600)
    secret.write_text(site.issuer.registry.make_secret("ana", TOKEN, 1))
    arguments = Namespace(
        config=None, folder=str(folder), run=None, cluster="gpu", token_file=str(secret), account="ana", json=False
    )
    login = Login(arguments, "127.0.0.1", site.port, 4.0, [("gpu", WORKER, 0)])
    until, started, path = login.log_in(), files.now(), folder / "gpu-worker-0.pem"
    [other] = issue.issue(site.issuer.folder, site.issuer.authority, [identify(7)])
    first, hours, serials = path.read_bytes(), iter([1.0, 2.0, 3.5, 3.6]), []

    def wait(seconds: float) -> bool:
        serials.append(path.read_bytes() == first)
        if len(serials) == 2:
            issue.revoke(site.issuer.folder, site.issuer.authority, [other.peer.serial], "sold")
        return len(serials) < 5

    def present() -> datetime:
        return started + timedelta(hours=next(hours, 3.6)) if serials else started

    assert keep_logged_in(login, until, wait, present) == DONE
    assert serials[0] and not serials[-1]
    own = authority.load_certificates(folder)
    with pytest.raises(RevokedError):
        Trust(own, DenyList(folder / files.REVOKED, own)).check(other.peer.certificate)
    site.issuer.registry.set_state("ana", DISABLED)
    with pytest.raises(LoginError):
        keep_logged_in(login, started, lambda seconds: True, files.now)


def test_kept_login_waits_for_an_unreachable_service(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own").mkdir(0o700)
    (tmp_path / "own" / "ca.pem").write_bytes(site.ca)
    arguments = Namespace(config=None, folder=str(tmp_path / "own"), run=None, cluster="gpu", account="ana", json=False)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    login, answers = Login(arguments, "127.0.0.1", port, 4.0, [("gpu", WORKER, 0)]), iter([True, True, True, False])
    assert keep_logged_in(login, files.now() + timedelta(hours=4), lambda seconds: next(answers), files.now) == DONE
    assert capsys.readouterr().err.count("continuing with the existing files") == 1

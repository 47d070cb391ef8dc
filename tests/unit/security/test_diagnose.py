"""Every refusal has its own diagnosis, on the side that can know it: against servers of gRPC and of Python's ssl."""

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from tests.unit.security.authorities import DAY, GPU, NPU, Home, write_self_signed
from whale_nebula.errors import (
    ExpiredError,
    IdentityError,
    NoCertificateError,
    PlaintextError,
    RevokedError,
    SelfSignedError,
    TransportError,
    WrongAuthorityError,
    WrongNameError,
)
from whale_nebula.security import Credentials, Files, Identity, files, issue
from whale_nebula.security.diagnose import KINDS, Diagnosis, probe, read_grpc_error


class Place(NamedTuple):
    """Two authorities, and the credentials of a worker of the first."""

    home: Home
    other: Home
    npu: Credentials


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("diagnose")
    home = Home.at(folder / "certs", at=files.now() - 10 * DAY)
    return Place(home, Home.at(folder / "other"), home.credentials(NPU))


@contextlib.contextmanager
def grpc_server(paths: Files | None, ca: Path | None = None) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    if paths is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        pair = [(paths.key.read_bytes(), paths.cert.read_bytes())]
        roots = (ca or paths.ca).read_bytes()
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pair, roots, require_client_auth=True))
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait(10)


@contextlib.contextmanager
def line_server(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that calls `serve` with each connection."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(10)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = listening.accept()
                line.settimeout(10)
                with line, contextlib.suppress(OSError):
                    serve(line)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    host, port = listening.getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(10)


def answer_as_ssh(line: socket.socket) -> None:
    """Send a banner, and read to the end, as closing with unread data would discard the banner."""
    line.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")
    while line.recv(4096):
        pass


def make_tls_handler(paths: Files, ca: Path, version: ssl.TLSVersion) -> Callable[[socket.socket], None]:
    """A handler for TLS connections that refuses with alerts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(paths.cert, paths.key)
    context.load_verify_locations(ca)
    context.verify_mode = ssl.CERT_REQUIRED
    context.maximum_version = version

    def serve(line: socket.socket) -> None:
        with context.wrap_socket(line, server_side=True) as secured:
            secured.sendall(b"\0\0\0\4\0\0\0\0\0")
            secured.recv(1)

    return serve


def check_diagnosis(diagnosis: Diagnosis | None, kind: type[TransportError], side: str) -> None:
    assert diagnosis is not None
    assert (type(diagnosis.error), diagnosis.side, diagnosis.kind) == (kind, side, KINDS[kind])
    assert diagnosis.error.mend
    assert diagnosis.error.what


def revoke_gpu(place: Place) -> Files:
    credentials = place.home.credentials(GPU)
    issue.revoke(place.home.folder, place.home.authority, [credentials.serial], "lost")
    return credentials.files


SERVER_CASES: dict[str, tuple[Callable[[Place, Path], Files | None], type[TransportError], str]] = {
    # the files of a server that should be gpu/0, the error, and a part of its text
    "another authority": (lambda place, _: place.other.files(GPU), WrongAuthorityError, ""),
    "self-signed": (lambda _, folder: write_self_signed(folder, GPU), SelfSignedError, "self-signed"),
    "expired": (lambda place, _: place.home.one_day_files(GPU, files.now() - 3 * DAY), ExpiredError, "has expired"),
    "not yet valid": (
        lambda place, _: place.home.one_day_files(GPU, files.now() + 3 * DAY),
        ExpiredError,
        "not valid",
    ),
    "another identity": (lambda place, _: place.home.files(Identity("mt", "b")), WrongNameError, "b/0"),
    "revoked": (lambda place, _: revoke_gpu(place), RevokedError, ""),
    "plaintext": (lambda *_: None, PlaintextError, ""),
}


class TestFaultOfPeer:
    def test_valid_peer_has_no_diagnosis(self, place: Place) -> None:
        with grpc_server(place.home.files(Identity("mt", "a"))) as address:
            assert probe(address, place.npu, Identity("mt", "a")) is None
            assert probe(address, place.npu) is None

    @pytest.mark.parametrize("case", SERVER_CASES)
    def test_invalid_peer_certificate_gets_its_own_diagnosis(self, place: Place, tmp_path: Path, case: str) -> None:
        make, kind, words = SERVER_CASES[case]
        with grpc_server(make(place, tmp_path), place.home.folder / "ca.pem") as address:
            diagnosis = probe(address, place.npu, GPU)
        check_diagnosis(diagnosis, kind, "there")
        assert diagnosis is not None and words in diagnosis.error.what

    @pytest.mark.parametrize(
        ("serve", "kind"),
        [(answer_as_ssh, IdentityError), (lambda line: line.recv(1 << 16) and line.recv(1) and None, TransportError)],
        ids=["ssh", "nothing"],
    )
    def test_peer_without_tls_is_diagnosed(
        self, place: Place, serve: Callable[[socket.socket], None], kind: Any
    ) -> None:
        with line_server(serve) as address:
            check_diagnosis(probe(address, place.npu, GPU, timeout=0.2), kind, "there")

    def test_unreachable_peer_is_diagnosed(self, place: Place) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
        for address in (f"127.0.0.1:{port}", "no-such-host.invalid:1"):
            check_diagnosis(probe(address, place.npu, GPU), TransportError, "there")


class TestFaultOfThisProcess:
    def test_own_expired_certificate_is_reported_without_dialing(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = files.now()
        paths = place.home.one_day_files(GPU, now - 3 * DAY)
        with monkeypatch.context() as patch:
            patch.setattr(files, "now", lambda: now - 2.5 * DAY)
            credentials = Credentials.load(paths)
        check_diagnosis(probe("no-such-host.invalid:1", credentials), ExpiredError, "here")

    def test_own_revoked_certificate_is_reported_without_dialing(self, place: Place) -> None:
        credentials = place.home.credentials(Identity("mt", "d"))
        issue.revoke(place.home.folder, place.home.authority, [credentials.serial], "lost")
        check_diagnosis(probe("no-such-host.invalid:1", credentials), RevokedError, "here")

    def test_missing_own_credentials_are_reported_for_tls_peer(self, place: Place) -> None:
        with grpc_server(place.home.files(Identity("mt", "e"))) as address:
            check_diagnosis(probe(address, None), PlaintextError, "here")

    def test_silent_refusal_by_grpc_server_is_diagnosed(self, place: Place) -> None:
        """The server is trusted, but does not trust this process, and only closes the connection."""
        paths = place.home.files(Identity("mt", "f"))
        with grpc_server(paths, place.other.folder / "ca.pem") as address:
            diagnosis = probe(address, place.npu, Identity("mt", "f"))
        check_diagnosis(diagnosis, IdentityError, "here")
        assert "clock" in diagnosis.error.why
        assert "ca.pem" in diagnosis.error.why

    @pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
    def test_tls_alert_is_diagnosed_before_and_after_handshake(self, place: Place, version: ssl.TLSVersion) -> None:
        paths = Files.in_folder(place.home.folder, Identity("mt", "g"))
        paths = paths if paths.cert.exists() else place.home.files(Identity("mt", "g"))
        with line_server(make_tls_handler(paths, place.other.folder / "ca.pem", version)) as address:
            check_diagnosis(probe(address, place.npu), WrongAuthorityError, "here")
        with line_server(make_tls_handler(paths, paths.ca, version)) as address:
            assert probe(address, place.npu) is None


def test_diagnosis_kinds_and_error_codes_are_distinct() -> None:
    assert len(set(KINDS.values())) == len(KINDS)
    assert len({kind.code for kind in KINDS}) == len(KINDS)


class TestGrpcErrors:
    """A gRPC client gets the reason as an error; a gRPC server writes it to its log."""

    def call(self, address: str, credentials: Credentials, expected: Identity) -> str:
        secure = grpc.ssl_channel_credentials(credentials.ca_pem, credentials.key_pem, credentials.cert_pem)
        options = [("grpc.ssl_target_name_override", expected.dns)]
        with grpc.secure_channel(address, secure, options=options) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/x/y")(b"", timeout=5)
            return caught.value.details()

    def test_server_with_another_name_is_refused_by_grpc(self, place: Place) -> None:
        with grpc_server(place.home.files(Identity("mt", "h"))) as address:
            assert read_grpc_error(self.call(address, place.npu, Identity("mt", "h")), address) is None
            assert isinstance(read_grpc_error(self.call(address, place.npu, GPU), address), WrongNameError)

    def test_client_error_of_grpc_is_classified(self, place: Place, tmp_path: Path) -> None:
        now = files.now()
        bad = {
            ExpiredError: place.home.one_day_files(GPU, now - 3 * DAY),
            WrongAuthorityError: Home.at(tmp_path / "third").files(GPU),
            SelfSignedError: write_self_signed(tmp_path / "self", GPU),
        }
        for kind, paths in bad.items():
            with grpc_server(paths, place.home.folder / "ca.pem") as address:
                assert type(read_grpc_error(self.call(address, place.npu, GPU), address)) is kind

    def test_server_log_of_grpc_is_classified(self, place: Place, tmp_path: Path) -> None:
        now = files.now()
        good = place.home.files(Identity("mt", "i"))
        clients: dict[type[IdentityError], Files | bytes | None] = {
            NoCertificateError: None,
            PlaintextError: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            ExpiredError: place.home.one_day_files(GPU, now - 3 * DAY),
            WrongAuthorityError: place.other.files(Identity("mt", "i")),
            SelfSignedError: write_self_signed(tmp_path / "self", GPU),
        }
        with logging_server(good, tmp_path / "log") as address:
            for shown in clients.values():
                connect_with(address, shown)
        errors = [read_grpc_error(line, "a client") for line in (tmp_path / "log").read_text().splitlines()]
        assert [type(each) for each in errors if each] == list(clients)


SERVER_SCRIPT = """
import grpc, sys
from concurrent import futures
key, cert, ca = (open(path, "rb").read() for path in sys.argv[1:])
server = grpc.server(futures.ThreadPoolExecutor(1))
print(server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, cert)], ca, True)), flush=True)
server.start()
sys.stdin.read()
server.stop(None).wait(10)
"""


@contextlib.contextmanager
def logging_server(paths: Files, log: Path) -> Iterator[str]:
    """A gRPC server in a separate process that logs, which is disabled in the process of the tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    command = [sys.executable, "-c", SERVER_SCRIPT, str(paths.key), str(paths.cert), str(paths.ca)]
    with (
        open(log, "wb") as errors,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            yield f"127.0.0.1:{process.stdout.readline().strip()}"
            process.communicate(timeout=30)
        finally:
            process.kill()


def connect_with(address: str, shown: Files | bytes | None) -> None:
    """Connect with a certificate, with none, or with plaintext bytes, and wait until the server disconnects."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), 10) as line:
        if isinstance(shown, bytes):
            line.sendall(shown)
            line.recv(1)
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        if shown is not None:
            context.load_cert_chain(shown.cert, shown.key)
        with contextlib.suppress(OSError), context.wrap_socket(line) as secured:
            secured.recv(1)

"""One public port for links, logins and data, distinguished by the ClientHello; other connections are refused."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.datasets.conftest import Owner, certify, owner  # noqa: F401 - a fixture
from tests.unit.gateway import client_hellos
from tests.unit.gateway.client_hellos import INVALID_HELLOS, make_context, make_hello, split_record
from tests.unit.gateway.networks import (
    GPU,
    NPU,
    TIMEOUT_SECONDS,
    GatewayNetwork,
    issue_certificates,
    open_network,
    read_records,
    wait_until,
)
from tests.unit.gateway.test_process import kill_at_exit, read_listening_line
from tests.unit.transport.test_connection_limits import IdleConnections
from whale_nebula.accounts import passwords, server, service
from whale_nebula.accounts.login import LoginIssuer, LoginRequest
from whale_nebula.accounts.registry import PASSWORD, TOKEN
from whale_nebula.accounts.service import LoginClient
from whale_nebula.accounts.service import serve as serve_logins
from whale_nebula.cli.arguments import DONE, FAILED
from whale_nebula.cli.main import main
from whale_nebula.datasets.guard import Guard, Reader, Usage
from whale_nebula.datasets.reading import RowSelection, open_remote
from whale_nebula.datasets.service import serve as serve_data
from whale_nebula.errors import AccountError, LoginError, NebulaError, TransportError
from whale_nebula.gateway import front
from whale_nebula.gateway.front import MAX_HELLO_BYTES, read_hello
from whale_nebula.gateway.settings import GatewaySettings
from whale_nebula.launch.gateways import start_gateway
from whale_nebula.security import Credentials, Files, Identity
from whale_nebula.security.audit import AuditLog
from whale_nebula.transport.grpc import options
from whale_nebula.transport.grpc.limits import Limits
from whale_nebula.transport.grpc.listener import Listener
from whale_nebula.transport.handover import DATA, LOGIN, hand_over, is_served, receive_connections, socket_path

REFUSED_SAMPLE = {
    name: client_hellos.INVALID_HELLOS[name] for name in ("SSH", "a record for each byte")
} | client_hellos.UNSUPPORTED_HELLOS
"""A sample of refused first messages; `INVALID_HELLOS` has all invalid ones."""
PASSPHRASE = "a sentence to remember"
H2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@dataclass
class ServiceGateway:
    """A gateway with an owner's services for logins and data."""

    network: GatewayNetwork
    owner: Owner
    tmp: Path
    port: int

    @property
    def login(self) -> LoginClient:
        return LoginClient("127.0.0.1", self.port, (self.owner.home / "certs/ca.pem").read_bytes(), "mt", "gpu")

    def log_in(self, secret: str = PASSPHRASE) -> Any:
        return self.login.log_in(LoginRequest("ana", PASSWORD, secret, []))

    def read(self, count: int = 100) -> list[int]:
        folder = self.tmp / "of-ana"
        if not folder.exists():
            certify(self.owner, "ana", folder)
        remote = open_remote(f"127.0.0.1:{self.port}", folder, "mt", "gpu", Reader("", "", "r", "ab" * 32))
        about = remote.describe("corpus")
        return [
            int(age)
            for each in remote.read(RowSelection("corpus", None, 0, 0, count, 25), about)
            for age in each["age"]
        ]

    def dial(self, source: str = "127.0.0.1") -> socket.socket:
        line = socket.create_connection(("127.0.0.1", self.port), TIMEOUT_SECONDS, (source, 0))
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return line

    @contextlib.contextmanager
    def open_tls(self, *protocols: str, source: str = "127.0.0.1") -> Iterator[ssl.SSLSocket]:
        with self.dial(source) as line, make_context(*protocols).wrap_socket(line) as found:
            yield found

    def list_logins(self) -> list[dict[str, Any]]:
        return [each for each in self.owner.registry.list_events() if each["action"] == "login"]

    def has_refusal(self, text: str) -> bool:
        return any(
            each["action"] == "refuse" and text in each["reason"]
            for each in read_records(self.network.settings_by_cluster["gpu"])
        )


@pytest.fixture(scope="module")
def files() -> Iterator[dict[str, Files]]:
    with issue_certificates(GPU, NPU) as network:
        yield network


@pytest.fixture
def service_gateway(
    owner: Owner,  # noqa: F811
    tmp_path: Path,
    files: dict[str, Files],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[ServiceGateway]:
    monkeypatch.setattr(server, "_OPEN_RATE", 1000.0)
    monkeypatch.setattr(passwords, "_LOG_N", 4)  # cheap passwords
    monkeypatch.setattr(service, "_RATE", 0.0)
    monkeypatch.setattr(service, "_ALL_RATE", 1000.0)
    monkeypatch.setattr(front, "HELLO_SECONDS", 1.0)
    folder, identity = owner.home / "certs", Identity("mt", "gpu", "operator")
    owner.registry.set_password("ana", PASSPHRASE)
    owner.publish()
    owner.grant("ana")
    issuer = LoginIssuer(owner.registry, owner.signer, folder)
    with contextlib.ExitStack() as stack:
        usage = stack.enter_context(contextlib.closing(Usage(folder)))
        signer = Credentials.load(server.certify_service(issuer, identity))
        log = stack.enter_context(contextlib.closing(AuditLog(tmp_path / "data-gpu.jsonl", identity, signer)))
        stack.enter_context(serve_logins(issuer, "gpu", "127.0.0.1", 0, folder))
        stack.enter_context(serve_data(issuer, Guard(owner.grants, usage, log), "gpu", "127.0.0.1", 0, folder))
        network = stack.enter_context(open_network(tmp_path, files))
        network.start_gateways("gpu", services=folder)
        network.start_gateways("npu")
        yield ServiceGateway(
            network, owner, tmp_path, int(network.settings_by_cluster["gpu"].listen.rpartition(":")[2])
        )


def test_links_logins_and_data_share_one_port(service_gateway: ServiceGateway) -> None:
    service_gateway.network.start_workers()
    service_gateway.network.exchange_steps()
    assert service_gateway.log_in()["account"] == "ana" and service_gateway.read() == list(range(100))
    service_gateway.network.exchange_tensors(range(3), size=1 << 18)
    with pytest.raises(LoginError):
        service_gateway.log_in("guess")
    assert [(each["decision"], each["source"]) for each in service_gateway.list_logins()] == [
        ("allow", "127.0.0.1"), ("deny", "127.0.0.1")
    ]  # fmt: skip
    service_gateway.network.close_workers()
    service_gateway.network.gateways["gpu"].stop("the test is over")
    assert [
        each for each in read_records(service_gateway.network.settings_by_cluster["gpu"]) if each["action"] == "refuse"
    ] == []


# ---------------------------------------------------------------------- invalid connections and attacks
def test_unsupported_first_message_is_refused_and_recorded(service_gateway: ServiceGateway) -> None:
    for name, (data, words) in REFUSED_SAMPLE.items():
        with service_gateway.dial() as line:
            line.sendall(data)
            answer = line.recv(100)
            assert line.recv(100) == b"", name
        assert answer[:6] == bytes([21, 3, 3, 0, 2, 2]) and answer[6] in (50, 120), name
        wait_until(lambda words=words: service_gateway.has_refusal(words))
    assert service_gateway.log_in()["account"] == "ana"


def test_incomplete_client_hello_times_out(service_gateway: ServiceGateway) -> None:
    whole = make_hello(LOGIN)
    lines = [service_gateway.dial() for _ in range(3)]
    lines[0].sendall(whole[:100])
    lines[1].sendall(whole[:3])
    lines[1].shutdown(socket.SHUT_WR)
    for line in lines:  # the third one is silent, as a probe of the port
        with line:
            assert line.recv(100)[6:] in (b"", bytes([50]))
    wait_until(
        lambda: (
            service_gateway.has_refusal("incomplete TLS ClientHello")
            and service_gateway.has_refusal("ended within its TLS ClientHello")
        )
    )
    service_gateway.network.gateways["gpu"].journal._record_omitted()
    assert (
        sum(each["action"] == "refuse" for each in read_records(service_gateway.network.settings_by_cluster["gpu"]))
        == 2
    )


def test_client_hello_in_many_segments_is_accepted(service_gateway: ServiceGateway) -> None:
    client, incoming, outgoing = make_context(LOGIN), ssl.MemoryBIO(), ssl.MemoryBIO()
    found = client.wrap_bio(incoming, outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        found.do_handshake()
    with service_gateway.dial() as line:
        for byte in split_record(outgoing.read(), 5):
            line.send(bytes([byte]))
        for _ in range(10):
            incoming.write(line.recv(1 << 14))
            with contextlib.suppress(ssl.SSLWantReadError):
                found.do_handshake()
                break
    assert found.selected_alpn_protocol() == LOGIN


def test_link_frames_over_service_protocols_are_refused(service_gateway: ServiceGateway) -> None:
    with service_gateway.open_tls(LOGIN) as line:
        line.sendall(H2)
        assert b"505 - Cannot fulfill request" in line.recv(1000)
    # This service requires a certificate first.
    with (
        contextlib.suppress(OSError),
        service_gateway.open_tls(DATA) as line,
    ):
        line.sendall(H2)
        assert line.recv(1000) == b""
    assert service_gateway.list_logins() == [] and service_gateway.read(25) == list(range(25))


def test_login_over_the_link_protocol_is_refused(service_gateway: ServiceGateway) -> None:
    body = json.dumps({"account": "ana", "kind": "password", "secret": PASSPHRASE, "requests": []}).encode()
    login_request = f"POST /login HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    with contextlib.suppress(OSError), service_gateway.open_tls("h2") as line:
        line.sendall(login_request)
        assert line.recv(1000) == b""
    assert service_gateway.list_logins() == []


def test_replayed_login_is_refused(service_gateway: ServiceGateway) -> None:
    """Also with another protocol written into its first message."""
    recorded_parts: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def relay() -> None:
            with listening.accept()[0] as here, service_gateway.dial() as there:
                here.settimeout(TIMEOUT_SECONDS)

                def back() -> None:
                    with contextlib.suppress(OSError):
                        while part := there.recv(1 << 14):
                            here.sendall(part)

                thread = threading.Thread(target=back)
                thread.start()
                with contextlib.suppress(OSError):
                    while part := here.recv(1 << 14):
                        recorded_parts.append(part)
                        there.sendall(part)
                with contextlib.suppress(OSError):
                    there.shutdown(socket.SHUT_WR)
                thread.join(TIMEOUT_SECONDS)

        thread = threading.Thread(target=relay)
        thread.start()
        service_gateway.login._replace(port=listening.getsockname()[1]).log_in(
            LoginRequest("ana", PASSWORD, PASSPHRASE, [])
        )
        thread.join(TIMEOUT_SECONDS)
    assert len(service_gateway.list_logins()) == 1
    whole = b"".join(recorded_parts)
    for data in (whole, whole.replace(LOGIN.encode(), LOGIN.encode()[:-1] + b"9")):
        with service_gateway.dial() as line, contextlib.suppress(OSError):
            line.sendall(data)
            line.shutdown(socket.SHUT_WR)
            while line.recv(1 << 14):
                pass
    assert len(service_gateway.list_logins()) == 1


def test_login_misrouted_to_another_service_is_refused_by_the_client(service_gateway: ServiceGateway) -> None:
    """A dishonest gateway forwards a login to the data service, which has the same certificate."""
    settings = service_gateway.network.settings_by_cluster["gpu"]
    service_gateway.network.gateways["gpu"]._listener._front._services[LOGIN] = socket_path(
        settings.services, DATA, "gpu"
    )  # type: ignore
    with pytest.raises(AccountError) as caught:
        service_gateway.log_in()
    assert "is a different service of gpu" in str(caught.value) and service_gateway.list_logins() == []


# ---------------------------------------------------------------------- source addresses and limits
def guess_password(service_gateway: ServiceGateway, source: str) -> bytes:
    body = json.dumps({"account": "ana", "kind": "password", "secret": "guess", "requests": []}).encode()
    with service_gateway.open_tls(LOGIN, source=source) as line:
        line.sendall(f"POST /login HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        return line.recv(1000).split()[1]


def test_password_guesses_are_limited_by_source_address(service_gateway: ServiceGateway) -> None:
    """The service receives the address of the client that dialled the gateway."""
    found = [guess_password(service_gateway, "127.0.0.2") for _ in range(service._ADDRESS_BURST + 2)]
    assert found == [b"401"] * service._ADDRESS_BURST + [b"429"] * 2
    assert guess_password(service_gateway, "127.0.0.3") == b"401"
    assert [each["source"] for each in service_gateway.list_logins()] == ["127.0.0.2"] * service._ADDRESS_BURST + [
        "127.0.0.3"
    ]


@contextlib.contextmanager
def run_gateway(settings: GatewaySettings) -> Iterator[subprocess.Popen[bytes]]:
    process = start_gateway(settings)
    with kill_at_exit(process):
        yield process


COMMAND = (sys.executable, "-m", "whale_nebula.cli.main")


@contextlib.contextmanager
def run_service(kind: str, folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A service in a separate process."""
    words = [*COMMAND, kind, "serve", "--folder", str(folder), "--listen", "127.0.0.1:0", *more]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    with kill_at_exit(process):
        assert process.stderr is not None
        assert "whale-nebula: " in process.stderr.readline()
        yield process


@pytest.mark.parametrize(
    ("greeting", "source"),
    [pytest.param(make_hello(LOGIN)[:50], "127.0.0.1", marks=pytest.mark.grid), (make_hello("h2"), "127.0.0.9")],
    ids=["half", "of links"],
)
def test_idle_connections_do_not_block_logins_or_links(
    greeting: bytes,
    source: str,
    service_gateway: ServiceGateway,
    files: dict[str, Files],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They do not occupy threads either."""
    monkeypatch.setitem(Listener.__init__.__kwdefaults__, "limits", Limits(total=24, address=16))  # type: ignore
    folder, other_folder = service_gateway.owner.home / "certs", service_gateway.tmp / "apart"
    other_folder.mkdir()
    with run_service("accounts", folder, "--services", str(other_folder)), open_network(other_folder, files) as network:
        network.start_gateways("gpu", services=other_folder)
        port, before = int(network.settings_by_cluster["gpu"].listen.rpartition(":")[2]), threading.active_count()
        with IdleConnections(f"127.0.0.1:{port}", 40, source=source, greeting=greeting) as idle_connections:
            wait_until(lambda: idle_connections.closed > 20)
            assert threading.active_count() < before + 20  # of 40; the other gateways have some
            assert replace(service_gateway, port=port).log_in()["account"] == "ana"
            network.start_gateways("npu")
            network.start_workers()
            network.exchange_steps()
            network.exchange_tensors(range(2))
            network.close_workers()


def test_gateway_and_services_may_be_restarted_in_any_order(
    service_gateway: ServiceGateway, files: dict[str, Files], capsys: pytest.CaptureFixture[str]
) -> None:
    """With a config that contains only the gateway's port."""
    certs, other_folder = service_gateway.owner.home / "certs", service_gateway.tmp / "apart"
    other_folder.mkdir()
    with open_network(other_folder, files) as network, contextlib.ExitStack() as stack:
        settings = replace(network.settings_by_cluster["gpu"], services=other_folder)
        config = other_folder / "clusters.yaml"
        config.write_text(f'run: mt\nclusters: {{gpu: {{gateway: "{settings.listen}"}}, npu: {{}}}}\n')
        token, own = other_folder / "token", other_folder / "own"
        token.touch(0o600)
        token.write_text(service_gateway.owner.registry.make_secret("ana", TOKEN, 1))
        own.mkdir(0o700)
        (own / "ca.pem").write_bytes((certs / "ca.pem").read_bytes())
        words = ["login", "--cluster", "gpu", "--config", str(config), "--account", "ana", "--folder", str(own)]

        def log_in() -> None:
            assert main([*words, "--token-file", str(token)]) == DONE, capsys.readouterr().err

        def begin() -> subprocess.Popen[bytes]:
            process = stack.enter_context(run_gateway(settings))
            assert "logins and data are forwarded to the services in " in read_listening_line(process)
            return process

        gateway = begin()
        with run_service("accounts", certs, "--services", str(other_folder)) as accounts:
            log_in()
            accounts.kill()
            accounts.wait(TIMEOUT_SECONDS)
        assert main([*words, "--token-file", str(token)]) == FAILED
        assert "its owner starts it with: whale-nebula accounts serve" in capsys.readouterr().err
        with (
            run_service("accounts", certs, "--services", str(other_folder)) as accounts,
            run_service("data", certs, "--services", str(other_folder)) as data,
        ):
            gateway.kill()
            gateway.wait(TIMEOUT_SECONDS)
            gateway = begin()
            log_in()
            assert main(["data", "list", "--cluster", "gpu", "--at", settings.listen, "--folder", str(own)]) == DONE
            assert "corpus" in capsys.readouterr().out
            for process in (accounts, data, gateway):
                process.send_signal(signal.SIGTERM)
                assert process.wait(TIMEOUT_SECONDS) == DONE
        assert not [*other_folder.glob("*.sock")]


def test_connections_are_limited_by_open_files(
    service_gateway: ServiceGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = service_gateway.network.gateways["gpu"]
    public_port = gateway._listener._front
    assert isinstance(public_port, front.Front)
    assert public_port._max_connections <= options.find_max_connections(gateway._listener._connections)
    monkeypatch.setattr(public_port, "_max_connections", len(public_port._pipes) + 2)
    lines = [service_gateway.dial() for _ in range(5)]
    closed = 0
    for line in lines[2:]:
        with line:
            closed += line.recv(1) == b""
    assert closed == 3
    for line in lines[:2]:
        line.close()
    wait_until(lambda: not public_port._pending)
    assert service_gateway.log_in()["account"] == "ana"


# ---------------------------------------------------------------------- services that start and stop
def test_missing_service_is_reported(service_gateway: ServiceGateway, files: dict[str, Files], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with open_network(tmp_path / "empty", files) as network:
        network.start_gateways("gpu", services=tmp_path / "empty")
        other = ServiceGateway(
            network, service_gateway.owner, tmp_path, int(network.settings_by_cluster["gpu"].listen.rpartition(":")[2])
        )
        with pytest.raises(AccountError, match=r"the service for logins behind the gateway at .* is not running"):
            other.log_in()
        with pytest.raises(AccountError, match=r"the service for data behind the gateway at .* is not running"):
            other.read()
        wait_until(
            lambda: (
                other.has_refusal("no service for logins is running: No such file") and other.has_refusal("for data")
            )
        )
        public_port = network.gateways["gpu"]._listener._front
        public_port._services = {}  # type: ignore[union-attr]
        with pytest.raises(AccountError, match=r"the gateway at .* does not serve logins"):
            other.log_in()


class TestHandover:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        folder = tmp_path / ("long" * 30)
        folder.mkdir()
        return socket_path(folder, LOGIN, "gpu")

    def test_only_tcp_connections_are_passed_with_their_addresses(self, path: Path) -> None:
        taken: list[tuple[socket.socket, tuple[str, int]]] = []
        with receive_connections(path, lambda line, end: taken.append((line, end))):
            one, other = socket.socketpair()
            with one, other, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
                for wrong in (one, datagrams):
                    hand_over(wrong, path)
            with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listening:
                port = listening.getsockname()[1]
                with socket.create_connection(("127.0.0.1", port), TIMEOUT_SECONDS, ("127.0.0.7", 0)) as line:
                    here, _ = listening.accept()
                    with here:
                        hand_over(here, path)
                    wait_until(lambda: taken)
                    found, end = taken.pop()
                    with found:
                        assert end == line.getsockname()
                        found.sendall(b"hello")
                    assert line.recv(10) == b"hello"
        assert not taken and not path.exists()
        with pytest.raises(OSError, match="No such file"), socket.socket() as line:
            hand_over(line, path)

    def test_socket_serves_one_service_that_may_restart(self, path: Path) -> None:
        with receive_connections(path, lambda line, end: None):
            assert is_served(path)
            with pytest.raises(NebulaError, match="another service already listens"), receive_connections(path, print):
                pass
        path.touch()  # left by a service that was killed
        assert not is_served(path)
        with receive_connections(path, lambda line, end: None):
            assert is_served(path)

    def test_missing_folder_is_reported(self, tmp_path: Path) -> None:
        with (
            pytest.raises(NebulaError, match="the folder does not exist"),
            receive_connections(tmp_path / "x/y", print),
        ):
            pass


def test_port_in_use_is_reported(service_gateway: ServiceGateway, tmp_path: Path, files: dict[str, Files]) -> None:
    (tmp_path / "second").mkdir()
    with open_network(tmp_path / "second", files) as network, pytest.raises(TransportError, match="cannot listen on"):
        network.start_gateways(
            "gpu", services=tmp_path, listen=service_gateway.network.settings_by_cluster["gpu"].listen
        )


@pytest.mark.parametrize("newest_version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("protocols", [["h2"], ["nebula-login/1"], ["a", "b" * 255], []], ids=str)
def test_protocols_of_an_openssl_client_are_read(protocols: list[str], newest_version: ssl.TLSVersion) -> None:
    assert read_hello(make_hello(*protocols, newest_version=newest_version)) == tuple(protocols)


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_partial_client_hello_reports_the_missing_bytes(parts: int) -> None:
    """So that the message is not parsed again before that number has arrived."""
    data, requested_sizes = split_record(make_hello("h2"), parts), []
    size = 0
    while isinstance(found := read_hello(data[:size]), int):
        assert found > size
        requested_sizes.append(found)
        size = found
    assert (found, size, len(requested_sizes)) == (("h2",), len(data), 2 * parts)


@pytest.mark.parametrize("case", INVALID_HELLOS.values(), ids=INVALID_HELLOS)
def test_invalid_client_hello_is_refused(case: tuple[bytes, str]) -> None:
    data, words = case
    with pytest.raises(NebulaError) as caught:
        read_hello(data)
    assert words in f"{caught.value.what}: {caught.value.why}"


@given(st.binary(max_size=64), st.integers(0, 300), st.integers(0, 64), st.integers(1, 8))
def test_any_bytes_are_read_or_refused(more: bytes, at: int, size: int, parts: int) -> None:
    whole = make_hello("h2")
    for data in (more, split_record(whole[:at] + more + whole[at + size :], parts), bytes([22, 3, 1]) + more):
        with contextlib.suppress(NebulaError):
            found = read_hello(data)
            assert not isinstance(found, int) or len(data) < found <= MAX_HELLO_BYTES

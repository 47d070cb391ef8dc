"""One public port for links, logins and data, told apart by the first message of TLS; strangers are refused."""

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
from tests.unit.gateway import greetings
from tests.unit.gateway.greetings import REFUSED, context, cut, hello
from tests.unit.gateway.test_process import ended, listens
from tests.unit.gateway.town import GPU, NPU, SOON, Town, certificates, records, town, until
from tests.unit.transport.test_strangers import Strangers
from whale_nebula.accounts import passwords, server, service
from whale_nebula.accounts.login import Asked, Desk
from whale_nebula.accounts.registry import PASSWORD, TOKEN
from whale_nebula.accounts.service import Service
from whale_nebula.accounts.service import serve as serve_logins
from whale_nebula.cli.arguments import DONE, FAILED
from whale_nebula.cli.main import main
from whale_nebula.datasets.guard import Guard, Reader, Usage
from whale_nebula.datasets.reading import Wish, open_remote
from whale_nebula.datasets.service import serve as serve_data
from whale_nebula.errors import AccountError, LoginError, NebulaError, TransportError
from whale_nebula.gateway import front
from whale_nebula.gateway.front import MOST_BYTES, read_hello
from whale_nebula.gateway.site import Site
from whale_nebula.launch.gateways import start_gateway
from whale_nebula.security import Credentials, Files, Identity
from whale_nebula.security.audit import AuditLog
from whale_nebula.transport.grpc import options
from whale_nebula.transport.grpc.limits import Limits
from whale_nebula.transport.grpc.listener import Listener
from whale_nebula.transport.handover import DATA, LOGIN, hand_over, is_served, receive_connections, socket_path

STRANGE = {name: greetings.REFUSED[name] for name in ("SSH", "a record for each byte")} | greetings.UNSPOKEN
"""Some messages that are no ClientHello; `REFUSED` has all."""
GOOD = "a sentence to remember"
H2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@dataclass
class Place:
    """A gateway, and an owner's services behind it."""

    made: Town
    owner: Owner
    tmp: Path
    port: int

    @property
    def login(self) -> Service:
        return Service("127.0.0.1", self.port, (self.owner.home / "certs/ca.pem").read_bytes(), "mt", "gpu")

    def log_in(self, secret: str = GOOD) -> Any:
        return self.login.log_in(Asked("ana", PASSWORD, secret, []))

    def read(self, count: int = 100) -> list[int]:
        folder = self.tmp / "of-ana"
        if not folder.exists():
            certify(self.owner, "ana", folder)
        remote = open_remote(f"127.0.0.1:{self.port}", folder, "mt", "gpu", Reader("", "", "r", "ab" * 32))
        about = remote.describe("corpus")
        return [int(age) for each in remote.read(Wish("corpus", None, 0, 0, count, 25), about) for age in each["age"]]

    def dial(self, source: str = "127.0.0.1") -> socket.socket:
        line = socket.create_connection(("127.0.0.1", self.port), SOON, (source, 0))
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return line

    @contextlib.contextmanager
    def secured(self, *protocols: str, source: str = "127.0.0.1") -> Iterator[ssl.SSLSocket]:
        with self.dial(source) as line, context(*protocols).wrap_socket(line) as found:
            yield found

    def logins(self) -> list[dict[str, Any]]:
        return [each for each in self.owner.registry.list_events() if each["action"] == "login"]

    def refused(self, text: str) -> bool:
        return any(each["action"] == "refuse" and text in each["reason"] for each in records(self.made.sites["gpu"]))


@pytest.fixture(scope="module")
def files() -> Iterator[dict[str, Files]]:
    with certificates(GPU, NPU) as made:
        yield made


@pytest.fixture
def place(
    owner: Owner,  # noqa: F811
    tmp_path: Path,
    files: dict[str, Files],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Place]:
    monkeypatch.setattr(server, "_OPEN_RATE", 1000.0)
    monkeypatch.setattr(passwords, "_LOG_N", 4)  # how much work a password is, its own example says
    monkeypatch.setattr(service, "_RATE", 0.0)
    monkeypatch.setattr(service, "_ALL_RATE", 1000.0)
    monkeypatch.setattr(front, "HELLO_SECONDS", 1.0)
    folder, identity = owner.home / "certs", Identity("mt", "gpu", "operator")
    owner.registry.set_password("ana", GOOD)
    owner.publish()
    owner.grant("ana")
    desk = Desk(owner.registry, owner.signs, folder)
    with contextlib.ExitStack() as stack:
        usage = stack.enter_context(contextlib.closing(Usage(folder)))
        signer = Credentials.of(server.certify_service(desk, identity))
        log = stack.enter_context(contextlib.closing(AuditLog(tmp_path / "data-gpu.jsonl", identity, signer)))
        stack.enter_context(serve_logins(desk, "gpu", "127.0.0.1", 0, folder))
        stack.enter_context(serve_data(desk, Guard(owner.grants, usage, log), "gpu", "127.0.0.1", 0, folder))
        made = stack.enter_context(town(tmp_path, files))
        made.start("gpu", services=folder)
        made.start("npu")
        yield Place(made, owner, tmp_path, int(made.sites["gpu"].listen.rpartition(":")[2]))


def test_links_logins_and_data_come_in_at_one_port(place: Place) -> None:
    place.made.join()
    place.made.meet()
    assert place.log_in()["account"] == "ana" and place.read() == list(range(100))
    place.made.cross(range(3), size=1 << 18)
    with pytest.raises(LoginError):
        place.log_in("guess")
    assert [(each["decision"], each["source"]) for each in place.logins()] == [
        ("allow", "127.0.0.1"), ("deny", "127.0.0.1")
    ]  # fmt: skip
    place.made.leave()
    place.made.gateways["gpu"].stop("the test is over")
    assert [each for each in records(place.made.sites["gpu"]) if each["action"] == "refuse"] == []


# ---------------------------------------------------------------------- strangers and attackers
def test_what_nobody_speaks_here_is_refused_and_written_down(place: Place) -> None:
    for name, (data, said) in STRANGE.items():
        with place.dial() as line:
            line.sendall(data)
            answer = line.recv(100)
            assert line.recv(100) == b"", name
        assert answer[:6] == bytes([21, 3, 3, 0, 2, 2]) and answer[6] in (50, 120), name
        until(lambda said=said: place.refused(said))
    assert place.log_in()["account"] == "ana"


def test_half_a_message_ends_in_time(place: Place) -> None:
    whole = hello(LOGIN)
    lines = [place.dial() for _ in range(3)]
    lines[0].sendall(whole[:100])
    lines[1].sendall(whole[:3])
    lines[1].shutdown(socket.SHUT_WR)
    for line in lines:  # the third one is silent, as a probe that looks whether a port is open
        with line:
            assert line.recv(100)[6:] in (b"", bytes([50]))
    until(lambda: place.refused("incomplete TLS ClientHello") and place.refused("ended within its TLS ClientHello"))
    place.made.gateways["gpu"].journal._note_unwritten()
    assert sum(each["action"] == "refuse" for each in records(place.made.sites["gpu"])) == 2


def test_a_message_in_many_segments_is_one(place: Place) -> None:
    client, incoming, outgoing = context(LOGIN), ssl.MemoryBIO(), ssl.MemoryBIO()
    found = client.wrap_bio(incoming, outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        found.do_handshake()
    with place.dial() as line:
        for byte in cut(outgoing.read(), 5):
            line.send(bytes([byte]))
        for _ in range(10):
            incoming.write(line.recv(1 << 14))
            with contextlib.suppress(ssl.SSLWantReadError):
                found.do_handshake()
                break
    assert found.selected_alpn_protocol() == LOGIN


def test_links_frames_under_the_protocol_of_logins_reach_no_link(place: Place) -> None:
    with place.secured(LOGIN) as line:
        line.sendall(H2)
        assert b"505 - Cannot fulfill request" in line.recv(1000)
    with contextlib.suppress(OSError), place.secured(DATA) as line:  # it wants a certificate first
        line.sendall(H2)
        assert line.recv(1000) == b""
    assert place.logins() == [] and place.read(25) == list(range(25))


def test_a_login_under_the_protocol_of_links_reaches_no_registry(place: Place) -> None:
    body = json.dumps({"account": "ana", "kind": "password", "secret": GOOD, "requests": []}).encode()
    asked = f"POST /login HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    with contextlib.suppress(OSError), place.secured("h2") as line:
        line.sendall(asked)
        assert line.recv(1000) == b""
    assert place.logins() == []


def test_what_was_recorded_of_a_login_is_worth_nothing(place: Place) -> None:
    """Nor does it reach the service of data, whatever protocol is written over its first message."""
    said: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def relay() -> None:
            with listening.accept()[0] as here, place.dial() as there:
                here.settimeout(SOON)

                def back() -> None:
                    with contextlib.suppress(OSError):
                        while part := there.recv(1 << 14):
                            here.sendall(part)

                thread = threading.Thread(target=back)
                thread.start()
                with contextlib.suppress(OSError):
                    while part := here.recv(1 << 14):
                        said.append(part)
                        there.sendall(part)
                with contextlib.suppress(OSError):
                    there.shutdown(socket.SHUT_WR)
                thread.join(SOON)

        thread = threading.Thread(target=relay)
        thread.start()
        place.login._replace(port=listening.getsockname()[1]).log_in(Asked("ana", PASSWORD, GOOD, []))
        thread.join(SOON)
    assert len(place.logins()) == 1
    whole = b"".join(said)
    for data in (whole, whole.replace(LOGIN.encode(), LOGIN.encode()[:-1] + b"9")):
        with place.dial() as line, contextlib.suppress(OSError):
            line.sendall(data)
            line.shutdown(socket.SHUT_WR)
            while line.recv(1 << 14):
                pass
    assert len(place.logins()) == 1


def test_a_service_that_is_another_one_learns_nothing(place: Place) -> None:
    """Its certificate is the same, and it speaks another protocol: a gateway that lies sends a login there."""
    site = place.made.sites["gpu"]
    place.made.gateways["gpu"]._listener._front._services[LOGIN] = socket_path(site.services, DATA, "gpu")  # type: ignore
    with pytest.raises(AccountError) as refused:
        place.log_in()
    assert "is a different service of gpu" in str(refused.value) and place.logins() == []


# ---------------------------------------------------------------------- who it is, how many, how long
def guess(place: Place, source: str) -> bytes:
    body = json.dumps({"account": "ana", "kind": "password", "secret": "guess", "requests": []}).encode()
    with place.secured(LOGIN, source=source) as line:
        line.sendall(f"POST /login HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        return line.recv(1000).split()[1]


def test_who_guesses_waits_and_nobody_else(place: Place) -> None:
    """The service knows the address of who dialled the gateway."""
    found = [guess(place, "127.0.0.2") for _ in range(service._BURST + 2)]
    assert found == [b"401"] * service._BURST + [b"429"] * 2
    assert guess(place, "127.0.0.3") == b"401"
    assert [each["source"] for each in place.logins()] == ["127.0.0.2"] * service._BURST + ["127.0.0.3"]


@contextlib.contextmanager
def started(site: Site) -> Iterator[subprocess.Popen[bytes]]:
    process = start_gateway(site)
    with ended(process):
        yield process


COMMAND = (sys.executable, "-m", "whale_nebula.cli.main")


@contextlib.contextmanager
def serving(kind: str, folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A service in a process of its own."""
    words = [*COMMAND, kind, "serve", "--folder", str(folder), "--listen", "127.0.0.1:0", *more]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    with ended(process):
        assert process.stderr is not None
        assert "whale-nebula: " in process.stderr.readline()
        yield process


@pytest.mark.parametrize(
    ("greeting", "source"),
    [pytest.param(hello(LOGIN)[:50], "127.0.0.1", marks=pytest.mark.grid), (hello("h2"), "127.0.0.9")],
    ids=["half", "of links"],
)
def test_strangers_keep_nobody_out(
    greeting: bytes, source: str, place: Place, files: dict[str, Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do they have threads here."""
    monkeypatch.setitem(Listener.__init__.__kwdefaults__, "limits", Limits(total=24, address=16))  # type: ignore
    folder, apart = place.owner.home / "certs", place.tmp / "apart"
    apart.mkdir()
    with serving("accounts", folder, "--services", str(apart)), town(apart, files) as made:
        made.start("gpu", services=apart)
        port, before = int(made.sites["gpu"].listen.rpartition(":")[2]), threading.active_count()
        with Strangers(f"127.0.0.1:{port}", 40, source=source, greeting=greeting) as crowd:
            until(lambda: crowd.closed > 20)
            assert threading.active_count() < before + 20  # of 40; the other gateways have some
            assert replace(place, port=port).log_in()["account"] == "ana"
            made.start("npu")
            made.join()
            made.meet()
            made.cross(range(2))
            made.leave()


def test_commands_that_are_ended_and_started_again(
    place: Place, files: dict[str, Files], capsys: pytest.CaptureFixture[str]
) -> None:
    """In any order, and with a config that names no other port than that of the gateway."""
    certs, apart = place.owner.home / "certs", place.tmp / "apart"
    apart.mkdir()
    with town(apart, files) as made, contextlib.ExitStack() as stack:
        site = replace(made.sites["gpu"], services=apart)
        config = apart / "clusters.yaml"
        config.write_text(f'run: mt\nclusters: {{gpu: {{gateway: "{site.listen}"}}, npu: {{}}}}\n')
        token, own = apart / "token", apart / "own"
        token.touch(0o600)
        token.write_text(place.owner.registry.make_secret("ana", TOKEN, 1))
        own.mkdir(0o700)
        (own / "ca.pem").write_bytes((certs / "ca.pem").read_bytes())
        words = ["login", "--cluster", "gpu", "--config", str(config), "--account", "ana", "--folder", str(own)]

        def log_in() -> None:
            assert main([*words, "--token-file", str(token)]) == DONE, capsys.readouterr().err

        def begin() -> subprocess.Popen[bytes]:
            process = stack.enter_context(started(site))
            assert "logins and data are forwarded to the services in " in listens(process)
            return process

        gateway = begin()
        with serving("accounts", certs, "--services", str(apart)) as accounts:
            log_in()
            accounts.kill()
            accounts.wait(SOON)
        assert main([*words, "--token-file", str(token)]) == FAILED
        assert "its owner starts it with: whale-nebula accounts serve" in capsys.readouterr().err
        with (
            serving("accounts", certs, "--services", str(apart)) as accounts,
            serving("data", certs, "--services", str(apart)) as data,
        ):
            gateway.kill()
            gateway.wait(SOON)
            gateway = begin()
            log_in()
            assert main(["data", "list", "--cluster", "gpu", "--at", site.listen, "--folder", str(own)]) == DONE
            assert "corpus" in capsys.readouterr().out
            for process in (accounts, data, gateway):
                process.send_signal(signal.SIGTERM)
                assert process.wait(SOON) == DONE
        assert not [*apart.glob("*.sock")]


def test_no_more_connections_than_there_are_files(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = place.made.gateways["gpu"]
    held = gateway._listener._front
    assert isinstance(held, front.Front)
    assert held._most <= options.most_connections(gateway._listener._connections)
    monkeypatch.setattr(held, "_most", len(held._pipes) + 2)
    lines = [place.dial() for _ in range(5)]
    closed = 0
    for line in lines[2:]:
        with line:
            closed += line.recv(1) == b""
    assert closed == 3
    for line in lines[:2]:
        line.close()
    until(lambda: not held._guests)
    assert place.log_in()["account"] == "ana"


# ---------------------------------------------------------------------- services that come and go
def test_without_services_it_is_said(place: Place, files: dict[str, Files], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with town(tmp_path / "empty", files) as made:
        made.start("gpu", services=tmp_path / "empty")
        other = Place(made, place.owner, tmp_path, int(made.sites["gpu"].listen.rpartition(":")[2]))
        with pytest.raises(AccountError, match=r"the service of logins behind the gateway at .* is not running"):
            other.log_in()
        with pytest.raises(AccountError, match=r"the service of data behind the gateway at .* is not running"):
            other.read()
        until(lambda: other.refused("no service for logins is running: No such file") and other.refused("for data"))
        held = made.gateways["gpu"]._listener._front
        held._services = {}  # type: ignore[union-attr]
        with pytest.raises(AccountError, match=r"the gateway at .* has no logins behind it"):
            other.log_in()


class TestAHandover:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        folder = tmp_path / ("long" * 30)
        folder.mkdir()
        return socket_path(folder, LOGIN, "gpu")

    def test_takes_connections_with_their_addresses_and_nothing_else(self, path: Path) -> None:
        taken: list[tuple[socket.socket, tuple[str, int]]] = []
        with receive_connections(path, lambda line, end: taken.append((line, end))):
            one, other = socket.socketpair()
            with one, other, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
                for wrong in (one, datagrams):
                    hand_over(wrong, path)
            with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listening:
                port = listening.getsockname()[1]
                with socket.create_connection(("127.0.0.1", port), SOON, ("127.0.0.7", 0)) as line:
                    here, _ = listening.accept()
                    with here:
                        hand_over(here, path)
                    until(lambda: taken)
                    found, end = taken.pop()
                    with found:
                        assert end == line.getsockname()
                        found.sendall(b"hello")
                    assert line.recv(10) == b"hello"
        assert not taken and not path.exists()
        with pytest.raises(OSError, match="No such file"), socket.socket() as line:
            hand_over(line, path)

    def test_is_to_one_service_which_may_be_started_again(self, path: Path) -> None:
        with receive_connections(path, lambda line, end: None):
            assert is_served(path)
            with pytest.raises(NebulaError, match="another service already listens"), receive_connections(path, print):
                pass
        path.touch()  # left by a service that was killed
        assert not is_served(path)
        with receive_connections(path, lambda line, end: None):
            assert is_served(path)

    def test_without_a_folder_there_is_none(self, tmp_path: Path) -> None:
        with (
            pytest.raises(NebulaError, match="the folder does not exist"),
            receive_connections(tmp_path / "x/y", print),
        ):
            pass


def test_a_port_that_is_taken_is_told(place: Place, tmp_path: Path, files: dict[str, Files]) -> None:
    (tmp_path / "second").mkdir()
    with town(tmp_path / "second", files) as made, pytest.raises(TransportError, match="cannot listen on"):
        made.start("gpu", services=tmp_path, listen=place.made.sites["gpu"].listen)


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("protocols", [["h2"], ["nebula-login/1"], ["a", "b" * 255], []], ids=str)
def test_the_protocols_of_a_client_of_openssl(protocols: list[str], newest: ssl.TLSVersion) -> None:
    assert read_hello(hello(*protocols, newest=newest)) == tuple(protocols)


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_of_a_part_it_is_said_how_much_is_missing(parts: int) -> None:
    """So that nothing need be looked at again before that has come."""
    data, asked = cut(hello("h2"), parts), []
    size = 0
    while isinstance(found := read_hello(data[:size]), int):
        assert found > size
        asked.append(found)
        size = found
    assert (found, size, len(asked)) == (("h2",), len(data), 2 * parts)


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_is_no_first_message_is_an_error(case: tuple[bytes, str]) -> None:
    data, said = case
    with pytest.raises(NebulaError) as refused:
        read_hello(data)
    assert said in f"{refused.value.what}: {refused.value.why}"


@given(st.binary(max_size=64), st.integers(0, 300), st.integers(0, 64), st.integers(1, 8))
def test_any_bytes_are_read_or_refused(more: bytes, at: int, size: int, parts: int) -> None:
    whole = hello("h2")
    for data in (more, cut(whole[:at] + more + whole[at + size :], parts), bytes([22, 3, 1]) + more):
        with contextlib.suppress(NebulaError):
            found = read_hello(data)
            assert not isinstance(found, int) or len(data) < found <= MOST_BYTES

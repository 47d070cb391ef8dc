"""The credentials in gRPC's hands: both ends know each other, and a renewed certificate is shown to the next caller."""

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from tests.unit.security.made import GPU, NPU, Home
from whale_nebula.errors import RevokedError
from whale_nebula.security import CurrentCredentials, Files, issue


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.at(tmp_path / "certs")


@pytest.fixture
def server(home: Home) -> Iterator[tuple[CurrentCredentials, str]]:
    """One that answers with the name in its caller's certificate, and takes up renewed certificates."""
    current = CurrentCredentials(home.credentials(GPU))

    def shown() -> grpc.ServerCertificateConfiguration:
        held = current()
        return grpc.ssl_server_certificate_configuration([(held.key_pem, held.cert_pem)], held.ca_pem)

    def who(request: bytes, context: grpc.ServicerContext) -> bytes:
        pem = context.auth_context()["x509_pem_cert"][0]
        return current().trust.check(pem).identity.uri.encode()

    made = grpc.server(futures.ThreadPoolExecutor(1))
    handler = grpc.method_handlers_generic_handler("x", {"who": grpc.unary_unary_rpc_method_handler(who)})
    made.add_generic_rpc_handlers((handler,))
    secure = grpc.dynamic_ssl_server_credentials(shown(), shown, require_client_authentication=True)
    port = made.add_secure_port("127.0.0.1:0", secure)
    made.start()
    yield current, f"127.0.0.1:{port}"
    made.stop(None).wait(10)


def call(home: Home, address: str) -> str:
    """Who the server says that npu/0 is."""
    files = Files.under(home.folder, NPU)
    secure = grpc.ssl_channel_credentials(files.ca.read_bytes(), files.key.read_bytes(), files.cert.read_bytes())
    options = [("grpc.ssl_target_name_override", GPU.dns), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(address, secure, options=options) as channel:
        return channel.unary_unary("/x/who")(b"", timeout=10).decode()


def test_a_server_knows_its_caller_by_his_certificate(home: Home, server: tuple[CurrentCredentials, str]) -> None:
    home.files(NPU)
    assert call(home, server[1]) == NPU.uri


def test_renewed_certificates_are_taken_up_on_both_sides(home: Home, server: tuple[CurrentCredentials, str]) -> None:
    current, address = server
    home.files(NPU)
    shown = set()
    for _ in range(3):
        issue.renew(home.folder, home.authority, [GPU, NPU])
        assert call(home, address) == NPU.uri
        shown.add(current().serial)
    assert len(shown) == 3


def test_tls_lets_a_revoked_one_in_and_the_handler_does_not(home: Home, server: tuple[CurrentCredentials, str]) -> None:
    held = home.credentials(NPU)
    assert call(home, server[1]) == NPU.uri
    issue.revoke(home.folder, home.authority, [held.serial], "lost")
    with pytest.raises(grpc.RpcError) as told:
        call(home, server[1])
    assert RevokedError.code in told.value.details()

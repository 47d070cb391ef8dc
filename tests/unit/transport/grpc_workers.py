"""Helpers of tests of links over gRPC: certificates, pairs of workers, and a TCP proxy between them."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from tests.unit.transport.link_pairs import (  # the later name dials
    GPU,
    NPU,
    TIMEOUT_SECONDS,
    build_step_message,
    close_all,
)
from whale_nebula.launch.placement import free_port
from whale_nebula.security import Credentials, Files, Identity, files
from whale_nebula.security.allowance import Allowance
from whale_nebula.security.authority import Authority, create, encode_certificate, make_process_certificate
from whale_nebula.security.issue import issue
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.grpc.links import GrpcLinks, Place
from whale_nebula.transport.peer import PeerLink

RUN = "mt"
SHORT_DEADLINES = Deadlines(
    patience=TIMEOUT_SECONDS, silence=TIMEOUT_SECONDS, grace=2.0, connect=5.0, check_interval=0.02
)


class Certificates:
    """An authority in a folder, which issues certificates."""

    def __init__(self, folder: Path, run: str = RUN) -> None:
        self.folder, self.run = folder, run
        self.authority = Authority.create(run, {})
        create(folder, self.authority)

    def identity(self, worker: str) -> Identity:
        return Identity.of_worker(self.run, worker)

    def issue(self, *open_workers: str, days: float = 1.0) -> None:
        issue(self.folder, self.authority, [self.identity(worker) for worker in open_workers], days)

    def issue_to_account(self, worker: str, account: str, allowance: Allowance) -> None:
        """Issue a certificate of an account for a worker's key."""
        paths, now, signs = Files.in_folder(self.folder, self.identity(worker)), files.now(), self.authority
        key = files.parse_private_key(paths.key.read_bytes(), "").public_key()
        until = now + timedelta(days=1)
        certificate = make_process_certificate(
            self.identity(worker), key, signs.certificate, signs.key, until, now, account, allowance
        )
        files.write(paths.cert, encode_certificate(certificate), files.PUBLIC)

    def of(self, worker: str) -> Credentials:
        return Credentials.load(Files.in_folder(self.folder, self.identity(worker)))


def find_free_address() -> str:
    return f"127.0.0.1:{free_port()}"


class TcpProxy:
    """A proxy of a TCP address whose connections can be broken or blackholed."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.is_forwarding = True
        self.connection_count = 0
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def disconnect(self) -> None:
        """Break the open connections."""
        with self._lock:
            broken, self._open = self._open, set()
        for each in broken:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.disconnect()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                self.connection_count += 1
                threading.Thread(target=self._carry, args=(near,), name="proxy", daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(self._target) as far:
            with self._lock:
                self._open |= {near, far}
            other = {near: far, far: near}
            while True:
                for each in select.select([near, far], [], [])[0]:
                    data = each.recv(1 << 16)
                    if not data:
                        return
                    if self.is_forwarding:
                        other[each].sendall(data)


class WorkerPair:
    """Two workers with links over gRPC; `npu` dials `gpu` through a proxy if requested."""

    def __init__(
        self,
        certificates: Certificates | None,
        *,
        proxy: bool = False,
        deadlines: Deadlines = SHORT_DEADLINES,
        listen_npu: bool = True,
        **options: object,
    ) -> None:
        credentials = {name: certificates.of(name) if certificates else None for name in (GPU, NPU)}
        npu = find_free_address() if listen_npu else None
        self.gpu_links = GrpcLinks(
            Place(RUN, GPU, {NPU: npu}, "127.0.0.1:0", credentials=credentials[GPU]), deadlines=deadlines, **options
        )
        address = str(self.gpu_links.address)
        self.proxy = TcpProxy(address) if proxy else None
        self.npu_links = GrpcLinks(
            Place(RUN, NPU, {GPU: self.proxy.address if self.proxy else address}, npu, credentials=credentials[NPU]),
            deadlines=deadlines,
            **options,
        )

    @property
    def gpu(self) -> PeerLink:
        return self.gpu_links.links[NPU]

    @property
    def npu(self) -> PeerLink:
        return self.npu_links.links[GPU]

    def exchange_steps(self) -> None:
        """Let both send HELLO and announce step 0."""
        for link in (self.gpu, self.npu):
            link.post({"kind": "SESSION", "about": "HELLO"})
            link.post(build_step_message())
        for link in (self.gpu, self.npu):
            for _ in range(2):
                link.take("SESSION", TIMEOUT_SECONDS)

    def close(self) -> None:
        close_all(self.gpu_links, self.npu_links)
        if self.proxy:
            self.proxy.close()


@contextlib.contextmanager
def open_workers(certificates: Certificates | None, **options: object) -> Iterator[WorkerPair]:
    """Two workers, closed at the end."""
    pair = WorkerPair(certificates, **options)
    try:
        yield pair
    finally:
        pair.close()

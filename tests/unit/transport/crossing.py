"""Helpers of tests of links over gRPC: certificates, pairs of workers, and a line between them that can be cut."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from tests.unit.transport.cable import GPU, NPU, SOON, close_all, step  # the later name dials
from whale_nebula.launch.placement import free_port
from whale_nebula.security import Credentials, Files, Identity, files
from whale_nebula.security.allowance import Allowance
from whale_nebula.security.authority import Authority, certificate_bytes, create, process_certificate
from whale_nebula.security.issue import issue
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.grpc.links import GrpcLinks, Place
from whale_nebula.transport.peer import PeerLink

RUN = "mt"
QUICK = Deadlines(patience=SOON, silence=SOON, grace=2.0, connect=5.0, look=0.02)


class Certificates:
    """An authority in a folder, and what it issues."""

    def __init__(self, folder: Path, run: str = RUN) -> None:
        self.folder, self.run = folder, run
        self.authority = Authority.create(run, {})
        create(folder, self.authority)

    def identity(self, worker: str) -> Identity:
        return Identity.of_worker(self.run, worker)

    def issue(self, *workers: str, days: float = 1.0) -> None:
        issue(self.folder, self.authority, [self.identity(worker) for worker in workers], days)

    def certify(self, worker: str, account: str, allowance: Allowance) -> None:
        """A certificate of an account, for the key that a worker has."""
        paths, now, signs = Files.in_folder(self.folder, self.identity(worker)), files.now(), self.authority
        key = files.private_key(paths.key.read_bytes(), "").public_key()
        until = now + timedelta(days=1)
        made = process_certificate(
            self.identity(worker), key, signs.certificate, signs.key, until, now, account, allowance
        )
        files.write(paths.cert, certificate_bytes(made), files.PUBLIC)

    def of(self, worker: str) -> Credentials:
        return Credentials.load(Files.in_folder(self.folder, self.identity(worker)))


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


class Line:
    """TCP to an address, through a port of its own that can be cut, blackholed and opened again."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.passes = True
        self.dialled = 0
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="line", daemon=True).start()

    def cut(self) -> None:
        """Break what is open."""
        with self._lock:
            broken, self._open = self._open, set()
        for each in broken:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                self.dialled += 1
                threading.Thread(target=self._carry, args=(near,), name="line", daemon=True).start()

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
                    if self.passes:
                        other[each].sendall(data)


class Workers:
    """Two workers with links over gRPC; `npu` dials `gpu` over a line, if there is one."""

    def __init__(
        self,
        certificates: Certificates | None,
        *,
        line: bool = False,
        deadlines: Deadlines = QUICK,
        listen_npu: bool = True,
        **options: object,
    ) -> None:
        credentials = {name: certificates.of(name) if certificates else None for name in (GPU, NPU)}
        npu = free_address() if listen_npu else None
        self.gpu_links = GrpcLinks(
            Place(RUN, GPU, {NPU: npu}, "127.0.0.1:0", credentials=credentials[GPU]), deadlines=deadlines, **options
        )
        address = str(self.gpu_links.address)
        self.line = Line(address) if line else None
        self.npu_links = GrpcLinks(
            Place(RUN, NPU, {GPU: self.line.address if self.line else address}, npu, credentials=credentials[NPU]),
            deadlines=deadlines,
            **options,
        )

    @property
    def gpu(self) -> PeerLink:
        return self.gpu_links.links[NPU]

    @property
    def npu(self) -> PeerLink:
        return self.npu_links.links[GPU]

    def meet(self) -> None:
        """Both say HELLO, and announce step 0."""
        for link in (self.gpu, self.npu):
            link.post({"kind": "SESSION", "about": "HELLO"})
            link.post(step())
        for link in (self.gpu, self.npu):
            for _ in range(2):
                link.take("SESSION", SOON)

    def close(self) -> None:
        close_all(self.gpu_links, self.npu_links)
        if self.line:
            self.line.close()


@contextlib.contextmanager
def workers(certificates: Certificates | None, **options: object) -> Iterator[Workers]:
    """Two workers, closed at the end."""
    made = Workers(certificates, **options)
    try:
        yield made
    finally:
        made.close()

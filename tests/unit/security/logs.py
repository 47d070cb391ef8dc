"""Write and read audit logs for the tests of this folder."""

import json
import os
from pathlib import Path

from tests.unit.security.authorities import GATE, RUN
from whale_nebula.security import Credentials
from whale_nebula.security.audit import AuditLog, Head


def write(path: Path, signer: Credentials | None, count: int = 250, *, close: bool = True, **options) -> list[Head]:
    heads: list[Head] = []
    log = AuditLog(path, signer.identity if signer else GATE, signer, on_head=heads.append, **options)
    for number in range(count):
        log.record("relay", actor=f"nebula://{RUN}/gpu/worker/0", target=f"npu/{number}", durable=False)
    log.close() if close else abandon(log)
    return heads


def abandon(log: AuditLog) -> None:
    """Close the file as a crash does, without an end record."""
    os.close(log._file)
    log._file = -1


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def read_lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()

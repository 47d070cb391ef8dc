"""Resource limits of accounts. The owner sets them; the account's signed certificates contain them, so that hosts
without a registry apply them too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from cryptography.x509 import ObjectIdentifier

from whale_nebula.security.chain import encode_canonical

ALLOWANCE_OID = ObjectIdentifier("2.25.216046748900487350867445607681924750072")
"""The certificate extension that holds the allowance."""
BYTE_LIMITS = ("memory", "disk", "line")
"""The limits that are bytes."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """Resource limits of an account, None for no limit: on each host `memory` in bytes, `cpus`, `processes` with their
    threads, and bytes on `disk`, of all its workers there together; and bytes a day over the `line`, by all its workers
    behind a gateway together.

    >>> some = Allowance(memory=4 << 30, cpus=1.5)
    >>> some.encode()
    b'{"cpus":1.5,"memory":4294967296}'
    >>> Allowance.decode(some.encode()) == some, str(some), bool(Allowance())
    (True, 'memory 4 GiB, cpus 1.5', False)
    """

    memory: int | None = None
    cpus: float | None = None
    processes: int | None = None
    disk: int | None = None
    line: int | None = None

    @property
    def limits(self) -> dict[str, int | float]:
        """The limits that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __bool__(self) -> bool:
        return bool(self.limits)

    def __str__(self) -> str:
        words = (
            f"{name} {format_bytes(value) if name in BYTE_LIMITS else f'{value:g}'}"
            for name, value in self.limits.items()
        )
        return ", ".join(words) + " a day" * (self.line is not None)

    def encode(self) -> bytes:
        """The text form in registries and certificates."""
        return encode_canonical(self.limits)

    @classmethod
    def decode(cls, data: bytes | str) -> Allowance:
        """Parse the output of `encode`; anything else is a `ValueError`, as an unknown limit must not be ignored."""
        content = json.loads(data)
        if not isinstance(content, Mapping) or not content.keys() <= set(cls.__slots__):
            raise ValueError("unknown names of limits")
        for name, value in content.items():
            right = type(value) is int or (name == "cpus" and type(value) is float and math.isfinite(value))
            if not right or value <= 0:
                raise ValueError(f"{value!r} is not a valid limit of {name}")
        return cls(**content)


UNLIMITED = Allowance()


def format_bytes(count: float) -> str:
    """A number of bytes as text.

    >>> format_bytes(1536), format_bytes(20 << 30), format_bytes(999)
    ('1.5 KiB', '20 GiB', '999 bytes')
    """
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.3g} {unit}"
    return f"{count:g} bytes"

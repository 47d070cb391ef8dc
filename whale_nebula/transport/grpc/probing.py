"""Whether anything listens at an address: what gRPC's errors leave open, plain TCP tells."""

from __future__ import annotations

import socket
from typing import Literal, NamedTuple, TypeAlias

Found: TypeAlias = Literal["open", "refused", "silent", "unknown"]


class Probe(NamedTuple):
    """What was found at an address. `unknown`: its name does not resolve, or there is no way to it."""

    found: Found
    why: str


def probe(address: str, seconds: float) -> Probe:
    """Connect to an address once and leave at once."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except ConnectionRefusedError:
        return Probe("refused", f"nothing listens at {address}")
    except TimeoutError:
        return Probe("silent", f"{address} does not answer")
    except OSError as error:
        return Probe("unknown", f"{address}: {error.strerror or error}")
    return Probe("open", "")

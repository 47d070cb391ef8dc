"""The metadata of a new stream: its run, the caller's identity, and the identity called."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from whale_nebula.errors import IdentityError, RemoteProtocolError
from whale_nebula.security import Identity, Peer, Prover, files
from whale_nebula.security.chain import canonical

METHOD = "/nebula.Wire/Talk"
VERSION = 1
LANES = "nebula-lanes"
TROUBLE = "nebula-trouble"
"""What the answer to a knock says, too, if it is known: why nobody beyond can be reached just now."""
LANES_AT_MOST = 16
"""Lanes of one connection."""
_PREFIX = "nebula-"
_LONGEST = 200
_CONNECTION = re.compile(r"[0-9a-f]{16}")


class Knock(NamedTuple):
    """The metadata of a stream. `connection` is drawn anew for each attempt; its lanes share it.

    >>> knock = Knock("mt", "npu/0", "gpu/0", "00112233aabbccdd", lane=1)
    >>> Knock.read(knock.metadata()) == knock
    True
    """

    run: str
    source: str
    destination: str
    connection: str
    lane: int = 0

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """As gRPC sends it."""
        words = {**self._asdict(), "version": VERSION}
        return tuple((_PREFIX + key, quote(str(value), safe="/")) for key, value in words.items())

    @classmethod
    def read(cls, metadata: Iterable[tuple[str, str | bytes]]) -> Knock:
        """What somebody sent, checked; anything else is his mistake."""
        said = {str(key).removeprefix(_PREFIX): value for key, value in metadata if str(key).startswith(_PREFIX)}
        text = {key: unquote(value) for key, value in said.items() if isinstance(value, str)}
        if text.get("version") != str(VERSION):
            raise RemoteProtocolError(
                f"a stream of another version of this protocol: {text.get('version', 'none')!r:.20}",
                why=f"this side speaks version {VERSION}",
            )
        run, source, destination = (_name(text, each) for each in ("run", "source", "destination"))
        return cls(run, source, destination, _connection(text), _lane(text))


def _name(text: dict[str, str], key: str) -> str:
    name = text.get(key, "")
    if not 0 < len(name) <= _LONGEST or not name.isprintable():
        raise RemoteProtocolError(f"a stream without a proper {key}")
    return name


def _connection(text: dict[str, str]) -> str:
    name = text.get("connection", "")
    if not _CONNECTION.fullmatch(name):
        raise RemoteProtocolError("a stream without a proper connection number")
    return name


def _lane(text: dict[str, str]) -> int:
    lane = text.get("lane", "")
    if lane not in {str(number) for number in range(LANES_AT_MOST)}:
        raise RemoteProtocolError("a stream with a lane that cannot be")
    return int(lane)


CERTIFICATE, SIGNATURE = "nebula-certificate-bin", "nebula-signature-bin"
"""The metadata of the answer to a knock; keys that end in "-bin" hold bytes."""
Metadata = tuple[tuple[str, bytes], ...]
_LABEL = b"whale_nebula stream 1\0"


def prove_identity(prover: Prover, knock: Knock, here: Identity) -> Metadata:
    """The proof of the dialled side, as metadata of its answer."""
    credentials = prover.credentials
    return ((CERTIFICATE, credentials.cert_pem), (SIGNATURE, prover.sign(_transcript(knock, here))))


def check_proof(prover: Prover, knock: Knock, answer: Mapping[str, Any], there: Identity) -> Peer:
    """The certificate that the dialled side has proven to hold; raises an `IdentityError` if it is not good."""
    certificate, signature = answer.get(CERTIFICATE), answer.get(SIGNATURE)
    if not isinstance(certificate, bytes) or not isinstance(signature, bytes):
        raise IdentityError(
            f"{there.worker} does not prove who it is",
            why="its answer holds no certificate and no signature",
            mend="install the same release of whale_nebula in every cluster",
        )
    text = certificate.decode("ascii", "replace")
    prover.verify(text, signature, _transcript(knock, there), there.worker)
    return files.peer(files.certificate(certificate, f"what {there.worker} sent"))


def _transcript(knock: Knock, signer: Identity) -> bytes:
    return _LABEL + canonical({**knock._asdict(), "signer": signer.uri})

"""Proof of identity by the side of a stream that was dialled: its certificate, and a signature over the knock.

TLS shows a server the certificate of its client. gRPC shows a client nothing of its server's, only that one with the
right name was there. The proof makes that certificate known, so that its dates and the deny list can be checked while
the stream stands. The number of the connection, which the dialling side draws anew, makes each proof good once only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whale_nebula.errors import IdentityError
from whale_nebula.security import Identity, Peer, Prover, reading
from whale_nebula.security.chain import canonical
from whale_nebula.transport.grpc.knock import Knock

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
    return reading.peer(reading.certificate(certificate, f"what {there.worker} sent"))


def _transcript(knock: Knock, signer: Identity) -> bytes:
    return _LABEL + canonical({**knock._asdict(), "signer": signer.uri})

"""End-to-end encryption of payloads between two workers: AES-256-GCM, with keys from X25519.

Both send the public half of an exchange in their greeting and sign it there; from both halves comes one key for each
direction. A frame's number is its nonce, and a frame that is sent again is the same bytes: so no nonce ever sees two
texts. The header is not secret, but bound: a chunk opens only under the header that it was sealed under.
"""

from __future__ import annotations

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from whale_nebula.errors import DamagedFrameError, RemoteProtocolError
from whale_nebula.wire.frame import TAG_BYTES, Flag, Header, open_header, sealed_header_bytes
from whale_nebula.wire.tensor import Bytes

_KEY_BYTES = 32
_INFO = b"whale_nebula sealed frames 1"


class Exchange:
    """One side's half of a key exchange; a new one for each conversation."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def agree(self, theirs: bytes, salt: bytes) -> bytes:
        """The secret of both, as key material for both directions.

        >>> a, b = Exchange(), Exchange()
        >>> a.agree(b.public, b"salt") == b.agree(a.public, b"salt")
        True
        """
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(theirs))
        except ValueError:
            raise RemoteProtocolError("the other side's half of the key exchange is no such thing") from None
        return HKDF(SHA256(), 2 * _KEY_BYTES, salt, _INFO).derive(shared)


class Sealer:
    """Seals what goes out and opens what comes in, between the workers with these numbers."""

    def __init__(self, material: bytes, here: int, there: int) -> None:
        first, second = material[:_KEY_BYTES], material[_KEY_BYTES:]
        ours, theirs = (first, second) if here < there else (second, first)
        self._seal, self._open = AESGCM(ours), AESGCM(theirs)

    def seal(self, header: Header, chunk: Bytes) -> tuple[Header, Bytes]:
        """A numbered frame as it travels: its header, and its chunk as ciphertext and tag."""
        header = header._replace(flags=header.flags | Flag.SEALED, length=header.length + TAG_BYTES)
        sealed = np.empty(header.length, np.uint8)
        self._seal.encrypt_into(_nonce(header), chunk.data, sealed_header_bytes(header), sealed.data)
        return header, sealed

    def open(self, header: Header, sealed: Bytes, place: Bytes) -> Header:
        """Put the chunk of a sealed frame in its place; gives the header that it has unsealed."""
        try:
            self._open.decrypt_into(_nonce(header), sealed.data, sealed_header_bytes(header), place.data)
        except InvalidTag:
            raise DamagedFrameError(
                f"the seal of frame {header.sequence} is broken",
                why="it was changed on its way, or sealed with another key",
            ) from None
        return open_header(header)


def _nonce(header: Header) -> bytes:
    return header.source.to_bytes(4, "big") + header.sequence.to_bytes(8, "big")

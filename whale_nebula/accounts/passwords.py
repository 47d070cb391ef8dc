"""Passwords and other secrets: storage, creation and comparison."""

from __future__ import annotations

import hashlib
import hmac
import secrets

from whale_nebula.errors import AccountError

SHORTEST = 12
_LOG_N, _R, _P, _SIZE = 15, 8, 1, 32
_MEMORY = 128 << 20
_LONGEST = 1024


def check_password(text: str) -> str:
    """Validate a new password: long enough, and not of a few distinct characters."""
    if len(text) < SHORTEST or len(set(text)) < 5 or len(text) > _LONGEST:
        raise AccountError(
            "this password is too weak",
            why=f"a password needs at least {SHORTEST} characters, at least 5 of them different",
            mend="use a sentence that you can remember",
        )
    return text


def hash_password(text: str) -> str:
    """Hash a password for storage: scrypt with its own salt and costs, which later hashes may raise.

    >>> kept = hash_password("a sentence to remember")
    >>> kept.split("$")[:4], verify_password("a sentence to remember", kept), verify_password("another", kept)
    (['scrypt', '15', '8', '1'], True, False)
    """
    salt = secrets.token_bytes(16)
    return f"scrypt${_LOG_N}${_R}${_P}${salt.hex()}${_scrypt(text, salt, _LOG_N, _R, _P).hex()}"


def verify_password(text: str, stored: str) -> bool:
    """Whether this is the password, in constant time."""
    try:
        kind, log_n, r, p, salt, digest = stored.split("$")
        expected = bytes.fromhex(digest)
        computed = _scrypt(text, bytes.fromhex(salt), int(log_n), int(r), int(p))
    except ValueError:
        return False
    return kind == "scrypt" and hmac.compare_digest(computed, expected)


def _scrypt(text: str, salt: bytes, log_n: int, r: int, p: int) -> bytes:
    data = text[:_LONGEST].encode("utf-8", "surrogatepass")
    return hashlib.scrypt(data, salt=salt, n=1 << log_n, r=r, p=p, maxmem=_MEMORY, dklen=_SIZE)


def make_secret(kind: str, number: str) -> str:
    """Create a random secret: its kind and number, which are public, and 32 random bytes."""
    return f"{kind}-{number}-{secrets.token_urlsafe(32)}"


def digest_secret(text: str) -> str:
    """The stored form of such a secret: it is random, so that a fast hash suffices."""
    return hashlib.sha256(text[:_LONGEST].encode("utf-8", "surrogatepass")).hexdigest()

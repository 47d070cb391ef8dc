"""Parser of the first message of TLS, the ClientHello, as far as the protocols (ALPN) that it offers.

Nothing is decrypted, answered or consumed. All sizes are checked before they are used, and a message in many records
costs no more to read than one in a single record.
"""

from __future__ import annotations

from whale_nebula.errors import PlaintextError, RemoteProtocolError

MOST_BYTES = 16 << 10
"""The largest first message, with the headers of its records."""
_MOST_RECORDS = 8
_HANDSHAKE, _CLIENT_HELLO, _ALPN = 22, 1, 16
_RECORD_HEADER, _MESSAGE_HEADER = 5, 4


def read_hello(data: bytes) -> tuple[str, ...] | int:
    """The protocols that a first message offers; or, if it is incomplete, the number of bytes that are needed to
    continue.

    >>> read_hello(b""), read_hello(bytes([22, 3, 1, 1, 0]))
    (5, 261)
    """
    message, at = b"", 0
    for _ in range(_MOST_RECORDS):
        if data[at : at + 1] not in (b"", bytes([_HANDSHAKE])):
            raise PlaintextError("what comes here is no TLS") if not at else _hello_error("a record of another kind")
        if len(data) < at + _RECORD_HEADER:
            return at + _RECORD_HEADER
        size = int.from_bytes(data[at + 3 : at + 5])
        if data[at + 1] != 3 or not 0 < size <= 1 << 14:
            raise _hello_error("a record that cannot be")
        end = at + _RECORD_HEADER + size
        if end > MOST_BYTES:
            raise _hello_error(f"more than {MOST_BYTES} bytes")
        if len(data) < end:
            return end
        message, at = message + data[at + _RECORD_HEADER : end], end
        if len(message) >= _MESSAGE_HEADER:
            whole = _MESSAGE_HEADER + int.from_bytes(message[1:4])
            if message[0] != _CLIENT_HELLO or whole > MOST_BYTES:
                raise _hello_error("another message, or one that is too large")
            if len(message) >= whole:
                return _read_protocols(message, whole)
    raise _hello_error(f"more than {_MOST_RECORDS} records")


def _hello_error(why: str) -> RemoteProtocolError:
    return RemoteProtocolError("this is no first message of TLS", why=why)


class _Reader:
    """Reads parts of a message one after the other."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise _hello_error("a length that is not that of its parts")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def vector(self, size: int) -> bytes:
        """A field with a length prefix of this size."""
        return self.take(self.number(size))


def _read_protocols(message: bytes, whole: int) -> tuple[str, ...]:
    if len(message) != whole:
        raise _hello_error("more stands behind it in its record")
    reader = _Reader(message[_MESSAGE_HEADER:])
    reader.take(2 + 32)  # version, random number
    session, suites, compressions = reader.vector(1), reader.vector(2), reader.vector(1)
    if len(session) > 32 or not suites or len(suites) % 2 or not compressions:
        raise _hello_error("parts that cannot be")
    extensions = _Reader(reader.vector(2) if reader.left else b"")
    if reader.left:
        raise _hello_error("more stands behind its extensions")
    found: dict[int, bytes] = {}
    while extensions.left:
        kind, content = extensions.number(2), extensions.vector(2)
        if kind in found:
            raise _hello_error("an extension that comes twice")
        found[kind] = content
    if _ALPN not in found:
        return ()
    outer = _Reader(found[_ALPN])
    names = _Reader(outer.vector(2))
    protocols: list[str] = []
    while names.left:
        protocols.append(names.vector(1).decode("latin-1"))
    if outer.left or not protocols or not all(protocols):
        raise _hello_error("protocols that cannot be")
    return tuple(protocols)

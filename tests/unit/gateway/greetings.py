"""First messages of TLS: valid ones, truncated ones, and unusual ones."""

from __future__ import annotations

import contextlib
import ssl
import struct

from whale_nebula.gateway.front import MOST_BYTES


def context(*protocols: str, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    """A client's TLS that takes every certificate."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    made.maximum_version = newest
    if protocols:
        made.set_alpn_protocols(list(protocols))
    return made


def hello(*protocols: str, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> bytes:
    """What a client of OpenSSL sends first."""
    outgoing = ssl.MemoryBIO()
    client = context(*protocols, newest=newest).wrap_bio(ssl.MemoryBIO(), outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def record(content: bytes, kind: int = 22, major: int = 3) -> bytes:
    return bytes([kind, major, 1]) + struct.pack(">H", len(content)) + content


def cut(data: bytes, parts: int) -> bytes:
    """The message of a record in several records."""
    content = data[5:]
    size = max(1, -(-len(content) // parts))
    return b"".join(record(content[at : at + size]) for at in range(0, len(content), size))


def message(extensions: bytes, *, suites: bytes = b"\x13\x01", behind: bytes = b"", kind: int = 1) -> bytes:
    """A first message with these extensions, in a record of its own."""
    body = bytes([3, 3]) + bytes(32) + b"\0" + struct.pack(">H", len(suites)) + suites + b"\x01\0"
    body += struct.pack(">H", len(extensions)) + extensions
    content = bytes([kind]) + struct.pack(">I", len(body))[1:] + body + behind
    if len(content) > 1 << 14:
        return b"".join(record(content[at : at + (1 << 14)]) for at in range(0, len(content), 1 << 14))
    return record(content)


def extension(kind: int, content: bytes) -> bytes:
    return struct.pack(">HH", kind, len(content)) + content


def alpn(*names: bytes) -> bytes:
    listed = b"".join(bytes([len(name)]) + name for name in names)
    return extension(16, struct.pack(">H", len(listed)) + listed)


REFUSED: dict[str, tuple[bytes, str]] = {
    "HTTP in the clear": (b"GET /login HTTP/1.1\r\nHost: x\r\n\r\n", "not TLS"),
    "HTTP/2 in the clear": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "not TLS"),
    "SSH": (b"SSH-2.0-OpenSSH_9.6\r\n", "not TLS"),
    "zeros": (bytes(64), "not TLS"),
    "an alert": (record(b"\2\x28", kind=21), "not TLS"),
    "SSL 2": (b"\x80\x2e\x01\x00\x02", "not TLS"),
    "another version": (record(b"\1\0\0\0", major=2), "an invalid record"),
    "an empty record": (record(b""), "an invalid record"),
    "a record that is too long": (bytes([22, 3, 1, 255, 255]), "an invalid record"),
    "a record of another kind in between": (record(b"\1\0") + record(b"x", 23), "a record of another type"),
    "a server's message": (message(alpn(b"h2"), kind=2), "another message"),
    "a message of 16 MiB": (record(b"\1\xff\xff\xff"), "too large"),
    "more bytes than a message may have": (message(b"", suites=b"\x13\x01" * (MOST_BYTES // 2 - 8)), "more than 16384"),
    "two large records": (record(b"\1\0\x3f\xf0" + bytes(1 << 13)) + record(bytes(1 << 13)), "more than 16384 bytes"),
    "a record for each byte": (cut(hello("h2"), 1000), "more than 8 records"),
    "something behind it": (message(alpn(b"h2"), behind=b"\1\0\0\0"), "its record contains further data"),
    "protocols twice": (message(alpn(b"h2") + alpn(b"nebula-login/1")), "it has an extension twice"),
    "a list of no protocols": (message(extension(16, b"\0\0")), "its list of protocols is invalid"),
    "a protocol without a name": (message(extension(16, b"\0\1\0")), "its list of protocols is invalid"),
    "a length beyond its list": (message(extension(16, b"\0\3\x09h2")), "a length does not match the data"),
    "a length beyond its extension": (message(extension(16, b"\0\x09\2h2")), "a length does not match the data"),
    "bytes behind the list": (message(extension(16, b"\0\3\2h2\0")), "its list of protocols is invalid"),
    "half an extension": (message(b"\0\x10\0"), "a length does not match the data"),
    "no suites": (message(alpn(b"h2"), suites=b""), "it has invalid fields"),
    "half a suite": (message(alpn(b"h2"), suites=b"\x13"), "it has invalid fields"),
}
"""What is not the first message of a TLS connection, and what is said of it."""

UNSPOKEN: dict[str, tuple[bytes, str]] = {
    "no protocol": (message(b""), "the client offers no supported protocol: it offers none"),
    "another protocol": (message(alpn(b"http/1.1")), "the client offers no supported protocol: it offers 'http/1.1'"),
    "bytes for a protocol": (message(alpn(b"\xff\r\n\x1b[2J")), r"it offers 'ÿ\r\n\x1b[2J'"),
    "another version of logins": (message(alpn(b"nebula-login/2")), "it offers 'nebula-login/2'"),
    "that of logins and that of links": (
        message(alpn(b"nebula-login/1", b"h2")),
        "the client offers several protocols",
    ),
    "that of logins and that of data": (
        message(alpn(b"nebula-data/1", b"nebula-login/1")),
        "the client offers several protocols",
    ),
}
"""First messages of protocols that are not spoken so."""

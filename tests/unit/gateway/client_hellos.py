"""First messages of TLS: valid ones, truncated ones, and unusual ones."""

from __future__ import annotations

import contextlib
import ssl
import struct

from whale_nebula.gateway.front import MAX_HELLO_BYTES


def make_context(*protocols: str, newest_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    """A client's TLS context that accepts every certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = newest_version
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


def make_hello(*protocols: str, newest_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> bytes:
    """The first message of an OpenSSL client."""
    outgoing = ssl.MemoryBIO()
    client = make_context(*protocols, newest_version=newest_version).wrap_bio(ssl.MemoryBIO(), outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def make_record(content: bytes, kind: int = 22, major: int = 3) -> bytes:
    return bytes([kind, major, 1]) + struct.pack(">H", len(content)) + content


def split_record(data: bytes, parts: int) -> bytes:
    """The message of a record in several records."""
    content = data[5:]
    size = max(1, -(-len(content) // parts))
    return b"".join(make_record(content[at : at + size]) for at in range(0, len(content), size))


def make_message(extensions: bytes, *, suites: bytes = b"\x13\x01", trailing: bytes = b"", kind: int = 1) -> bytes:
    """A ClientHello with these extensions, in one record if possible."""
    body = bytes([3, 3]) + bytes(32) + b"\0" + struct.pack(">H", len(suites)) + suites + b"\x01\0"
    body += struct.pack(">H", len(extensions)) + extensions
    content = bytes([kind]) + struct.pack(">I", len(body))[1:] + body + trailing
    if len(content) > 1 << 14:
        return b"".join(make_record(content[at : at + (1 << 14)]) for at in range(0, len(content), 1 << 14))
    return make_record(content)


def make_extension(kind: int, content: bytes) -> bytes:
    return struct.pack(">HH", kind, len(content)) + content


def make_alpn(*names: bytes) -> bytes:
    listed = b"".join(bytes([len(name)]) + name for name in names)
    return make_extension(16, struct.pack(">H", len(listed)) + listed)


INVALID_HELLOS: dict[str, tuple[bytes, str]] = {
    "HTTP in plaintext": (b"GET /login HTTP/1.1\r\nHost: x\r\n\r\n", "not TLS"),
    "HTTP/2 in plaintext": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "not TLS"),
    "SSH": (b"SSH-2.0-OpenSSH_9.6\r\n", "not TLS"),
    "zeros": (bytes(64), "not TLS"),
    "an alert": (make_record(b"\2\x28", kind=21), "not TLS"),
    "SSL 2": (b"\x80\x2e\x01\x00\x02", "not TLS"),
    "another version": (make_record(b"\1\0\0\0", major=2), "an invalid record"),
    "an empty record": (make_record(b""), "an invalid record"),
    "a record that is too long": (bytes([22, 3, 1, 255, 255]), "an invalid record"),
    "a record of another kind in between": (make_record(b"\1\0") + make_record(b"x", 23), "a record of another type"),
    "a server's message": (make_message(make_alpn(b"h2"), kind=2), "another message"),
    "a message of 16 MiB": (make_record(b"\1\xff\xff\xff"), "too large"),
    "more bytes than a message may have": (
        make_message(b"", suites=b"\x13\x01" * (MAX_HELLO_BYTES // 2 - 8)),
        "more than 16384",
    ),
    "two large records": (
        make_record(b"\1\0\x3f\xf0" + bytes(1 << 13)) + make_record(bytes(1 << 13)),
        "more than 16384 bytes",
    ),
    "a record for each byte": (split_record(make_hello("h2"), 1000), "more than 8 records"),
    "trailing data": (make_message(make_alpn(b"h2"), trailing=b"\1\0\0\0"), "its record contains further data"),
    "two protocol extensions": (
        make_message(make_alpn(b"h2") + make_alpn(b"nebula-login/1")),
        "it has an extension twice",
    ),
    "a list of no protocols": (make_message(make_extension(16, b"\0\0")), "its list of protocols is invalid"),
    "a protocol without a name": (make_message(make_extension(16, b"\0\1\0")), "its list of protocols is invalid"),
    "a length beyond its list": (make_message(make_extension(16, b"\0\3\x09h2")), "a length does not match the data"),
    "a length beyond its extension": (
        make_message(make_extension(16, b"\0\x09\2h2")),
        "a length does not match the data",
    ),
    "bytes after the list": (make_message(make_extension(16, b"\0\3\2h2\0")), "its list of protocols is invalid"),
    "half an extension": (make_message(b"\0\x10\0"), "a length does not match the data"),
    "no suites": (make_message(make_alpn(b"h2"), suites=b""), "it has invalid fields"),
    "half a suite": (make_message(make_alpn(b"h2"), suites=b"\x13"), "it has invalid fields"),
}
"""First messages that are no valid ClientHello, with a part of the error."""

UNSUPPORTED_HELLOS: dict[str, tuple[bytes, str]] = {
    "no protocol": (make_message(b""), "the client offers no supported protocol: it offers none"),
    "another protocol": (
        make_message(make_alpn(b"http/1.1")),
        "the client offers no supported protocol: it offers 'http/1.1'",
    ),
    "bytes for a protocol": (make_message(make_alpn(b"\xff\r\n\x1b[2J")), r"it offers 'ÿ\r\n\x1b[2J'"),
    "another version of the login protocol": (make_message(make_alpn(b"nebula-login/2")), "it offers 'nebula-login/2'"),
    "protocols of logins and links": (
        make_message(make_alpn(b"nebula-login/1", b"h2")),
        "the client offers several protocols",
    ),
    "protocols of logins and data": (
        make_message(make_alpn(b"nebula-data/1", b"nebula-login/1")),
        "the client offers several protocols",
    ),
}
"""ClientHellos without a supported protocol, with a part of the error."""

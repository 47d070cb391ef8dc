"""Diagnose why a TLS connection is refused, as gRPC reports little more than a closed socket.

`probe` checks this side first, then performs one TLS handshake and returns the fault of the other end, or the fault
that the other end finds here.

A client receives its server's certificate, and can diagnose it exactly. A server sends hardly any reason to a client
that it refuses; `read_refusal` parses what it writes to its own log.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import NamedTuple

from whale_nebula.config.place import split_address
from whale_nebula.errors import (
    ExpiredError,
    IdentityError,
    NebulaError,
    NoCertificateError,
    PlaintextError,
    RevokedError,
    SelfSignedError,
    TransportError,
    WrongAuthorityError,
    WrongNameError,
)
from whale_nebula.security import files
from whale_nebula.security.credentials import Credentials
from whale_nebula.security.identity import Identity

_ALERTS: dict[str, tuple[type[IdentityError], str]] = {
    "UNKNOWN_CA": (WrongAuthorityError, "does not trust the authority that signed the certificate of this process"),
    "CERTIFICATE_EXPIRED": (ExpiredError, "considers the certificate of this process expired: one clock is wrong"),
    "CERTIFICATE_REVOKED": (RevokedError, "considers the certificate of this process revoked"),
    "CERTIFICATE_REQUIRED": (NoCertificateError, "requires a certificate, and this process presented none"),
    "BAD_CERTIFICATE": (IdentityError, "rejects the certificate of this process: it may not be valid yet there"),
    "CERTIFICATE_UNKNOWN": (IdentityError, "rejects the certificate of this process"),
    "UNSUPPORTED_CERTIFICATE": (IdentityError, "does not support this type of certificate"),
    "ACCESS_DENIED": (IdentityError, "denies access to this process"),
    "HANDSHAKE_FAILURE": (
        IdentityError,
        "has no TLS parameters in common with this process, or requires a certificate",
    ),
    "PROTOCOL_VERSION": (IdentityError, "uses a different version of TLS"),
}


def read_alert(error: OSError, address: str) -> IdentityError | None:
    """The error for a TLS alert about our certificate; None if this error is not such an alert.

    >>> error = ssl.SSLError(1, "[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca")
    >>> read_alert(error, "10.77.0.2:7101").code
    'NB-421'
    """
    reason = str(getattr(error, "reason", None) or error).upper()
    if not isinstance(error, ssl.SSLError) or "ALERT" not in reason:
        return None
    for alert, (kind, fault) in _ALERTS.items():
        if alert in reason:
            return kind(f"{address} {fault}", why=f"it sent the TLS alert {alert.lower().replace('_', ' ')}")
    return None


_GRPC_PHRASES: tuple[tuple[str, type[IdentityError], str], ...] = (
    ("certificate has expired", ExpiredError, "presents a certificate that has expired by the clock of this host"),
    ("certificate is not yet valid", ExpiredError, "presents a certificate that is not valid yet: one clock is wrong"),
    ("self signed certificate", SelfSignedError, "presents a self-signed certificate"),
    ("self-signed certificate", SelfSignedError, "presents a self-signed certificate"),
    ("unable to get local issuer", WrongAuthorityError, "presents a certificate of an authority not in ca.pem"),
    ("certificate signature failure", WrongAuthorityError, "presents a certificate of an authority not in ca.pem"),
    ("peer_did_not_return_a_certificate", NoCertificateError, "presents no certificate"),
    ("wrong_version_number", PlaintextError, "does not use TLS"),
    ("http_request", PlaintextError, "does not use TLS, but plaintext HTTP"),
    ("hostname verification check failed", WrongNameError, "presents a certificate with a different name"),
    ("certificate_verify_failed", IdentityError, "presents an invalid certificate"),
)


def read_grpc_error(text: str, subject: str) -> IdentityError | None:
    """The TLS error behind a text of gRPC: a line of a server's log about a client, or the details of a failed call.

    `subject` is the other side, as the error names it: "a client", or an address.

    >>> line = "Handshake failed with error SSL_ERROR_SSL: ...:PEER_DID_NOT_RETURN_A_CERTIFICATE: ..."
    >>> print(read_grpc_error(line, "a client").what, "/", read_grpc_error("Socket closed", "a client"))
    a client presents no certificate / None
    """
    lower = text.lower()
    for words, kind, fault in _GRPC_PHRASES:
        if words in lower:
            return kind(f"{subject} {fault}", why=f"TLS reports: {words}")
    return None


_REFUSED = "Handshake failed with error"


def read_refusal(line: str) -> str | None:
    """Translate a line of gRPC's log about a failed TLS handshake; None for other lines.

    The line does not name the side; the side that rejects the other's certificate writes it.

    >>> read_refusal("I1122 tls.cc:1] Handshake failed with error SSL_ERROR_SSL: ...:CERTIFICATE_VERIFY_FAILED")
    'TLS handshake refused: the other side presents an invalid certificate (NB-420)'
    >>> read_refusal("certificate has expired") is None
    True
    """
    if _REFUSED not in line:
        return None
    error = read_grpc_error(line, "the other side")
    return "TLS handshake refused: " + (f"{error.what} ({error.code})" if error is not None else "see the line above")


HERE, THERE = "here", "there"
KINDS: dict[type[NebulaError], str] = {
    WrongAuthorityError: "wrong authority",
    SelfSignedError: "self-signed",
    ExpiredError: "expired",
    WrongNameError: "wrong name",
    NoCertificateError: "no certificate",
    PlaintextError: "plaintext",
    RevokedError: "revoked",
    IdentityError: "refused",
    TransportError: "unreachable",
}
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = 4
_BANNER_SECONDS = 2.0


class Diagnosis(NamedTuple):
    """A diagnosed fault: what is wrong, the side that must correct it ("here" or "there"), and the error for it."""

    kind: str
    side: str
    error: NebulaError


def make_diagnosis(error: NebulaError, side: str) -> Diagnosis:
    """An error as a diagnosis.

    >>> make_diagnosis(ExpiredError("the certificate of gpu/0 has expired"), HERE)[:2]
    ('expired', 'here')
    """
    return Diagnosis(KINDS.get(type(error), "refused"), side, error)


def probe(
    address: str, credentials: Credentials | None, expected: Identity | None = None, *, timeout: float = 5.0
) -> Diagnosis | None:
    """Diagnose why TLS to an address fails; None if it works.

    Without credentials this process uses plaintext (`insecure: true`).
    """
    try:
        if credentials is not None:
            credentials.check_now()
    except IdentityError as error:
        return make_diagnosis(error, HERE)
    try:
        with contextlib.closing(_dial(address, timeout)) as connection:
            if credentials is not None:
                return _probe_tls(address, connection, credentials, expected)
            if _answers_plaintext(connection):
                return None
            wants_tls = PlaintextError(
                f"{address} requires TLS, and this process does not use it",
                why="the config of this process has insecure: true, and that of the other side does not",
                mend="replace insecure: true with security: {ca: certs/ca.pem, cert: ..., key: ...}",
            )
            return make_diagnosis(wants_tls, HERE)
    except OSError as error:
        return _diagnose_unreachable(address, error)


def _dial(address: str, timeout: float) -> socket.socket:
    return socket.create_connection(split_address(address), timeout)


def _diagnose_unreachable(address: str, error: OSError) -> Diagnosis:
    why = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
    fault = TransportError(f"cannot reach {address}", why=why, mend="start the process, or fix the address or firewall")
    return make_diagnosis(fault, THERE)


# ---------------------------------------------------------------------- with TLS
def _probe_tls(
    address: str, connection: socket.socket, credentials: Credentials, expected: Identity | None
) -> Diagnosis | None:
    try:
        secured = _make_context(credentials).wrap_socket(connection, server_hostname=expected.dns if expected else None)
    except TimeoutError as error:
        return _diagnose_unreachable(address, error)
    except (ssl.SSLError, ConnectionError) as error:
        return _diagnose_failed_handshake(address, error, connection.gettimeout() or _BANNER_SECONDS)
    with contextlib.closing(secured):
        return _diagnose_peer_certificate(address, secured, credentials, expected) or _probe_refusal(
            address, secured, credentials
        )


def _make_context(credentials: Credentials) -> ssl.SSLContext:
    """A context that accepts every certificate: it is verified afterwards, by rules with exact errors.

    TLS still proves that the other side holds the key of its certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(credentials.files.cert, credentials.files.key)
    return context


def _diagnose_failed_handshake(address: str, error: OSError, timeout: float) -> Diagnosis:
    refusal = read_alert(error, address)
    if refusal is not None:
        return make_diagnosis(refusal, HERE)
    plaintext = False
    with contextlib.suppress(OSError), contextlib.closing(_dial(address, timeout)) as connection:
        plaintext = _answers_plaintext(connection)
    if plaintext:
        fault = PlaintextError(
            f"{address} does not use TLS", why="it answers in plaintext, and this process requires TLS"
        )
        return make_diagnosis(fault, THERE)
    if isinstance(error, ConnectionError | ssl.SSLEOFError | ssl.SSLZeroReturnError):
        hung_up = TransportError(  # a forwarder whose target has not started yet: transient
            f"{address} closes the connection before it presents a certificate",
            why="the process there is stopping, or it is a proxy whose target has not started",
            mend="start the process, and check that the address is that of a worker or gateway",
        )
        return make_diagnosis(hung_up, THERE)
    why = "it sent data that is not TLS"
    mend = "check that the address is that of a worker or gateway, and that any proxy forwards TCP unchanged"
    return make_diagnosis(IdentityError(f"{address} does not use TLS", why=why, mend=mend), THERE)


def _diagnose_peer_certificate(
    address: str, secured: ssl.SSLSocket, credentials: Credentials, expected: Identity | None
) -> Diagnosis | None:
    """The fault of the other side's certificate; None if it is valid and has the expected identity."""
    certificate = ssl.DER_cert_to_PEM_cert(secured.getpeercert(binary_form=True) or b"")
    try:
        credentials.trust.check(
            files.parse_certificate(certificate, address), expected, subject=f"the process at {address}"
        )
    except IdentityError as error:
        return make_diagnosis(error, THERE)
    return None


def _probe_refusal(address: str, secured: ssl.SSLSocket, credentials: Credentials) -> Diagnosis | None:
    """The other side's refusal of our certificate; None if it accepts. TLS 1.3 reports it after the handshake, so a
    read is needed.

    A server that accepts sends first (HTTP/2 begins with settings); one that refuses sends an alert or closes.
    """
    secured.settimeout(_BANNER_SECONDS)
    try:
        if secured.recv(1):
            return None
    except TimeoutError:
        return None
    except OSError as error:
        refusal = read_alert(error, address)
        if refusal is not None:
            return make_diagnosis(refusal, HERE)
    fault = IdentityError(
        f"{address} closes the connection after it receives the certificate of this process",
        why=f"its certificate is valid, and so is that of {credentials.identity.worker} by the clock and the files of "
        "this host: on that host the clock is wrong, or ca.pem is different",
        mend=f"run whale-nebula doctor --config clusters.yaml there, and see its log for serial {credentials.serial}",
    )
    return make_diagnosis(fault, HERE)


def _answers_plaintext(connection: socket.socket) -> bool:
    """Whether the first frame of the answer is an HTTP/2 SETTINGS frame."""
    connection.settimeout(_BANNER_SECONDS)
    try:
        connection.sendall(_PREFACE)
        answer = connection.recv(9)
    except OSError:
        return False
    return len(answer) == 9 and answer[3] == _SETTINGS

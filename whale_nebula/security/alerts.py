"""What TLS libraries say when they refuse, as errors of ours: alerts of OpenSSL, and the log lines of gRPC.

Alerts are what the other side says of us. gRPC sends none, but it writes why it refused somebody to its log, and
its clients are told what was wrong with the server's certificate: both in BoringSSL's words.
"""

from __future__ import annotations

import ssl

from whale_nebula.errors import (
    ExpiredError,
    IdentityError,
    NoCertificateError,
    PlaintextError,
    RevokedError,
    SelfSignedError,
    WrongAuthorityError,
    WrongNameError,
)

_ALERTS: dict[str, tuple[type[IdentityError], str]] = {
    "UNKNOWN_CA": (WrongAuthorityError, "does not know the authority that signed the certificate of this process"),
    "CERTIFICATE_EXPIRED": (ExpiredError, "holds the certificate of this process for expired: one clock is wrong"),
    "CERTIFICATE_REVOKED": (RevokedError, "holds the certificate of this process for revoked"),
    "CERTIFICATE_REQUIRED": (NoCertificateError, "wants a certificate of this process, and got none"),
    "BAD_CERTIFICATE": (IdentityError, "does not take the certificate of this process: it may not be valid yet there"),
    "CERTIFICATE_UNKNOWN": (IdentityError, "does not take the certificate of this process"),
    "UNSUPPORTED_CERTIFICATE": (IdentityError, "does not take this kind of certificate"),
    "ACCESS_DENIED": (IdentityError, "denies this process"),
    "HANDSHAKE_FAILURE": (IdentityError, "finds no way of TLS that both speak, or wants a certificate"),
    "PROTOCOL_VERSION": (IdentityError, "speaks another version of TLS"),
}


def heard(error: OSError, address: str) -> IdentityError | None:
    """What the other side says of us in a TLS alert, if it is one.

    >>> error = ssl.SSLError(1, "[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca")
    >>> heard(error, "10.77.0.2:7101").code
    'NB-421'
    """
    reason = str(getattr(error, "reason", None) or error).upper()
    if not isinstance(error, ssl.SSLError) or "ALERT" not in reason:
        return None
    for alert, (kind, said) in _ALERTS.items():
        if alert in reason:
            return kind(f"{address} {said}", why=f"it answers with the TLS alert {alert.lower().replace('_', ' ')}")
    return None


_WORDS: tuple[tuple[str, type[IdentityError], str], ...] = (
    ("certificate has expired", ExpiredError, "shows a certificate that has expired by the clock of this host"),
    ("certificate is not yet valid", ExpiredError, "shows a certificate that is not valid yet: one clock is wrong"),
    ("self signed certificate", SelfSignedError, "shows a certificate that is signed by itself"),
    ("self-signed certificate", SelfSignedError, "shows a certificate that is signed by itself"),
    ("unable to get local issuer", WrongAuthorityError, "shows a certificate of another authority than ca.pem"),
    ("certificate signature failure", WrongAuthorityError, "shows a certificate of another authority than ca.pem"),
    ("peer_did_not_return_a_certificate", NoCertificateError, "shows no certificate"),
    ("wrong_version_number", PlaintextError, "speaks without TLS"),
    ("http_request", PlaintextError, "speaks without TLS: HTTP in the clear"),
    ("hostname verification check failed", WrongNameError, "shows the certificate of somebody else"),
    ("certificate_verify_failed", IdentityError, "shows a certificate that is not taken"),
)


def spoken(text: str, who: str) -> IdentityError | None:
    """What gRPC means: a line of a server's log about a client, or the details of a client's failed call.

    `who` is the other side, as far as it is known: "a client", or an address.

    >>> line = "Handshake failed with error SSL_ERROR_SSL: ...:PEER_DID_NOT_RETURN_A_CERTIFICATE: ..."
    >>> print(spoken(line, "a client").what, "/", spoken("Socket closed", "a client"))
    a client shows no certificate / None
    """
    lower = text.lower()
    for words, kind, said in _WORDS:
        if words in lower:
            return kind(f"{who} {said}", why=f"TLS says: {words}")
    return None


_REFUSED = "Handshake failed with error"


def refused(line: str) -> str | None:
    """What a line of gRPC's log says of somebody with whom TLS did not come about, in our words; None for others.

    It does not say who dialled whom: either side writes it that does not take the certificate of the other.

    >>> refused("I1122 tls.cc:1] Handshake failed with error SSL_ERROR_SSL: ...:CERTIFICATE_VERIFY_FAILED")
    'TLS was refused: the other side shows a certificate that is not taken (NB-420)'
    >>> refused("certificate has expired") is None
    True
    """
    if _REFUSED not in line:
        return None
    error = spoken(line, "the other side")
    return "TLS was refused: " + (f"{error.what} ({error.code})" if error is not None else "the line above says why")

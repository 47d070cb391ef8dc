"""Whom a process trusts: certificates that its authority signed, within their dates, and not taken back.

The rules, in the order in which they are told:

* a certificate that its own key signed is nobody's (`SelfSignedError`);
* it must be signed by an authority in `ca` (`WrongAuthorityError`), which must be within its dates too;
* the present must lie within its dates (`ExpiredError`);
* it must be made for both ends of TLS, and name one identity of the authority's run (`WrongNameError`);
* its serial number must not be on the deny list (`RevokedError`);
* where somebody is expected, it must be his (`WrongNameError`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from whale_nebula.errors import ExpiredError, RevokedError, SelfSignedError, WrongAuthorityError, WrongNameError
from whale_nebula.security import making, reading
from whale_nebula.security.denied import DenyList
from whale_nebula.security.identity import Identity
from whale_nebula.security.reading import Peer, plain

_USES = {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
_SKEWED = timedelta(days=1)


class Trust:
    """The authorities of a run and its deny list."""

    def __init__(self, authorities: Sequence[x509.Certificate], denied: DenyList | None = None) -> None:
        self.authorities = tuple(authorities)
        self.denied = DenyList(None) if denied is None else denied

    def check(
        self,
        shown: x509.Certificate | bytes | str,
        expected: Identity | None = None,
        *,
        whose: str = "",
        at: datetime | None = None,
    ) -> Peer:
        """Who shows this certificate, or the error that says why he is not trusted. `at` is the present."""
        found = shown if isinstance(shown, x509.Certificate) else reading.certificate(shown, whose or "a peer")
        said = _subject(found, whose)
        moment = at or making.now()
        authority = self._authority(found, said)
        check_dates(found, moment, f"the certificate of {said}")
        check_dates(authority, moment, f"the authority that signed the certificate of {said}", authority=True)
        peer = reading.peer(found)
        _check_made_for(found, authority, peer.identity)
        self.check_denied(peer)
        if expected is not None and peer.identity != expected:
            raise wrong_name(peer.identity, expected)
        return peer

    def check_denied(self, peer: Peer) -> None:
        """Whether a certificate was taken back: asked again while a channel lives."""
        revoked = self.denied.find(peer.serial, self.authorities)
        if revoked is not None:
            raise RevokedError(
                f"the certificate of {peer.identity.worker} was revoked",
                where=f"serial {peer.serial[:16]}",
                why=" ".join(part for part in (revoked.when, revoked.why) if part),
            )

    def _authority(self, found: x509.Certificate, said: str) -> x509.Certificate:
        for authority in self.authorities:
            if reading.signed_by(found, authority):
                return authority
        if reading.signed_by(found, found):
            raise SelfSignedError(f"the certificate of {said} is signed by itself")
        ours = ", ".join(each.subject.rfc4514_string() for each in self.authorities)
        raise WrongAuthorityError(
            f"the certificate of {said} is of another authority",
            why=f"signed by {plain(found.issuer.rfc4514_string())}, and not by the key of {ours} in ca.pem",
        )


def check_live(trust: Trust, peer: Peer, at: datetime | None = None) -> None:
    """Whether a peer that was let in may stay: TLS does not look again at a connection that stands."""
    check_span(peer.not_before, peer.not_after, at or making.now(), f"the certificate of {peer.identity.worker}")
    trust.check_denied(peer)


def check_dates(found: x509.Certificate, at: datetime, whose: str, *, authority: bool = False) -> None:
    """Whether the present lies within the dates of a certificate."""
    check_span(found.not_valid_before_utc, found.not_valid_after_utc, at, whose, authority=authority)


def check_span(begin: datetime, end: datetime, at: datetime, whose: str, *, authority: bool = False) -> None:
    """Whether the present lies between two dates. One that lies before both is most likely a wrong clock."""
    if at < begin:
        why = f"it begins at {begin:%Y-%m-%d %H:%M} UTC and the clock of this host says {at:%Y-%m-%d %H:%M} UTC"
        raise ExpiredError(f"{whose} is not valid yet", why=f"{why}: one of two clocks is wrong", mend=_CLOCK)
    if at > end:
        why = f"it ended at {end:%Y-%m-%d %H:%M} UTC and the clock of this host says {at:%Y-%m-%d %H:%M} UTC"
        close = end - begin < _SKEWED and at - end > 30 * _SKEWED
        hint = "; a certificate that short and that old hints at a wrong clock" if close else ""
        raise ExpiredError(f"{whose} has expired", why=why + hint, mend=_RENEW_CA if authority else None)


def ends_soon(begin: datetime, end: datetime, at: datetime) -> bool:
    """Whether what is good between two dates is in the last quarter of its life, or in its last week if that is less.

    >>> start = datetime(2026, 1, 1)
    >>> [ends_soon(start, start + timedelta(days=life), start + timedelta(days=6)) for life in (7, 90)]
    [True, False]
    """
    return end - at < min((end - begin) / 4, timedelta(days=7))


_CLOCK = "set the clock: timedatectl set-ntp true, or chronyc makestep"
_RENEW_CA = "whale-nebula certs renew --ca, where the authority is; then copy ca.pem to every host"


def _subject(found: x509.Certificate, whose: str) -> str:
    """Whose it is, for messages: what a caller knows comes before what a stranger says."""
    names = [uri for uri in reading.alternative_names(found) if uri.startswith("nebula://")]
    return whose or plain(names[0] if names else found.subject.rfc4514_string()) or "a nameless side"


def _check_made_for(found: x509.Certificate, authority: x509.Certificate, identity: Identity) -> None:
    run = reading.authority_run(authority)
    if run is not None and run != identity.run:
        raise WrongNameError(
            f"{identity.uri} is of another run than its authority", why=f"the authority is that of {run!r}"
        )
    uses = reading.extension(found, x509.ExtendedKeyUsage)
    basic = reading.extension(found, x509.BasicConstraints)
    if uses is None or not set(uses) >= _USES or basic is None or basic.ca:
        raise WrongNameError(
            f"the certificate of {identity.worker} is made for something else",
            why="one of ours serves both ends of TLS and signs no others",
            mend="whale-nebula certs issue",
        )


def wrong_name(found: Identity, expected: Identity) -> WrongNameError:
    """The error about somebody who is not the one that was expected."""
    other = f"of run {found.run!r}" if found.run != expected.run else "of the same run"
    return WrongNameError(
        f"expected {expected.worker}, and this is {found.worker}",
        where=expected.worker,
        why=f"the certificate names {found.uri} ({other}), not {expected.uri}",
    )

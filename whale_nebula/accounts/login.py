"""Login: an account requests certificates of workers, for some hours, and keeps the keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

from whale_nebula.accounts.members import AUDITOR, OWNER, TRAINER, Account, AccountCertificate
from whale_nebula.accounts.registry import INVITATION, PASSWORD, TOKEN, Registry
from whale_nebula.accounts.scope import Scope
from whale_nebula.errors import AccountError, LoginError, NebulaError
from whale_nebula.security import GATEWAY, OPERATOR, WORKER, Identity, authority, files, issue, owners
from whale_nebula.security.authority import Authority
from whale_nebula.transport.grpc.limits import Buckets

HOURS, MOST_HOURS = 12.0, 168.0
MOST_REQUESTS = 64
_LONGEST = 4096
KINDS = (PASSWORD, TOKEN, INVITATION)
_CERTIFICATE_ROLES = {
    OWNER: (WORKER, GATEWAY, OPERATOR),
    TRAINER: (WORKER,),
    AUDITOR: (AUDITOR,),  # the certificates of auditors have a role of the same name
}
"""The roles of certificates that an account can obtain, by the account's role."""
_FULL_LOGINS, _FULL_LOGINS_RATE = 4.0, 2 / 3600
"""How often an account can get certificates of all its workers, at once and a second: each is recorded, and one that
replaces a valid one adds to the deny list.
"""
_SPARE = 3  # workers that are added to those of an account in that limit


class LoginRequest(NamedTuple):
    """A request of an account for certificates: one for each of the `requests`, which are in PEM, valid for `hours`."""

    account: str
    kind: str
    secret: str
    requests: Sequence[str]
    hours: float = HOURS
    password: str | None = None

    @classmethod
    def parse(cls, message: Any) -> LoginRequest:
        """Parse a message; an invalid one is refused before anything is looked up."""
        if not isinstance(message, dict) or not message.keys() <= set(cls._fields):
            raise AccountError("this is not a login request", mend=f"send an object with {', '.join(cls._fields)}")
        texts = [message.get(name) for name in ("account", "kind", "secret")]
        requests, hours, password = message.get("requests"), message.get("hours", HOURS), message.get("password")
        is_valid = all(isinstance(each, str) and len(each) <= _LONGEST for each in (*texts, password or ""))
        is_valid = is_valid and isinstance(requests, list) and len(requests) <= MOST_REQUESTS
        is_valid = is_valid and all(isinstance(each, str) and len(each) <= _LONGEST for each in requests or ())
        is_valid = is_valid and all(_is_text(each) for each in (*texts, password or "", *(requests or ())))
        is_valid = is_valid and type(hours) in (int, float) and 0 < hours <= MOST_HOURS and texts[1] in KINDS
        if not is_valid:
            raise AccountError(
                "this is not a valid login request",
                why=f"the limits are {MOST_REQUESTS} certificates and {MOST_HOURS:g} hours",
                mend="whale-nebula login",
            )
        account, kind, secret = map(str, texts)
        return cls(account, kind, secret, requests or (), float(hours), password)


def _is_text(text: str) -> bool:
    """Whether a text from JSON can be encoded: it may contain lone surrogates."""
    return not any("\ud800" <= each <= "\udfff" for each in text)


def read_deny_lists(folder: Path) -> dict[str, str]:
    """The deny lists in a folder, by the names of their files."""
    paths = sorted(folder.glob("revoked*.json"))
    texts = [files.read(each, "a deny list", most=files.MOST_LIST_BYTES) for each in paths]
    return {path.name: text.decode("utf-8", "replace") for path, text in zip(paths, texts, strict=True)}


@dataclass(frozen=True)
class LoginIssuer:
    """The issuing side of logins: the registry, and the authority in its folder."""

    registry: Registry
    authority: Authority
    folder: Path
    issuances: Buckets = field(default_factory=lambda: Buckets(_FULL_LOGINS, _FULL_LOGINS_RATE))

    def log_in(self, request: LoginRequest, source: str = "") -> Mapping[str, Any]:
        """Authenticate an account, and issue the certificates that it requests; returns them with the other files that
        a host needs. `source` is the address in the event.
        """
        about: dict[str, Any] = {"kind": request.kind, "source": source}
        try:
            account, scope = self.registry.log_in(request.account, request.kind, request.secret, request.password)
            certificates = self._certify(account.name, request, scope)
        except NebulaError as error:
            reason = error.reason if isinstance(error, LoginError) else f"{error.code} {error.what}"
            self.registry.record_event("login", request.account, "deny", reason, **about)
            raise
        serials = [each.serial for each in certificates]
        self.registry.record_event("login", account.name, "allow", role=account.role, serials=serials, **about)
        pems = [(self.folder / authority.ISSUED / f"{serial}.pem").read_text("ascii") for serial in serials]
        return {
            "account": account.name,
            "role": account.role,
            "certificates": pems,
            "until": min((each.until for each in certificates), default=""),
            "ca": (self.folder / authority.CA).read_text("ascii"),
            "lists": read_deny_lists(self.folder),
        }

    def _certify(self, name: str, request: LoginRequest, scope: Scope) -> list[AccountCertificate]:
        requested_identities = [owners.read_request(text.encode(), "a request") for text in request.requests]
        for identity, _ in requested_identities:
            scope.check(identity, request.hours)
        with files.lock_folder(self.folder):  # no other process certifies, disables or removes meanwhile
            return self._certify_locked(self.registry.check_enabled(name), request.hours, requested_identities)

    def _certify_locked(
        self, account: Account, hours: float, requested_identities: Sequence[tuple[Identity, EllipticCurvePublicKey]]
    ) -> list[AccountCertificate]:
        valid_certificates = self.registry.list_certificates()
        identities = [identity for identity, _ in requested_identities]
        for identity in identities:
            self._check(account, identity, valid_certificates)
        if repeated := [each for each in identities if identities.count(each) > 1]:
            raise AccountError(f"{repeated[0].worker} was requested twice", mend="send one request for each worker")
        own_uris = {each.identity for each in valid_certificates if each.account == account.name}
        count = len(own_uris | {identity.uri for identity in identities})
        if count > account.workers:
            most = f"{account.workers} worker{'s' * (account.workers != 1)}"
            raise AccountError(
                f"the account may have {most} at a time, but would have {count}",
                why=f"it has certificates of {', '.join(sorted(own_uris)) or 'no worker'}",
                mend="ask the owner for more, or wait until a certificate has expired",
            )
        if not self.issuances.take(account.name, len(identities) / (account.workers + _SPARE))[1]:
            raise AccountError(
                f"account {account.name} logs in too often",
                why="each login for its workers adds certificates, which are recorded until they expire",
                mend="wait half an hour; whale-nebula login --keep logs in only when certificates are about to expire",
            )
        authority.check_current(self.authority, files.now())
        certificates: list[AccountCertificate] = []
        try:
            for identity, key in requested_identities:
                certificates.append(self._certify_key(account, hours, identity, key, valid_certificates))
            if certificates:
                self.registry.add_certificates(certificates)
        except BaseException:  # they are delivered to no one, and must not block their identities
            issue.discard(self.folder, [each.serial for each in certificates])
            raise
        return certificates

    def _certify_key(
        self,
        account: Account,
        hours: float,
        identity: Identity,
        key: EllipticCurvePublicKey,
        valid_certificates: Sequence[AccountCertificate],
    ) -> AccountCertificate:
        digest, moment = files.digest_public_key(key), files.now()
        old = [each.serial for each in valid_certificates if each.identity == identity.uri and each.key != digest]
        if old:  # from another host: the latest login replaces it
            issue.revoke_locked(self.folder, self.authority, old, f"a later login of {account.name}", moment)
        peer = issue.certify(
            self.folder, self.authority, identity, key, hours / 24, moment, "a request", account.name, account.allowance
        ).peer
        return AccountCertificate(peer.serial, account.name, identity.uri, digest, files.format_time(peer.not_after))

    def _check(self, account: Account, identity: Identity, valid_certificates: Sequence[AccountCertificate]) -> None:
        """Refuse an account that may not have an identity."""
        self.authority.check(identity)
        if identity.role not in _CERTIFICATE_ROLES[account.role]:
            article = "an" if identity.role in (OPERATOR, AUDITOR) else "a"
            what = f"an account with role {account.role} cannot get the certificate of {article} {identity.role}"
            mend = "whale-nebula login --role auditor" if account.role == AUDITOR else "ask the owner of the cluster"
            raise AccountError(what, mend=mend)
        for each in valid_certificates:
            if each.identity == identity.uri and each.account != account.name:
                what = f"{identity.worker} belongs to another account until {each.until}"
                raise AccountError(what, mend="use --index with a different number")

    def revoke_certificates(self, name: str, why: str) -> list[AccountCertificate]:
        """Revoke the valid certificates of an account, also those of a login in progress when it was disabled; returns
        the revoked ones.
        """
        with files.lock_folder(self.folder):
            valid = self.registry.list_certificates(name)
            if valid:
                issue.revoke_locked(self.folder, self.authority, [each.serial for each in valid], why, files.now())
                self.registry.remove_certificates(valid)
        return valid

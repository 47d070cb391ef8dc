"""Fuzzing of certificates, heads, deny lists and audit logs: every mutation must be accepted, or refused with a
`NebulaError`.
"""

import base64
import ipaddress
import json
import random
import tempfile
import time
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID

from tests.unit.security.authorities import GATE, GPU, Home, write_self_signed
from whale_nebula.cli import audit
from whale_nebula.errors import NebulaError
from whale_nebula.security import Prover, Trust, chain, files, issue
from whale_nebula.security import trust as denied
from whale_nebula.security.audit import AuditLog, Head, read_heads
from whale_nebula.security.trust import check_live
from whale_nebula.security.verdict import verify

Draw = random.Random
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**64, 10**400, 1.5, "", "é", "\ud800", "\n\x1b[2J", "a" * 70, "nebula://mt"),
    *([], {}, [[]], {"a": 1}, "-----BEGIN CERTIFICATE-----", "0" * 64, "0" * 40),
)


def garble_bytes(draw: Draw, data: bytes) -> bytes:
    """Data with one to four bytes flipped, replaced, removed or doubled."""
    found = bytearray(data)
    kinds = 2 if draw.random() < 0.7 else 4  # a certificate of another length is refused early
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(found) + 1)
        match draw.randrange(kinds):
            case 0 if place < len(found):
                found[place] ^= 1 << draw.randrange(8)
            case 1 if place < len(found):
                found[place] = draw.choice((0, 1, 2, 6, 12, 22, 48, 60, 127, 128, 255))
            case 2:
                del found[place : place + draw.randrange(6)]
            case _:
                found[place:place] = draw.choice((draw.randbytes(draw.randrange(6)), bytes(found[place : place + 9])))
    return bytes(found)


def alter_value(draw: Draw, value: Any) -> Any:
    """A JSON value in which a part is replaced, removed or added."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        rest = {each: value[each] for each in value.keys() - {key}}
        match draw.randrange(10):
            case 0:
                return rest
            case 1:
                return {**value, str(draw.choice(ODD_VALUES))[:20]: draw.choice(ODD_VALUES)}
            case _:
                return {**value, key: alter_value(draw, value[key])}
    if isinstance(value, str) and value and draw.random() < 0.5:
        return garble_bytes(draw, value.encode("utf-8", "surrogatepass")).decode("latin-1")
    return draw.choice(ODD_VALUES)


# ---------------------------------------------------------------------- certificates
def encode_pem(der: bytes) -> str:
    text = base64.encodebytes(der).decode()
    return f"-----BEGIN CERTIFICATE-----\n{text}-----END CERTIFICATE-----\n"


def make_unusual_certificates() -> list[x509.Certificate]:
    """Certificates with other keys, names and extensions than ours."""
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, "é, or not"),
            x509.NameAttribute(NameOID.COUNTRY_NAME, "NL"),
            x509.NameAttribute(NameOID.EMAIL_ADDRESS, "a@b.example"),
        ]
    )
    odd_names = [
        x509.IPAddress(ipaddress.ip_address("::1")),
        x509.RegisteredID(NameOID.COMMON_NAME),
        x509.DirectoryName(name),
        x509.OtherName(NameOID.COMMON_NAME, b"\x05\x00"),
        x509.UniformResourceIdentifier(GPU.uri),
    ]
    keys = (
        ed25519.Ed25519PrivateKey.generate(),
        rsa.generate_private_key(65537, 2048),
        ec.generate_private_key(ec.SECP384R1()),
    )
    now = files.now()
    return [
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(odd_names), critical=True)
        .add_extension(x509.NameConstraints([x509.DNSName("a.example")], None), critical=True)
        .sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256())
        for key in keys
    ]


class Certificates:
    """Certificates of a peer, in HELLO or in TLS."""

    def __init__(self, folder: Path) -> None:
        home = Home.at(folder / "certs")
        ours = home.credentials(GATE)
        self_signed_pem = write_self_signed(folder / "alone", GPU).cert.read_bytes()
        found = [home.certificate(), home.authority.certificate, x509.load_pem_x509_certificate(self_signed_pem)]
        self.valid = [each.public_bytes(serialization.Encoding.DER) for each in (*found, *make_unusual_certificates())]
        self.trust, self.prover = ours.trust, Prover(ours)

    def attack(self, draw: Draw) -> None:
        der = draw.choice(self.valid)
        text = encode_pem(garble_bytes(draw, der))
        if draw.random() < 0.2:
            text = garble_bytes(draw, encode_pem(der).encode()).decode(
                draw.choice(("latin-1", "utf-8")), "surrogateescape"
            )
        for look in (self._check_trust, self._verify_signature, self._read_fields, self._read_peer):
            try:
                look(text)
            except NebulaError as error:
                str(error).encode("utf-8")

    def _check_trust(self, text: str) -> None:
        check_live(self.trust, self.trust.check(text))

    def _verify_signature(self, text: str) -> None:
        self.prover.verify(text, b"0" * 70, b"said", GPU.worker)

    def _read_fields(self, text: str) -> None:
        found = files.parse_certificate(text, "a peer")
        (
            files.find_authority_run(found),
            files.list_alternative_names(found, x509.DNSName),
            files.digest_certificate_key(found),
        )
        files.is_signed_by(found, found), self.trust.check(found)

    def _read_peer(self, text: str) -> None:
        files.read_peer(files.parse_certificate(text, "a peer"))


# ---------------------------------------------------------------------- heads and logs
class Heads:
    """The head of an audit log, as sent by a peer and as stored in a file."""

    def __init__(self, folder: Path) -> None:
        self.gate = Home.at(folder / "certs").credentials(GATE)
        self.file = folder / "heads.jsonl"
        self.head = Head.sign(self.gate, 7, "0" * 64)._asdict()

    def attack(self, draw: Draw) -> None:
        value = alter_value(draw, self.head)
        if draw.random() < 0.3:
            value = {**self.head, "certificate": encode_pem(garble_bytes(draw, decode_pem(self.head["certificate"])))}
        try:
            head = Head.from_dict(value if isinstance(value, dict) else {})
            head.check(), head.check(self.gate.trust)
        except NebulaError as error:
            str(error).encode("utf-8")
        line = json.dumps(value).encode()
        self.file.write_bytes(garble_bytes(draw, line) if draw.random() < 0.5 else line)
        try:
            list(read_heads(self.file))
        except NebulaError as error:
            str(error).encode("utf-8")


def decode_pem(pem: str) -> bytes:
    return base64.b64decode("".join(pem.splitlines()[1:-1]))


class DenyLists:
    """Deny lists that were changed, and ones that the authority signed with invalid values."""

    def __init__(self, folder: Path) -> None:
        self.home = Home.at(folder / "certs")
        self.ours = self.home.credentials(GATE)
        self.path = self.home.folder / "revoked.json"
        issue.revoke(self.home.folder, self.home.authority, [self.ours.serial], "sold")
        self.valid = self.path.read_bytes()
        self.authorities = [self.home.authority.certificate]
        denied._highest_file(self.path).unlink(missing_ok=True)
        denied._highest_file(self.path).mkdir()  # no list number can be stored
        self.deny_list = denied.DenyList(self.path, self.authorities)

    def attack(self, draw: Draw) -> None:
        value = alter_value(draw, json.loads(self.valid)) if draw.random() < 0.8 else json.loads(self.valid)
        if isinstance(value, dict) and draw.random() < 0.5:
            value.pop("signature", None)
            message = denied._SIGNATURE_PREFIX + chain.encode_canonical(value)
            value["signature"] = base64.b64encode(self.home.authority.key.sign(message, files.SIGNATURE)).decode()
        data = json.dumps(value).encode()
        self.path.write_bytes(garble_bytes(draw, data) if draw.random() < 0.5 else data)
        try:
            denied.DenyList(self.path, self.authorities)
        except NebulaError as error:
            str(error).encode("utf-8")
        self.deny_list.find(self.ours.serial, self.authorities)


class Logs:
    """Audit logs that were changed: bytes, or records with recomputed digests."""

    def __init__(self, folder: Path) -> None:
        gate = Home.at(folder / "certs").credentials(GATE)
        self.path, self.copy_path = folder / "audit.jsonl", folder / "again.jsonl"
        self.heads: list[Head] = []
        log = AuditLog(self.path, GATE, gate, on_head=self.heads.append, head_every=4)
        for number in range(6):
            log.record("open", decision="allow", target=f"npu/{number}", durable=False)
        log.close()
        self.lines = self.path.read_bytes().splitlines()
        self.trust: Trust = gate.trust

    def attack(self, draw: Draw) -> None:
        data = b"\n".join(self._forge_chain(draw) if draw.random() < 0.6 else self.lines) + b"\n"
        if draw.random() < 0.5:
            data = garble_bytes(draw, data)
        self.path.write_bytes(data)
        heads, trust = draw.choice(([], self.heads)), draw.choice((None, self.trust))
        try:
            verdict = verify(self.path, heads, trust)
            text = audit._format_text(verdict, Namespace(heads=heads, ca=trust))
            text.encode("utf-8"), json.dumps({"ok": verdict.ok, **asdict(verdict)}).encode()
        except NebulaError as error:
            str(error).encode("utf-8")
        self.copy_path.write_bytes(data)
        try:
            AuditLog(self.copy_path, GATE, None).close()
        except NebulaError as error:
            str(error).encode("utf-8")

    def _forge_chain(self, draw: Draw) -> list[bytes]:
        """The lines with one changed record and a recomputed chain."""
        changed_line, link, lines = draw.randrange(len(self.lines)), chain.START, []
        for number, line in enumerate(self.lines):
            value = json.loads(line)
            if number == changed_line:
                value = alter_value(draw, value)
                value = value if isinstance(value, dict) else {"action": value}
            value = {key: value[key] for key in value if key not in ("seq", "prev")}
            line, link = chain.make_line(link, value)
            lines.append(line)
        return lines


TARGETS: dict[str, Callable[[Path], Any]] = {
    "certificates": Certificates,
    "heads": Heads,
    "lists": DenyLists,
    "logs": Logs,
}


def run(target: str, seed: int, mutations: int) -> dict[str, Any]:
    """Run this many attacks; the report contains the traceback of the first failure."""
    draw, counts, failure = random.Random(seed), Counter[str](), None
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        victim = TARGETS[target](Path(folder))
        while counts["mutations"] < mutations and failure is None:
            counts["mutations"] += 1
            try:
                victim.attack(draw)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                failure = traceback.format_exc()
    return {"target": target, "seed": seed, **counts, "seconds": round(time.monotonic() - began, 1), "failure": failure}

"""The handshake on a connection: HELLO both ways, then AUTH both ways, each a signature over the HELLO.

The first authenticated greeting fixes the identity of the other process: on a later connection the same process
resumes, and a different process is detected. Each greeting has the epoch of the run (the number of restarts): a process
of an earlier epoch is refused. Through a gateway the two also agree on keys (X25519) and seal frames (AES-GCM).
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from whale_nebula.errors import (
    DamagedFrameError,
    EpochOverError,
    LocalProtocolError,
    OtherWorkersError,
    PeerRestartedError,
    RemoteProtocolError,
    StaleWorkerError,
)
from whale_nebula.errors.text import escape_foreign_text, list_counts
from whale_nebula.wire.frame import TAG_BYTES, Flag, Header, encode_sealed_header, unseal_header
from whale_nebula.wire.message import MAX_UINT64, encode_message, is_count
from whale_nebula.wire.tensor import Bytes

NONCE_BYTES = 16
_PUBLIC_KEY_BYTES = 32
_CHANGING_FIELDS = ("certificate", "challenge", "received", "acknowledged", "epoch", "in_session")
_MAX_TEXT_LENGTH = 48 << 10
_LABEL = b"whale_nebula greeting 3\0"


@dataclass(frozen=True, slots=True)
class Hello:
    """One side's HELLO. Bytes are in hex.

    `nonce` is random for each process, `challenge` for each connection: a proof that is signed with a challenge is
    valid on its connection only. `received` is the number of the next frame that this side expects, `acknowledged` that
    of the first frame that the other side still counts as in flight, and `budget` how many bytes may be in flight: the
    smaller of the two budgets applies to both sides. `epoch` is the run's epoch as known to this process; once it is
    `in_session`, all workers have the same epoch, and it is final. In elastic runs, `absent` are the workers without
    which the run continues, as known to this process, and `launched` those that its launcher may start; otherwise
    `absent` is None.
    """

    run: str
    worker: str
    to: str
    nonce: str
    challenge: str
    budget: int
    received: int
    acknowledged: int
    certificate: str | None = None
    exchange: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    epoch: int = 0
    in_session: bool = False
    absent: Sequence[str] | None = None
    launched: Sequence[str] = ()

    def to_message(self) -> dict[str, Any]:
        """The greeting as a control message."""
        return {"kind": "HELLO", **asdict(self)}

    def select_lasting_fields(self) -> dict[str, Any]:
        """The fields that stay the same on every connection of a process, without its certificate, which may be
        renewed.
        """
        return {name: value for name, value in asdict(self).items() if name not in _CHANGING_FIELDS}


def read_hello_message(message: Mapping[str, Any]) -> Hello:
    """The HELLO in a message; every field is checked."""
    fields = {name: value for name, value in message.items() if name != "kind"}
    wrong = sorted(fields.keys() ^ _FIELDS.keys()) or [n for n, fits in _FIELDS.items() if not fits(fields[n])]
    if message.get("kind") != "HELLO" or wrong:
        raise RemoteProtocolError(
            f"invalid HELLO in the greeting: {escape_foreign_text(', '.join(wrong)) or 'kind'}",
            mend="install the same release of whale_nebula in every cluster",
        )
    return Hello(**fields)


def build_transcript(hellos: tuple[Hello, Hello], signer: str) -> bytes:
    """The bytes that the worker `signer` signs: both greetings, and the signer's name."""
    contents = [asdict(hello) for hello in _sort_hellos(hellos)]
    return _LABEL + encode_message({"kind": "TRANSCRIPT", "signer": signer, "hellos": contents})


def build_salt(hellos: tuple[Hello, Hello]) -> bytes:
    """Both nonces, in an order that is the same at both sides."""
    return b"".join(bytes.fromhex(hello.nonce) for hello in _sort_hellos(hellos))


def derive_conversation_number(hellos: tuple[Hello, Hello]) -> int:
    """The number on every frame between these two processes; never 0, the number of greetings."""
    return int.from_bytes(hashlib.sha256(b"conversation" + build_salt(hellos)).digest()[:4], "big") or 1


def _sort_hellos(hellos: tuple[Hello, Hello]) -> list[Hello]:
    return sorted(hellos, key=lambda hello: hello.worker)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT_LENGTH


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_text, value))


def _is_positive(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_UINT64


def _is_hex(value: Any, size: int) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]*", value) is not None and len(value) == 2 * size


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "run": _is_text,
    "worker": _is_text,
    "to": _is_text,
    "nonce": lambda value: _is_hex(value, NONCE_BYTES),
    "challenge": lambda value: _is_hex(value, NONCE_BYTES),
    "budget": _is_positive,
    "received": _is_positive,
    "acknowledged": _is_positive,
    "certificate": lambda value: value is None or _is_text(value),
    "exchange": lambda value: value is None or _is_hex(value, _PUBLIC_KEY_BYTES),
    "versions": lambda value: isinstance(value, dict) and all(map(_is_text, value.values())),
    "epoch": is_count,
    "in_session": lambda value: isinstance(value, bool),
    "absent": lambda value: value is None or _is_list_of_texts(value),
    "launched": _is_list_of_texts,
}


def draw_nonce() -> bytes:
    """Random bytes for one use."""
    return secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class Greeting:
    """Identity of this side, of the expected peer, and of the run and its epoch; `versions` are for information.

    In elastic runs, `absent` are the workers without which the run continues, possibly including the other side: its
    greeting announces that it is available. `launched` are the workers that this side's launcher may start, and the
    `anchor` is the worker that decides on those of other launchers. `free_places` are the numbers of workers that may
    come, by cluster, where there are limits.
    """

    run: str
    worker: str
    peer: str
    nonce: bytes = field(default_factory=draw_nonce)
    versions: Mapping[str, str] = field(default_factory=dict)
    epoch: int = 0
    absent: Sequence[str] | None = None
    launched: Sequence[str] = ()
    anchor: str | None = None
    free_places: Mapping[str, int] = field(default_factory=dict)


class Prover(Protocol):
    """Authenticates this side to the other one, and verifies the other's proof."""

    @property
    def certificate(self) -> str:
        """The certificate of this worker, as PEM; it may have been renewed."""

    def sign(self, transcript: bytes) -> bytes:
        """A signature with the certificate's key."""

    def verify(self, certificate: str, signature: bytes, transcript: bytes, worker: str) -> None:
        """Raise unless this certificate is valid and belongs to this worker, and its key created this signature."""

    def check_live(self, certificate: str, worker: str) -> None:
        """Raise unless this certificate, which passed `verify` before, is still valid: its dates and the deny list."""


class Handshake:
    """The greetings of one side, on consecutive connections.

    `exchange` is the public half of a key exchange, if frames are sealed.
    """

    def __init__(
        self, greeting: Greeting, budget: int, prover: Prover | None = None, exchange: bytes | None = None
    ) -> None:
        if exchange is not None and prover is None:
            raise LocalProtocolError(
                "cannot seal frames without certificates",
                why="any process between the two could exchange keys with both",
                mend="configure certificates, or turn off sealing",
            )
        self._greeting = greeting
        self._budget = budget
        self._prover = prover
        self._exchange = exchange
        self._draw_challenge = draw_nonce
        self._epoch, self._in_session = greeting.epoch, False
        self._own_hello: Hello | None = None
        self._peer_hello: Hello | None = None
        self.proven_hello: Hello | None = None  # the other process's first authenticated HELLO
        self.peer_certificate: str | None = None  # the certificate of its latest proof

    def begin_session(self, epoch: int) -> None:
        """Begin the session: all workers have agreed on this epoch."""
        self._epoch, self._in_session = epoch, True

    def build_hello(self, received: int, acknowledged: int) -> dict[str, Any]:
        """The first message on a new connection."""
        self._peer_hello = None
        self._own_hello = Hello(
            run=self._greeting.run,
            worker=self._greeting.worker,
            to=self._greeting.peer,
            nonce=self._greeting.nonce.hex(),
            challenge=self._draw_challenge().hex(),
            budget=self._budget,
            received=received,
            acknowledged=acknowledged,
            certificate=self._prover.certificate if self._prover else None,
            exchange=self._exchange.hex() if self._exchange else None,
            versions=dict(self._greeting.versions),
            epoch=self._epoch,
            in_session=self._in_session,
            absent=None if self._greeting.absent is None else list(self._greeting.absent),
            launched=list(self._greeting.launched),
        )
        return self._own_hello.to_message()

    def answer_hello(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Process the other side's HELLO; returns the AUTH that answers it."""
        peer_hello = read_hello_message(message)
        own_hello = self._require_hello()
        _check_peer(own_hello, peer_hello)
        self._peer_hello = peer_hello
        if self._prover is None:
            return {"kind": "AUTH", "signature": None}
        return {
            "kind": "AUTH",
            "signature": self._prover.sign(build_transcript((own_hello, peer_hello), own_hello.worker)).hex(),
        }

    def process_auth(self, message: Mapping[str, Any]) -> tuple[Hello, Hello]:
        """Process the other side's AUTH; returns both greetings once it has authenticated its own."""
        if self._peer_hello is None:
            raise RemoteProtocolError("received AUTH before HELLO")
        hellos = self._require_hello(), self._peer_hello
        signature: Any = message.get("signature")
        if message.keys() != {"kind", "signature"} or (signature is None) != (self._prover is None):
            raise RemoteProtocolError("invalid AUTH in the greeting")
        if self._prover is not None:
            try:
                signed = bytes.fromhex(signature)
            except (TypeError, ValueError):
                raise RemoteProtocolError("the signature of the greeting is not a hex string") from None
            worker = self._peer_hello.worker
            self._prover.verify(self._peer_hello.certificate or "", signed, build_transcript(hellos, worker), worker)
        if not self._in_session and not self._peer_hello.in_session:  # a process of an old session has old numbers
            check_absent(*hellos, self._greeting.anchor, self._greeting.free_places)
        _check_epoch(*hellos, self.proven_hello)
        self.proven_hello = self.proven_hello or self._peer_hello
        if self._peer_hello.nonce != self.proven_hello.nonce:
            raise PeerRestartedError(
                f"worker '{self._peer_hello.worker}' was restarted",
                why="its state of this run was lost with its process",
            )
        if self._peer_hello.select_lasting_fields() != self.proven_hello.select_lasting_fields():
            raise RemoteProtocolError(
                f"the greeting of worker '{self._peer_hello.worker}' differs from that of the same process before"
            )
        self.peer_certificate = self._peer_hello.certificate
        return hellos

    def _require_hello(self) -> Hello:
        if self._own_hello is None:
            raise LocalProtocolError("cannot greet without a connection")
        return self._own_hello


def _check_peer(own_hello: Hello, peer_hello: Hello) -> None:
    """Check that both sides belong to the same run, address each other, and secure their frames in the same way."""
    run, worker, to = map(escape_foreign_text, (peer_hello.run, peer_hello.worker, peer_hello.to))
    if peer_hello.run != own_hello.run:
        raise RemoteProtocolError(
            f"worker '{worker}' belongs to run '{run}', but this is run '{own_hello.run}'",
            mend="use the same 'run' in all clusters, and stop remaining processes of earlier runs",
        )
    if (peer_hello.worker, peer_hello.to) != (own_hello.to, own_hello.worker):
        raise RemoteProtocolError(
            f"'{worker}' greets '{to}', but '{own_hello.worker}' expects '{own_hello.to}'",
            mend="compare the addresses in the clusters' configs",
        )
    if peer_hello.nonce == own_hello.nonce:
        raise RemoteProtocolError("the greeting is a copy of this side's own greeting")
    for what in ("certificate", "exchange"):
        with_field = [hello.worker for hello in (own_hello, peer_hello) if getattr(hello, what) is not None]
        if len(with_field) == 1:
            raise RemoteProtocolError(
                f"only '{with_field[0]}' greets with {_NOUNS[what]}",
                mend="use the same security section on both sides, and gateways on both or neither",
            )


def _check_epoch(own_hello: Hello, peer_hello: Hello, earlier: Hello | None) -> None:
    """Compare epochs of the run; `earlier` is the greeting of the process that was connected before, if any.

    Processes that have just started may have different epochs: all workers then agree on the highest.
    """
    worker = escape_foreign_text(peer_hello.worker)
    if earlier is not None and peer_hello.nonce == earlier.nonce:
        if own_hello.in_session and peer_hello.in_session and own_hello.epoch != peer_hello.epoch:
            raise RemoteProtocolError(
                f"worker '{worker}' has epoch {peer_hello.epoch}, but {own_hello.epoch} was agreed on"
            )
        return
    if own_hello.in_session and peer_hello.epoch > own_hello.epoch:
        raise EpochOverError(
            f"this worker, '{own_hello.worker}', is in epoch {own_hello.epoch}, "
            f"but the run is in epoch {peer_hello.epoch}",
            why=f"according to worker '{worker}', all workers were restarted while this one was stopped or unreachable",
        )
    if own_hello.in_session or (earlier is not None and not peer_hello.in_session):
        current_epoch = own_hello.epoch if own_hello.in_session or earlier is None else earlier.epoch
        if peer_hello.epoch < current_epoch:
            error = StaleWorkerError(
                f"worker '{worker}' is in epoch {peer_hello.epoch}, but the run is in epoch {current_epoch}",
                why="it or its launcher was stopped or unreachable while all workers were restarted",
            )
            error.fresh = own_hello.in_session and not peer_hello.in_session
            raise error
    elif peer_hello.in_session:
        raise StaleWorkerError(
            f"worker '{worker}' is still in a session of epoch {peer_hello.epoch}, which does not include this process",
            why=f"'{own_hello.worker}' was restarted for epoch {own_hello.epoch}, "
            "and that worker was not restarted yet",
        )


def check_absent(
    own_hello: Hello, peer_hello: Hello, anchor: str | None, free_places: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Compare the absent workers. The `anchor` learns from each worker about those of that worker's launcher, and all
    others learn from the anchor. The side with outdated knowledge ends, to be restarted. Workers that have come, but
    for which their cluster has no `free_places` if it has limits, are spare, and wait.
    """
    worker, here = peer_hello.worker, own_hello.worker
    own_absent, peer_absent = own_hello.absent, peer_hello.absent
    if own_absent and worker in own_absent and peer_absent is None:
        raise RemoteProtocolError(
            f"worker '{escape_foreign_text(worker)}' has connected, but its greeting does not name the absent workers",
            mend="use the same 'elastic' in the config of every cluster",
        )
    if own_absent is None or peer_absent is None or set(own_absent) == set(peer_absent):
        return
    different = set(own_absent) ^ set(peer_absent)
    cluster = worker.rpartition("/")[0]
    peer_launched = {worker, *(each for each in peer_hello.launched if each.rpartition("/")[0] == cluster)}
    known = {here: peer_launched, worker: different - {here, *own_hello.launched}}.get(anchor or "", set())
    counts = {each: int(each not in peer_absent) for each in sorted(different & known)}
    if here == anchor:
        counts = _select_arrivals(counts, free_places)
    if counts:
        error = OtherWorkersError(
            f"the run continues {list_counts(counts)}",
            why=f"worker '{escape_foreign_text(worker)}' reported this, "
            f"and '{here}' was started {_describe_absent(own_absent)}",
        )
        error.counts = counts
        raise error
    refusal = StaleWorkerError(
        f"worker '{escape_foreign_text(worker)}' was started {_describe_absent(peer_absent)}",
        why=f"'{here}' was started {_describe_absent(own_absent)}",
    )
    refusal.absent = here in peer_absent
    raise refusal


def _select_arrivals(counts: Mapping[str, int], free_places: Mapping[str, int]) -> dict[str, int]:
    """Those of the reported workers that are gone (0), or have come (1) and are not spare.

    >>> _select_arrivals({"gpu/1": 0, "gpu/2": 1, "gpu/3": 1, "npu/0": 1}, {"gpu": 1})
    {'gpu/1': 0, 'gpu/2': 1, 'npu/0': 1}
    """
    taken: Counter[str] = Counter()
    selected = {}
    for worker, count in counts.items():
        cluster = worker.rpartition("/")[0]
        if not count or taken[cluster] < free_places.get(cluster, len(counts)):
            selected[worker] = count
            taken[cluster] += count
    return selected


def _describe_absent(absent: Sequence[str]) -> str:
    return list_counts(dict.fromkeys(absent, 0)) or "with all workers"


_NOUNS = {"certificate": "a certificate", "exchange": "a key for sealed frames"}


_KEY_BYTES = 32
_INFO = b"whale_nebula sealed frames 1"


class Exchange:
    """One side's half of a key exchange; a new one for each conversation."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def agree(self, peer_public_key: bytes, salt: bytes) -> bytes:
        """The shared secret, as key material for both directions."""
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(peer_public_key))
        except ValueError:
            raise RemoteProtocolError("the other side's public key for the key exchange is invalid") from None
        return HKDF(SHA256(), 2 * _KEY_BYTES, salt, _INFO).derive(shared)


class Sealer:
    """Encrypts and decrypts frames between the workers with these numbers."""

    def __init__(self, material: bytes, here: int, there: int) -> None:
        first, second = material[:_KEY_BYTES], material[_KEY_BYTES:]
        own_key, peer_key = (first, second) if here < there else (second, first)
        self._seal, self._open = AESGCM(own_key), AESGCM(peer_key)

    def seal(self, header: Header, chunk: Bytes) -> tuple[Header, Bytes]:
        """Encrypt a numbered frame: returns its header, and its chunk as ciphertext and tag."""
        header = header._replace(flags=header.flags | Flag.SEALED, length=header.length + TAG_BYTES)
        sealed = np.empty(header.length, np.uint8)
        self._seal.encrypt_into(_nonce(header), chunk.data, encode_sealed_header(header), sealed.data)
        return header, sealed

    def open(self, header: Header, sealed: Bytes, place: Bytes) -> Header:
        """Decrypt the chunk of a sealed frame into its place; returns its unsealed header."""
        try:
            self._open.decrypt_into(_nonce(header), sealed.data, encode_sealed_header(header), place.data)
        except InvalidTag:
            raise DamagedFrameError(
                f"the seal of frame {header.sequence} is invalid",
                why="the frame was modified in transit, or sealed with a different key",
            ) from None
        return unseal_header(header)


def _nonce(header: Header) -> bytes:
    return header.source.to_bytes(4, "big") + header.sequence.to_bytes(8, "big")

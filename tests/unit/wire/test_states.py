"""The state table of a conversation, one side that runs through it, and control messages as JSON."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.errors import LocalProtocolError, RemoteProtocolError
from whale_nebula.wire.frame import FRAME_CAP, Header, Kind
from whale_nebula.wire.message import (
    GREETING_STATES,
    OPEN_STATES,
    TABLE,
    Side,
    State,
    Trigger,
    apply_frame,
    build_message,
    check_message,
    decode_message,
    encode_message,
    find_kind,
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-a-step-crosses.md"


def draw_arrows(sources: tuple[State, ...], *, within: bool = False) -> Iterator[str]:
    """Lines for the transitions from these states; `within`: only to open states."""
    for source in sources:
        for target in State:
            triggers = [trigger for trigger in Trigger if TABLE.get((source, trigger)) == target]
            if triggers and not (within and target not in OPEN_STATES):
                yield f"    {source} --> {target}: {', '.join(triggers)}"


def draw_diagram() -> str:
    """The table as a Mermaid diagram; transitions from all open states are drawn once, from their frame."""
    common = {
        target: [trigger for trigger in Trigger if {TABLE.get((source, trigger)) for source in OPEN_STATES} == {target}]
        for target in State
        if target not in OPEN_STATES
    }
    return "\n".join(
        [
            "stateDiagram-v2",
            "    [*] --> START",
            *draw_arrows(GREETING_STATES),
            "    state joined {",
            *(f"    {line}" for line in draw_arrows(OPEN_STATES, within=True)),
            "    }",
            *(f"    joined --> {target}: {', '.join(triggers)}" for target, triggers in common.items() if triggers),
            *draw_arrows((State.DRAINED,)),
            "    joined --> START: cut",
            "    note right of START: after a cut both greet again, and AUTH leads back to where each was",
        ]
    )


def test_documented_diagram_matches_the_state_table() -> None:
    assert f"```mermaid\n{draw_diagram()}\n```" in PAGE.read_text()


def test_all_states_are_reachable_and_all_triggers_are_used() -> None:
    reachable = {State.START}
    for _ in State:
        reachable |= {after for (state, _), after in TABLE.items() if state in reachable}
    assert reachable == set(State)
    assert {trigger for _, trigger in TABLE} == set(Trigger)


def test_failed_is_final_and_drained_allows_only_fail() -> None:
    failed = {trigger: after for (state, trigger), after in TABLE.items() if state is State.FAILED}
    assert failed == {trigger: State.FAILED for trigger in Trigger if trigger not in (Trigger.HELLO, Trigger.AUTH)}
    assert {trigger for state, trigger in TABLE if state is State.DRAINED} == {Trigger.FAIL}


@pytest.mark.parametrize(
    ("message", "trigger"),
    [
        ({"kind": "SESSION", "about": "HELLO"}, Trigger.INIT),
        ({"kind": "SESSION", "about": "LINES"}, Trigger.LINES),
        ({"kind": "SESSION", "about": "AUTH"}, None),
        ({"kind": "SESSION", "about": ["STEP"]}, None),
        ({"kind": "SESSION", "about": None}, None),
        ({"kind": "FAIL"}, Trigger.FAIL),
        ({"kind": "HELLO"}, None),
        ({"kind": "AUTH"}, None),
        ({"kind": "LEAVING"}, Trigger.NOTE),
        ({"kind": "STEP"}, None),
        ({"kind": "TENSOR"}, None),
        ({"kind": "METRICS", "about": "STEP"}, None),
    ],
    ids=str,
)
def test_message_kind_maps_to_its_trigger(message: dict[str, object], trigger: Trigger | None) -> None:
    entry = find_kind(message)
    assert (entry and entry.trigger) is trigger


OPEN = Side(State.OPEN)
STEPPING = Side(State.STEPPING, announced=(7, 3))
CONTROL = Header(Kind.CONTROL)


def build_session_message(about: str, **fields: object) -> dict[str, object]:
    return {"kind": "SESSION", "about": about, **fields}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"program": 7},
        {"program": "7", "step": 3},
        {"program": 7, "step": -1},
        {"program": 2**64, "step": 1},
        {"program": True, "step": 1},
    ],
    ids=str,
)
def test_step_without_valid_numbers_is_refused(fields: dict[str, object]) -> None:
    assert "without valid numbers" in str(apply_frame(OPEN, CONTROL, build_session_message("STEP", **fields)))


@pytest.mark.parametrize("state", [State.AGREEING, State.MEETING])
def test_value_is_allowed_only_while_agreeing_or_meeting(state: State) -> None:
    assert apply_frame(Side(state), Header(Kind.VALUE, step=9), None) == Side(state)
    assert "VALUE in state STEPPING" in str(apply_frame(STEPPING, Header(Kind.VALUE), None))


def test_failed_side_may_still_send_queued_frames() -> None:
    failed = apply_frame(STEPPING, CONTROL, {"kind": "FAIL"})
    assert isinstance(failed, Side) and failed.state is State.FAILED
    assert apply_frame(failed, Header(Kind.SCALAR, step=99), None) == failed
    assert apply_frame(failed, CONTROL, {"kind": "BYE"}) == failed


@pytest.mark.parametrize("cuts", [1, 2, 3])
def test_side_resumes_its_state_after_cuts(cuts: int) -> None:
    side: Side | None = STEPPING
    for _ in range(cuts):
        assert side is not None
        side = side.disconnect().advance(Trigger.HELLO)
    assert side is not None and not side.greeted
    assert side.advance(Trigger.AUTH) == STEPPING
    assert side.disconnect().disconnect().advance(Trigger.AUTH) is None


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64) + 1, 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=5), st.text())
def test_message_round_trip_preserves_content(message: dict[str, object], kind: str) -> None:
    message["kind"] = kind
    assert decode_message(encode_message(message)) == message


@pytest.mark.parametrize("number", ["1" + 400 * "0", "-" + 30 * "9", "1e999", "-1e999"])
def test_number_beyond_float_range_is_refused(number: str) -> None:
    with pytest.raises(RemoteProtocolError, match="is not JSON"):
        decode_message(f'{{"kind":"SESSION","seen":{{"stages":{{"a":[{number}]}}}}}}'.encode())
    with pytest.raises(RemoteProtocolError, match="invalid value of 'clock'"):
        check_message({"kind": "PONG", "clock": 10**400})


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({}, "'kind' must be a string"),
        ({"kind": 3}, "'kind' must be a string"),
        ({"kind": "A", "x": object()}, "'A' is not plain JSON"),
        ({"kind": "A", "x": float("nan")}, "'A' is not plain JSON"),
        ({"kind": "A", "x": "y" * FRAME_CAP}, "invalid control message 'A'"),
    ],
    ids=["no kind", "kind is a number", "object", "nan", "too long"],
)
def test_invalid_outgoing_message_is_refused(message: dict[str, object], words: str) -> None:
    with pytest.raises(LocalProtocolError, match=words):
        encode_message(message)


INVALID_MESSAGES = [
    b"",
    b"{",
    b"[]",
    b"3",
    b"{}",
    b'{"kind": 3}',
    b'{"kind": "A", "x": NaN}',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"kind": "A", "x": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("data", INVALID_MESSAGES, ids=lambda data: repr(data[:12]))
def test_invalid_received_message_is_a_remote_protocol_error(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_message(data)


LINES = b'{"about":"LINES","kind":"SESSION","lines":[%s],"program":"p"}'
TEXTS = ['say "," and [{}]', "\\", "é\n", "", '\\"', "x" * 70]


def test_program_lines_may_be_many_and_of_any_text() -> None:
    message = build_message("SESSION", "LINES", program="p", lines=TEXTS * 10_000, doing="", line="")
    assert decode_message(encode_message(message)) == message
    assert decode_message(LINES % b"")["lines"] == []


@pytest.mark.parametrize("part", [b"{}", b'{"":0}', b"[[]]", b"0", b"null", b'["a"]'])
def test_program_lines_other_than_texts_are_refused_unparsed(monkeypatch: pytest.MonkeyPatch, part: bytes) -> None:
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("parsed"))
    for count in (1, 300_000):
        with pytest.raises(RemoteProtocolError, match="only texts and lists of texts"):
            decode_message(LINES % b",".join([b'"a"', *[part] * count, b'"b"']))
    with pytest.raises(RemoteProtocolError, match="exceed the limit of 262144"):
        decode_message(LINES % b",".join([b'""'] * 300_000))


@given(st.binary(max_size=60))
def test_any_bytes_decode_or_raise_remote_protocol_error(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        assert "kind" in decode_message(data)

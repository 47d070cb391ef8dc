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
    Word,
    build_message,
    check_message,
    decode_message,
    encode_message,
    kind_of,
    speak,
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-a-step-crosses.md"


def arrows(sources: tuple[State, ...], *, within: bool = False) -> Iterator[str]:
    """What leads from each of these states to which, and `within`: to which open one."""
    for source in sources:
        for target in State:
            words = [word for word in Word if TABLE.get((source, word)) == target]
            if words and not (within and target not in OPEN_STATES):
                yield f"    {source} --> {target}: {', '.join(words)}"


def diagram() -> str:
    """The table in mermaid. What leads out of all open states is drawn once, from their frame."""
    common = {
        target: [word for word in Word if {TABLE.get((source, word)) for source in OPEN_STATES} == {target}]
        for target in State
        if target not in OPEN_STATES
    }
    return "\n".join(
        [
            "stateDiagram-v2",
            "    [*] --> START",
            *arrows(GREETING_STATES),
            "    state joined {",
            *(f"    {line}" for line in arrows(OPEN_STATES, within=True)),
            "    }",
            *(f"    joined --> {target}: {', '.join(words)}" for target, words in common.items() if words),
            *arrows((State.DRAINED,)),
            "    joined --> START: cut",
            "    note right of START: after a cut both greet again, and AUTH leads back to where each was",
        ]
    )


def test_the_page_shows_the_table() -> None:
    assert f"```mermaid\n{diagram()}\n```" in PAGE.read_text()


def test_every_state_and_every_word_is_reached() -> None:
    reached = {State.START}
    for _ in State:
        reached |= {after for (state, _), after in TABLE.items() if state in reached}
    assert reached == set(State)
    assert {word for _, word in TABLE} == set(Word)


def test_nothing_leads_out_of_a_failure_and_only_a_failure_out_of_the_end() -> None:
    failed = {word: after for (state, word), after in TABLE.items() if state is State.FAILED}
    assert failed == {word: State.FAILED for word in Word if word not in (Word.HELLO, Word.AUTH)}
    assert {word for state, word in TABLE if state is State.DRAINED} == {Word.FAIL}


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ({"kind": "SESSION", "about": "HELLO"}, Word.INIT),
        ({"kind": "SESSION", "about": "LINES"}, Word.LINES),
        ({"kind": "SESSION", "about": "AUTH"}, None),
        ({"kind": "SESSION", "about": ["STEP"]}, None),
        ({"kind": "SESSION", "about": None}, None),
        ({"kind": "FAIL"}, Word.FAIL),
        ({"kind": "HELLO"}, None),
        ({"kind": "AUTH"}, None),
        ({"kind": "LEAVING"}, Word.NOTE),
        ({"kind": "STEP"}, None),
        ({"kind": "TENSOR"}, None),
        ({"kind": "METRICS", "about": "STEP"}, None),
    ],
    ids=str,
)
def test_messages_are_told_apart(message: dict[str, object], word: Word | None) -> None:
    entry = kind_of(message)
    assert (entry and entry.word) is word


OPEN = Side(State.OPEN)
STEPPING = Side(State.STEPPING, announced=(7, 3))
CONTROL = Header(Kind.CONTROL)


def session(about: str, **fields: object) -> dict[str, object]:
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
def test_a_step_without_numbers_is_none(fields: dict[str, object]) -> None:
    assert "without valid numbers" in str(speak(OPEN, CONTROL, session("STEP", **fields)))


@pytest.mark.parametrize("state", [State.AGREEING, State.MEETING])
def test_values_belong_to_an_agreement_or_a_meeting(state: State) -> None:
    assert speak(Side(state), Header(Kind.VALUE, step=9), None) == Side(state)
    assert "VALUE in state STEPPING" in str(speak(STEPPING, Header(Kind.VALUE), None))


def test_a_side_that_failed_may_still_send_what_it_had() -> None:
    failed = speak(STEPPING, CONTROL, {"kind": "FAIL"})
    assert isinstance(failed, Side) and failed.state is State.FAILED
    assert speak(failed, Header(Kind.SCALAR, step=99), None) == failed
    assert speak(failed, CONTROL, {"kind": "BYE"}) == failed


@pytest.mark.parametrize("cuts", [1, 2, 3])
def test_after_cuts_a_side_is_where_it_was(cuts: int) -> None:
    side: Side | None = STEPPING
    for _ in range(cuts):
        assert side is not None
        side = side.cut().say(Word.HELLO)
    assert side is not None and not side.greeted
    assert side.say(Word.AUTH) == STEPPING
    assert side.cut().cut().say(Word.AUTH) is None


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64) + 1, 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), PLAIN, max_size=5), st.text())
def test_any_plain_object_with_a_kind_comes_back(message: dict[str, object], kind: str) -> None:
    message["kind"] = kind
    assert decode_message(encode_message(message)) == message


@pytest.mark.parametrize("number", ["1" + 400 * "0", "-" + 30 * "9", "1e999", "-1e999"])
def test_a_number_that_no_float_holds_is_refused_wherever_it_stands(number: str) -> None:
    with pytest.raises(RemoteProtocolError, match="is not JSON"):
        decode_message(f'{{"kind":"SESSION","seen":{{"stages":{{"a":[{number}]}}}}}}'.encode())
    with pytest.raises(RemoteProtocolError, match="invalid value of 'clock'"):
        check_message({"kind": "PONG", "clock": 10**400})


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"kind": 3},
        {"kind": "A", "x": object()},
        {"kind": "A", "x": float("nan")},
        {"kind": "A", "x": "y" * FRAME_CAP},
    ],
    ids=["no kind", "kind is a number", "object", "nan", "too long"],
)
def test_what_is_no_message_is_not_sent(message: dict[str, object]) -> None:
    with pytest.raises(LocalProtocolError):
        encode_message(message)


BAD = [
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


@pytest.mark.parametrize("data", BAD, ids=lambda data: repr(data[:12]))
def test_what_is_no_message_is_the_other_sides_mistake(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_message(data)


LINES = b'{"about":"LINES","kind":"SESSION","lines":[%s],"program":"p"}'
TEXTS = ['say "," and [{}]', "\\", "é\n", "", '\\"', "x" * 70]


def test_lines_of_a_program_may_be_many_and_say_anything() -> None:
    message = build_message("SESSION", "LINES", program="p", lines=TEXTS * 10_000, doing="", line="")
    assert decode_message(encode_message(message)) == message
    assert decode_message(LINES % b"")["lines"] == []


@pytest.mark.parametrize("part", [b"{}", b'{"":0}', b"[[]]", b"0", b"null", b'["a"]'])
def test_lines_of_a_program_are_texts_or_are_not_parsed(monkeypatch: pytest.MonkeyPatch, part: bytes) -> None:
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    for count in (1, 300_000):
        with pytest.raises(RemoteProtocolError, match="only texts and lists of texts"):
            decode_message(LINES % b",".join([b'"a"', *[part] * count, b'"b"']))
    with pytest.raises(RemoteProtocolError, match="exceed the limit of 262144"):
        decode_message(LINES % b",".join([b'""'] * 300_000))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_a_remote_protocol_error(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        assert "kind" in decode_message(data)

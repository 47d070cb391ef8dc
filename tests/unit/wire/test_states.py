"""The state table of a conversation, and one side that runs through it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from whale_nebula.wire.frame import Header, Kind
from whale_nebula.wire.message import GREETING_STATES, OPEN_STATES, TABLE, Side, State, Word, kind_of, speak

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
    assert "without the numbers" in str(speak(OPEN, CONTROL, session("STEP", **fields)))


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

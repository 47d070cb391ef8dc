"""The table of a conversation: written down once more, drawn, and looked at from all sides."""

from pathlib import Path

import pytest

from whale_nebula.wire.message import Word
from whale_nebula.wire.states import OPEN_STATES, TABLE, State, diagram, table, word_of

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-a-step-crosses.md"
GOLDEN = """\
START: HELLO -> GREETED
GREETED: AUTH -> OPEN
OPEN: INIT -> OPEN, AGREE -> AGREEING, STEP -> STEPPING, MEET -> MEETING, NOTE -> OPEN, ROUND -> OPEN, \
BYE -> DRAINED, FAIL -> FAILED
AGREEING: AGREE -> AGREEING, LINES -> AGREEING, STEP -> STEPPING, MEET -> MEETING, NOTE -> AGREEING, \
VALUE -> AGREEING, ROUND -> AGREEING, BYE -> DRAINED, FAIL -> FAILED
STEPPING: AGREE -> AGREEING, STEP -> STEPPING, VOTE -> STEPPING, MEET -> MEETING, NOTE -> STEPPING, \
TENSOR -> STEPPING, ROUND -> STEPPING, BYE -> DRAINED, FAIL -> FAILED
MEETING: AGREE -> AGREEING, STEP -> STEPPING, MEET -> MEETING, NOTE -> MEETING, VALUE -> MEETING, \
ROUND -> MEETING, BYE -> DRAINED, FAIL -> FAILED
DRAINED: FAIL -> FAILED
FAILED: INIT -> FAILED, AGREE -> FAILED, LINES -> FAILED, STEP -> FAILED, VOTE -> FAILED, MEET -> FAILED, \
NOTE -> FAILED, TENSOR -> FAILED, VALUE -> FAILED, ROUND -> FAILED, BYE -> FAILED, FAIL -> FAILED"""


def test_the_table_is_what_was_decided() -> None:
    assert table() == GOLDEN


def test_the_page_shows_the_diagram_that_is_drawn() -> None:
    assert f"```mermaid\n{diagram()}\n```" in PAGE.read_text()


def test_the_diagram_has_every_move() -> None:
    drawn = set()
    for line in diagram().splitlines():
        source, arrow, rest = line.strip().partition(" --> ")
        target, colon, words = rest.partition(": ")
        if arrow and colon and words != "cut":
            sources = OPEN_STATES if source == "joined" else [State(source)]
            drawn |= {(each, Word(word), State(target)) for each in sources for word in words.split(", ")}
    absorbed = {(state, word, after) for (state, word), after in TABLE.items() if state is State.FAILED}
    assert drawn == {(state, word, after) for (state, word), after in TABLE.items()} - absorbed


def test_every_state_and_every_word_is_reached() -> None:
    reached = {State.START}
    for _ in State:
        reached |= {after for (state, _), after in TABLE.items() if state in reached}
    assert reached == set(State)
    assert {word for _, word in TABLE} == set(Word)


def test_nothing_leads_out_of_a_failure_and_only_a_failure_out_of_the_end() -> None:
    assert {after for (state, _), after in TABLE.items() if state is State.FAILED} == {State.FAILED}
    assert {after for (state, _), after in TABLE.items() if state is State.DRAINED} == {State.FAILED}


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
    assert word_of(message) is word

"""One side of a conversation: what moves it, and what it may not say."""

import pytest

from whale_nebula.wire.frame import Header, Kind
from whale_nebula.wire.message import Word
from whale_nebula.wire.states import Side, State, speak

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

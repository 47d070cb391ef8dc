"""`nb.compress("auto")`: the chosen precision, when it is chosen, and its report. No clock runs here."""

from dataclasses import replace

import pytest

from whale_nebula.codec.encoding import Encoding, parse_encoding
from whale_nebula.report.records import BoundaryReport
from whale_nebula.runtime.exchange.auto import Auto, Direction, Outlook
from whale_nebula.runtime.exchange.state import ChannelState, States, Tally
from whale_nebula.spec import Spec

LINK, RAW = "gpu->npu", 64 * 256 * 4
ROWS = (32, 32)
CODECS = ("none", "fp16", "int8", "int4")


class Ground:
    """A program whose auto directions are all sent over one link, and the states that its ends would keep."""

    def __init__(self, *labels: str, way: Encoding | None = None, training: bool = True) -> None:
        self.way, self.states = way or parse_encoding("auto"), States()
        spec = Spec("float32", (None, 256))
        self.directions = [Direction(label, label, self.way, spec, (LINK,)) for label in labels or ("b0",)]
        self.auto = Auto(self.directions, self.states, training)
        self.said: list[str] = []

    def step(
        self, rate: float | None = None, compute: float | None = 0.01, carried: int = 0, **last: BoundaryReport
    ) -> str:
        """A step of training; gives the codec that it uses."""
        tally = Tally()
        rates = {} if rate is None else {LINK: rate}
        self.auto.choose(Outlook(ROWS, compute, rates, {LINK: carried}), last, tally)
        self.said = list(tally.changes())
        for each in self.directions:
            state = self.states.of(each.key)
            self.states.put(each.key, replace(state, steps=state.steps + 1))
        return self.now()

    def now(self) -> str:
        found = {CODECS[self.states.of(each.key).rung] for each in self.directions}
        assert len(found) == 1
        return found.pop()

    def steps(self, count: int, **given: float) -> list[str]:
        return [self.step(**given) for _ in range(count)]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(1.1, "none"), (0.9, "fp16"), (0.51, "fp16"), (0.4, "int8"), (0.2, "int4"), (0.01, "int4")],
)
def test_the_mildest_that_hides_is_taken_and_the_last_where_none_does(seconds: float, expected: str) -> None:
    assert Ground().step(rate=RAW, compute=seconds) == expected


def test_a_line_that_takes_no_time_leaves_tensors_alone() -> None:
    ground = Ground()
    assert ground.steps(21, compute=1e-6) == ["none"] * 21
    assert ground.said == []


def test_what_else_the_link_carries_leaves_less_room() -> None:
    assert Ground().step(rate=RAW, compute=1.6, carried=RAW) == "fp16"
    own = BoundaryReport("none", RAW, RAW, RAW)
    assert Ground().step(rate=RAW, compute=1.6, carried=RAW, b0=own) == "none"


def test_directions_that_share_a_link_move_together() -> None:
    ground = Ground("b0", "b1")
    assert ground.step(rate=RAW, compute=1.1) == "fp16"
    assert [line.split(":")[0] for line in ground.said] == ["b0", "b1"]


def test_it_looks_every_tenth_step() -> None:
    ground = Ground()
    assert ground.steps(3, rate=RAW, compute=2.0) == ["none"] * 3
    assert ground.steps(7, rate=RAW / 10, compute=2.0) == ["none"] * 7
    assert ground.steps(10, rate=RAW / 10, compute=2.0) == ["int4"] * 10
    assert ground.steps(1, rate=RAW, compute=2.0) == ["none"]


def test_it_looks_again_as_soon_as_computing_was_measured() -> None:
    ground = Ground()
    assert ground.step(rate=RAW, compute=None) == "int4"  # the config's rate, and a guess
    assert ground.step(rate=RAW, compute=None) == "int4"
    assert ground.step(rate=RAW, compute=9.0) == "none"
    assert ground.steps(7, rate=RAW / 1e6, compute=9.0) == ["none"] * 7
    assert ground.step(rate=RAW / 1e6, compute=9.0) == "int4"


def test_before_anything_is_measured_a_fast_line_is_trusted() -> None:
    assert Ground().step(rate=RAW * 1000, compute=None) == "none"
    assert Ground().step(rate=None, compute=None) == "none"


def test_a_line_that_is_just_as_fast_does_not_make_it_flap() -> None:
    ground, half = Ground(), 0.51  # what fp16 takes, and a hair more
    assert ground.steps(10, rate=RAW, compute=half)[-1] == "fp16"
    assert ground.steps(10, rate=RAW, compute=half * 0.97)[-1] == "int8"
    assert ground.steps(10, rate=RAW, compute=half * 1.03)[-1] == "int8"
    assert ground.steps(10, rate=RAW, compute=half / 0.79)[-1] == "fp16"


def test_bytes_are_those_that_were_measured_where_rows_were_left_out() -> None:
    ground = Ground()
    assert ground.step(rate=RAW, compute=0.3) == "int8"
    ground.steps(9, rate=RAW, compute=0.3)
    halved = BoundaryReport("int8", RAW, RAW // 8, RAW // 8)
    assert ground.step(rate=RAW, compute=0.34, carried=RAW // 8, b0=halved) == "fp16"


def test_a_measure_of_another_codec_says_nothing_of_this_one() -> None:
    ground = Ground()
    ground.states.put("b0", ChannelState(rung=2))
    assert ground.step(rate=RAW, compute=0.3, b0=BoundaryReport("fp16", RAW, 1, 1)) == "int8"


def test_it_waits_for_its_first_step() -> None:
    ground = Ground(way=replace(parse_encoding("auto"), start=5))
    assert ground.steps(6, rate=RAW, compute=0.1) == ["none"] * 5 + ["int4"]


def test_an_evaluation_changes_nothing_once_there_was_training() -> None:
    ground = Ground(training=False)
    assert ground.step(rate=RAW, compute=0.3) == "int8"
    assert ground.steps(20, rate=RAW, compute=9.0) == ["int8"] * 20


def test_a_model_that_only_predicts_is_looked_at_as_well() -> None:
    ground = Ground(training=False)
    for _ in range(11):
        ground.step(rate=RAW, compute=0.3)
        ground.states.put("b0", replace(ground.states.of("b0"), steps=0))
    assert ground.now() == "int8"
    for _ in range(10):
        ground.step(rate=RAW, compute=9.0)
        ground.states.put("b0", replace(ground.states.of("b0"), steps=0))
    assert ground.now() == "none"


def test_a_change_is_told_with_its_reason() -> None:
    ground = Ground()
    ground.step(rate=RAW, compute=0.3)
    (line,) = ground.said
    assert line == "b0: auto chooses int8: 0.262 s of the link a step, under 0.300 s of computation"
    ground.step(rate=RAW, compute=0.3)
    assert ground.said == []


def test_what_does_not_fit_is_said_not_to() -> None:
    ground = Ground()
    ground.step(rate=RAW, compute=0.001)
    assert "and not under 1.0 ms of computation" in ground.said[0]


def test_sizes_that_only_a_step_knows_are_guessed_by_proportion() -> None:
    ground = Ground()
    ground.auto.directions = [replace_spec(each, Spec("float32", None)) for each in ground.directions]
    last = BoundaryReport("none", RAW, RAW, RAW)
    assert ground.step(rate=RAW, compute=0.6, carried=RAW, b0=last) == "fp16"


def replace_spec(direction: Direction, spec: Spec) -> Direction:
    return direction._replace(spec=spec)


# ---------------------------------------------------------------------- where no rate was seen
@pytest.mark.parametrize(
    ("rates", "codec", "words"),
    [
        ({LINK: 7.5e6}, "none", "uses the configured 60mbit"),
        ({}, "none", "assumes that the link is free, as configured"),
    ],
)
def test_a_choice_that_rests_on_the_config_alone_is_told(rates: dict[str, float], codec: str, words: str) -> None:
    ground, tally = Ground(), Tally()
    ground.auto.choose(Outlook(ROWS, 1.0, rates, {LINK: 64}, {LINK}), {}, tally)
    (note,) = tally.notes()
    assert note == f"b0: auto {words}: too little is written to {LINK} at a time to measure its rate"
    assert ground.now() == codec and tally.changes() == ()


def test_before_a_step_was_measured_and_where_a_rate_was_seen_nothing_is_told() -> None:
    early, other = Outlook(ROWS, None, {}, {}, {LINK}), Outlook(ROWS, 1.0, {}, {}, {"x"})
    for outlook in (early, other, Outlook(ROWS, 1.0, {LINK: 1.0})):
        tally = Tally()
        Ground().auto.choose(outlook, {}, tally)
        assert tally.notes() == ()

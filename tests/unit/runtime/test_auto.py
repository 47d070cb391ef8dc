"""`nb.compress("auto")`: the chosen precision, when it is chosen, and its report. No clock runs here."""

from dataclasses import replace

import pytest

from whale_nebula.codec.encoding import Encoding, parse_encoding
from whale_nebula.report.records import BoundaryReport
from whale_nebula.runtime.exchange.auto import CodecChooser, Direction, StepEstimate
from whale_nebula.runtime.exchange.state import ChannelState, States, Tally
from whale_nebula.spec import Spec

LINK, RAW = "gpu->npu", 64 * 256 * 4
ROWS = (32, 32)
CODECS = ("none", "fp16", "int8", "int4")


class LinkCase:
    """A program whose auto directions are all sent over one link, and the states that its ends would keep."""

    def __init__(self, *labels: str, way: Encoding | None = None, training: bool = True) -> None:
        self.way, self.states = way or parse_encoding("auto"), States()
        spec = Spec("float32", (None, 256))
        self.directions = [Direction(label, label, self.way, spec, (LINK,)) for label in labels or ("b0",)]
        self.auto = CodecChooser(self.directions, self.states, training)
        self.changes: list[str] = []

    def step(
        self, rate: float | None = None, compute: float | None = 0.01, carried: int = 0, **last: BoundaryReport
    ) -> str:
        """A step of training; gives the codec that it uses."""
        tally = Tally()
        rates = {} if rate is None else {LINK: rate}
        self.auto.choose(StepEstimate(ROWS, compute, rates, {LINK: carried}), last, tally)
        self.changes = list(tally.changes())
        for each in self.directions:
            state = self.states.find_state(each.key)
            self.states.put(each.key, replace(state, steps=state.steps + 1))
        return self.now()

    def now(self) -> str:
        found = {CODECS[self.states.find_state(each.key).rung] for each in self.directions}
        assert len(found) == 1
        return found.pop()

    def steps(self, count: int, **given: float) -> list[str]:
        return [self.step(**given) for _ in range(count)]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(1.1, "none"), (0.9, "fp16"), (0.51, "fp16"), (0.4, "int8"), (0.2, "int4"), (0.01, "int4")],
)
def test_mildest_codec_that_hides_is_chosen_or_else_the_last(seconds: float, expected: str) -> None:
    assert LinkCase().step(rate=RAW, compute=seconds) == expected


def test_free_link_chooses_no_codec() -> None:
    case = LinkCase()
    assert case.steps(21, compute=1e-6) == ["none"] * 21
    assert case.changes == []


def test_other_traffic_of_the_link_is_counted() -> None:
    assert LinkCase().step(rate=RAW, compute=1.6, carried=RAW) == "fp16"
    own = BoundaryReport("none", RAW, RAW, RAW)
    assert LinkCase().step(rate=RAW, compute=1.6, carried=RAW, b0=own) == "none"


def test_directions_that_share_a_link_change_together() -> None:
    case = LinkCase("b0", "b1")
    assert case.step(rate=RAW, compute=1.1) == "fp16"
    assert [line.split(":")[0] for line in case.changes] == ["b0", "b1"]


def test_routes_of_one_direction_count_its_bytes_once() -> None:
    case = LinkCase()
    case.auto.directions = [case.directions[0]._replace(key=f"b0 by {route}") for route in ("x", "y")]
    case.directions = case.auto.directions
    own = BoundaryReport("none", RAW, RAW, RAW)
    assert case.step(rate=RAW, compute=1.6, carried=RAW + RAW // 2, b0=own) == "none"


def test_codec_is_chosen_every_tenth_step() -> None:
    case = LinkCase()
    assert case.steps(3, rate=RAW, compute=2.0) == ["none"] * 3
    assert case.steps(7, rate=RAW / 10, compute=2.0) == ["none"] * 7
    assert case.steps(10, rate=RAW / 10, compute=2.0) == ["int4"] * 10
    assert case.steps(1, rate=RAW, compute=2.0) == ["none"]


def test_codec_is_chosen_again_after_the_first_measurement() -> None:
    case = LinkCase()
    assert case.step(rate=RAW, compute=None) == "int4"  # the config's rate, and a guess
    assert case.step(rate=RAW, compute=None) == "int4"
    assert case.step(rate=RAW, compute=9.0) == "none"
    assert case.steps(7, rate=RAW / 1e6, compute=9.0) == ["none"] * 7
    assert case.step(rate=RAW / 1e6, compute=9.0) == "int4"


def test_fast_link_chooses_no_codec_before_measurements() -> None:
    assert LinkCase().step(rate=RAW * 1000, compute=None) == "none"
    assert LinkCase().step(rate=None, compute=None) == "none"


def test_small_changes_of_the_step_time_do_not_change_the_codec() -> None:
    case, half = LinkCase(), 0.51  # what fp16 takes, and a hair more
    assert case.steps(10, rate=RAW, compute=half)[-1] == "fp16"
    assert case.steps(10, rate=RAW, compute=half * 0.97)[-1] == "int8"
    assert case.steps(10, rate=RAW, compute=half * 1.03)[-1] == "int8"
    assert case.steps(10, rate=RAW, compute=half / 0.79)[-1] == "fp16"


def test_measured_bytes_replace_the_planned_ones() -> None:
    case = LinkCase()
    assert case.step(rate=RAW, compute=0.3) == "int8"
    case.steps(9, rate=RAW, compute=0.3)
    halved = BoundaryReport("int8", RAW, RAW // 8, RAW // 8)
    assert case.step(rate=RAW, compute=0.34, carried=RAW // 8, b0=halved) == "fp16"


def test_measurement_of_another_codec_is_ignored() -> None:
    case = LinkCase()
    case.states.put("b0", ChannelState(rung=2))
    assert case.step(rate=RAW, compute=0.3, b0=BoundaryReport("fp16", RAW, 1, 1)) == "int8"


def test_codec_is_not_chosen_before_its_start_step() -> None:
    case = LinkCase(way=replace(parse_encoding("auto"), start=5))
    assert case.steps(6, rate=RAW, compute=0.1) == ["none"] * 5 + ["int4"]


def test_evaluation_after_training_changes_nothing() -> None:
    case = LinkCase(training=False)
    assert case.step(rate=RAW, compute=0.3) == "int8"
    assert case.steps(20, rate=RAW, compute=9.0) == ["int8"] * 20


def test_codec_is_chosen_for_a_model_that_only_predicts() -> None:
    case = LinkCase(training=False)
    for _ in range(11):
        case.step(rate=RAW, compute=0.3)
        case.states.put("b0", replace(case.states.find_state("b0"), steps=0))
    assert case.now() == "int8"
    for _ in range(10):
        case.step(rate=RAW, compute=9.0)
        case.states.put("b0", replace(case.states.find_state("b0"), steps=0))
    assert case.now() == "none"


def test_change_is_noted_with_its_reason() -> None:
    case = LinkCase()
    case.step(rate=RAW, compute=0.3)
    (line,) = case.changes
    assert line == "b0: auto chooses int8: 0.262 s of the link a step, under 0.300 s of computation"
    case.step(rate=RAW, compute=0.3)
    assert case.changes == []


def test_codec_that_does_not_hide_is_noted_as_such() -> None:
    case = LinkCase()
    case.step(rate=RAW, compute=0.001)
    assert "and not under 1.0 ms of computation" in case.changes[0]


def test_unknown_sizes_are_estimated_from_the_last_step() -> None:
    case = LinkCase()
    case.auto.directions = [replace_spec(each, Spec("float32", None)) for each in case.directions]
    last = BoundaryReport("none", RAW, RAW, RAW)
    assert case.step(rate=RAW, compute=0.6, carried=RAW, b0=last) == "fp16"


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
def test_choice_without_a_measured_rate_is_noted(rates: dict[str, float], codec: str, words: str) -> None:
    case, tally = LinkCase(), Tally()
    case.auto.choose(StepEstimate(ROWS, 1.0, rates, {LINK: 64}, {LINK}), {}, tally)
    (note,) = tally.notes()
    assert note == f"b0: auto {words}: too little is written to {LINK} at a time to measure its rate"
    assert case.now() == codec and tally.changes() == ()


def test_choice_is_not_noted_before_a_step_or_with_a_measured_rate() -> None:
    early, other = StepEstimate(ROWS, None, {}, {}, {LINK}), StepEstimate(ROWS, 1.0, {}, {}, {"x"})
    for estimate in (early, other, StepEstimate(ROWS, 1.0, {LINK: 1.0})):
        tally = Tally()
        LinkCase().auto.choose(estimate, {}, tally)
        assert tally.notes() == ()

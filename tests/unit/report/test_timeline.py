"""A step's spans as a drawing: still a tuple of spans."""

from whale_nebula.report.records import ONCE, Span, StageReport
from whale_nebula.report.report import Report, Timeline

SPANS = (
    Span("gpu", "forward 0", 0.0, 0.5, 0),
    Span("gpu->npu", "forward 0", 0.5, 0.75, 0, 0, 1000),
    Span("gpu", "backward 0", 0.75, 0.999, 0),
    Span(ONCE, "update", 0.9999, 1.0),
)


def test_a_lane_has_a_letter_for_what_ran() -> None:
    head, gpu, line, once = str(Timeline(SPANS)).splitlines()
    assert head == "1.000 s from left to right; F forward, B backward, U update"
    assert gpu == f"  gpu         |{'F' * 36}{'.' * 18}{'B' * 18}|  0.749 s in 2 pieces"
    assert line == f"  gpu->npu    |{'.' * 36}{'F' * 18}{'.' * 18}|  0.250 s in 1 piece"
    assert once.startswith(f"  once a step |{'.' * 71}U|")


def test_it_is_the_tuple_of_spans() -> None:
    report = Report("fit", 1, 1.0, 1, {"gpu": StageReport()}, {}, spans=SPANS)
    assert report.timeline() == SPANS
    assert isinstance(report.timeline(), tuple)
    assert len(repr(report.timeline()).splitlines()) == 4

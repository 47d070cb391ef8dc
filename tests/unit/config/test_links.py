"""Rates, delays and lines."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.config import FREE, Line, Links, parse_links
from whale_nebula.config.place import Place
from whale_nebula.config.quantities import convert_to_bits, rate, read_seconds, read_share
from whale_nebula.errors import ConfigError

VALID_QUANTITIES: list[tuple[Any, dict[Any, float]]] = [
    (rate, {"60mbit": 60e6, "9600bit": 9600.0, "1.5 Gbit": 1.5e9, "60Mbit/s": 60e6, ".5mbit": 5e5, "1tbit": 1e12}),
    (
        read_seconds,
        {"20ms": 0.02, "1.5s": 1.5, "500us": 5e-4, "500µs": 5e-4, "2min": 120.0, "1h": 3600.0, 0: 0.0, "0": 0.0},
    ),
    (read_share, {0: 0.0, 0.01: 0.01, "1%": 0.01, "0.5%": 0.005}),
]
INVALID_QUANTITIES: list[tuple[Any, str, list[Any]]] = [
    (rate, "rate", ["60", "mbit", "-60mbit", "60mb", "60MB/s", "60mbps", "0mbit", "", "6e1mbit", "nanmbit"]),
    (read_seconds, "time", ["20", "ms", "-20ms", "20 parsecs", "", None, True, False, [], 20]),
    (read_share, "share", [1, -0.1, "100%", "1", True, None, float("nan")]),
]


@pytest.mark.parametrize(
    ("read", "text", "number"), [(read, *each) for read, known in VALID_QUANTITIES for each in known.items()]
)
def test_quantity_is_parsed(read: Any, text: object, number: float) -> None:
    assert read(Place(text)) == number


@pytest.mark.parametrize(
    ("read", "kind", "text"), [(read, kind, each) for read, kind, all_ in INVALID_QUANTITIES for each in all_]
)
def test_invalid_quantity_is_refused(read: Any, kind: str, text: object) -> None:
    with pytest.raises(ConfigError, match=f"is not a {kind}"):
        read(Place(text))


BITS = {
    "60MB": "480mbit", "60MB/s": "480mbit", "60MBps": "480mbit", "1.5 GB/s": "12gbit", "100kbyte": "800kbit",
    "125B": "1000bit", "60mb": None, "60Mb/s": None, "60mbps": None, "20ms": None, "fast": None,
}  # fmt: skip


def test_convert_to_bits_recognizes_units_of_bytes() -> None:
    assert {text: convert_to_bits(text) for text in BITS} == BITS


def test_rate_in_bytes_is_refused_with_its_value_in_bits() -> None:
    for refused in (lambda: rate(Place("60MB/s")), lambda: parse_links("60MB/s,20ms")):
        with pytest.raises(ConfigError) as caught:
            refused()
        assert caught.value.why == "rates are in bits per second, and B is a byte of 8 bits: 60MB/s is 480mbit"
        assert "480mbit" in caught.value.mend


def test_number_without_unit_is_refused_with_example_units() -> None:
    with pytest.raises(ConfigError, match="60kbit, 60mbit, 60gbit"):
        rate(Place(60))
    with pytest.raises(ConfigError, match="20ms, 20s"):
        read_seconds(Place(20))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("60mbit,20ms", Line(60e6, 0.02)),
        ("20ms, 60mbit", Line(60e6, 0.02)),
        ("60mbit/s, 20ms, 1%", Line(60e6, 0.02, 0.01)),
        ("60mbit", Line(60e6, 0.0)),
        ("1.5s", Line(None, 1.5)),
        ("0ms", Line(None, 0.0)),
    ],
)
def test_line_is_parsed_from_text(text: str, line: Line) -> None:
    links = parse_links(text)
    assert links == Links(line)
    assert links.between("gpu", "npu") == line
    assert links.between("gpu", "gpu") is FREE


@pytest.mark.parametrize(
    "text", ["", ",", "60mbit,70mbit", "60mbit,20ms,3ms", "60", "fast", "60mbit 20ms", "60mbit;20ms", "0mbit", "20m"]
)
def test_invalid_line_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_links(text)


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        ("60mbits", 'did you mean "60mbit"?'),
        ("60mbit,20msec", 'did you mean "20ms"?'),
        ("60mbit;20ms", '"60mbit,20ms"'),
        ("60", '"60mbit,20ms"'),
        (60, 'add a unit: "60mbit", "60ms" ...'),
    ],
)
def test_invalid_line_error_suggests_a_fix(text: Any, mend: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_links(text)
    assert caught.value.mend == mend


def test_misspelt_rate_in_config_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        rate(Place("60mbps"))
    assert caught.value.mend == "did you mean '60mbit'?"
    with pytest.raises(ConfigError) as caught:
        read_seconds(Place("60mbps", "delay"))
    assert caught.value.mend == "delay: 20ms"


def test_link_to_unknown_cluster_is_refused_with_suggestion() -> None:
    assert parse_links({("gpu", "npu"): "free"}, ["gpu", "npu"]).names == ("gpu", "npu")
    with pytest.raises(ConfigError, match="unknown cluster 'nup'") as caught:
        parse_links({("gpu", "nup"): "free"}, ["gpu", "npu"], "train.py:3")
    assert (caught.value.mend, caught.value.where) == ("did you mean 'npu'?", "train.py:3: links")


@pytest.mark.parametrize("value", [60, True, ["60mbit"], b"60mbit"])
def test_link_value_of_wrong_type_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="is not a link"):
        parse_links(value)


def test_pair_applies_to_both_directions_unless_both_are_given() -> None:
    links = parse_links({("gpu", "npu"): "60mbit", ("gpu", "tpu"): "1gbit", ("tpu", "gpu"): Line(1e6)})
    assert links.between("gpu", "npu") == links.between("npu", "gpu") == Line(60e6)
    assert (links.between("gpu", "tpu").rate, links.between("tpu", "gpu").rate) == (1e9, 1e6)
    assert links.between("npu", "tpu") is FREE


@pytest.mark.parametrize("pair", ["gpu", ("gpu",), ("gpu", "gpu"), ("gpu", 3), ("a", "b", "c"), None])
def test_invalid_pair_of_clusters_is_refused(pair: Any) -> None:
    with pytest.raises(ConfigError, match="is not a pair of clusters"):
        parse_links({pair: "60mbit"})


def test_error_in_pair_reports_its_place() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_links({("gpu", "npu"): "60mbps"})
    assert caught.value.where == "links[('gpu', 'npu')]"


def test_missing_links_are_free_and_links_object_is_returned_unchanged() -> None:
    assert parse_links(None).between("gpu", "npu") is FREE
    links = Links(Line(1.0))
    assert parse_links(links) is links


@given(st.none() | st.integers(1, 10**9), st.integers(0, 10**5), st.integers(0, 99))
def test_line_survives_text_round_trip(kbit: int | None, ms: int, percent: int) -> None:
    line = Line(None if kbit is None else kbit * 1e3, ms / 1000, percent / 100)
    parsed = parse_links(str(line)).default
    assert parsed is not None
    assert (parsed.rate or 0, parsed.delay, parsed.loss) == pytest.approx((line.rate or 0, line.delay, line.loss))


@given(st.text(max_size=12))
def test_any_text_gives_a_line_or_an_error_with_a_fix(text: str) -> None:
    try:
        assert isinstance(parse_links(text).default, Line)
    except ConfigError as error:
        assert error.mend

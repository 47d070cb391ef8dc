"""A measurement as data: its file, its table, and its advice for the config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from whale_nebula.config import load
from whale_nebula.config.schema import FREE, Line
from whale_nebula.errors import TransportError
from whale_nebula.launch.link_advice import (
    THROUGH,
    LinkMeasurement,
    LinkThroughput,
    advise,
    find_measurement_path,
    format_link_rate,
    load_measurement,
    save_measurement,
)
from whale_nebula.launch.link_measurement import list_warnings

SMALL = LinkThroughput(1 << 16, 6e6, 6e6, 5e6, 5e6)
LARGE = LinkThroughput(1 << 20, 7.2e6, 7.15e6, 7e6, 6.9e6)
SHEETS = {"gpu/0": {"congestion_control": "bbr"}, "npu/0": {"congestion_control": "cubic"}}
FOUND = LinkMeasurement("gpu/0", "npu/0", "direct", 0.041, 0.0404, 0.001, (SMALL, LARGE), SHEETS, 4, 0, 0.0)


class TestMeasurementFile:
    def test_saved_measurement_is_loaded(self, tmp_path: Path) -> None:
        path = find_measurement_path(tmp_path / "clusters.yaml", "npu", "gpu")
        save_measurement(FOUND, path)
        assert load_measurement(path) == FOUND
        assert path == find_measurement_path(tmp_path / "clusters.yaml", "gpu", "npu")

    @pytest.mark.parametrize("text", ["", "{}", "[]", '{"crossings": [{}]}', '{"crossings": 3}'])
    def test_invalid_or_missing_file_loads_as_none(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "a-b.json").write_text(text)
        assert load_measurement(tmp_path / "a-b.json") is None
        assert load_measurement(tmp_path / "b-a.json") is None

    def test_failed_save_raises_transport_error(self, tmp_path: Path) -> None:
        (tmp_path / "line").write_text("a file")
        with pytest.raises(TransportError, match="cannot save the measurement"):
            save_measurement(FOUND, find_measurement_path(tmp_path / "clusters.yaml", "gpu", "npu"))


class TestAdvice:
    def test_matching_config_needs_no_change(self) -> None:
        assert advise(FOUND, Line(60e6, 0.02)) == (
            True,
            "the config has 60mbit, 20ms, which matches the measurement",
            "",
        )
        assert "a faster link would not show" in advise(replace(FOUND, path=THROUGH), Line(60e6, 0.02)).why

    @pytest.mark.parametrize(
        ("configured", "why"),
        [
            (FREE, "no rate, but the measured rate is 57mbit; the config has no delay, but the measured delay is 20ms"),
            (Line(100e6, 0.02), "the config has 100mbit, but the measured rate is 57mbit"),
            (Line(30e6, 0.02), "the config has 30mbit, but the measured rate is 57mbit"),
            (Line(100e6, 0.021), "the config has 100mbit, but the measured rate is 57mbit"),
        ],
    )
    def test_differing_config_gets_the_line_to_write(self, configured: Line, why: str) -> None:
        advice = advise(FOUND, configured)
        assert not advice.agrees and why in advice.why
        delay = 21 if configured.delay == 0.021 else 20
        assert advice.write == f"links: [{{between: [gpu, npu], rate: 57mbit, delay: {delay}ms}}]"

    def test_advice_keeps_a_rate_that_gateways_pace(self) -> None:
        """They pace below the rate by what TLS and TCP add, and each burst is met with less luck than another."""
        crossings = (SMALL, replace(LARGE, there=6.6e6, back=6.5e6, both_there=7.2e6, both_back=7e6))
        found = replace(FOUND, path=THROUGH, crossings=crossings)
        assert advise(found, Line(60e6, 0.02)).agrees
        assert advise(found, Line(60e6, 0.05)).write == "links: [{between: [gpu, npu], rate: 60mbit, delay: 20ms}]"
        slow = replace(found, crossings=(replace(LARGE, there=5e6, back=5e6, both_there=5e6, both_back=5e6),))
        assert "rate: 40mbit" in advise(slow, Line(60e6, 0.02)).write

    def test_advised_line_is_valid_config(self, tmp_path: Path) -> None:
        path = tmp_path / "clusters.yaml"
        path.write_text(f"clusters: {{gpu: {{}}, npu: {{}}}}\n{advise(FOUND, FREE).write}\n")
        assert advise(FOUND, load(path).links.between("gpu", "npu")).agrees

    @pytest.mark.parametrize("bits", [1.23e5, 9.99e6, 1e7, 57.9e6, 999e6, 12.345e9])
    def test_rate_text_is_rounded_down_slightly(self, bits: float) -> None:
        written = load(
            {"clusters": {"a": {}, "b": {}}, "links": [{"between": ["a", "b"], "rate": format_link_rate(bits)}]}
        )
        found = written.links.between("a", "b").rate
        assert found is not None and 0.9 * bits < found <= bits


class TestNotes:
    def test_notes_list_clock_offset_reconnections_and_versions(self) -> None:
        sheets = {"gpu/0": {"tensorflow": "2.21.0"}, "npu/0": {"tensorflow": "2.21.1"}}
        text = "\n".join(list_warnings(replace(FOUND, clock=-90.0, broken=2, sheets=sheets)))
        assert "npu/0 is 90.0 s behind" in text
        assert "broke 2 times" in text
        assert "tensorflow differs: 2.21.0 at gpu/0, 2.21.1 at npu/0" in text
        assert list_warnings(FOUND) == []

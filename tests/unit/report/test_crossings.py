"""Boundaries in the text of a report."""

from dataclasses import replace

from tests.unit.report.making import full
from whale_nebula.report.records import BoundaryReport
from whale_nebula.report.text import boundary_lines

SENT = BoundaryReport("int8", 4096, 1088, 1216, 1, 0.002, 0.001, 0.0093)


def test_they_stand_below_the_links_in_columns() -> None:
    lines = str(full()).splitlines()
    links = [number for number, line in enumerate(lines) if line.startswith("  link ")]
    heads, row = lines[links[-1] + 1 : links[-1] + 3]
    assert " ".join(heads.split()) == "boundary codec raw -> payload on the wire error encode decode"
    assert " ".join(row.split()) == "b0 gpu->npu int8 4.0 KiB -> 1.1 KiB 29.7 % 0.0093 2.0 ms 1.0 ms"
    starts = [heads.index(word) for word in ("codec", "raw", "on the wire", "error", "encode", "decode")]
    assert all(row[start] != " " and row[start - 1] == " " for start in starts)


def test_what_crosses_as_it_is_has_no_line() -> None:
    plain = BoundaryReport("none", 4096, 4096, 4224, 1)
    assert boundary_lines({"b0": plain, "b1": BoundaryReport()}) == []
    assert "boundary  " not in str(replace(full(), boundaries={"b0": plain}))


def test_rows_that_were_left_out_have_one() -> None:
    (_, row) = boundary_lines({"b0": BoundaryReport("none", 4096, 2048, 2176, 1, error=0.0)})
    assert row.split()[:8] == ["b0", "none", "4.0", "KiB", "->", "2.0", "KiB", "53.1"]


def test_what_another_process_measured_is_a_dash() -> None:
    taken = replace(SENT, error=None, encode_seconds=0.0)
    assert boundary_lines({"b0": taken})[1].split()[-4:] == ["-", "-", "1.0", "ms"]


def test_columns_are_as_wide_as_what_stands_in_them() -> None:
    found = boundary_lines({"b0": SENT, "b10 encoder->decoder": replace(SENT, codec="svd(0.6) >> fp16")})
    assert len({line.index("4.0 KiB") for line in found[1:]}) == 1
    assert all(line == line.rstrip() for line in found)

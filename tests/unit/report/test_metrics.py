"""A line of JSON for every step: appended whole, by any process, after any content."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tests.unit.report.making import full
from whale_nebula.report.report import Report, read
from whale_nebula.report.watchers import MetricsFile


def test_each_step_is_in_the_file_as_soon_as_it_was_told(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "run.jsonl")
    for step in (1, 2):
        file.step(replace(full(), step=step))
        lines = (tmp_path / "run.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, step + 1))
    file.close()


def test_two_writers_append_to_one_file(tmp_path: Path) -> None:
    files = [MetricsFile(tmp_path / "run.jsonl") for _ in range(2)]
    for step in (1, 2):
        for number, file in enumerate(files):
            file.step(replace(full(), step=step, worker=f"c{number}/0"))
    for file in files:
        file.close()
    found = [(report.worker, report.step) for report in read(tmp_path / "run.jsonl")[0]]
    assert found == [("c0/0", 1), ("c1/0", 1), ("c0/0", 2), ("c1/0", 2)]


def test_a_line_that_was_cut_short_stays_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"format": "whale_neb')
    file = MetricsFile(path)
    file.step(full())
    file.close()
    assert read(path) == ([Report.load(path)], 1)
    MetricsFile(path).close()
    assert path.read_text().count("\n") == 2  # nothing to end this time

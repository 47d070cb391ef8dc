"""`whale-nebula show --report FILE`: what a saved report, or a file of metrics, says of a run. Needs no TensorFlow."""

from __future__ import annotations

import json
import os

from whale_nebula.report.report import read
from whale_nebula.report.saved import finite
from whale_nebula.report.summary import summary_document, summary_text


def show_report(path: str | os.PathLike[str], *, as_json: bool = False) -> int:
    """Print the summary of a file that `Report.save` or `nb.init(metrics=...)` wrote; gives the exit code.

    What cannot be read raises a `StateError`, as everywhere.
    """
    reports, broken = read(path)
    if as_json:
        print(json.dumps(finite(summary_document(reports, broken)), allow_nan=False))
    else:
        print(summary_text(reports, broken))
    return 0

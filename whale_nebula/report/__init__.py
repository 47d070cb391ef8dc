"""Reports of steps: what was measured, as records, text, files and live displays."""

from whale_nebula.report.prediction import LinkPrediction, Prediction, StagePrediction
from whale_nebula.report.published import last_report, publish
from whale_nebula.report.records import LinkReport, RunTotals, Span, StageReport
from whale_nebula.report.report import Report

__all__ = [
    "LinkPrediction",
    "LinkReport",
    "Prediction",
    "Report",
    "RunTotals",
    "Span",
    "StagePrediction",
    "StageReport",
    "last_report",
    "publish",
]

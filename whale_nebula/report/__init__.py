"""What happened in a step, and how it is shown. Imports no TensorFlow."""

from whale_nebula.report.prediction import LinkPrediction, Prediction, StagePrediction
from whale_nebula.report.published import last_report, publish
from whale_nebula.report.report import LinkReport, Report, RunTotals, Span, StageReport

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

"""What happened in a step, and how it is shown. Imports no TensorFlow."""

from whale_nebula.report.report import LinkReport, Report, RunTotals, StageReport, last_report, publish

__all__ = ["LinkReport", "Report", "RunTotals", "StageReport", "last_report", "publish"]

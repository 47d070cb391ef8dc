"""Name the bottleneck of a step in a sentence, from what was measured and from two simulations: the step as it is, and
over lines that take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from whale_nebula.ir.routing import row_name
from whale_nebula.report.prediction import Basis, Prediction, free, predict
from whale_nebula.report.records import duration

if TYPE_CHECKING:
    from whale_nebula.report.report import Report


NOTHING = 0.05
"""A change of less than this share of the step is not worth a word."""

FAR_OFF = 0.3
"""Where measured and predicted differ by more than this share, the simulator misses something, and says so."""

_MEASURED = 2
_LOCAL = 'over free links a step is one local function, not timed apart; nb.init(links="60mbit,20ms") emulates a line'


def describe_bottleneck(report: Report) -> str:
    """The bottleneck of a step."""
    if report.meetings is not None:
        return report.meetings.sentence()
    if report.basis is not None and report.prediction is not None:
        return _Simulated(report, report.basis, report.prediction).describe()
    if len(report.stages) == 1 and not report.links:
        return "there is one stage, and nothing crosses a link"
    waits = _waits(report)
    if waits:
        stage = max(waits, key=lambda name: waits[name])
        said = f"stage {stage} waits {_percent(waits[stage])} of the step"
        if report.step > _MEASURED:
            return f"{said}; what for is not known, because the size of what crosses is only known when it does"
        return f"{said}; what for, the simulator says once two steps have been measured"
    clusters = {stage.cluster for stage in report.stages.values()}
    if len(clusters) == 1 and clusters != {""}:
        many = "both" if len(report.stages) == 2 else f"all {len(report.stages)}"
        return f"{many} stages are in cluster {min(clusters)}: nothing crosses a link"
    return _LOCAL


def _waits(report: Report) -> dict[str, float]:
    """The share of the step that each stage waits, where that was measured."""
    whole = report.step_seconds or 1.0
    return {n: s.wait_seconds / whole for n, s in report.stages.items() if s.wait_seconds is not None}


@dataclass
class _Simulated:
    """One report, and what the simulator says of changes to it."""

    report: Report
    basis: Basis
    prediction: Prediction

    @property
    def whole(self) -> float:
        return self.prediction.seconds

    @cached_property
    def without_lines(self) -> Prediction:
        return predict(self.basis.over(free))

    def is_shorter(self, other: float) -> bool:
        """Whether a step of so many seconds would be clearly shorter."""
        return other < (1.0 - NOTHING) * self.whole

    def describe(self) -> str:
        """What the step waits for; a step that takes much longer than it should has a reason nobody simulates."""
        took = self.report.step_seconds
        apart = f"this step took {duration(took)}, the simulator says {duration(self.whole)}"
        if took < (1.0 - FAR_OFF) * self.whole:
            return f"not known: {apart}"
        if self.is_shorter(self.without_lines.seconds):
            said = self._describe_crossing()
        elif self.basis.once > 0.5 * self.whole:
            share = _percent(self.basis.once / self.whole)
            said = f"what runs once a step (updates, metrics, results) takes {share} of it"
        else:
            said = self._describe_computing()
        return said if self.whole >= (1.0 - FAR_OFF) * took else f"{said} ({apart}: something else takes time too)"

    # -------------------------------------------------------------------------- the line
    def _describe_crossing(self) -> str:
        """What crosses while stages compute, what crosses once a step, or both: whatever is worth a word."""
        exchange = self.basis.exchange_seconds
        if exchange <= NOTHING * self.whole:
            return f"{self._describe_waiting()}; {self._compare_with_free_lines()}"
        words = list(dict.fromkeys(chain.from_iterable(one.what for each in self.basis.exchange for one in each)))
        what = f"{' and '.join(words)}, sent once a step, hold" if words else "what clusters exchange once a step holds"
        share = _percent(exchange / self.whole)
        if self.whole - self.without_lines.seconds - exchange <= NOTHING * self.whole:
            return f"{what} the step for {share}, and no codec touches that"
        return f"{self._describe_waiting()}, and {what} it for {share}; {self._compare_with_free_lines()}"

    def _compare_with_free_lines(self) -> str:
        return f"{duration(self.without_lines.seconds)} a step instead of {duration(self.whole)} over free lines"

    def _describe_waiting(self) -> str:
        """The stage that waits most for lines, by the simulator; how long it waits, as it was measured."""
        alone = self.without_lines.stages
        lost = {name: own.wait_seconds - alone[name].wait_seconds for name, own in self.prediction.stages.items()}
        stage = max(lost, key=lambda name: lost[name])
        waits, part = _waits(self.report).get(stage), lost[stage] / self.whole
        if waits is not None and part >= (1.0 - 2 * NOTHING) * waits:
            return f"stage {stage} waits {_percent(waits)} of the step for {self._name_lines()}"
        return f"stage {stage} waits for {self._name_lines()}: {_percent(part)} of the step, by the simulator"

    def _name_lines(self) -> str:
        """The line on which a micro-batch is longest on its way; where others are as long, lines."""
        away: dict[str, float] = {}
        for hop in (hop for phase in self.basis.phases for hop in phase.hops.values()):
            for line, size in ((hop.there, hop.forward), (hop.back, hop.backward)):
                if line is not None and size is not None:
                    away[line.name] = away.get(line.name, line.delay) + line.seconds(size)
        worst = sorted(name for name, each in away.items() if each >= (1.0 - NOTHING) * max(away.values()))
        return f"the line {worst[0]}" if len(worst) == 1 else f"the lines {', '.join(worst[:-1])} and {worst[-1]}"

    # -------------------------------------------------------------------------- computing
    def _describe_computing(self) -> str:
        stages = self.prediction.stages
        busiest = max(stages, key=lambda name: stages[name].compute_seconds + stages[name].codec_seconds)
        busy, codecs = duration(stages[busiest].compute_seconds), stages[busiest].codec_seconds
        said = (
            f"computing, not the line: stage {busiest} computes {busy} of the {duration(self.whole)} that are foretold"
        )
        said += f", and its codecs {duration(codecs)}" if codecs > NOTHING * self.whole else ""
        return said


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


WORTH = 0.05
"""Who waits for less than this share is not worth a word."""


def waits(seconds: Sequence[float]) -> float:
    """How long each replica but the slowest stands idle, on the average.

    >>> waits([3.0, 1.0, 2.0]), waits([1.0])
    (1.5, 0.0)
    """
    return sum(max(seconds) - each for each in seconds) / max(1, len(seconds) - 1) if seconds else 0.0


def straggler_text(stage: str, seconds: Sequence[float], waiting: str) -> str:
    """Who is slowest, and that the others wait for it.

    >>> straggler_text("npu", [0.08, 0.068], "12 ms of 80 ms")
    'npu.0 is the slowest of npu: npu.1 waits 12 ms of 80 ms'
    """
    slowest = max(range(len(seconds)), key=lambda replica: (seconds[replica], -replica))
    others = [row_name(stage, len(seconds), each) for each in range(len(seconds)) if each != slowest]
    who = f"{others[0]} waits" if len(others) == 1 else "the others wait"
    each = " each, on the average" * (len(others) > 1)
    return f"{row_name(stage, len(seconds), slowest)} is the slowest of {stage}: {who} {waiting}{each}"


def describe_straggler(report: Report) -> str:
    """Of the stage whose replicas wait most: who is slowest, and how long the others wait; empty where that is little.

    >>> from whale_nebula.report.report import Report
    >>> from whale_nebula.report.records import StageReport, busiest
    >>> npu = busiest([StageReport(0.04), StageReport(0.028)])
    >>> describe_straggler(Report("fit", 9, 0.05, 2, {"npu": npu}, {}))
    'npu.0 is the slowest of npu: npu.1 waits 12.0 ms of 50.0 ms'
    """
    stages = {**report.elsewhere.stages, **report.stages}
    told = {name: [one.compute_seconds or 0.0 for one in each.replicas or ()] for name, each in stages.items()}
    name = max(told, key=lambda each: waits(told[each]), default="")
    if not name or waits(told[name]) <= WORTH * report.step_seconds:
        return ""
    return straggler_text(name, told[name], f"{duration(waits(told[name]))} of {duration(report.step_seconds)}")

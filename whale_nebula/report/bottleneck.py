"""Name the bottleneck of a step in a sentence, from measurements and from simulations based on them.

The step is simulated with one change at a time: links without transfer time, numbers sent in fewer bytes, more
micro-batches. Every statement is computed, and only options that would be accepted are recommended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING

from whale_nebula.codec.objects import Precision
from whale_nebula.codec.precisions import FP16, INT4, INT8
from whale_nebula.codec.sizes import cost
from whale_nebula.ir.routing import (
    TOLERANCE,
    choose_micro_batches,
    compute_excess,
    compute_share_times,
    compute_shares,
    count_turns,
    row_name,
)
from whale_nebula.report.prediction import Basis, Prediction, free_line, lift_rate_limit, predict, predict_seconds
from whale_nebula.report.records import ALONE, duration

if TYPE_CHECKING:
    from whale_nebula.report.report import Report


_DIMS = (1024, 1024)  # large enough that the scales of blocks have their share of a large tensor


@dataclass(frozen=True, slots=True)
class AdvisedCodec:
    """A codec that may be recommended, with its bytes per number for a tensor and for its gradient.

    >>> ADVISED_CODECS[1].line, ADVISED_CODECS[2].widths
    ('nb.compress(fp16=True)', (1.03125, 1.03125))
    """

    line: str
    activation_codec: Precision
    gradient_codec: Precision

    @property
    def widths(self) -> tuple[float, float]:
        """Bytes per number, overhead included, for a tensor and for its gradient."""
        count = _DIMS[0] * _DIMS[1]
        there, back = (
            sum(part.nbytes for part in codec.parts(_DIMS, "float32"))
            for codec in (self.activation_codec, self.gradient_codec)
        )
        return there / count, back / count

    def apply_to(self, basis: Basis) -> Basis:
        """The step with this codec at every boundary: fewer bytes, and the time of encoding on one core."""

        def estimate(precision: Precision, back: bool, count: float) -> tuple[float, float]:
            return cost(precision, (round(count),), back=back) or (0.0, 0.0)

        there, back = partial(estimate, self.activation_codec, False), partial(estimate, self.gradient_codec, True)
        return basis.narrow_numbers(*self.widths).add_codec_seconds(there, back, basis)


ADVISED_CODECS = (
    AdvisedCodec('nb.compress(fp16=True, backward="fp16")', FP16(), FP16()),
    AdvisedCodec("nb.compress(fp16=True)", FP16(), INT8()),
    AdvisedCodec("nb.compress(int8=True)", INT8(), INT8()),
    AdvisedCodec("nb.compress(int4=True)", INT4(), INT8()),
)
"""The codecs, the most accurate first; by default gradients are int8."""


def list_advisable_codecs(basis: Basis) -> tuple[AdvisedCodec, ...]:
    """The codecs that a step may use, the most accurate first. Without a backward the first is omitted: it differs from
    the second only for gradients.
    """
    back = any(hop.backward is not None for phase in basis.phases for hop in phase.hops.values())
    return ADVISED_CODECS if back else ADVISED_CODECS[1:]


NEGLIGIBLE_SHARE = 0.05
"""A change of less than this share of the step is not mentioned."""

MIN_SAVED_SHARE = 0.2
"""More micro-batches are recommended only if they would save this share, as each call has a fixed cost."""

LARGE_GAP_SHARE = 0.3
"""If measured and predicted differ by more than this share, the text states that the simulation is incomplete."""

_PARTS = (2, 4, 8)
_MEASURED = 2
_LOCAL = (
    'with free links a step runs as one function, and stages are not timed; nb.init(links="60mbit,20ms") emulates a '
    "slow link"
)


def describe_bottleneck(report: Report) -> str:
    """The bottleneck of a step, in a sentence."""
    if report.meetings is not None:
        return report.meetings.sentence()
    if report.basis is not None and report.prediction is not None:
        return _Simulated(report, report.basis, report.prediction).describe()
    if len(report.stages) == 1 and not report.links:
        return "there is only one stage, so no data crosses a link"
    waits = _measure_waits(report)
    if waits:
        stage = max(waits, key=lambda name: waits[name])
        text = f"stage {stage} waits {_percent(waits[stage])} of the step"
        if report.step > _MEASURED:
            return f"{text}; the cause is unknown, because the sizes of some tensors are known only at run time"
        return f"{text}; the cause is simulated after two measured steps"
    clusters = {stage.cluster for stage in report.stages.values()}
    if len(clusters) == 1 and clusters != {""}:
        many = "both" if len(report.stages) == 2 else f"all {len(report.stages)}"
        return f"{many} stages are in cluster {min(clusters)}, so no data crosses a link"
    return _LOCAL


def _measure_waits(report: Report) -> dict[str, float]:
    """The share of the step that each stage waits, if measured."""
    whole = report.step_seconds or 1.0
    return {n: s.wait_seconds / whole for n, s in report.stages.items() if s.wait_seconds is not None}


@dataclass
class _Simulated:
    """One report, with simulations of changes to its step."""

    report: Report
    basis: Basis
    prediction: Prediction

    @property
    def whole_seconds(self) -> float:
        return self.prediction.seconds

    @cached_property
    def without_lines(self) -> Prediction:
        return predict(self.basis.change_lines(free_line))

    def is_shorter(self, other: float) -> bool:
        """Whether a step of this duration would be clearly shorter."""
        return other < (1.0 - NEGLIGIBLE_SHARE) * self.whole_seconds

    def describe(self) -> str:
        """The bottleneck in words; a step that takes much longer than its simulation has a cause outside the
        simulation.
        """
        took = self.report.step_seconds
        apart = f"this step took {duration(took)}, the simulation predicts {duration(self.whole_seconds)}"
        if took < (1.0 - LARGE_GAP_SHARE) * self.whole_seconds:
            return f"unknown: {apart}"
        if self.is_shorter(self.without_lines.seconds):
            said = self._describe_crossing()
        elif self.basis.once > 0.5 * self.whole_seconds:
            share = _percent(self.basis.once / self.whole_seconds)
            said = f"updates, metrics and results, computed once per step, take {share} of the step"
        else:
            said = self._describe_computing()
        return (
            said
            if self.whole_seconds >= (1.0 - LARGE_GAP_SHARE) * took
            else f"{said} ({apart}, so there is another cause)"
        )

    # -------------------------------------------------------------------------- the line
    def _describe_crossing(self) -> str:
        """A text on the crossings during computing, those once per step, or both, as far as they are significant."""
        exchange = self.basis.exchange_seconds
        if exchange <= NEGLIGIBLE_SHARE * self.whole_seconds:
            return f"{self._describe_waiting()}; {self._advise_codec()}"
        words = list(dict.fromkeys(chain.from_iterable(one.what for each in self.basis.exchange for one in each)))
        what = (
            f"{' and '.join(words)}, sent once per step, take"
            if words
            else "exchanges between clusters once per step take"
        )
        share = _percent(exchange / self.whole_seconds)
        if self.whole_seconds - self.without_lines.seconds - exchange <= NEGLIGIBLE_SHARE * self.whole_seconds:
            return f"{what} {share} of the step, and no codec applies to them"
        return f"{self._describe_waiting()}, and {what} {share} of it; {self._advise_codec()}"

    def _describe_waiting(self) -> str:
        """A text on the stage that waits most for links in the simulation, and its measured waiting time."""
        alone = self.without_lines.stages
        lost = {name: own.wait_seconds - alone[name].wait_seconds for name, own in self.prediction.stages.items()}
        stage = max(lost, key=lambda name: lost[name])
        waits, part = _measure_waits(self.report).get(stage), lost[stage] / self.whole_seconds
        if waits is not None and part >= (1.0 - 2 * NEGLIGIBLE_SHARE) * waits:
            return f"stage {stage} waits {_percent(waits)} of the step for {self._name_lines()}"
        return f"stage {stage} waits {_percent(part)} of the step (simulated) for {self._name_lines()}"

    def _name_lines(self) -> str:
        """The name of the link with the longest transfer of a micro-batch, or of several equal ones."""
        away: dict[str, float] = {}
        for hop in (hop for phase in self.basis.phases for hop in phase.hops.values()):
            for line, size in ((hop.forward_line, hop.forward), (hop.backward_line, hop.backward)):
                if line is not None and size is not None:
                    away[line.name] = away.get(line.name, line.delay) + line.seconds(size)
        worst = sorted(name for name, each in away.items() if each >= (1.0 - NEGLIGIBLE_SHARE) * max(away.values()))
        return f"link {worst[0]}" if len(worst) == 1 else f"links {', '.join(worst[:-1])} and {worst[-1]}"

    def _advise_codec(self) -> str:
        """Recommend the most accurate codec after which a stronger one, or an unlimited rate, would save no significant
        time.
        """
        if not self.is_shorter(predict_seconds(self.basis.change_lines(lift_rate_limit))):
            more = self._advise_micro_batches()
            return f"the cause is the delay, not the rate{f'; {more}' if more else ', so a codec would not help'}"
        taken = {each.line: predict_seconds(each.apply_to(self.basis)) for each in list_advisable_codecs(self.basis)}
        best = min(taken.values())
        if not self.is_shorter(best):
            return "no codec would help"
        line = next(line for line, took in taken.items() if took <= (1.0 + NEGLIGIBLE_SHARE) * best)
        hides = taken[line] <= (1.0 + NEGLIGIBLE_SHARE) * self.without_lines.seconds
        return f"{line} would {'hide the transfers' if hides else 'shorten the wait'}: {self._compare(taken[line])}"

    # -------------------------------------------------------------------------- computing
    def _describe_computing(self) -> str:
        stages = self.prediction.stages
        busiest = max(stages, key=lambda name: stages[name].compute_seconds + stages[name].codec_seconds)
        busy, codecs = duration(stages[busiest].compute_seconds), stages[busiest].codec_seconds
        predicted = duration(self.whole_seconds)
        said = f"computation, not links: stage {busiest} computes for {busy} of the predicted {predicted}"
        said += f", its codecs for {duration(codecs)}" if codecs > NEGLIGIBLE_SHARE * self.whole_seconds else ""
        more = self._advise_micro_batches()
        return f"{said}; {more}" if more else said

    def _advise_micro_batches(self) -> str:
        """Recommend more micro-batches for more overlap, as far as there are rows; not if rows depend on each other."""
        tries = [parts for parts in _PARTS if parts <= self.basis.rows and self.basis.divides]
        taken = {parts: predict_seconds(self.basis.divide(parts)) for parts in tries}
        best = min(taken.values(), default=self.whole_seconds)
        if best > (1.0 - MIN_SAVED_SHARE) * min(self.whole_seconds, self.report.step_seconds):
            return ""
        enough = next(parts for parts, took in taken.items() if took <= (1.0 + NEGLIGIBLE_SHARE) * best)
        many = enough * self.basis.micro_batches
        return f"{many} micro-batches would help, if computation divides evenly: {self._compare(taken[enough])}"

    def _compare(self, other: float) -> str:
        return f"{duration(other)} per step instead of {duration(self.whole_seconds)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


MIN_WAIT_SHARE = 0.05
"""A shorter waiting time, as a share of the step, is not mentioned."""

_MIN_GAIN = 0.1
"""Speeds in the config are recommended if shares by measured speeds would save at least this part of the slowest
replica's time.
"""


def mean_idle_seconds(seconds: Sequence[float]) -> float:
    """The seconds that a replica waits for the slowest, on average over all others.

    >>> mean_idle_seconds([3.0, 1.0, 2.0]), mean_idle_seconds([1.0])
    (1.5, 0.0)
    """
    return sum(max(seconds) - each for each in seconds) / max(1, len(seconds) - 1) if seconds else 0.0


def straggler_text(stage: str, seconds: Sequence[float], waiting: str, mend: str = "") -> str:
    """A sentence on the slowest replica, for which the others wait.

    >>> straggler_text("npu", [0.08, 0.068], "12 ms of 80 ms", "with micro_batch=3 shares could match speeds")
    'npu.0 is the slowest of npu: npu.1 waits 12 ms of 80 ms; with micro_batch=3 shares could match speeds'
    """
    slowest = max(range(len(seconds)), key=lambda replica: (seconds[replica], -replica))
    others = [row_name(stage, len(seconds), each) for each in range(len(seconds)) if each != slowest]
    who = f"{others[0]} waits" if len(others) == 1 else "the others wait"
    each = " each on average" * (len(others) > 1)
    sentence = f"{row_name(stage, len(seconds), slowest)} is the slowest of {stage}: {who} {waiting}{each}"
    return f"{sentence}; {mend}" if mend else sentence


def suggest_micro_batches(speeds: Sequence[float], micro_batches: int, rows: int | None = None) -> str:
    """The number of micro-batches with which shares could follow these speeds, in words; "" if there are enough, or too
    few rows.

    >>> suggest_micro_batches([1, 2], 2), suggest_micro_batches([1, 2], 3), suggest_micro_batches([1, 2], 2, rows=2)
    ('with micro_batch=3 shares could match speeds', '', '')
    """
    count = choose_micro_batches([speeds], micro_batches)
    helps = compute_excess(speeds, count) * TOLERANCE < compute_excess(speeds, micro_batches)
    fits = rows is None or count <= rows
    return f"with micro_batch={count} shares could match speeds" if helps and fits else ""


def describe_straggler(report: Report) -> str:
    """For the stage whose replicas wait most: the slowest replica, and the others' idle time; "" if that is little.

    >>> from whale_nebula.report.report import Report
    >>> from whale_nebula.report.records import StageReport, busiest
    >>> npu = busiest([StageReport(0.04), StageReport(0.028)])
    >>> describe_straggler(Report("fit", 9, 0.05, 2, {"npu": npu}, {}))
    'npu.0 is the slowest of npu: npu.1 waits 12.0 ms of 50.0 ms'
    """
    computed = {
        name: [replica.compute_seconds or 0.0 for replica in each.replicas or ()]
        for name, each in report.all_stages.items()
    }
    name = max(computed, key=lambda each: mean_idle_seconds(computed[each]), default="")
    idle = mean_idle_seconds(computed.get(name, ()))
    if idle <= MIN_WAIT_SHARE * report.step_seconds:
        return ""
    waiting = f"{duration(idle)} of {duration(report.step_seconds)}"
    return straggler_text(name, computed[name], waiting, _describe_straggler_fix(report, name, computed[name]))


def _describe_straggler_fix(report: Report, stage: str, computed: Sequence[float]) -> str:
    """The change that would let shares follow speeds: speeds in the config, or more micro-batches. "" for replicas of
    one process, which share its cores.
    """
    basis, count = report.basis, report.micro_batches
    if basis is None or stage not in basis.stages or report.worker == ALONE or not all(computed):
        return ""
    shares = count_turns(basis.phases[0].works[basis.stages.index(stage)].order, len(computed), count)
    if not all(shares):
        return ""
    speeds = [share / took for share, took in zip(shares, computed, strict=True)]
    if max(compute_share_times(compute_shares(speeds, count), speeds)) < (1.0 - _MIN_GAIN) * max(computed):
        ratio = " : ".join(f"{speed / min(speeds):.2g}" for speed in speeds)
        return f"measured speeds are {ratio}; set them in the config: workers: [{{address: ..., speed: ...}}]"
    return suggest_micro_batches(speeds, count, basis.rows * count) if basis.divides else ""

"""Simulate and draw a step: stages run their instructions, messages queue for links, and a clock gives the times.

A stage runs its instructions in order, each when its inputs have arrived. A line transfers one message at a time, in
the order of submission; the two directions of a link are separate lines.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import floor, fsum

from whale_nebula.errors import OptionError
from whale_nebula.schedule.lines import Hops, Line, Work, make_uniform_hops
from whale_nebula.schedule.lines import compute_pace as pace_of
from whale_nebula.schedule.schedules import (
    DEFAULT,
    SPLIT_BACKWARD,
    InFlight,
    Instruction,
    Pace,
    choose_delays,
    limits,
    list_instructions,
)


@dataclass(frozen=True, slots=True)
class Span:
    """An interval from `start` to `end` in which a stage (number `place`), in this `replica`, or a line was busy with
    one micro-batch.

    `what` is "F" for forward (or a message of activations), "B" for backward (or a message of gradients), and "W" for
    separate gradients of weights.
    """

    place: int | str
    what: str
    micro_batch: int
    start: float
    end: float
    replica: int = 0

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The spans of one step, ordered by their start."""

    stages: int
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """The time at which all stages have finished."""
        return max((span.end for span in self.spans if isinstance(span.place, int)), default=0.0)

    def spans_of(self, place: int | str, replica: int | None = None) -> tuple[Span, ...]:
        """The spans of one stage, or of one of its replicas, or of one line."""
        own = (span for span in self.spans if span.place == place)
        return tuple(span for span in own if replica in (None, span.replica))

    def replicas(self, stage: int) -> range:
        """The numbers of a stage's replicas, up to the last one with any work."""
        return range(1 + max((span.replica for span in self.spans_of(stage)), default=0))

    def busy(self, place: int | str) -> float:
        """Seconds that a stage computed (the busiest of its replicas), or that a line was occupied."""
        if isinstance(place, str):
            return fsum(span.seconds for span in self.spans_of(place))
        return max(fsum(span.seconds for span in self.spans_of(place, replica)) for replica in self.replicas(place))

    def wait(self, stage: int) -> float:
        """Seconds of the step in which the busiest replica of a stage did not compute."""
        return max(self.seconds - self.busy(stage), 0.0)

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines that were used, in the order of their first use."""
        return tuple(dict.fromkeys(span.place for span in self.spans if isinstance(span.place, str)))

    @property
    def bubble(self) -> float:
        """The share of the step in which the busiest stage did not compute."""
        total = self.seconds
        return 1.0 - max(map(self.busy, range(self.stages))) / total if total else 0.0


Event = Callable[[float], None]


def simulate(
    works: Sequence[Work],
    hops: Hops,
    micro_batches: int,
    *,
    name: str = DEFAULT,
    in_flight: InFlight | None = None,
    fused: Sequence[bool] | None = None,
    pace: Pace | None = None,
    recompute: bool = False,
) -> Timeline:
    """Time one phase of a step: `works` by stage, `hops` by (source, destination), both for one micro-batch.

    `fused` states for each stage whether its forward and backward are one function, by default those of the last one.
    Limits are derived from `pace`, by default that of these works and hops. With `recompute` forwards
    are computed again, and gradients of weights, which some schedules separate, are not deferred.

    >>> from whale_nebula.schedule.lines import make_uniform_hops
    >>> works = [Work(1.0, 2.0)] * 2
    >>> simulate(works, make_uniform_hops(2, seconds=3.0), 16).seconds
    57.0
    >>> simulate(works, make_uniform_hops(2, seconds=3.0), 16, name="1f1b").seconds
    99.0
    >>> simulate([Work(1.0, 2.0), Work(3.0, 6.0, replicas=3)], make_uniform_hops(2), 12).seconds
    43.0
    >>> parted = [Work(1.0, 1.0, weights=1.0)] * 4
    >>> [simulate(parted, make_uniform_hops(4), 8, name=name).seconds for name in ("1f1b", "zero-bubble")]
    [33.0, 27.0]
    """
    stages = len(works)
    if name not in SPLIT_BACKWARD:
        works = [work.undivided for work in works]
    own = pace_of(works, hops) if pace is None else pace
    chosen = limits(
        name, stages, micro_batches, pace=own, in_flight=in_flight, replicas=[work.replicas for work in works],
        orders=[work.order for work in works],
    )  # fmt: skip
    whole = [stage == stages - 1 for stage in range(stages)] if fused is None else fused
    later = choose_delays(chosen, micro_batches, whole, pace=own, in_flight=in_flight, recompute=recompute)
    lists = [
        list_instructions(
            stage, stages, micro_batches, chosen[stage], backward=work.has_backward, fused=whole[stage],
            delay=None if work.weights is None else later[stage],
        )
        for stage, work in enumerate(works)
    ]  # fmt: skip
    return run_lists(lists, works, hops)


def run_lists(lists: Sequence[Sequence[Instruction]], works: Sequence[Work], hops: Hops) -> Timeline:
    """Simulate instruction lists as given. Each replica of a stage runs its part of the stage's list.

    >>> run_lists([list_instructions(0, 2, 2, in_flight=2)], [Work(1.0, 2.0)], {}).seconds
    6.0
    """
    return _Simulation(lists, works, hops).finish()


class _Simulation:
    """The state of one simulation: an event queue, and the messages that have arrived."""

    def __init__(self, lists: Sequence[Sequence[Instruction]], works: Sequence[Work], hops: Hops) -> None:
        self.works = works
        self.seats = [(stage, replica) for stage, work in enumerate(works) for replica in range(work.replicas)]
        self.seat = {seat: number for number, seat in enumerate(self.seats)}
        self.lists = [
            [each for each in lists[stage] if works[stage].replica(each.micro_batch) == replica]
            for stage, replica in self.seats
        ]
        self.sends = _list_messages(works, hops)
        self.expected_counts = Counter((m.stage, m.what) for messages in self.sends.values() for m in messages)
        self.next = [0] * len(self.lists)
        self.is_busy = [False] * len(self.lists)
        self.arrived_counts: Counter[tuple[int, str, int]] = Counter()
        self.free_at: defaultdict[str, float] = defaultdict(float)
        self.spans: list[Span] = []
        self.events: list[tuple[float, int, Event]] = []
        self.order = count()

    def finish(self) -> Timeline:
        """Process all events; returns the timeline."""
        for seat in range(len(self.lists)):
            self.advance(seat, 0.0)
        while self.events:
            now, _, event = heapq.heappop(self.events)
            event(now)
        if stuck := [seat for seat, instructions in enumerate(self.lists) if self.next[seat] < len(instructions)]:
            raise _deadlock_error([self.seats[seat][0] for seat in stuck], [self.lists[s][self.next[s]] for s in stuck])
        return Timeline(len(self.works), tuple(sorted(self.spans, key=lambda span: span.start)))

    def schedule_event(self, when: float, event: Event) -> None:
        """Schedule an event; simultaneous events are processed in the order of scheduling."""
        heapq.heappush(self.events, (when, next(self.order), event))

    def advance(self, seat: int, now: float) -> None:
        """Start the next instruction of a replica, if it is free and all inputs have arrived."""
        if self.is_busy[seat] or self.next[seat] == len(self.lists[seat]):
            return
        instruction, (stage, replica) = self.lists[seat][self.next[seat]], self.seats[seat]
        needs = [(stage, what) for what in instruction.letters]
        if any(self.arrived_counts[*need, instruction.micro_batch] < self.expected_counts[need] for need in needs):
            return
        self.next[seat] += 1
        self.is_busy[seat] = True
        for what in instruction.letters:
            start, now = now, now + self.works[stage].seconds_of(what) * self.works[stage].slowdown(replica)
            self.spans.append(Span(stage, what, instruction.micro_batch, start, now, replica))
        self.schedule_event(now, partial(self.finish_instruction, seat, instruction))

    def finish_instruction(self, seat: int, instruction: Instruction, now: float) -> None:
        """Send the result of an instruction, and continue."""
        for what in instruction.letters:
            for message in self.sends[self.seats[seat][0], what]:
                self.send(message, instruction.micro_batch, now)
        self.is_busy[seat] = False
        self.advance(seat, now)

    def send(self, message: _Message, micro_batch: int, now: float) -> None:
        """Submit a message to its line, which may still be occupied by earlier ones."""
        if message.line is None:
            self.arrive(message, micro_batch, now)
            return
        start = max(now, self.free_at[message.line.name])
        end = start + message.line.seconds(message.size)
        self.free_at[message.line.name] = end
        if message.size:
            self.spans.append(Span(message.line.name, message.what, micro_batch, start, end))
        self.schedule_event(end + message.line.delay, partial(self.arrive, message, micro_batch))

    def arrive(self, message: _Message, micro_batch: int, now: float) -> None:
        """Record the arrival of a message, and advance the replica that may wait for it."""
        self.arrived_counts[message.stage, message.what, micro_batch] += 1
        self.advance(self.seat[message.stage, self.works[message.stage].replica(micro_batch)], now)


@dataclass(frozen=True, slots=True)
class _Message:
    """A message of a stage after each forward or backward: destination, line and size."""

    stage: int
    what: str
    line: Line | None
    size: float


def _list_messages(works: Sequence[Work], hops: Hops) -> Mapping[tuple[int, str], list[_Message]]:
    sends: defaultdict[tuple[int, str], list[_Message]] = defaultdict(list)
    for (source, destination), hop in sorted(hops.items()):
        sends[source, "F"].append(_Message(destination, "F", hop.forward_line, hop.forward))
        if hop.backward is not None and works[source].has_backward and works[destination].has_backward:
            sends[destination, "B"].append(_Message(source, "B", hop.backward_line, hop.backward))
    return sends


def _deadlock_error(stuck: Sequence[int], instructions: Sequence[Instruction]) -> OptionError:
    waits = ", ".join(f"stage {stage} at {each}" for stage, each in zip(stuck, instructions, strict=True))
    return OptionError(
        f"the lists of instructions wait for each other: {waits}",
        why="a stage runs its list in order, and must not have more micro-batches in flight than the stage before it",
        mend="use the lists of one schedule, with the limits that `limits` returns",
    )


IDLE = "."
FILL = {"F": "-", "B": "=", "W": "~"}
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ROUNDING = 1e-9
Row = tuple[int | str, int]
"""The key of a row: a replica of a stage, or a line."""


def draw_timeline(timeline: Timeline, *, width: int = 100, lines: bool = False) -> str:
    """Draw a timeline: "F0-" is a forward, "B0==" a backward, "W0~" gradients of weights in a function of their own,
    dots are waiting; `lines` adds a row for each line.

    It is at most `width` columns wide. If that is too narrow for names, a block begins with the micro-batch as one
    digit (10 is "a"): "0-" is a forward, "0=" a backward, "0~" gradients of weights. A block is at least one column
    wide.

    >>> timeline = simulate([Work(1.0, 2.0)] * 2, make_uniform_hops(2, seconds=1.0), 2)
    >>> print(draw_timeline(timeline, lines=True))
    stage 0 |F0-F1-............B0====...B1====|
    stage 1 |......F0-B0====F1-B1====.........|
    0->1    |...F0-F1-........................|
    1->0    |...............B0=......B1=......|
    """
    own = [(stage, replica) for stage in range(timeline.stages) for replica in timeline.replicas(stage)]
    rows_of: list[Row] = [*own, *((line, 0) for line in timeline.lines if lines)]
    names = [_format_title(*row, timeline) for row in rows_of]
    margin = max(map(len, names))
    shown = [span for span in timeline.spans if _row_key(span) in rows_of and (span.seconds or _is_message(span))]
    room = max(width - margin - 3, 1)
    scale = _choose_scale(shown, room)
    rows = _draw_rows(shown, rows_of, scale, min(_count_columns(shown, scale), room))
    return "\n".join(f"{name:<{margin}} |{row}|" for name, row in zip(names, rows, strict=True))


def _row_key(span: Span) -> Row:
    return span.place, span.replica


def _format_title(place: int | str, replica: int, timeline: Timeline) -> str:
    if isinstance(place, str):
        return place
    return f"stage {place}.{replica}" if len(timeline.replicas(place)) > 1 else f"stage {place}"


def draw_schedule(name: str, *, stages: int, micro_batches: int, seconds: float = 0.0, width: int = 100) -> str:
    """Draw a schedule where a forward takes 1, a backward 2, and a message occupies the line for `seconds`. Each part
    of a divided backward takes 1; the first stage sends no gradient back, so its backward is not divided.

    >>> print(draw_schedule("1f1b", stages=2, micro_batches=3))
    stage 0 |F0-F1-......B0====F2-B1====...B2====|
    stage 1 |...F0-B0====F1-B1====F2-B2====......|
    """
    works = [Work(1.0, 2.0), *[Work(1.0, 1.0, weights=1.0)] * (stages - 1)]
    return draw_timeline(
        simulate(works, make_uniform_hops(stages, seconds=seconds), micro_batches, name=name), width=width
    )


def _is_message(span: Span) -> bool:
    return isinstance(span.place, str)


def _choose_scale(spans: Sequence[Span], columns: int) -> float:
    """Columns a second: whole columns for the shortest span, up to its name and one more.

    If messages are too short for that, for the shortest span of a stage.
    """
    room = columns / (max((span.end for span in spans), default=0.0) or 1.0)
    for own in (spans, [span for span in spans if not _is_message(span)]):
        shortest = min((span.seconds for span in own if span.seconds), default=0.0)
        whole = min(floor(room * shortest + _ROUNDING), _longest_name(spans) + 1)
        if whole:
            return whole / shortest
    return room


def _count_columns(spans: Sequence[Span], scale: float) -> int:
    """The number of columns: as the time requires, or the row with the most blocks."""
    blocks = Counter(map(_row_key, spans)).values()
    return max([0, *blocks, *(_find_column(span.end, scale) for span in spans)])


def _draw_rows(spans: Sequence[Span], places: Sequence[Row], scale: float, columns: int) -> Iterator[str]:
    """Draw the rows; names of blocks are shown in all rows of stages or in none, and likewise for lines."""
    enough = _longest_name(spans) - _ROUNDING
    named = {kind: all(s.seconds * scale >= enough for s in spans if _is_message(s) is kind) for kind in (False, True)}
    for place in places:
        own = sorted((span for span in spans if _row_key(span) == place), key=lambda span: span.start)
        row = [IDLE] * columns
        for span, (start, stop) in zip(own, _place_blocks(own, scale, columns), strict=True):
            room = stop - start
            row[start:stop] = _draw_block(span, room, named[_is_message(span)] and room >= len(_format_name(span)))
        yield "".join(row)


def _place_blocks(spans: Sequence[Span], scale: float, columns: int) -> Iterator[tuple[int, int]]:
    """The columns of each span of a row: at least one each, without overlap as long as there is room."""
    after = 0
    for left, span in zip(range(len(spans), 0, -1), spans, strict=True):
        start = max(min(max(_find_column(span.start, scale), after), columns - left), 0)
        after = min(max(_find_column(span.end, scale), start + 1), columns)
        yield start, after


def _find_column(seconds: float, scale: float) -> int:
    return floor(seconds * scale + 0.5 + _ROUNDING)


def _draw_block(span: Span, width: int, named: bool) -> str:
    fill = FILL[span.what]
    if named:
        return _format_name(span).ljust(width, fill)[:width]
    digit = DIGITS[span.micro_batch] if span.micro_batch < len(DIGITS) else fill
    return (fill if width == 1 and span.what != "F" else digit).ljust(width, fill)[:width]


def _longest_name(spans: Sequence[Span]) -> int:
    return max((len(_format_name(span)) for span in spans), default=0)


def _format_name(span: Span) -> str:
    return f"{span.what}{span.micro_batch}"

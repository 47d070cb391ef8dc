"""What happened when: the spans of one step, simulated or measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """From `start` to `end`, stage number `place`, in this `replica`, or the line of that name, was busy with one
    micro-batch.

    `what` is "F" for forward (or a message of activations) and "B" for backward (or a message of gradients).
    """

    place: int | str
    what: str
    micro_batch: int
    start: float
    end: float
    replica: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The spans of one step, in the order in which they began."""

    stages: int
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """When the last stage stopped computing."""
        return max((span.end for span in self.spans if isinstance(span.place, int)), default=0.0)

    def of(self, place: int | str, replica: int | None = None) -> tuple[Span, ...]:
        """The spans of one stage, or of one of its replicas, or of one line."""
        own = (span for span in self.spans if span.place == place)
        return tuple(span for span in own if replica in (None, span.replica))

    def replicas(self, stage: int) -> range:
        """The replicas of a stage, of which each has something to do."""
        return range(1 + max((span.replica for span in self.of(stage)), default=0))

    def busy(self, place: int | str) -> float:
        """Seconds that a stage computed (the busiest of its replicas), or that a line was held."""
        if isinstance(place, str):
            return sum(span.seconds for span in self.of(place))
        return max(sum(span.seconds for span in self.of(place, replica)) for replica in self.replicas(place))

    def wait(self, stage: int) -> float:
        """Seconds of the step in which a stage did not compute."""
        return max(self.seconds - self.busy(stage), 0.0)

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines that were used, in the order of their first use."""
        return tuple(dict.fromkeys(span.place for span in self.spans if isinstance(span.place, str)))

    @property
    def bubble(self) -> float:
        """The share of the step in which even the busiest stage did not compute."""
        total = self.seconds
        return 1.0 - max(map(self.busy, range(self.stages))) / total if total else 0.0

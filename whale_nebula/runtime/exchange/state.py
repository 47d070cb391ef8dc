"""The codec state of one end of one direction of a boundary, kept from step to step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

AT = " at "
"""Between a channel's name and the host whose end of it a state is of."""
LANE = " by "
"""Between its name and the hosts that it joins, where replicas make several channels of one boundary."""


@dataclass(frozen=True)
class ChannelState:
    """Frozen: a step makes a new one, and a step that fails leaves the old one.

    `steps` are those of training that were begun, `rung` the place on the ladder of precisions, `structure` what the
    codec's structure remembers, and `version` how often that was sent to the other side. `held` is what differences
    are kept of (`codec.bytes.deltas.Cache`), for a checkpoint as `held.as_arrays()`; then `version` is its version.
    `codec` is what the last step of training used, and `error` how exact that was when it was last measured.
    """

    steps: int = 0
    rung: int = 0
    version: int = 0
    structure: Any = None
    held: Any = None
    codec: str = ""
    error: float | None = None

    def saved(self) -> ChannelState:
        """As it is now, whatever is written to what it holds."""
        return self if self.held is None else replace(self, held=self.held.copy())


@dataclass
class States:
    """The states of a run by name: steps of all programs of a model that a boundary is in share them."""

    held: dict[str, ChannelState] = field(default_factory=dict)
    model: int = 0

    def of(self, name: str) -> ChannelState:
        """The state of a channel of this model; a fresh one at first."""
        return self.held.get(self._full(name), ChannelState())

    def put(self, name: str, state: ChannelState) -> None:
        """Remember."""
        self.held[self._full(name)] = state

    def _full(self, name: str) -> str:
        return f"model {self.model}: {name}"

    def forget(self, models: Collection[int]) -> None:
        """Drop what belongs to models that are gone."""
        starts = tuple(f"model {model}: " for model in models)
        for name in [name for name in self.held if name.startswith(starts)]:
            del self.held[name]

    def versions(self, ends: Iterable[str] = ()) -> dict[str, int]:
        """Those that both sides must have alike, by channel: the highest that an end of it holds here. Of `ends`, the
        channels that have one here, it is 0 where nothing is held.
        """
        found = dict.fromkeys(map(self._full, ends), 0)
        for name, state in self.held.items():
            channel = name.partition(AT)[0]
            if state.version:
                found[channel] = max(found.get(channel, 0), state.version)
        return found

    def drop(self, told: Mapping[str, Mapping[str, int]], ends: Iterable[str] = ()) -> list[str]:
        """Forget the states that some process with an end has in another version, or not at all: all processes do so
        alike. Gives their names.
        """
        own = self.versions(ends)
        versions: dict[str, set[int]] = {}
        for sheet in (own, *told.values()):
            for channel, version in sheet.items():
                versions.setdefault(channel, set()).add(version)
        unlike = sorted(channel for channel, found in versions.items() if len(found) > 1)
        for name in list(self.held):
            if name.partition(AT)[0] in unlike:
                del self.held[name]
        return unlike

    def saved(self) -> dict[str, ChannelState]:
        """All of them as they are now: what a failed step goes back to."""
        return {name: state.saved() for name, state in self.held.items()}

    def restore(self, saved: dict[str, ChannelState]) -> None:
        """As it was."""
        self.held.clear()
        self.held.update(saved)


class At(NamedTuple):
    """Where a tensor belongs: the step of its program, the micro-batch, and whether the step trains; `lead` is the
    first micro-batch of a step that goes between the same two hosts.
    """

    step: int
    micro_batch: int
    training: bool
    seed: int = 0
    lead: int = 0

    @property
    def first(self) -> bool:
        """Whether it is the first of a step that these two hosts see."""
        return self.micro_batch == self.lead


@dataclass(frozen=True)
class Residue:
    """What the gradient of a micro-batch is treated with: the rows that were sent, whether the tensor was `taken` by a
    structure and what that left, and the sizes of the tensor, which are its own.
    """

    rows: Any = None
    structure: Any = None
    dims: tuple[int, ...] | None = None
    taken: bool = False

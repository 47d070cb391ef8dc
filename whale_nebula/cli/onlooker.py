"""Who looks at a script's steps for `whale-nebula show`: so many of them are planned, and then the script ends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from whale_nebula.scopes.observer import PlanShown

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan
    from whale_nebula.runtime.show import Shown


@dataclass
class Onlooker:
    """Plans the first `wanted` steps that differ; `config` and `links` stand for what the script opens its run with.

    Steps beyond the first are reached by answering those before with zeros; so a script that is about to save what
    it has "trained" is ended, too. `ended` says why, where it is not that all was seen.
    """

    wanted: float = 1
    config: str | None = None
    links: str | None = None
    ended: str = ""

    @cached_property
    def shown(self) -> Shown:
        """The plans so far. TensorFlow is there by now: the script has made a step of it."""
        from whale_nebula.runtime.show import Shown

        return Shown(self.wanted > 1, self._about_to_save)

    @property
    def plans(self) -> list[Plan]:
        """The plans that were made."""
        return self.shown.plans if "shown" in self.__dict__ else []

    def close(self) -> None:
        """Let savers save again."""
        if "shown" in self.__dict__:
            self.shown.guarded.close()

    def instead(self, config: Any, links: Any) -> tuple[Any, Any]:
        """What the command line says goes before what the script says."""
        if self.config is not None:
            return self.config, self.links
        return config, links if self.links is None else self.links

    def begins(self) -> None:
        """Leave the script's callbacks out: they write files, of a training that there is not."""
        self.shown.without_callbacks()

    def look(self, step: Any, layout: Any, tensors: Any, unpack: Any) -> Any:
        """Plan a step, and give zeros for its results."""
        found = self.shown.look(step, layout, tensors, unpack)
        if found is None:
            return None
        if not found.scoped:
            if found.trains:
                self.plain(step.name, "train")
            return None
        if len(self.plans) >= self.wanted:
            raise PlanShown
        return (self.shown.zeros(found, tensors),)

    def report(self) -> Any:
        """What stands for the report of a step that was not run."""
        from whale_nebula.cli.unrun import unrun

        return unrun(self.plans)

    def plain(self, name: str, kind: str) -> None:
        """Let a model without scopes predict, but not train: that would be for real."""
        if kind == "train":
            self.ended = f"{name} has no scopes, and was about to be trained"
            raise PlanShown

    def _about_to_save(self, what: str) -> None:
        self.ended = f"the script was about to save by {what}, with nothing trained"
        raise PlanShown

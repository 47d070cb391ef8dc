"""Options of a step that replace those of its scopes, such as those that depend on the length of its sequences."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from whale_nebula.scopes.frames import Frame, describe_open_scopes


@dataclass(frozen=True, slots=True)
class StepOptions:
    """The number of micro-batches of a step, and the codec of all tensors that cross in it, as the frame of an
    `nb.compress`. None leaves either to the step's scopes. Under `nb.auto_parallel` a step is planned anew for each
    `plan`, which names what it is planned for. `description` is a sentence on them for plans and reports. `choose`
    returns the options of a step that is about to run, if they are not chosen yet, and `after_step` is called after it.

    >>> StepOptions(micro_batch=2).text
    'micro_batch=2'
    """

    micro_batch: int | None = None
    compress: Frame | None = None
    plan: str = ""
    description: str = ""
    choose: Callable[..., StepOptions | None] | None = field(default=None, compare=False)
    after_step: Callable[..., None] | None = field(default=None, compare=False)

    @property
    def text(self) -> str:
        """The options as text, the same in every process; "" if they replace nothing."""
        found = [f"micro_batch={self.micro_batch}"] * (self.micro_batch is not None)
        if self.compress is not None:
            found.append(f"compress={sorted(self.compress.options.items())!r}")
        found += [f"planned for {self.plan}"] * bool(self.plan)
        return ", ".join(found)


_CURRENT: ContextVar[StepOptions | None] = ContextVar("whale_nebula_step_options", default=None)


def current_step_options() -> StepOptions:
    """The options that replace those of scopes now; an empty `StepOptions` if there are none."""
    return _CURRENT.get() or StepOptions()


@contextlib.contextmanager
def replace_options(options: StepOptions | None) -> Iterator[None]:
    """Replace the options of the scopes of steps that are planned and run in this context."""
    before = _CURRENT.set(options)
    try:
        yield
    finally:
        _CURRENT.reset(before)


def describe_surroundings() -> tuple[tuple[str, str], ...]:
    """The open scopes and the options that replace theirs, in a form that can be compared: a step is planned once for
    each.
    """
    text = current_step_options().text
    return (*describe_open_scopes(), *([("options", text)] if text else []))

"""A simulated run: what goes wrong in it, as a line of text, and what came of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from whale_nebula.errors import OptionError
from whale_nebula.faults import Fault
from whale_nebula.testing.lesson import Numbers
from whale_nebula.testing.line_faults import LineFault

NAMES = ("gpu/0", "npu/0", "tpu/0")
PATIENCE = 20.0


@dataclass(frozen=True, slots=True)
class Case:
    """A run and what goes wrong in it; as text it is all that is needed to run it again.

    `restart`: a worker that is killed comes again after so many seconds.
    """

    seed: int
    workers: int = 2
    steps: int = 3
    faults: tuple[Fault, ...] = ()
    lines: tuple[LineFault, ...] = ()
    restart: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read what `str` wrote."""
        try:
            parts = dict(word.split("=", 1) for word in text.split())
            unknown = parts.keys() - {"seed", "workers", "steps", "faults", "lines", "restart"}
            if unknown:
                raise ValueError(f"{', '.join(sorted(unknown))} is no part of a case")
            return cls(
                int(parts["seed"]),
                int(parts.get("workers", 2)),
                int(parts.get("steps", 3)),
                tuple(map(Fault.parse, filter(None, parts.get("faults", "").split(",")))),
                tuple(map(LineFault.parse, filter(None, parts.get("lines", "").split(",")))),
                float(parts.get("restart", 0)),
            )
        except (KeyError, ValueError) as error:
            raise OptionError(f"{text!r} is no case", why=str(error), mend="seed=1 workers=2 steps=3") from None

    def __str__(self) -> str:
        parts = [f"seed={self.seed} workers={self.workers} steps={self.steps}"]
        parts += ["faults=" + ",".join(map(str, self.faults))] if self.faults else []
        parts += ["lines=" + ",".join(map(str, self.lines))] if self.lines else []
        parts += [f"restart={self.restart:g}"] if self.restart else []
        return " ".join(parts)

    @property
    def row(self) -> tuple[str, ...]:
        """Its workers."""
        return NAMES[: self.workers]


@dataclass(slots=True)
class Outcome:
    """How one worker ended: by itself (`held` is what it holds), by an error, or killed."""

    applied: int = 0
    held: Numbers | None = None
    error: BaseException | None = None
    at: float = 0.0
    killed: float | None = None
    leftover: int = 0


@dataclass(slots=True)
class Found:
    """What came of a case; `wrong` says in words what must not be."""

    case: Case
    outcomes: dict[str, Outcome]
    reached: Counter[str]
    struck: list[object]
    seconds: float = 0.0
    hangs: bool = False
    when: float | None = None  # a worker was killed, or failed
    wrong: list[str] = field(default_factory=list)

    @property
    def went_on(self) -> bool:
        """Whether every worker came to its end."""
        return all(outcome.held is not None for outcome in self.outcomes.values())

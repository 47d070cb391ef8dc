"""Numbers of micro-batches and codecs by the length of sequences, for a curriculum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from whale_nebula.capture.entered_scopes import make_no_boundary_error
from whale_nebula.codec.encoding import AUTO, NONE, derive_encodings, mirror_options
from whale_nebula.errors import OptionError
from whale_nebula.runtime.length_choice import OpenChoices, choose_by_length
from whale_nebula.runtime.step.step import Arguments, Step, Unpack
from whale_nebula.scopes import public
from whale_nebula.scopes.auto import get_current_limits
from whale_nebula.scopes.compress_options import find_learned_rank
from whale_nebula.scopes.frames import Frame
from whale_nebula.scopes.scope import Scope
from whale_nebula.scopes.step_options import StepOptions
from whale_nebula.site import Site

ByLength = Mapping[int, Any] | Callable[[int], Any]
"""Values by the length from which on each holds, or a function of the length."""


@dataclass(frozen=True)
class LengthOptions:
    """The options of steps by the length of their sequences; false if they change nothing. `micro_batch` and `compress`
    have a value for some of the `lengths`; steps of others run as scopes say. The options named in `open` are chosen
    before the first step, with the predicted `seconds` of a step by length; or steps are `planned` by
    `nb.auto_parallel`, for each length. `site` is the line of the curriculum.
    """

    lengths: Sequence[int]
    micro_batch: Mapping[int, int]
    compress: Mapping[int, Frame]
    site: Site
    open: frozenset[str] = frozenset()
    planned: bool = False
    seconds: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, lengths: Sequence[int], micro_batch: Any, compress: Any, site: Site) -> LengthOptions:
        """Validate the options `micro_batch` and `compress` of a curriculum with these lengths."""
        frames: dict[str, Frame] = {}  # one for each text: steps with equal codecs share a trace

        def parse_codec(value: Any) -> Frame:
            frame = _parse_codec(value, site)
            return frames.setdefault(repr(sorted(frame.options.items())), frame)

        given = {"micro_batch": micro_batch, "compress": compress}
        open_options = frozenset(name for name, value in given.items() if isinstance(value, str) and value == AUTO)
        micro_batch, compress = (None if name in open_options else value for name, value in given.items())
        counts = _complete("micro_batch", micro_batch, lengths, site, "{64: 2, 256: 4}")
        codecs = _complete("compress", compress, lengths, site, '{64: "none", 256: "int8"}')
        return cls(
            lengths,
            {length: _check_count(value, site) for length, value in counts.items()},
            {length: parse_codec(value) for length, value in codecs.items()},
            site,
            open_options,
        )

    def __bool__(self) -> bool:
        return bool(self.micro_batch or self.compress or self.open)

    def choose(self, step: Step, arguments: Arguments, unpack: Unpack, shapes: ShapesByLength) -> LengthOptions:
        """The options with a choice for those that are open."""
        if (limits := get_current_limits()) is not None:
            if "compress" in self.open:
                raise OptionError(
                    f'compress="auto" of a curriculum cannot be combined with nb.auto_parallel at {limits.site}',
                    where=str(self.site),
                    why="nb.auto_parallel plans the steps of each length, including their codecs",
                    mend='use nb.auto_parallel(compress="auto"), and only micro_batch="auto" in the curriculum',
                )
            return replace(self, open=frozenset(), planned=True)
        asked = OpenChoices(
            None if "micro_batch" in self.open else self.micro_batch,
            None if "compress" in self.open else self.compress,
            shapes.shapes,
            shapes.free,
            self.site,
        )
        found = choose_by_length(step, arguments, unpack, asked)
        counts = {length: each.micro_batch for length, each in found.items() if each.micro_batch is not None}
        codecs = {length: each.codec for length, each in found.items() if each.codec is not None}
        parsed = LengthOptions.parse(self.lengths, counts or None, None, self.site)
        frames = {
            codec: Frame("compress", mirror_options(codec), self.site) for codec in dict.fromkeys(codecs.values())
        }
        return replace(
            self,
            micro_batch=parsed.micro_batch or self.micro_batch,
            compress={length: frames[codec] for length, codec in codecs.items()} or self.compress,
            open=frozenset(),
            seconds={length: each.seconds for length, each in found.items()},
        )

    def find(self, length: int) -> StepOptions | None:
        """The options of steps with sequences of this length; None if they run as scopes say."""
        return self._options_by_length.get(length)

    @cached_property
    def _options_by_length(self) -> dict[int, StepOptions | None]:
        return {length: self._find(length) for length in self.lengths}

    def _find(self, length: int) -> StepOptions | None:
        if self.planned:
            plan = f"sequences of {length}"
            description = f"the curriculum at {self.site} lets nb.auto_parallel plan for {plan}"
            return StepOptions(None, self.compress.get(length), plan, description)
        options = self._make_options(length)
        if not options.text:
            return None
        chosen = " (chosen)" * bool(self.seconds)
        alike = [each for each in self.lengths if self._make_options(each).text == options.text]
        parts = [f"{options.micro_batch} micro-batch{'es' * (options.micro_batch != 1)}"] * bool(options.micro_batch)
        if options.compress is not None:
            there, back = map(str, derive_encodings(options.compress.options))
            parts.append(f"codec {there}" + f" ({back} back)" * (there != back))
        numbers = ", ".join(map(str, alike))
        description = f"the curriculum at {self.site} sets, for sequences of {numbers}, {' and '.join(parts)}{chosen}"
        return StepOptions(options.micro_batch, options.compress, description=description)

    def _make_options(self, length: int) -> StepOptions:
        return StepOptions(self.micro_batch.get(length), self.compress.get(length))

    def check_rows(self, rows: int, length: int, packs: Mapping[int, int]) -> None:
        """Refuse numbers of micro-batches that exceed the rows of a batch. `rows` are those of a batch of this length;
        `packs` has the number of sequences that a full one becomes at each length.
        """
        for other, count in self.micro_batch.items():
            most = rows // packs[length] * packs[other]
            if count > most:
                raise OptionError(
                    f"micro_batch= of a curriculum is {count} for sequences of {other}, but their batches have {most} "
                    f"row{'s' * (most != 1)}",
                    where=str(self.site),
                    why="a micro-batch needs at least one row",
                    mend=f"use {other}: {most}, or larger batches",
                )

    def check_program(self, step: Step | None) -> None:
        """Refuse codecs if each cluster trains a copy of this step's model, which has no boundaries. None, or a step
        that has not run, is accepted.
        """
        local_sgd = None if step is None or step.last is None else step.last.captured.program.local_sgd
        if local_sgd is not None and self.compress:
            raise make_no_boundary_error(local_sgd, next(iter(self.compress.values())))


class ShapesByLength(NamedTuple):
    """The shapes of a batch's tensors by length, and the same with None for sizes that depend on the length."""

    shapes: Mapping[int, Sequence[tuple[int, ...]]]
    free: Sequence[tuple[int | None, ...]]


def _complete(option: str, setting: Any, lengths: Sequence[int], site: Site, example: str) -> dict[int, Any]:
    """The value of an option for each length: a table's entry holds from its length on, and a function is called."""
    if setting is None:
        return {}
    if callable(setting) and not isinstance(setting, Scope):
        return {length: setting(length) for length in lengths}
    if not isinstance(setting, Mapping) or not setting:
        where = f"nb.pipeline({option}={setting!r})" if option == "micro_batch" else f"nb.compress({setting!r})"
        raise OptionError(
            f"{option}={setting!r} of a curriculum is not a table by length",
            where=str(site),
            why=f"it sets what changes with the length; to set it for all lengths, use {where}",
            mend=f"{option}={example} (each value applies from its length on), or a function of the length",
        )
    for length in setting:
        if length not in lengths:
            known = ", ".join(map(str, lengths))
            raise OptionError(
                f"{option}={dict(setting)!r} of a curriculum has the length {length!r}, which never occurs",
                where=str(site),
                why=f"its lengths are {known}",
                mend=f"{min(lengths, key=lambda each: abs(each - length)) if _is_number(length) else lengths[0]} "
                f"instead of {length!r}",
            )
    steps = sorted(setting)
    return {
        length: setting[max(begin for begin in steps if begin <= length)] for length in lengths if length >= steps[0]
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_count(value: Any, site: Site) -> int:
    if not _is_number(value) or value < 1:
        raise OptionError(
            f"micro_batch= of a curriculum contains {value!r}",
            where=str(site),
            why="values are numbers of micro-batches",
            mend="use positive integers, such as micro_batch={64: 2, 256: 4}",
        )
    return int(value)


def _parse_codec(value: Any, site: Site) -> Frame:
    """The frame of an `nb.compress` with this codec, or of the given scope; "none" is no codec."""
    if value is None or value == NONE:
        return Frame("compress", mirror_options(NONE), site)
    if isinstance(value, str) and value == AUTO:
        raise OptionError(
            'compress= of a curriculum contains "auto" for some lengths',
            where=str(site),
            why="it is ambiguous: a choice for each length, or a codec that follows the link",
            mend='use compress="auto" for all lengths, or nb.compress("auto") in the table, which follows the link',
        )
    try:
        scope = value if isinstance(value, Scope) else public.compress(value)
    except OptionError as error:
        raise OptionError(error.what, where=str(site), why=error.why, mend=error.mend) from None
    if not isinstance(scope, Scope) or scope.kind != "compress":
        raise OptionError(
            f"compress= of a curriculum contains {value!r}",
            where=str(site),
            why="values must be codecs",
            mend='use a codec ("int8", "none"), or nb.compress(int8=True, backward="fp16")',
        )
    scope.record_placement()
    frame = Frame("compress", scope.options, site)
    if find_learned_rank(frame) is not None:
        raise OptionError(
            f"compress= of a curriculum contains {value!r}, whose basis is learned",
            where=str(site),
            why="a learned basis is a part of the model, which is the same for all lengths",
            mend="use nb.compress(...) around a part of the model, and remove compress= here",
        )
    return frame

"""Numbers of micro-batches and codecs by the length of sequences, for a curriculum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whale_nebula.errors import OptionError
from whale_nebula.scopes import public
from whale_nebula.scopes.compressing import learned_rank
from whale_nebula.scopes.frames import Frame
from whale_nebula.scopes.scope import Scope
from whale_nebula.scopes.step_options import StepOptions
from whale_nebula.site import Site

ByLength = Mapping[int, Any] | Callable[[int], Any]
"""Values by the length from which on each holds, or a function of the length."""


@dataclass(frozen=True)
class LengthOptions:
    """The options of steps by the length of their sequences. `micro_batch` and `compress` have a value for some of the
    `lengths`; the others keep what scopes say. `site` is the line of the curriculum.
    """

    lengths: Sequence[int]
    micro_batch: Mapping[int, int]
    compress: Mapping[int, Frame]
    site: Site

    @classmethod
    def parse(cls, lengths: Sequence[int], micro_batch: Any, compress: Any, site: Site) -> LengthOptions:
        """Validate the options `micro_batch` and `compress` of a curriculum with these lengths."""
        frames: dict[str, Frame] = {}  # one for each text: steps with equal codecs share a trace

        def parse_codec(value: Any) -> Frame:
            frame = _parse_codec(value, site)
            return frames.setdefault(repr(sorted(frame.options.items())), frame)

        counts = _complete("micro_batch", micro_batch, lengths, site, '{64: 2, 256: 4}')
        codecs = _complete("compress", compress, lengths, site, '{64: "none", 256: "int8"}')
        return cls(
            lengths,
            {length: _check_count(value, site) for length, value in counts.items()},
            {length: parse_codec(value) for length, value in codecs.items()},
            site,
        )

    def __bool__(self) -> bool:
        return bool(self.micro_batch or self.compress)

    def find(self, length: int) -> StepOptions | None:
        """The options of steps with sequences of this length; None if scopes alone say them."""
        options = self._choose(length)
        if not options.text:
            return None
        alike = [each for each in self.lengths if self._choose(each).text == options.text]
        said = [f"{options.micro_batch} micro-batch{'es' * (options.micro_batch != 1)}"] * bool(options.micro_batch)
        if options.compress is not None:
            said.append(f"codec {options.compress.options['codec'] or 'none'}")
        numbers = ", ".join(map(str, alike))
        return StepOptions(
            options.micro_batch,
            options.compress,
            f"the curriculum at {self.site} gives sequences of {numbers} {' and '.join(said)}",
        )

    def _choose(self, length: int) -> StepOptions:
        return StepOptions(self.micro_batch.get(length), self.compress.get(length))

    def check_rows(self, rows: int, length: int, packs: Mapping[int, int]) -> None:
        """Refuse numbers of micro-batches that exceed the rows of a batch. `rows` are those of a batch of this length;
        `packs` has the number of sequences that a full one becomes at each length.
        """
        for other, count in self.micro_batch.items():
            own = rows // packs[length] * packs[other]
            if count > own:
                raise OptionError(
                    f"micro_batch= of a curriculum says {count} for sequences of {other}, and their batches have {own} "
                    f"row{'s' * (own != 1)}",
                    where=str(self.site),
                    why="a micro-batch has at least one row",
                    mend=f"{other}: {own}, or larger batches",
                )


def _complete(option: str, given: Any, lengths: Sequence[int], site: Site, example: str) -> dict[int, Any]:
    """The given values for each length: a table has those from which on each holds, and a function is called."""
    if given is None:
        return {}
    if callable(given) and not isinstance(given, Scope):
        return {length: given(length) for length in lengths}
    if not isinstance(given, Mapping) or not given:
        where = f"nb.pipeline({option}={given!r})" if option == "micro_batch" else f"nb.compress({given!r})"
        raise OptionError(
            f"{option}={given!r} of a curriculum is no table by length",
            where=str(site),
            why=f"it says what changes with the length; for all lengths there is {where}",
            mend=f"{option}={example}, from which length on each holds; or a function of the length",
        )
    for length in given:
        if length not in lengths:
            known = ", ".join(map(str, lengths))
            raise OptionError(
                f"{option}={dict(given)!r} of a curriculum has a length {length!r}, and there are no such sequences",
                where=str(site),
                why=f"its lengths are {known}",
                mend=f"{min(lengths, key=lambda each: abs(each - length)) if _is_number(length) else lengths[0]} "
                f"in place of {length!r}",
            )
    steps = sorted(given)
    return {length: given[max(begin for begin in steps if begin <= length)] for length in lengths if length >= steps[0]}


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_count(value: Any, site: Site) -> int:
    if not _is_number(value) or value < 1:
        raise OptionError(
            f"micro_batch= of a curriculum has {value!r}",
            where=str(site),
            why="it is the number of micro-batches that a batch is cut into",
            mend="a whole number from 1 up, such as micro_batch={64: 2, 256: 4}",
        )
    return int(value)


def _parse_codec(value: Any, site: Site) -> Frame:
    """The frame of an `nb.compress` with this codec, or of the given scope; "none" is no codec."""
    if value is None or value == "none":
        return Frame("compress", {"codec": None, "backward": None}, site)
    if isinstance(value, str) and value == "auto":
        raise OptionError(
            'compress= of a curriculum has "auto" for some lengths',
            where=str(site),
            why="it would be either a choice for each length, or one that follows the line",
            mend='compress="auto" for all lengths, or nb.compress("auto") in the table, which follows the line',
        )
    try:
        scope = value if isinstance(value, Scope) else public.compress(value)
    except OptionError as error:
        raise OptionError(error.what, where=str(site), why=error.why, mend=error.mend) from None
    if not isinstance(scope, Scope) or scope.kind != "compress":
        raise OptionError(
            f"compress= of a curriculum has {value!r}",
            where=str(site),
            why="it says how tensors cross",
            mend='a codec ("int8", "none"), or nb.compress(int8=True, backward="fp16")',
        )
    scope.note_placed()
    frame = Frame("compress", scope.options, site)
    if learned_rank(frame) is not None:
        raise OptionError(
            f"compress= of a curriculum has {value!r}, whose basis is learned",
            where=str(site),
            why="that basis is a part of the model, which is the same for all lengths",
            mend="nb.compress(...) around a part of the model, and no compress= here",
        )
    return frame

"""How one direction of a boundary is encoded: the codec, and when and to which rows it applies, in the text form of
plans.

>>> print(Encoding(parse("rank(96) >> int8"), start=100, mask="tokens"))
rank(96) >> int8, from step 100, mask tokens
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from whale_nebula.codec.objects import PLAIN, Codec, Precision, Structure
from whale_nebula.codec.precisions import INT8, is_integers
from whale_nebula.codec.registry import parse
from whale_nebula.codec.structures import RENEWAL_STEPS, Rank
from whale_nebula.errors import OptionError

NONE, AUTO = "none", "auto"
AUTO_LADDER = ("none", "fp16", "int8", "int4")
SKIP = "skip"
"""The value of `nonfinite` by which a step with a NaN is skipped."""
NONFINITE = ("raise", SKIP)


@dataclass(frozen=True)
class Encoding:
    """How one direction of a boundary is encoded: the `codec` (None: unencoded), and its conditions.

    `start` is the first step of training that uses it. `ladder` are the precisions that are used before the codec's own
    one, each until the error of the next is at most `bound`. With `auto` the rung is chosen by the measured link.
    `delta` names the input with the sample ids of differences, `mask` the input that marks the rows to be sent ("" is
    the tensor's Keras mask). With `zstd` the bytes are also compressed, if that makes them fewer. `nonfinite` is the
    handling of a NaN or an infinity that would enter a state.
    """

    codec: Codec | None = None
    auto: bool = False
    start: int = 0
    ladder: tuple[str, ...] = ()
    bound: float = 0.05
    delta: str | None = None
    mask: str | None = None
    zstd: bool = False
    nonfinite: str = "raise"

    @property
    def structure(self) -> Structure | None:
        """The structure of the codec, if it has one."""
        return None if self.codec is None else self.codec.structure

    @property
    def precision(self) -> Precision | None:
        """The precision of the codec, if it has one."""
        return None if self.codec is None else self.codec.precision

    @cached_property
    def lossless(self) -> bool:
        """Whether the precision is lossless packing of integers."""
        return self.codec is not None and self.codec.lossless

    @cached_property
    def rungs(self) -> tuple[Codec | None, ...]:
        """The codecs of the ladder from the mildest to the codec itself."""
        return (*(self._replace_precision(name) for name in self.ladder), *([] if self.auto else [self.codec]))

    @cached_property
    def by_number(self) -> Mapping[int, Codec | None]:
        """The codecs that may be used, by their numbers on the wire, never 0: those of the ladder, their precisions
        alone, and None, which is unencoded but may omit rows.

        Two with equal 16-bit hashes of their texts have consecutive numbers, in the order of the ladder.
        """
        found: dict[int, Codec | None] = {}
        alone = (None if codec is None else codec.precision for codec in self.rungs)
        for codec in (None, *self.rungs, *alone):
            if codec not in found.values():
                number = zlib.crc32(str(codec or PLAIN).encode()) % 0xFFFF + 1
                while number in found:
                    number = number % 0xFFFF + 1
                found[number] = codec
        return found

    @cached_property
    def numbers(self) -> Mapping[Codec | None, int]:
        """The numbers of these codecs on the wire.

        >>> sorted(map(str, parse_encoding("int4, ramp int8 below 0.05").numbers))
        ['None', 'int4', 'int8']
        """
        return {codec: number for number, codec in self.by_number.items()}

    @property
    def returned(self) -> Encoding:
        """The encoding of a gradient whose codec's structure returns: in the form of its tensor."""
        return self if self.codec is None else replace(self, codec=self.codec.returned)

    def _replace_precision(self, precision: str) -> Codec | None:
        """The codec with another precision."""
        structure = self.structure
        if precision == NONE:
            return structure
        chosen = parse(precision)
        return chosen if structure is None else structure >> chosen

    @cached_property
    def plain(self) -> bool:
        """Whether the tensor is sent unencoded."""
        return self.codec is None and not self.auto and self.mask is None and not self.zstd

    @cached_property
    def cast(self) -> str | None:
        """The codec's name if it is a mere cast from the first step on, so that the tensor is sent as an array."""
        simple = replace(self, codec=None) == Encoding()
        return str(self.codec) if simple and str(self.codec) in ("fp16", "bf16") else None

    @cached_property
    def coded(self) -> bool:
        """Whether encoding is more than a cast."""
        return not self.plain and self.cast is None

    def __str__(self) -> str:
        words = [AUTO if self.auto else str(self.codec or NONE)]
        words += [f"from step {self.start}"] * bool(self.start)
        words += [f"ramp {' '.join(self.ladder)} below {self.bound!r}"] * (bool(self.ladder) and not self.auto)
        words += [f"delta {self.delta}"] * (self.delta is not None)
        words += [f"mask {self.mask}".rstrip()] * (self.mask is not None)
        words += ["zstd"] * self.zstd
        words += [f"nonfinite {self.nonfinite}"] * (self.nonfinite != "raise")
        return ", ".join(words)


@lru_cache(maxsize=4096)
def parse_encoding(text: str) -> Encoding:
    """Parse an encoding's text form, the inverse of `str`.

    >>> parse_encoding("int4, ramp fp16 int8 below 0.05, delta ids").delta
    'ids'
    """
    codec, *words = _split_pieces(text)
    made = (
        Encoding(auto=True, ladder=AUTO_LADDER) if codec == AUTO else Encoding(None if codec == NONE else parse(codec))
    )
    for word in words:
        name, _, value = word.partition(" ")
        reader = _READERS.get(name)
        if reader is None:
            raise OptionError(
                f"{text!r} is not a valid encoding",
                why=f"{word!r} is not a known condition",
                mend='write it like "int8"',
            )
        try:
            made = reader(made, value)
        except ValueError:
            raise OptionError(f"{text!r} is not a valid encoding", why=f"{value!r} is not a number") from None
    return made


def _split_pieces(text: str) -> list[str]:
    """Split at the commas outside parentheses."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [piece.strip() for piece in found]


def _replace_ladder(encoding: Encoding, value: str) -> Encoding:
    names, _, bound = value.partition(" below ")
    return replace(encoding, ladder=tuple(names.split()), bound=float(bound))


_READERS: dict[str, Callable[[Encoding, str], Encoding]] = {
    "from": lambda encoding, value: replace(encoding, start=int(value.removeprefix("step "))),
    "ramp": _replace_ladder,
    "delta": lambda encoding, value: replace(encoding, delta=value),
    "mask": lambda encoding, value: replace(encoding, mask=value),
    "zstd": lambda encoding, value: replace(encoding, zstd=True),
    "nonfinite": lambda encoding, value: replace(encoding, nonfinite=value),
}


DEFAULT = "default"
LADDER = ("fp16", "int8", "int4")
BOUND = 0.05
_COMMON_OPTIONS = ("mask", "zstd", "nonfinite")


def derive_encodings(options: Mapping[str, Any], *, training: bool = True) -> tuple[Encoding, Encoding]:
    """The encodings of a boundary and its gradient, from a scope's options. Steps without a gradient may have a codec
    of their own, without warm-up or ladder.

    >>> [str(encoding) for encoding in derive_encodings({"codec": parse("rank(96) >> int4")})]
    ['rank(96) >> int4', 'rank(96) >> int8']
    """
    if not training and options.get("forward") is not None:
        forward = None if options["forward"] == NONE else options["forward"]
        return derive_encodings(
            {"codec": forward, "backward": None} | {name: options.get(name) for name in _COMMON_OPTIONS}
        )
    codec, backward = options.get("codec"), options.get("backward", DEFAULT)
    common = _read_common_options(options if training else {**options, "delta": None})
    if codec == AUTO:
        auto = replace(common, auto=True, ladder=AUTO_LADDER, delta=None)
        return auto, auto if backward == DEFAULT else replace(common, codec=_choose_backward(None, backward))
    there = _drop_trained(codec)
    back = _drop_trained(_choose_backward(codec, backward))
    check_delta(common.delta, there)
    return _add_ladder(replace(common, codec=there), options), _add_ladder(
        replace(common, codec=back, delta=None), options
    )


def mirror_options(codec: str) -> dict[str, Any]:
    """The scope's options for the same precision of a tensor and its gradient, or of neither.

    >>> [str(encoding) for name in ("fp16", "none") for encoding in derive_encodings(mirror_options(name))]
    ['fp16', 'fp16', 'none', 'none']
    """
    return {"codec": None, "backward": None} if codec == NONE else {"codec": parse(codec), "backward": codec}


def _read_common_options(options: Mapping[str, Any]) -> Encoding:
    mask = options.get("mask")
    return Encoding(
        start=int(options.get("start_step") or 0),
        delta=options.get("delta"),
        mask=None if mask is None or mask is False else "" if mask is True else str(mask),
        zstd=bool(options.get("zstd")),
        nonfinite=str(options.get("nonfinite") or "raise"),
    )


def _choose_backward(forward: Codec | None, backward: Any) -> Codec | None:
    """The gradient's codec: an object replaces the codec; a text, or the default, sets only the precision."""
    structure = None if forward is None else forward.structure
    kept = structure if structure is not None and structure.returns else None
    if backward == DEFAULT:
        backward = None if forward is None else INT8.name
    if backward is None:
        return kept
    chosen = parse(backward) if isinstance(backward, str) and backward != NONE else backward
    if chosen == NONE:
        return kept
    if isinstance(backward, str) and chosen is chosen.precision:
        return chosen if kept is None else kept >> chosen
    _check_backward(chosen, kept)
    return chosen


def _check_backward(backward: Codec, forward_structure: Structure | None) -> None:
    own = backward.structure
    if own is not None and own.returns and own != forward_structure:
        raise OptionError(
            f"backward={str(backward)!r} has the structure {own.name}, which the forward codec does not have",
            why="a gradient is sent in the same subspace, or at the same positions, as its tensor",
            mend=f"nb.compress({own!r} >> ..., backward='int8')",
        )


def _drop_trained(codec: Codec | None) -> Codec | None:
    """Remove a trained basis, which is a part of the model; its precision remains."""
    trained = codec is not None and isinstance(codec.structure, Rank) and codec.structure.trained
    return codec.precision if codec is not None and trained else codec


def _add_ladder(encoding: Encoding, options: Mapping[str, Any]) -> Encoding:
    """Add the ladder of precisions before the codec's own."""
    ramp = options.get("ramp")
    if ramp is None or ramp is False or encoding.precision is None:
        return encoding
    bound = float(ramp) if isinstance(ramp, float) else BOUND
    names = LADDER if isinstance(ramp, bool | float) else tuple(str(name) for name in ramp)
    own = encoding.precision.name
    ladder = names[: names.index(own)] if own in names else names
    return replace(encoding, ladder=ladder, bound=bound) if ladder else encoding


def check_delta(delta: str | None, codec: Codec | None) -> None:
    """Refuse differences with a precision that both sides cannot add bit-identically."""
    if delta is not None and not is_integers(codec):
        raise OptionError(
            f"delta={delta!r} requires an integer codec (int8, int4), not {str(codec or NONE)!r}",
            why="both sides must add differences to their cached rows bit for bit, which only integers guarantee",
            mend=f"nb.compress(int8=True, delta={delta!r})",
        )


_MARKED = "only marked rows"
_RENEWED_STATES = {"rank": "the basis", "axes": "the axes"}


def describe_bytes(amount: str, text: str) -> str:
    """A short text of the sent bytes, and their encoding; `describe_conditions` has the rest.

    >>> [describe_bytes("32 KiB", text) for text in ("none", "int8, from step 100", "none, mask", "auto", "bits")]
    ['32 KiB', '32 KiB as int8', 'at most 32 KiB, only marked rows', 'at most 32 KiB', 'at most 32 KiB']
    """
    encoding = parse_encoding(text)
    amount = f"at most {amount}" if has_open_size(text) else amount
    if _describe_codec(encoding):
        return f"{amount} {_describe_codec(encoding)}"
    return f"{amount}, {_MARKED}" if encoding.mask is not None and not encoding.auto else amount


def has_open_size(text: str) -> bool:
    """Whether the encoded size depends on the values, so that sizes are only an upper bound.

    >>> [has_open_size(text) for text in ("int8", "int8, mask", "auto")]
    [False, True, True]
    """
    encoding = parse_encoding(text)
    return encoding.auto or encoding.mask is not None or encoding.zstd or encoding.lossless


def describe_conditions(text: str, *, back: bool = False, rungs: Sequence[str] = ()) -> str:
    """The details that `describe_bytes` omits; "" if there are none. With `back` it is a gradient's; `rungs` are
    the bytes of each rung of its ladder but the last.

    >>> describe_conditions("int8"), describe_conditions("none, mask"), describe_conditions("int8, from step 100, zstd")
    ('', '', 'from step 100 on, then zstd if it saves bytes')
    >>> describe_conditions("int4, ramp fp16 below 0.05", rungs=["2 KiB"])
    'first 2 KiB as fp16, each until the error of the next is at most 5 %; then int4 (the size shown)'
    """
    conditions = list(_list_conditions(parse_encoding(text), back, rungs))
    return "" if conditions == [_MARKED] and not _describe_codec(parse_encoding(text)) else ", ".join(conditions)


def describe_encoding(text: str, *, back: bool = False) -> str:
    """The full text of an encoding: codec and conditions; "" for an unencoded tensor.

    >>> describe_encoding("rank(96) >> int4, from step 9, mask tokens"), describe_encoding("none")
    ('as rank(96) >> int4, from step 9 on, plus the basis every 50 steps, only rows marked by tokens', '')
    """
    encoding = parse_encoding(text)
    return ", ".join([each for each in (_describe_codec(encoding), *_list_conditions(encoding, back)) if each])


def _describe_codec(encoding: Encoding) -> str:
    return "" if encoding.auto or encoding.codec is None or encoding.lossless else f"as {encoding.codec}"


def _list_conditions(encoding: Encoding, back: bool, rungs: Sequence[str] = ()) -> Iterator[str]:
    if encoding.auto:
        *milder, last = encoding.ladder[1:]
        yield f"unencoded, {', '.join(milder)} or {last}: the mildest that computation hides"
    if encoding.lossless:
        yield "in as many bits as the numbers need"
    if encoding.start:
        yield f"from step {encoding.start} on"
    if encoding.ladder and not encoding.auto:
        sizes = [f"{size} as " for size in rungs] or [""] * len(encoding.ladder)
        ladder = ", then ".join(size + name for size, name in zip(sizes, encoding.ladder, strict=True))
        until = f"each until the error of the next is at most {100 * encoding.bound:g} %"
        yield f"first {ladder}, {until}; then {encoding.precision} (the size shown)"
    structure = encoding.structure
    if structure is not None and structure.name in _RENEWED_STATES and not (back and structure.returns):
        yield f"plus {_RENEWED_STATES[structure.name]} every {RENEWAL_STEPS} steps"
    if encoding.delta is not None:
        yield f"as differences from the previous values of the samples in {encoding.delta}"
    if encoding.mask is not None:
        yield f"only rows marked by {encoding.mask}" if encoding.mask else _MARKED
    if encoding.zstd:
        yield "then zstd if it saves bytes"
    if encoding.nonfinite == SKIP:
        yield "steps with a NaN are skipped"
